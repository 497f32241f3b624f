//! Tensors as a call sees them: an address with a shape.
//!
//! Owns what can be said of a tensor without touching its memory. Read [`TensorDesc`] first, then [`Blocks`].

use accl_kernels::StridedView;
use accl_types::{Dtype, Elems, Error, Result};
use smallvec::SmallVec;

/// Which memory a tensor lies in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryKind {
    /// This process reads and writes it.
    #[default]
    Host,
    /// Memory of a device, which only external operations reach: the address is one of that device.
    Device {
        /// The number that the device has in this process.
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
/// The caller keeps the memory alive and untouched until the call is done or failed.
#[derive(Clone, Debug)]
pub struct TensorDesc {
    /// First element; may be null when the tensor is empty.
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
    /// How the elements lie, unless densely in row-major order.
    strided: Option<Box<Strided>>,
}

/// The shape of a tensor that is not dense, in elements.
#[derive(Clone, Debug)]
struct Strided {
    sizes: SmallVec<[i64; 4]>,
    strides: SmallVec<[i64; 4]>,
}

// SAFETY: a descriptor is an address with a shape; who may use the memory and when is the contract of `Group::submit`.
unsafe impl Send for TensorDesc {}

impl TensorDesc {
    /// A dense tensor.
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

    /// A tensor of any layout; sizes and strides are in elements, none of both for a zero-dimensional one.
    ///
    /// # Errors
    /// `Internal` for sizes and strides that cannot be a tensor's; `Unsupported` for more bytes than an address has.
    pub fn strided(ptr: *mut u8, dtype: Dtype, sizes: &[i64], strides: &[i64]) -> Result<Self> {
        let count = sizes.iter().try_fold(1_u64, |count, &size| count.checked_mul(u64::try_from(size).ok()?));
        let is_fit = sizes.len() == strides.len() && strides.iter().all(|&stride| stride >= 0);
        let Some(count) = count.filter(|_| is_fit) else {
            return Err(Error::internal("a tensor was described with unfit sizes or strides"));
        };
        // An expanded tensor has one element in memory and as many as it likes to be packed.
        if count > i64::MAX as u64 / dtype.size_bytes() as u64 {
            return Err(Error::exhausted(format!("a tensor of {count} elements has more bytes than an address has")));
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

    /// Memory that holds the conjugate, the negative or both of the value.
    #[must_use]
    pub fn viewed(mut self, conj: bool, neg: bool) -> Self {
        (self.conj, self.neg) = (conj, neg);
        self.note_plain();
        self
    }

    /// The same in another memory: the address is one there.
    #[must_use]
    pub fn in_memory(mut self, memory: MemoryKind) -> Self {
        self.memory = memory;
        self.note_plain();
        self
    }

    fn note_plain(&mut self) {
        self.plain = self.is_dense_value() && self.memory == MemoryKind::Host;
    }

    /// Which memory it lies in.
    #[inline]
    pub fn memory(&self) -> MemoryKind {
        self.memory
    }

    /// The address of the first element, in its memory.
    pub fn address(&self) -> *mut u8 {
        self.ptr
    }

    /// The type of its elements.
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

    /// Whether it is memory of the host that is the value itself in row-major order, so that it can be sent from and received into.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether the memory, of whatever kind, is the value itself in row-major order.
    pub(crate) fn is_dense_value(&self) -> bool {
        self.strided.is_none() && !self.conj && !self.neg
    }

    /// Whether several elements lie at one address.
    pub(crate) fn is_expanded(&self) -> bool {
        let repeats = |s: &Strided| s.sizes.iter().zip(&s.strides).any(|(&size, &stride)| size > 1 && stride == 0);
        self.strided.as_deref().is_some_and(repeats)
    }

    /// Lowest and one past the highest address that the tensor touches.
    pub(crate) fn bounds(&self) -> (usize, usize) {
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

    /// For the kernels that pack and unpack; `dense` is storage for the shape of a dense tensor.
    pub(crate) fn view<'a>(&'a self, dense: &'a mut [i64; 2]) -> StridedView<'a> {
        *dense = [self.count as i64, 1];
        let (sizes, strides) = match &self.strided {
            Some(strided) => (&strided.sizes[..], &strided.strides[..]),
            None => dense.split_at(1),
        };
        StridedView { ptr: self.ptr, dtype: self.dtype, sizes, strides, conj: self.conj, neg: self.neg }
    }
}

/// A list of blocks, each a list of pieces: block r is what goes to or comes from rank r; several pieces are the
/// tensors of a coalesced call.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    pieces: SmallVec<[TensorDesc; 1]>,
    /// Where each block ends in `pieces`.
    ends: SmallVec<[u32; 4]>,
}

impl Blocks {
    /// One block of one tensor.
    pub fn of(tensor: TensorDesc) -> Self {
        let mut blocks = Self::default();
        blocks.push([tensor]);
        blocks
    }

    /// Adds a block.
    pub fn push(&mut self, block: impl IntoIterator<Item = TensorDesc>) {
        self.pieces.extend(block);
        self.ends.push(self.pieces.len() as u32);
    }

    /// Number of blocks.
    #[inline]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no block.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The pieces of a block.
    pub fn get(&self, index: usize) -> Option<&[TensorDesc]> {
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        self.pieces.get(start..end)
    }

    /// The blocks in order.
    pub fn iter(&self) -> impl Iterator<Item = &[TensorDesc]> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The tensor of a list that is one block of one tensor.
    #[inline]
    pub(crate) fn alone(&self) -> Option<&TensorDesc> {
        match &self.pieces[..] {
            [tensor] if self.ends.len() == 1 => Some(tensor),
            _ => None,
        }
    }

    /// Where each block ends among the pieces.
    #[inline]
    pub(crate) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// All pieces in order.
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
