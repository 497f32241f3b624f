//! Tensors as a call sees them: an address with a shape.
//!
//! This module owns the facts about a tensor that need no access to its memory. Read [`TensorDesc`] first, then
//! [`Blocks`].

use accl_kernels::StridedView;
use accl_types::{Dtype, Elems, Error, Result};
use smallvec::SmallVec;

/// Kind of memory that holds a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryKind {
    /// Memory that this process can read and write.
    #[default]
    Host,
    /// Memory of a device. Only external operations can access it, and addresses belong to that device.
    Device {
        /// Number of the device in this process.
        id: u32,
    },
}

impl std::fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MemoryKind::Host => f.write_str("host memory"),
            MemoryKind::Device { id } => write!(f, "the memory of device {id}"),
        }
    }
}

/// A tensor's memory: `ptr` points to its first element.
///
/// The caller keeps the memory alive, and does not access it, until the call has completed.
#[derive(Clone, Debug)]
pub struct TensorDesc {
    /// Address of the first element; may be null if the tensor is empty.
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: Dtype,
    /// The memory holds the conjugate of the value.
    pub(crate) conj: bool,
    /// The memory holds the negative of the value.
    pub(crate) neg: bool,
    memory: MemoryKind,
    /// See [`TensorDesc::is_plain`].
    plain: bool,
    count: u64,
    /// Sizes and strides, unless the elements lie densely in row-major order.
    strided: Option<Box<Strided>>,
}

/// Shape of a tensor that is not dense, in elements.
#[derive(Clone, Debug)]
struct Strided {
    sizes: SmallVec<[i64; 4]>,
    strides: SmallVec<[i64; 4]>,
}

// SAFETY: a descriptor is only an address with a shape. The contract of `Group::submit` says who may use the memory and
// when.
unsafe impl Send for TensorDesc {}

impl TensorDesc {
    /// Describes a dense tensor in host memory.
    pub fn dense(ptr: *mut u8, dtype: Dtype, count: Elems) -> Self {
        Self {
            ptr,
            dtype,
            conj: false,
            neg: false,
            memory: MemoryKind::Host,
            plain: true,
            count: count.0,
            strided: None,
        }
    }

    /// Describes a tensor of any layout. `sizes` and `strides` are in elements; both are empty for a zero-dimensional
    /// tensor.
    ///
    /// # Errors
    /// `Internal` for sizes and strides that no tensor can have; `Exhausted` for more bytes than an address can span.
    pub fn strided(ptr: *mut u8, dtype: Dtype, sizes: &[i64], strides: &[i64]) -> Result<Self> {
        let count = sizes.iter().try_fold(1_u64, |count, &size| count.checked_mul(u64::try_from(size).ok()?));
        let is_fit = sizes.len() == strides.len() && strides.iter().all(|&stride| stride >= 0);
        let Some(count) = count.filter(|_| is_fit) else {
            return Err(Error::internal("a tensor description has invalid sizes or strides"));
        };
        // An expanded tensor has one element in memory, but packing it needs memory for all its elements.
        if count > i64::MAX as u64 / dtype.size_bytes() as u64 {
            return Err(Error::exhausted(format!(
                "a tensor of {count} elements has more bytes than the address space"
            )));
        }
        let mut expected = 1;
        let mut dense = true;
        for (&size, &stride) in sizes.iter().zip(strides).rev() {
            dense &= size == 1 || stride == expected;
            expected *= size;
        }
        let strided = (!dense && count > 0)
            .then(|| Box::new(Strided { sizes: SmallVec::from_slice(sizes), strides: SmallVec::from_slice(strides) }));
        let plain = strided.is_none();
        Ok(Self { ptr, dtype, conj: false, neg: false, memory: MemoryKind::Host, plain, count, strided })
    }

    /// Declares that the memory holds the conjugate of the value, its negative, or both.
    #[must_use]
    pub fn viewed(mut self, conj: bool, neg: bool) -> Self {
        (self.conj, self.neg) = (conj, neg);
        self.note_plain();
        self
    }

    /// Places the tensor in another memory. The address must belong to that memory.
    #[must_use]
    pub fn in_memory(mut self, memory: MemoryKind) -> Self {
        self.memory = memory;
        self.note_plain();
        self
    }

    fn note_plain(&mut self) {
        self.plain = self.is_dense_value() && self.memory == MemoryKind::Host;
    }

    /// Returns the kind of memory that holds the tensor.
    #[inline]
    pub fn memory(&self) -> MemoryKind {
        self.memory
    }

    /// Returns the address of the first element, in the tensor's own memory.
    pub fn address(&self) -> *mut u8 {
        self.ptr
    }

    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of elements.
    #[inline]
    pub fn count_elems(&self) -> u64 {
        self.count
    }

