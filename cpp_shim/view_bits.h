// Conjugate and negative views reach our backend as they are.
#pragma once

namespace accl {

// Installs the kernels that let them through, if they are not there: a process without a group of ours is as torch made it.
void install_view_kernels();

}  // namespace accl
