//! One copy of a task that copies between tensors and host memory. Read [`ExternalCopy`] first.

use super::tensor::TensorDesc;

/// A copy between a tensor and host memory. The task of the copy says in which direction.
#[derive(Clone, Debug)]
pub struct ExternalCopy {
    /// Index of the tensor among the outputs of the call, as its caller has described it; for a copy-in of a call with
    /// inputs, among these. The sample of a measured call is not counted.
    pub piece: u32,
    /// The tensor.
    pub tensor: TensorDesc,
    /// First byte that is copied, counted in the tensor's elements in row-major order.
    pub at: u64,
    /// Host memory of the bytes that are copied, as a dense tensor of bytes. A copy may begin and end within an element.
    pub host: TensorDesc,
}
