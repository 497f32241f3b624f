//! Copies between the memory of a device and host memory, and how the operations of a plan stream behind them.
//!
//! A staged tensor lies in memory that only external operations can access, so a call works on a copy in host memory.
//! This module decides which bytes are copied in and out, in which order, and which operations need or make them. It
//! depends on the shape of a call alone. `memory::staged` allocates the host memory, and `exec::run` follows the copies.
//! Read [`StagedCopies`] first.

use std::ops::Range;

use accl_schedule::{Buf, Extent};
use accl_types::{Bytes, Collective, Rank};
use smallvec::SmallVec;

use super::encoded::Operand;
use super::key::{PieceMemory, PlanKey};
use super::op::{ExternalStep, PlanOp, PlanOpKind};
use super::region::Region;

/// Number of segments into which a call's copies are divided, if its tensors are few.
const SEGMENTS: u64 = 16;

/// Minimum bytes of a segment, unless its tensor is shorter. A copy of fewer bytes takes hardly less time.
pub(super) const LEAST_COPY: Bytes = Bytes(1 << 20);

/// Bytes of one piece that are copied at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Index of the piece in its side of the call.
    pub(crate) piece: u32,
    /// Range of bytes in the dense form of the piece.
    pub(crate) range: Range<u64>,
}

/// Position in an operation from which on it needs a segment, or up to which it makes one. Counts as the operation does:
/// bytes, or tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    at: u64,
    segment: u32,
}

/// Position that an operation must have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Writer {
    op: u32,
    at: u64,
}

/// The copies of a plan, as segments.
///
/// Segments to copy in are numbered in the order in which operations need them, and segments to copy out in the order
/// in which they become final. So both kinds of progress are one number.
#[derive(Debug, Default)]
pub(crate) struct StagedCopies {
    /// Segments to copy in. They are pieces of the inputs; of a call in place, pieces of the outputs.
    pub(crate) copy_in: Vec<Segment>,
    /// Segments of the outputs to copy out.
    pub(crate) copy_out: Vec<Segment>,
    /// For each operation: the segments that it needs, by position.
    needs: Vec<SmallVec<[Mark; 1]>>,
    /// For each segment to copy in: the operations that need it. The last entry is for the sample.
    readers: Vec<SmallVec<[u32; 4]>>,
    /// For each segment to copy out: the operations that write it.
    writers: Vec<SmallVec<[Writer; 1]>>,
}

/// Cursor over the segments that have become final.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FinalSegments {
    /// Number of final segments.
    pub(crate) count: u32,
    /// Number of writers of the next segment that have passed it.
    writers: u32,
}

impl StagedCopies {
    /// Returns the progress of the copy-in at which everything may be used, including the sample.
    pub(crate) fn all_in(&self) -> u32 {
        self.copy_in.len() as u32 + 1
    }

    /// Returns how far operation `op` may go once the first `arrived` segments have arrived.
    pub(crate) fn reach(&self, op: u32, arrived: u32) -> u64 {
        if arrived == self.all_in() {
            return u64::MAX;
        }
        let needs = self.needs.get(op as usize).map_or(&[][..], |needs| needs);
        needs.iter().find(|need| need.segment >= arrived).map_or(u64::MAX, |need| need.at)
    }

    /// Returns the operations that may go further because of segment `segment`.
    pub(crate) fn readers(&self, segment: u32) -> &[u32] {
        &self.readers[segment as usize]
    }

    /// Moves the cursor over the segments that are final. `has_passed` returns whether an operation is complete or has
    /// passed a position. Each answer `true` is asked for once.
    pub(crate) fn advance(&self, cursor: &mut FinalSegments, has_passed: impl Fn(u32, u64) -> bool) {
        while let Some(writers) = self.writers.get(cursor.count as usize) {
            let left = &writers[cursor.writers as usize..];
            match left.iter().position(|writer| !has_passed(writer.op, writer.at)) {
                Some(passed) => {
                    cursor.writers += passed as u32;
                    return;
                }
                None => *cursor = FinalSegments { count: cursor.count + 1, writers: 0 },
            }
        }
    }

