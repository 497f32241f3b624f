//! Signatures of calls, which ranks compare, and the error message for two signatures that differ.
//!
//! Read [`signature`] first.

use accl_schedule::Part;
use accl_types::{Collective, Dtype, Elems, Error, Rank, ReduceOp};
use accl_wire::frame::Signature;

use super::build::OFFLOADED_ID;
use super::key::PlanKey;
use crate::call::{CallDesc, Codecs, TRIAL};
use accl_types::hash::{fold, hash_words};

/// Word of a call by reference, in place of the word of its codecs.
const BY_REFERENCE: u64 = u64::MAX;

/// Returns the signature of a checked call.
pub(super) fn signature(desc: &CallDesc, key: &PlanKey, algorithm: u8) -> Signature {
    let total = |blocks: &[Vec<Elems>]| blocks.iter().flatten().map(|elems| elems.0).sum::<u64>();
    let (count, shape) = match desc.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::AllGather => {
            (total(&key.outputs), Some(&key.outputs))
        }
        Collective::ReduceScatter => (total(&key.inputs), Some(&key.inputs)),
        Collective::Gather => (total(&key.inputs), None),
        Collective::Scatter => (total(&key.outputs), None),
        // Offloaded calls have equal blocks, and no messages whose sizes could be compared.
        Collective::AllToAll if key.is_offloaded => (total(&key.inputs), None),
        // With splits, the sizes differ from rank to rank. Each message is checked by its own length.
        Collective::AllToAll | Collective::Barrier | Collective::Send | Collective::Recv => (0, None),
    };
    // The count is in elements, although calls without arithmetic are planned in bytes.
    let count = count * key.elem_bytes / desc.dtype.size_bytes() as u64;
    let reduces = desc.collective.reduces();
    Signature {
        collective: desc.collective as u8,
        dtype: desc.dtype as u8,
        op: if reduces { desc.op as u8 } else { 0 },
        algorithm,
        root: if desc.collective.is_rooted() { desc.root.0 } else { 0 },
        count,
        // Half a hash suffices: it distinguishes blocks with equal totals and need not withstand an adversary. All
        // ranks must cut a call into the same number of parts.
        shape_hash: match key.part {
            Part::WHOLE => shape.map_or(0, |blocks| fold(hash_blocks(blocks))),
            part => fold(hash_words([shape.map_or(0, |blocks| hash_blocks(blocks)), u64::from(part.of)])),
        },
        reserved: match &key.codecs {
            Some(typed) => typed.codecs.word(),
            None if key.is_by_reference => BY_REFERENCE,
            None => desc.note,
        },
    }
}

/// Hashes the sizes, with a mark after each block.
fn hash_blocks(blocks: &[Vec<Elems>]) -> u64 {
    hash_words(blocks.iter().flat_map(|block| block.iter().map(|elems| elems.0).chain([u64::MAX])))
}

/// Returns the error for two ranks that issued different calls with one sequence number.
pub(crate) fn disagreement(seq: u64, (my_rank, mine): (Rank, &Signature), (from, theirs): (Rank, &Signature)) -> Error {
    let (mine_text, theirs_text) = (describe(mine), describe(theirs));
    if let Some(error) = disagreement_on_memory(seq, (my_rank, mine), (from, theirs)) {
        return error.with_peer(from);
    }
    if mine_text == theirs_text && mine.reserved != theirs.reserved {
        return disagreement_on_codecs(seq, (my_rank, mine), (from, theirs)).with_peer(from);
    }
    let is_on_device = |signature: &Signature| signature.algorithm == OFFLOADED_ID;
    if mine.collective == theirs.collective && is_on_device(mine) != is_on_device(theirs) {
        let on_device = if is_on_device(mine) { my_rank } else { from };
        let name = Collective::from_code(mine.collective).map_or("the collective", Collective::name);
        return Error::mismatch(format!(
            "ranks disagree on call {seq}: rank {my_rank} called {mine_text}, rank {from} called {theirs_text}, \
             and only rank {on_device} offloads it; on all ranks, pass split sizes or none, and tensors in the same kind \
             of memory, or use the host with sidestep=\"{name}=host\""
        ))
        .with_peer(from);
    }
    let detail = if mine_text == theirs_text { " (the sizes of individual blocks differ)" } else { "" };
    Error::mismatch(format!(
        "ranks disagree on call {seq}: rank {my_rank} called {mine_text}, rank {from} called {theirs_text}{detail}; all ranks of \
         a group must make the same calls in the same order"
    ))
    .with_peer(from)
}

