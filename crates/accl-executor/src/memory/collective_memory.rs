//! The memory of an offloaded collective, seen as one sequence of bytes per side.
//!
//! This module gives the worker that has the task access to that memory. The worker decides which bytes to copy. Read
//! [`CollectiveMemory`] first.

use crate::call::{Blocks, ExternalCollective, ExternalTask, TensorDesc};

/// The tensors of a task's collective. Each side (inputs, outputs) is one sequence of bytes, block by block. Each copy
/// first asks for permission, which is refused once the task is cancelled. The completion of a failed call therefore
/// waits for at most one copy.
pub struct CollectiveMemory<'task> {
    task: &'task ExternalTask,
    collective: &'task ExternalCollective,
    inputs: Flat<'task>,
    outputs: Flat<'task>,
}

/// Dense tensors, seen as one sequence of bytes.
struct Flat<'task> {
    pieces: &'task [TensorDesc],
    /// End offset of each tensor in the sequence.
    ends: Vec<u64>,
}

impl<'task> CollectiveMemory<'task> {
    /// Returns the memory of a task; `None` if its work is not a collective.
    pub fn of(task: &'task ExternalTask) -> Option<Self> {
        let collective = task.collective()?;
        Some(Self { task, collective, inputs: Flat::new(&collective.inputs), outputs: Flat::new(&collective.outputs) })
    }

    /// Returns the collective.
    pub fn collective(&self) -> &'task ExternalCollective {
        self.collective
    }

    /// Returns the bytes of this rank's contribution.
    pub fn input_bytes(&self) -> u64 {
        self.inputs.bytes()
    }

    /// Returns the bytes that this rank receives.
    pub fn output_bytes(&self) -> u64 {
        self.outputs.bytes()
    }

    /// Returns address and bytes of this rank's whole contribution, if it is one contiguous piece of memory. Does not
    /// access the memory.
    pub fn whole_input(&self) -> Option<(*mut u8, u64)> {
        self.inputs.whole()
    }

    /// Returns address and bytes of the whole output, like [`CollectiveMemory::whole_input`].
    pub fn whole_output(&self) -> Option<(*mut u8, u64)> {
        self.outputs.whole()
    }

    /// Copies bytes of this rank's contribution, starting at byte `at`. Returns `false` if the task is cancelled; then
    /// nothing was copied.
    ///
    /// # Panics
    /// Panics if `into` extends beyond the contribution.
    #[must_use]
    pub fn read_input(&self, at: u64, into: &mut [u8]) -> bool {
        let Some(_touch) = self.task.touch() else { return false };
        let mut rest = into;
        for (address, bytes) in self.inputs.stretches(at, rest.len() as u64) {
            let (head, tail) = rest.split_at_mut(bytes);
            // SAFETY: the stretch lies in a dense tensor of the task, which the caller keeps readable during a `Touch`.
            // `head` is separate memory with as many bytes.
            unsafe { accl_kernels::copy(head.as_mut_ptr(), address, bytes) };
            rest = tail;
        }
        assert!(rest.is_empty(), "a read ends within the rank's contribution");
        true
    }

    /// Copies `from` into this rank's output, starting at byte `at`. Returns `false` if the task is cancelled; then
    /// nothing was copied.
    ///
    /// # Panics
    /// Panics if `from` extends beyond the output.
    #[must_use]
    pub fn write_output(&mut self, at: u64, from: &[u8]) -> bool {
        let Some(_touch) = self.task.touch() else { return false };
        let mut rest = from;
        for (address, bytes) in self.outputs.stretches(at, rest.len() as u64) {
            let (head, tail) = rest.split_at(bytes);
            // SAFETY: the stretch lies in a dense tensor of the task, which no other code accesses during a `Touch`.
            // `head` is separate memory with as many bytes.
            unsafe { accl_kernels::copy(address, head.as_ptr(), bytes) };
            rest = tail;
        }
        assert!(rest.is_empty(), "a write ends within the rank's output");
        true
    }
}

impl<'task> Flat<'task> {
    fn new(blocks: &'task Blocks) -> Self {
        let pieces = blocks.pieces();
        let ends = pieces.iter().scan(0, |end, piece| {
            *end += piece.len_bytes();
            Some(*end)
        });
        Self { pieces, ends: ends.collect() }
    }

