//! The native module of torch_accl: PyO3 bindings and the bridge to the C++ shim.
