//! The memory of a collective that is done elsewhere, as bytes one behind the other.
//!
//! Owns the access to it for whoever has the task; what is copied where is theirs to say. Read [`CollectiveMemory`] first.

use crate::call::{Blocks, ExternalCollective, ExternalTask, TensorDesc};

/// The tensors of a task's collective: those of each side one behind the other, block by block. They are touched as long as the task is not
/// cancelled: each copy asks first, and the end of a failed call waits for no more than a copy.
pub struct CollectiveMemory<'task> {
    task: &'task ExternalTask,
    collective: &'task ExternalCollective,
    inputs: Flat<'task>,
    outputs: Flat<'task>,
}

/// Dense tensors one behind the other.
struct Flat<'task> {
    pieces: &'task [TensorDesc],
    /// Where each of them ends.
    ends: Vec<u64>,
}

impl<'task> CollectiveMemory<'task> {
    /// That of a task; `None` if it is not about a collective.
    pub fn of(task: &'task ExternalTask) -> Option<Self> {
        let collective = task.collective()?;
        Some(Self { task, collective, inputs: Flat::new(&collective.inputs), outputs: Flat::new(&collective.outputs) })
    }

    /// The collective.
    pub fn collective(&self) -> &'task ExternalCollective {
        self.collective
    }

    /// Bytes of what this rank contributes.
    pub fn input_bytes(&self) -> u64 {
        self.inputs.bytes()
    }

    /// Bytes of what this rank receives.
    pub fn output_bytes(&self) -> u64 {
        self.outputs.bytes()
    }

    /// Where all of what this rank contributes lies, and how many bytes it has, if that is one piece of memory. It is not touched here.
    pub fn whole_input(&self) -> Option<(*mut u8, u64)> {
        self.inputs.whole()
    }

    /// As [`CollectiveMemory::whole_input`], of what this rank receives.
    pub fn whole_output(&self) -> Option<(*mut u8, u64)> {
        self.outputs.whole()
    }

    /// Copies what this rank contributes, from its byte `at` on. `false`: the task is cancelled, and nothing was copied.
    ///
    /// # Panics
    /// Panics when there are not so many bytes.
    #[must_use]
    pub fn read_input(&self, at: u64, into: &mut [u8]) -> bool {
        let Some(_touch) = self.task.touch() else { return false };
        let mut rest = into;
        for (address, bytes) in self.inputs.stretches(at, rest.len() as u64) {
            let (head, tail) = rest.split_at_mut(bytes);
            // SAFETY: the stretch lies in a dense tensor of the task, whose caller keeps it readable while it is touched; `head` is memory
            // of its own with as many bytes.
            unsafe { accl_kernels::copy(head.as_mut_ptr(), address, bytes) };
            rest = tail;
        }
        assert!(rest.is_empty(), "a collective has no more than what its ranks contribute");
        true
    }

    /// Copies to what this rank receives, from its byte `at` on. `false`: the task is cancelled, and nothing was copied.
    ///
    /// # Panics
    /// Panics when there are not so many bytes.
    #[must_use]
    pub fn write_output(&mut self, at: u64, from: &[u8]) -> bool {
        let Some(_touch) = self.task.touch() else { return false };
        let mut rest = from;
        for (address, bytes) in self.outputs.stretches(at, rest.len() as u64) {
            let (head, tail) = rest.split_at(bytes);
            // SAFETY: the stretch lies in a dense tensor of the task, which nobody else touches meanwhile; `head` is other memory with as
            // many bytes.
            unsafe { accl_kernels::copy(address, head.as_ptr(), bytes) };
            rest = tail;
        }
        assert!(rest.is_empty(), "a collective has no more than what its ranks receive");
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

    /// The addresses of `bytes` bytes from byte `at` on, as far as there are so many.
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
        // An empty tensor is between them.
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
        // The arrays lie one behind the other.
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