    fn bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn whole(&self) -> Option<(*mut u8, u64)> {
        let mut pieces = self.pieces.iter().filter(|piece| piece.len_bytes() > 0);
        let first = pieces.next()?;
        let mut end = first.address().addr() as u64 + first.len_bytes();
        for piece in pieces {
            if piece.address().addr() as u64 != end {
                return None;
            }
            end += piece.len_bytes();
        }
        Some((first.address(), self.bytes()))
    }

    /// Returns address and length of each stretch of the `bytes` bytes from byte `at` on, up to the end of the
    /// sequence.
    fn stretches(&self, at: u64, bytes: u64) -> impl Iterator<Item = (*mut u8, usize)> {
        let (first, end) = (self.ends.partition_point(|&end| end <= at), at + bytes);
        let placed = self.pieces.iter().zip(&self.ends).skip(first);
        let placed = placed.map(|(piece, &piece_end)| (piece.address(), piece_end - piece.len_bytes(), piece_end));
        placed.take_while(move |&(_, begin, _)| begin < end).map(move |(address, begin, piece_end)| {
            let from = begin.max(at);
            (address.wrapping_add((from - begin) as usize), (piece_end.min(end) - from) as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use accl_types::{Collective, Dtype, Elems, Moment, Rank, ReduceOp};

    use super::*;
    use crate::call::{External, ExternalHandle, ExternalWork};

    #[derive(Debug, Default)]
    struct Shelf(Mutex<Option<ExternalTask>>);

    impl External for Shelf {
        fn name(&self) -> &str {
            "shelf"
        }

        fn begin(&self, task: ExternalTask) {
            *self.0.lock().unwrap() = Some(task);
        }
    }

    #[test]
    fn bytes_one_behind_the_other_are_those_of_the_tensors_in_order() {
        let mut memory = [[0_u8; 3], [1; 3], [2; 3]];
        memory.iter_mut().enumerate().for_each(|(index, piece)| piece.iter_mut().for_each(|byte| *byte = index as u8));
        let mut tensors = memory.iter_mut().map(|piece| TensorDesc::dense(piece.as_mut_ptr(), Dtype::U8, Elems(3)));
        // An empty tensor lies between the others.
        let empty = TensorDesc::dense(std::ptr::NonNull::dangling().as_ptr(), Dtype::U8, Elems(0));
        let [first, second, third] = std::array::from_fn(|_| tensors.next().unwrap());
        let blocks: Blocks = [vec![first, empty], vec![second, third]].into_iter().collect();
        let collective = ExternalCollective {
            collective: Collective::AllToAll,
            dtype: Dtype::U8,
            op: ReduceOp::Sum,
            root: Rank(0),
            seq: 0,
            started: Moment::from_nanos(0),
            deadline: None,
            inputs: blocks.clone(),
            outputs: blocks,
        };
        let shelf: Arc<Shelf> = Arc::default();
        let by: Arc<dyn External> = shelf.clone();
        let work = ExternalWork::Collective(collective.into());
        let handle = ExternalHandle::begin(&by, work, Arc::new(()), Arc::new(|| {}));
        let task = shelf.0.lock().unwrap().take().unwrap();
        let mut of_task = CollectiveMemory::of(&task).unwrap();
        // The arrays are contiguous.
        assert_eq!(of_task.whole_input().map(|(_, bytes)| bytes), Some(9));
        assert_eq!((of_task.input_bytes(), of_task.output_bytes()), (9, 9));
        let mut all = [9; 9];
        assert!(of_task.read_input(0, &mut all));
        assert_eq!(all, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
        let mut some = [9; 5];
        assert!(of_task.read_input(2, &mut some));
        assert_eq!(some, [0, 1, 1, 1, 2]);
        assert!(of_task.read_input(9, &mut []));
        assert!(of_task.write_output(1, &[7, 7, 7]));
        assert!(of_task.write_output(8, &[8]));
        assert!(of_task.read_input(0, &mut all));
        assert_eq!(all, [0, 7, 7, 7, 1, 1, 2, 2, 8]);
        drop(handle);
        assert!(!of_task.read_input(0, &mut all) && !of_task.write_output(0, &[9; 9]), "it is cancelled");
        assert_eq!(memory, [[0, 7, 7], [7, 1, 1], [2, 2, 8]]);
    }
}
