// Conjugate and negative views reach our backend as they are.
#pragma once

namespace accl {

// Installs the kernels that pass such views unchanged, unless they are installed. A process without our groups keeps
// torch's behaviour.
void install_view_kernels();

}  // namespace accl