    /// Creates the copies of a plan of operations `ops` for calls of `key` on rank `rank`.
    pub(super) fn new(ops: &[PlanOp], key: &PlanKey, rank: Rank, least_copy: Bytes) -> Self {
        let sides = Sides { key, is_root: rank == key.root };
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for op in ops {
            sides.touched(op, |touch| {
                let device = sides.memory(touch.extent) == PieceMemory::Device;
                if device && touch.is_read && sides.holds_contents(touch.extent.buf) {
                    reads.push(touch.extent);
                }
                if device && touch.is_write && touch.extent.buf == Buf::Out {
                    writes.push(touch.extent);
                }
            });
        }
        let (mut copy_in, mut copy_out) = (segments(reads, least_copy), segments(writes, least_copy));
        let (mut first_use, mut last_write) = (vec![(u32::MAX, 0); copy_in.len()], vec![(0, 0); copy_out.len()]);
        let mut needs: Vec<SmallVec<[Mark; 1]>> = vec![SmallVec::new(); ops.len()];
        let mut writers: Vec<SmallVec<[Writer; 1]>> = vec![SmallVec::new(); copy_out.len()];
        let sample = copy_in.len() as u32;
        let has_sample = key.staged.outputs.contains(&PieceMemory::Sample);
        for (index, op) in (0..).zip(ops) {
            sides.touched(op, |touch| {
                let memory = sides.memory(touch.extent);
                let holds_contents = sides.holds_contents(touch.extent.buf);
                // The sample is taken from contributions, so nothing is written over them before that. Outputs in host
                // memory may be contributions as well.
                let is_host_output = touch.extent.buf == Buf::Out && memory != PieceMemory::Device;
                let may_overwrite = touch.is_write && (holds_contents || is_host_output);
                if holds_contents && memory == PieceMemory::Sample || has_sample && may_overwrite {
                    let at = first_unit(op, touch.at, key.elem_bytes);
                    needs[index as usize].push(Mark { at, segment: sample });
                }
                if holds_contents {
                    // A write waits, too: a copy-in that comes later would overwrite it.
                    for (segment, bytes) in overlaps(&copy_in, touch.extent) {
                        let at = first_unit(op, touch.at + bytes.start, key.elem_bytes);
                        needs[index as usize].push(Mark { at, segment });
                        first_use[segment as usize] = first_use[segment as usize].min((index, at));
                    }
                }
                if touch.is_write && touch.extent.buf == Buf::Out {
                    for (segment, bytes) in overlaps(&copy_out, touch.extent) {
                        let at = units_to(op, touch.at + bytes.end, key.elem_bytes);
                        let of_segment = &mut writers[segment as usize];
                        match of_segment.last_mut().filter(|writer| writer.op == index) {
                            Some(writer) => writer.at = writer.at.max(at),
                            None => of_segment.push(Writer { op: index, at }),
                        }
                        last_write[segment as usize] = last_write[segment as usize].max((index, at));
                    }
                }
            });
        }
        let new_numbers = reorder(&mut copy_in, &first_use);
        reorder(&mut writers, &last_write);
        reorder(&mut copy_out, &last_write);
        let mut readers: Vec<SmallVec<[u32; 4]>> = vec![SmallVec::new(); copy_in.len() + 1];
        for (index, needs) in (0..).zip(&mut needs) {
            for need in needs.iter_mut() {
                need.segment = new_numbers.get(need.segment as usize).copied().unwrap_or(sample);
                let of_segment = &mut readers[need.segment as usize];
                if of_segment.last() != Some(&index) {
                    of_segment.push(index);
                }
            }
            needs.sort_by_key(|need| need.at);
        }
        Self { copy_in, copy_out, needs, readers, writers }
    }
}

/// Sorts `items` by `keys`. Returns the new index of each item.
fn reorder<T: Default>(items: &mut [T], keys: &[(u32, u64)]) -> Vec<u32> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&index| keys[index]);
    let mut old: Vec<T> = items.iter_mut().map(std::mem::take).collect();
    let mut new_index = vec![0; items.len()];
    for (new, &index) in order.iter().enumerate() {
        items[new] = std::mem::take(&mut old[index]);
        new_index[index] = new as u32;
    }
    new_index
}

impl Default for Segment {
    fn default() -> Self {
        Self { piece: 0, range: 0..0 }
    }
}

/// One access of an operation: bytes of a piece, and the position of the first one in the operation.
struct Touch {
    extent: Extent,
    at: u64,
    is_read: bool,
    is_write: bool,
}

/// The sides of a call: which buffers are the same memory, and which have contents when the call begins.
struct Sides<'key> {
    key: &'key PlanKey,
    is_root: bool,
}