    /// Size in bytes.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.count * self.dtype.size_bytes() as u64
    }

    /// Returns whether the tensor is host memory that holds the value itself in row-major order. Calls can send from
    /// and receive into such a tensor directly.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    /// Returns whether the memory, of whatever kind, holds the value itself in row-major order.
    pub(crate) fn is_dense_value(&self) -> bool {
        self.strided.is_none() && !self.conj && !self.neg
    }

    /// Returns whether several elements share one address.
    pub(crate) fn is_expanded(&self) -> bool {
        let repeats = |s: &Strided| s.sizes.iter().zip(&s.strides).any(|(&size, &stride)| size > 1 && stride == 0);
        self.strided.as_deref().is_some_and(repeats)
    }

    /// Returns the lowest address that the tensor occupies, and one past the highest.
    pub fn bounds(&self) -> (usize, usize) {
        if self.count == 0 {
            return (0, 0);
        }
        let elems = self.strided.as_deref().map_or(self.count, |s| {
            let last: i64 = s.sizes.iter().zip(&s.strides).map(|(&size, &stride)| (size - 1) * stride).sum();
            last as u64 + 1
        });
        let start = self.ptr as usize;
        (start, start + elems as usize * self.dtype.size_bytes())
    }

    /// Returns the view that the packing kernels take. `dense` is storage for the shape of a dense tensor.
    pub(crate) fn view<'a>(&'a self, dense: &'a mut [i64; 2]) -> StridedView<'a> {
        *dense = [self.count as i64, 1];
        let (sizes, strides) = match &self.strided {
            Some(strided) => (&strided.sizes[..], &strided.strides[..]),
            None => dense.split_at(1),
        };
        StridedView { ptr: self.ptr, dtype: self.dtype, sizes, strides, conj: self.conj, neg: self.neg }
    }
}

/// A list of blocks, each a list of pieces. Block r is sent to or received from rank r. A block of a coalesced call has
/// several pieces, one for each tensor.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    pieces: SmallVec<[TensorDesc; 1]>,
    /// End index of each block in `pieces`.
    ends: SmallVec<[u32; 4]>,
}

impl Blocks {
    /// Creates a list of one block with one tensor.
    pub fn of(tensor: TensorDesc) -> Self {
        let mut blocks = Self::default();
        blocks.push([tensor]);
        blocks
    }

    /// Appends a block.
    pub fn push(&mut self, block: impl IntoIterator<Item = TensorDesc>) {
        self.pieces.extend(block);
        self.ends.push(self.pieces.len() as u32);
    }

    /// Number of blocks.
    #[inline]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there is no block.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the pieces of a block, or `None` if there is no such block.
    pub fn get(&self, index: usize) -> Option<&[TensorDesc]> {
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        self.pieces.get(start..end)
    }

    /// Returns the blocks in order.
    pub fn iter(&self) -> impl Iterator<Item = &[TensorDesc]> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// Returns the tensor, if the list is one block of one tensor.
    #[inline]
    pub(crate) fn alone(&self) -> Option<&TensorDesc> {
        match &self.pieces[..] {
            [tensor] if self.ends.len() == 1 => Some(tensor),
            _ => None,
        }
    }

    /// Returns the end index of each block among the pieces.
    #[inline]
    pub(crate) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Returns all pieces in order.
    #[inline]
    pub fn pieces(&self) -> &[TensorDesc] {
        &self.pieces
    }
}

impl<B: IntoIterator<Item = TensorDesc>> FromIterator<B> for Blocks {
    fn from_iter<I: IntoIterator<Item = B>>(blocks: I) -> Self {
        let mut all = Self::default();
        blocks.into_iter().for_each(|block| all.push(block));
        all
    }
}

#[cfg(test)]
mod tests {
    use accl_types::ErrorKind;

    use super::*;

    #[test]
    fn an_expanded_tensor_with_more_bytes_than_an_address_has_is_refused() {
        let mut one = [1.0_f32];
        let mut expanded = |count: i64| TensorDesc::strided(one.as_mut_ptr().cast(), Dtype::F32, &[count], &[0]);
        assert_eq!(expanded(1 << 62).unwrap_err().kind, ErrorKind::Exhausted);
        assert_eq!(expanded(1 << 61).unwrap_err().kind, ErrorKind::Exhausted);
        assert_eq!(expanded((1 << 61) - 1).unwrap().len_bytes(), (1 << 63) - 4);
    }

    #[test]
    fn strides_that_go_backwards_are_refused() {
        let mut two = [1.0_f32, 2.0];
        let error = TensorDesc::strided(two.as_mut_ptr().cast(), Dtype::F32, &[2], &[-1]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Internal, "{error}");
    }
}
