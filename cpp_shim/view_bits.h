// Conjugate and negative views reach our backend as they are.
#pragma once

namespace accl {

// Installs the kernels that let them through; once, when the module is loaded.
void install_view_kernels();

}  // namespace accl
