//! Reduce, scale and strided-copy kernels of torch-accl.