impl Sides<'_> {
    /// Returns whether the call reduces its outputs in place, so that `In` and `Out` are the same memory.
    fn is_in_place(&self) -> bool {
        matches!(self.key.collective, Collective::AllReduce | Collective::Reduce)
    }

    /// Returns whether the contents of a buffer count when the call begins. Calls in place have only `Out`.
    fn holds_contents(&self, buf: Buf) -> bool {
        match self.key.collective {
            Collective::AllReduce | Collective::Reduce => buf == Buf::Out,
            Collective::Broadcast => buf == Buf::Out && self.is_root,
            Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll
            | Collective::Barrier
            | Collective::Send
            | Collective::Recv => buf == Buf::In,
        }
    }

    /// Returns whether results of an offloaded call are written on this rank.
    fn receives(&self) -> bool {
        match self.key.collective {
            Collective::Reduce => self.is_root,
            Collective::Broadcast => !self.is_root,
            _ => true,
        }
    }

    fn memory(&self, extent: Extent) -> PieceMemory {
        let pieces = match extent.buf {
            Buf::In => &self.key.staged.inputs,
            Buf::Out => &self.key.staged.outputs,
            Buf::Scratch | Buf::Code => return PieceMemory::Host,
        };
        pieces.get(extent.piece as usize).copied().unwrap_or(PieceMemory::Host)
    }

    /// Passes every access of an operation to tensors to `each`. In a call in place, all are accesses to `Out`.
    fn touched(&self, op: &PlanOp, mut each: impl FnMut(Touch)) {
        let mut region = |region: &Region, is_read: bool, is_write: bool| {
            for (at, mut extent) in region.parts() {
                if extent.buf == Buf::In && self.is_in_place() {
                    extent.buf = Buf::Out;
                }
                each(Touch { extent, at, is_read, is_write });
            }
        };
        match &op.kind {
            PlanOpKind::Send { src, .. } => region(src, true, false),
            PlanOpKind::Recv { dst, .. } => region(dst, false, true),
            PlanOpKind::RecvReduce { dst, local, .. } => {
                region(local, true, false);
                region(dst, false, true);
            }
            PlanOpKind::Copy { dst, src } => {
                region(src, true, false);
                region(dst, false, true);
            }
            PlanOpKind::Reduce { dst, srcs, .. } => {
                srcs.iter().for_each(|src| region(src, true, false));
                region(dst, false, true);
            }
            PlanOpKind::Combine(combination) => {
                for src in &combination.srcs {
                    if let Operand::Values(src) = src {
                        region(src, true, false);
                    }
                }
                if let Some(out) = &combination.out {
                    region(out, false, true);
                }
            }
            PlanOpKind::External(ExternalStep::Offload) => {
                let elem = self.key.elem_bytes;
                for (buf, blocks) in [(Buf::In, &self.key.inputs), (Buf::Out, &self.key.outputs)] {
                    if buf == Buf::In && self.is_in_place() {
                        continue;
                    }
                    let is_write = buf == Buf::Out && self.receives();
                    for (piece, elems) in (0..).zip(blocks.iter().flatten()).filter(|(_, elems)| elems.0 > 0) {
                        let extent = Extent { buf, piece, offset: 0, len: elems.0 * elem };
                        each(Touch { extent, at: 0, is_read: true, is_write });
                    }
                }
            }
            PlanOpKind::External(
                ExternalStep::CopyIn | ExternalStep::CopyOut | ExternalStep::Combine | ExternalStep::Join,
            ) => {}
        }
    }
}

/// Returns the unit of an operation that has byte `at`.
fn first_unit(op: &PlanOp, at: u64, elem_bytes: u64) -> u64 {
    match &op.kind {
        PlanOpKind::Combine(combination) => {
            combination.starts.partition_point(|&start| start * elem_bytes <= at).saturating_sub(1) as u64
        }
        PlanOpKind::External(_) => 0,
        _ => at,
    }
}

/// Returns how many units of an operation have its first `end` bytes. An external operation must be complete.
fn units_to(op: &PlanOp, end: u64, elem_bytes: u64) -> u64 {
    match &op.kind {
        PlanOpKind::Combine(combination) => {
            combination.starts.partition_point(|&start| start * elem_bytes < end) as u64
        }
        PlanOpKind::External(_) => u64::MAX,
        _ => end,
    }
}