/// Returns the error if only one of two ranks has a call by reference, or the trial that precedes such calls.
fn disagreement_on_memory(seq: u64, mine: (Rank, &Signature), theirs: (Rank, &Signature)) -> Option<Error> {
    let is_of = |word: u64| {
        let [mine, theirs] = [mine, theirs].map(|(rank, signature)| (rank, signature, signature.reserved == word));
        match (mine.2, theirs.2) {
            (true, false) => Some((mine.0, theirs.0, theirs.1)),
            (false, true) => Some((theirs.0, mine.0, mine.1)),
            (true, true) | (false, false) => None,
        }
    };
    const REMEDY: &str = "or set ACCL_GPU_ROUTE=staged on all ranks";
    if let Some((on_gpu, other, plain)) = is_of(TRIAL) {
        let plain = describe(plain);
        return Some(Error::mismatch(format!(
            "ranks disagree on call {seq}: rank {on_gpu} called a large collective with all tensors on a GPU, and rank {other} called \
             {plain}; move the tensors of rank {other} to its GPU, make all ranks issue the same calls, {REMEDY}"
        )));
    }
    let (on_gpu, other, _) = is_of(BY_REFERENCE).filter(|_| mine.1.collective == theirs.1.collective)?;
    let [mine, theirs] = [mine, theirs].map(|(rank, signature)| format!("rank {rank} called {}", describe(signature)));
    Some(Error::mismatch(format!(
        "ranks disagree on call {seq}: {mine}, {theirs}, and only rank {on_gpu} has all tensors on a GPU; move the tensors of rank \
         {other} to its GPU, pass split sizes on all ranks or on none, {REMEDY}"
    )))
}

fn disagreement_on_codecs(seq: u64, mine: (Rank, &Signature), theirs: (Rank, &Signature)) -> Error {
    let [(my_rank, my_text), (their_rank, their_text)] =
        [mine, theirs].map(|(rank, signature)| (rank, Codecs::describe_word(signature.reserved)));
    let detail = if my_text == their_text { " (the settings of another tensor of the call differ)" } else { "" };
    Error::mismatch(format!(
        "ranks disagree on how call {seq} is compressed: rank {my_rank} with {my_text}, rank {their_rank} with \
         {their_text}{detail}; give all ranks of the group the same compression settings"
    ))
}

/// Describes a call as its caller would write it, from its signature.
fn describe(signature: &Signature) -> String {
    let name = Collective::from_code(signature.collective).map_or("an unknown call", Collective::name);
    let dtype = Dtype::from_code(signature.dtype).map_or("unknown dtype", Dtype::name);
    let mut text = String::from(name);
    let collective = Collective::from_code(signature.collective);
    if collective == Some(Collective::Barrier) {
        return text;
    }
    text.push_str(&format!("({dtype}"));
    if collective.is_some_and(Collective::reduces) {
        text.push_str(&format!(", {}", ReduceOp::from_code(signature.op).map_or("unknown operator", ReduceOp::name)));
    }
    if collective.is_some_and(Collective::is_rooted) {
        text.push_str(&format!(", root {}", signature.root));
    }
    if signature.count > 0 || collective != Some(Collective::AllToAll) {
        text.push_str(&format!(", {} elements", signature.count));
    }
    text.push(')');
    text
}

#[cfg(test)]
mod tests {
    use accl_kernels::codec::{self, CODECS, Setting};

    use super::*;
    use crate::call::TensorCodecs;

    /// Returns one codec of each table row.
    fn texts() -> Vec<String> {
        let bits =
            |row: &codec::Row| if row.has(Setting::Bits) { format!(":{}", row.bits.end()) } else { String::new() };
        CODECS.iter().map(|row| format!("{}{}", row.name, bits(row))).collect()
    }

    fn of(reduce: &str, result: &str) -> Signature {
        let [intra_node, reduce, result] = ["raw", reduce, result].map(|text| codec::parse(text).unwrap());
        let codecs = Codecs::new(vec![TensorCodecs { intra_node, reduce, result, id: 1 }]).unwrap();
        Signature {
            collective: Collective::AllReduce as u8,
            dtype: Dtype::F32 as u8,
            op: ReduceOp::Sum as u8,
            algorithm: 1,
            root: 0,
            count: 4096,
            shape_hash: 0,
            reserved: codecs.word(),
        }
    }

    fn message(mine: &Signature, theirs: &Signature) -> String {
        disagreement(7, (Rank(0), mine), (Rank(3), theirs)).message
    }

    #[test]
    fn two_codecs_that_differ_are_both_named_whatever_rows_they_are() {
        let texts = texts();
        let whole = |text: &String| codec::parse(text).unwrap().summary().to_string();
        for mine in &texts {
            for theirs in texts.iter().filter(|theirs| *theirs != mine) {
                let said = message(&of(mine, mine), &of(theirs, theirs));
                let wanted = format!("rank 0 with {}, rank 3 with {};", whole(mine), whole(theirs));
                assert!(said.contains("on how call 7 is compressed") && said.contains(&wanted), "{said}");
            }
        }
    }

    #[test]
    fn codecs_that_differ_on_the_way_back_alone_are_both_named() {
        let said = message(&of("maxmin:4", "maxmin:8,meta=bfloat16"), &of("maxmin:4", "nvfp4"));
        let mine = "maxmin:4,bucket=512,meta=float32,rounding=nearest for sums and \
                    maxmin:8,bucket=512,meta=bfloat16,rounding=nearest for results";
        assert!(said.contains(&format!("rank 0 with {mine}, rank 3 with maxmin:4")), "{said}");
        assert!(said.contains("for sums and nvfp4 for results"), "{said}");
        let mut none = of("raw", "raw");
        none.reserved = 0;
        assert!(message(&of("raw", "raw"), &none).contains("rank 0 with raw, rank 3 with no codec"));
    }
}