/// Divides the bytes of these extents, each once, into segments in the order of pieces.
fn segments(mut extents: Vec<Extent>, least_copy: Bytes) -> Vec<Segment> {
    extents.sort_unstable_by_key(|extent| (extent.piece, extent.offset));
    let mut merged: Vec<Segment> = Vec::new();
    for extent in extents {
        let end = extent.offset + extent.len;
        match merged.last_mut() {
            Some(last) if last.piece == extent.piece && extent.offset <= last.range.end => {
                last.range.end = last.range.end.max(end);
            }
            _ => merged.push(Segment { piece: extent.piece, range: extent.offset..end }),
        }
    }
    let total: u64 = merged.iter().map(|segment| segment.range.end - segment.range.start).sum();
    // A multiple of a cache line, and so of each element's size.
    let length = total.div_ceil(SEGMENTS).max(least_copy.0).next_multiple_of(64);
    let cut = |Segment { piece, range }: Segment| {
        let starts = range.clone().step_by(length as usize);
        starts.map(move |start| Segment { piece, range: start..(start + length).min(range.end) })
    };
    merged.into_iter().flat_map(cut).collect()
}

/// Returns the sorted segments that share bytes with an extent, and these bytes counted from the extent's start.
fn overlaps(segments: &[Segment], extent: Extent) -> impl Iterator<Item = (u32, Range<u64>)> {
    let (begin, end) = (extent.offset, extent.offset + extent.len);
    let first = segments.partition_point(|segment| (segment.piece, segment.range.end) <= (extent.piece, begin));
    let here = (first as u32..).zip(&segments[first..]);
    here.take_while(move |(_, segment)| segment.piece == extent.piece && segment.range.start < end).map(
        move |(index, segment)| (index, segment.range.start.max(begin) - begin..segment.range.end.min(end) - begin),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use accl_kernels::codec;
    use accl_schedule::{ALGORITHMS, Algorithm, Part, Topology};
    use accl_types::Dtype;

    use super::super::build::tests::{HOSTS, key_of, plan_of};
    use super::super::key::StagedPieces;
    use super::*;
    use crate::call::{Codecs, TensorCodecs, TypedCodecs};

    /// A byte of one side of a call.
    type Byte = (u32, u64);

    /// Calls `check` with the operations and the copies of calls of each algorithm, whose tensors all lie on a device.
    fn each_plan(check: impl Fn(&str, &[PlanOp], &Sides<'_>, &StagedCopies)) {
        let parse = |text: &str| codec::parse(text).expect("a codec");
        let tensor =
            TensorCodecs { intra_node: parse("bf16"), reduce: parse("maxmin:4"), result: parse("bf16"), id: 0 };
        let coding = TypedCodecs { codecs: Codecs::new(vec![tensor]).expect("codecs"), dtype: Dtype::F32 };
        let encodes = |row: &Algorithm| !matches!(row.encodes, accl_schedule::Encodes::No);
        for topology in HOSTS.map(|hosts| Topology::new(hosts.to_vec())) {
            let fits = |row: &&Algorithm| (row.applies)(topology.world(), &topology);
            let sizes: [&[u64]; 3] = [&[300], &[70, 0, 3, 131], &[5]];
            for (row, counts) in ALGORITHMS.iter().filter(fits).flat_map(|row| sizes.map(|sizes| (row, sizes))) {
                if row.needs_equal_blocks && counts.len() > 1 {
                    continue;
                }
                let parts = [Part::WHOLE, Part { index: 0, of: 2 }, Part { index: 1, of: 2 }];
                for (part, coding) in parts.iter().flat_map(|part| [(*part, None), (*part, Some(&coding))]) {
                    if coding.is_some() && !encodes(row) {
                        continue;
                    }
                    for rank in 0..topology.world() {
                        let mut key = key_of(row, topology.world(), rank, counts, part, coding);
                        let device = |blocks: &[Vec<accl_types::Elems>]| {
                            blocks.iter().flatten().map(|_| PieceMemory::Device).collect()
                        };
                        key.staged = StagedPieces { inputs: device(&key.inputs), outputs: device(&key.outputs) };
                        let plan = plan_of(row, &topology, &key, rank);
                        let copies = StagedCopies::new(&plan.ops, &key, Rank(rank), Bytes(64));
                        let sides = Sides { key: &key, is_root: rank == 0 };
                        check(row.name, &plan.ops, &sides, &copies);
                    }
                }
            }
        }
    }

    /// Returns the segment of each byte.
    fn by_byte(segments: &[Segment]) -> BTreeMap<Byte, u32> {
        let mut found = BTreeMap::new();
        for (index, segment) in (0..).zip(segments) {
            for byte in segment.range.clone() {
                assert_eq!(found.insert((segment.piece, byte), index), None, "a byte is copied twice");
            }
        }
        found
    }

    fn bytes_of(touch: &Touch) -> impl Iterator<Item = (u64, Byte)> {
        let (extent, at) = (touch.extent, touch.at);
        (0..extent.len).map(move |skip| (at + skip, (extent.piece, extent.offset + skip)))
    }

    #[test]
    fn no_operation_passes_a_byte_that_has_not_arrived_and_none_waits_for_others() {
        each_plan(|name, ops, sides, copies| {
            let arrives_with = by_byte(&copies.copy_in);
            for (index, op) in (0..).zip(ops) {
                // For each segment, the first byte of the operation that needs it.
                let mut first: BTreeMap<u32, u64> = BTreeMap::new();
                sides.touched(op, |touch| {
                    if !sides.holds_contents(touch.extent.buf) {
                        return;
                    }
                    for (at, byte) in bytes_of(&touch) {
                        let segment = arrives_with.get(&byte);
                        assert!(segment.is_some() || !touch.is_read, "{name}: a byte is read and not copied in");
                        if let Some(&segment) = segment {
                            let unit = first_unit(op, at, sides.key.elem_bytes);
                            let first = first.entry(segment).or_insert(unit);
                            *first = unit.min(*first);
                        }
                    }
                });
                for arrived in 0..=copies.copy_in.len() as u32 {
                    let expected = first.range(arrived..).map(|(_, &at)| at).min().unwrap_or(u64::MAX);
                    assert_eq!(copies.reach(index, arrived), expected, "{name}: operation {index} after {arrived}");
                }
                for &segment in first.keys() {
                    assert!(copies.readers(segment).contains(&index), "{name}: operation {index} is not queued");
                }
            }
        });
    }

    #[test]
    fn a_segment_is_final_when_and_only_when_all_that_write_it_have_passed_it() {
        each_plan(|name, ops, sides, copies| {
            let leaves_with = by_byte(&copies.copy_out);
            let mut written: BTreeMap<Byte, Vec<(u32, u64)>> = BTreeMap::new();
            for (index, op) in (0..).zip(ops) {
                sides.touched(op, |touch| {
                    if touch.is_write && touch.extent.buf == Buf::Out {
                        for (at, byte) in bytes_of(&touch) {
                            written.entry(byte).or_default().push((index, units_to(op, at + 1, sides.key.elem_bytes)));
                        }
                    }
                });
            }
            assert!(written.keys().eq(leaves_with.keys()), "{name}: other bytes are copied out than written");
            for segment in 0..copies.copy_out.len() as u32 {
                let bytes = written.iter().filter(|(byte, _)| leaves_with[*byte] == segment);
                let mut least: BTreeMap<u32, u64> = BTreeMap::new();
                for &(op, at) in bytes.flat_map(|(_, writers)| writers) {
                    let least = least.entry(op).or_insert(at);
                    *least = at.max(*least);
                }
                for (&slow, &at) in &least {
                    let count = |done: u64| {
                        let mut cursor = FinalSegments { count: segment, writers: 0 };
                        copies.advance(&mut cursor, |op, at| op != slow || at <= done);
                        cursor.count > segment
                    };
                    assert!(count(at) && !count(at - 1), "{name}: operation {slow} and segment {segment}");
                }
            }
        });
    }

    #[test]
    fn the_cursor_asks_for_each_writer_once_more_than_it_fails() {
        let writers = (0..1000).map(|op| Writer { op, at: 1 }).collect();
        let copies = StagedCopies { writers: vec![writers], ..StagedCopies::default() };
        let (mut cursor, asked) = (FinalSegments::default(), std::cell::Cell::new(0));
        for done in 0..=1000 {
            copies.advance(&mut cursor, |op, _| {
                asked.set(asked.get() + 1);
                op < done
            });
        }
        assert_eq!((cursor.count, asked.get()), (1, 2000));
    }

    #[test]
    fn large_tensors_are_copied_in_pieces_and_small_ones_at_once() {
        let extent = |piece, len| Extent { buf: Buf::In, piece, offset: 0, len };
        let lengths = |extents: Vec<Extent>| -> Vec<(u32, u64)> {
            let segments = segments(extents, LEAST_COPY);
            segments.iter().map(|segment| (segment.piece, segment.range.end - segment.range.start)).collect()
        };
        assert_eq!(lengths(vec![extent(0, 64 << 20)]), vec![(0, 4 << 20); 16]);
        assert_eq!(lengths(vec![extent(0, (3 << 20) + 8)]), [(0, 1 << 20), (0, 1 << 20), (0, 1 << 20), (0, 8)]);
        assert_eq!(lengths(vec![extent(1, 100), extent(0, 4), extent(0, 4)]), [(0, 4), (1, 100)]);
    }
}
