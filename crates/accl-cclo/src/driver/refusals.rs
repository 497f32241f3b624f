//! Refusal of calls on which firmware would hang or do something other than requested.
//!
//! Owns the conditions of those hazards that a single call can meet; see [`crate::hazards`]. Calls that [`crate::offload::Pieces`] has split are
//! never refused.

use accl_types::{Error, ErrorKind, Result};

use crate::call::{ANY_TAG, Counts, Descriptor, Operation};
use crate::memory_map::{ArithmeticConfig, Network};
use crate::settings::Settings;

/// Maximum number of a kernel stream.
const MAX_STREAM: u32 = 246;

/// Context of a call that is not in its words.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallContext {
    /// Number of ranks in the call's communicator, and this rank's index in it (`local`).
    pub(super) ranks: u32,
    pub(super) local: u32,
    /// Arithmetic config of the call's elements; `None` if the call has none.
    pub(super) config: Option<ArithmeticConfig>,
}

/// Checks that firmware will do what the call asks for, as far as this rank can know.
pub(super) fn check(call: &Descriptor, settings: &Settings, context: CallContext) -> Result<()> {
    let refused = |why: String| {
        let text = format!("`{call}` is refused: {why}");
        Err(Error::new(ErrorKind::Unsupported, text))
    };
    let CallContext { ranks, local, config } = context;
    let row = call.operation.row();
    let is_local = matches!(call.operation, Operation::Copy | Operation::Combine | Operation::Nop);
    let is_message = matches!(call.operation, Operation::Send | Operation::Recv);
    if call.operation == Operation::Config {
        return refused("only the driver itself configures a device; open it with other settings".to_owned());
    }
    if row.has_root && call.root >= ranks {
        return refused(format!("its communicator has {ranks} ranks, and no rank {}", call.root));
    }
    if is_message && call.root == local {
        return refused("a device cannot send to itself; use a copy".to_owned());
    }
    if row.reduces && call.reduce_function().is_none() {
        return refused(format!("function {} is neither sum nor max", call.function));
    }
    if row.reduces && config.is_none_or(|config| config.functions.is_empty()) {
        return refused("it reduces, but its elements can only be moved".to_owned());
    }
    let element_bytes = config.map_or(1, |config| u64::from(config.uncompressed.size_bytes()));
    let bytes = u64::from(call.count) * element_bytes;
    let of_all = bytes * u64::from(ranks);
    // In operations counted per rank, one buffer holds the blocks of all ranks. Otherwise each message has `bytes` bytes for any number of ranks.
    let (counted, of_whom) = match row.counts {
        Counts::ElementsPerRank => (of_all, " of all ranks"),
        Counts::Elements => (bytes, ""),
        Counts::Nothing | Counts::Value => (0, ""),
    };
    if counted > u64::from(u32::MAX) {
        return refused(format!("it covers {counted} bytes{of_whom}, and firmware counts to 4 GiB; split it"));
    }
    if is_local || ranks <= 1 {
        return Ok(());
    }

    let (uses, hosts, streams) = (row.uses, call.hosts, call.streams);
    let in_host = [
        (uses.first && !streams.first, hosts.first),
        (uses.second, hosts.second),
        (uses.result && !streams.result, hosts.result),
    ];
    let all = settings.memory;
    if in_host.iter().any(|(is_used, is_host)| *is_used && *is_host != all.is_host()) {
        return refused(format!(
            "all its buffers must lie in {} memory",
            if all.is_host() { "host" } else { "device" }
        ));
    }
    let over_rdma = settings.network == Network::Rdma;
    if call.streams.result && is_message {
        if call.tag > MAX_STREAM {
            return refused(format!(
                "its tag must be the number of a kernel stream: expected at most {MAX_STREAM}, got {:#x}",
                call.tag
            ));
        }
        if call.operation == Operation::Send && over_rdma {
            return refused("a message for a kernel stream sometimes hangs over RDMA (hazard 10)".to_owned());
        }
    } else if is_message && call.tag == ANY_TAG {
        return refused("both ends of a message must name the same tag, which is not `any` (hazard 7)".to_owned());
    }

    let is_plain = !call.compression.is_any() && !call.streams.is_any();
    if matches!(call.operation, Operation::AllToAll | Operation::Barrier) {
        if !over_rdma {
            return refused("it needs RDMA (hazard 2)".to_owned());
        }
        return if is_plain {
            Ok(())
        } else {
            refused("it supports neither compression nor kernel streams".to_owned())
        };
    }
    let is_eager = !is_plain || bytes <= u64::from(settings.max_eager_bytes);
    if is_eager {
        let segment = u64::from(settings.rx_bytes) / element_bytes;
        return match empty_share(call, u64::from(ranks), segment) {
            Some(least) => refused(format!(
                "the last rank's share of its last segment is empty (hazard 1); pad its count to {least}, a multiple of {ranks} ranks"
            )),
            None => Ok(()),
        };
    }
    if !over_rdma {
        return refused(format!(
            "a message of {bytes} bytes is larger than the largest eager message of {} bytes (hazard 2); split it",
            settings.max_eager_bytes
        ));
    }
    let spare = u64::from(settings.max_rendezvous_bytes);
    match call.operation {
        Operation::Gather if call.root > 0 && call.root + 1 < ranks => refused(format!(
            "its root is neither the first nor the last rank (hazard 3); split its blocks to at most {} bytes",
            settings.max_eager_bytes
        )),
        Operation::ReduceScatter => refused(format!(
            "the source of rank 0 would be overwritten (hazard 6); split its blocks to at most {} bytes",
            settings.max_eager_bytes
        )),
        Operation::Reduce | Operation::AllReduce if of_all > spare => refused(format!(
            "{ranks} ranks contribute {of_all} bytes, and a spare buffer holds {spare} (hazard 5); split it, or use a larger `rendezvous`"
        )),
        _ => Ok(()),
    }
}

/// Returns `None` unless an eager all_reduce would leave the last rank without elements in its last segment. Then returns a larger, valid count: the
/// next multiple of `ranks`.
fn empty_share(call: &Descriptor, ranks: u64, segment: u64) -> Option<u64> {
    if call.operation != Operation::AllReduce {
        return None;
    }
    let (count, segment) = (u64::from(call.count), segment / ranks * ranks);
    let last = count.checked_rem(segment).unwrap_or(count);
    (last > 0 && (ranks - 1) * last.div_ceil(ranks) >= last).then(|| count.next_multiple_of(ranks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Compression, Hosts, Streams};
    use crate::memory_map::ARITHMETIC_CONFIGS;
    use crate::settings::Peer;

    const SINGLE: ArithmeticConfig = ARITHMETIC_CONFIGS[2];

    fn said(network: Network, ranks: u32, call: Descriptor) -> Option<String> {
        let peer = |session| Peer { ip: [127, 0, 0, 1].into(), port: 5500, session };
        let settings = Settings::new(network, 0, (0..ranks).map(peer).collect());
        let context = CallContext { ranks, local: 0, config: Some(SINGLE) };
        check(&call, &settings, context).err().map(|error| error.message)
    }

    #[test]
    fn what_hangs_or_is_wrong_is_refused_with_a_reason() {
        use Operation::*;
        let call = |operation, count| Descriptor { count, ..Descriptor::new(operation) };
        let tagged = |operation, count| Descriptor { tag: 7, root: 1, ..call(operation, count) };
        let to_stream = Streams { result: true, ..Streams::default() };
        let half = Compression { wire: true, ..Compression::default() };
        // The largest eager message has 4096 elements, and a spare buffer 8192.
        for (network, ranks, call, why) in [
            (Network::Udp, 2, call(Config, 1), "only the driver itself configures a device"),
            (
                Network::Udp,
                2,
                Descriptor { root: 2, ..call(Broadcast, 1) },
                "its communicator has 2 ranks, and no rank 2",
            ),
            (Network::Udp, 2, Descriptor { root: 0, ..tagged(Send, 1) }, "a device cannot send to itself; use a copy"),
            (Network::Udp, 2, Descriptor { function: 2, ..call(Reduce, 1) }, "function 2 is neither sum nor max"),
            (
                Network::Udp,
                2,
                Descriptor { tag: ANY_TAG, ..tagged(Recv, 1) },
                "both ends of a message must name the same tag",
            ),
            (
                Network::Udp,
                2,
                Descriptor { streams: to_stream, tag: 247, ..tagged(Send, 1) },
                "its tag must be the number of a kernel stream: expected at most 246, got",
            ),
            (
                Network::Rdma,
                2,
                Descriptor { streams: to_stream, ..tagged(Send, 1) },
                "a message for a kernel stream sometimes hangs",
            ),
            (
                Network::Udp,
                2,
                Descriptor { hosts: Hosts::all(true), ..call(Broadcast, 1) },
                "all its buffers must lie in device memory",
            ),
            (Network::Tcp, 2, call(AllToAll, 1), "it needs RDMA (hazard 2)"),
            (Network::Udp, 2, call(Barrier, 0), "it needs RDMA (hazard 2)"),
            (
                Network::Rdma,
                2,
                Descriptor { compression: half, ..call(AllToAll, 1) },
                "it supports neither compression nor kernel streams",
            ),
            (
                Network::Udp,
                2,
                call(Broadcast, 4097),
                "a message of 16388 bytes is larger than the largest eager message of 16384 bytes (hazard 2)",
            ),
            (
                Network::Udp,
                2,
                call(AllReduce, 1),
                "the last rank's share of its last segment is empty (hazard 1); pad its count to 2",
            ),
            (
                Network::Rdma,
                3,
                call(AllReduce, 4),
                "the last rank's share of its last segment is empty (hazard 1); pad its count to 6",
            ),
            (
                Network::Rdma,
                3,
                Descriptor { root: 1, ..call(Gather, 5000) },
                "its root is neither the first nor the last rank (hazard 3)",
            ),
            (
                Network::Rdma,
                3,
                call(AllReduce, 4099),
                "3 ranks contribute 49188 bytes, and a spare buffer holds 32768 (hazard 5)",
            ),
            (Network::Rdma, 2, call(ReduceScatter, 5000), "the source of rank 0 would be overwritten (hazard 6)"),
            (
                Network::Rdma,
                4,
                call(AllGather, 1 << 29),
                "it covers 8589934592 bytes of all ranks, and firmware counts to 4 GiB",
            ),
        ] {
            let text = said(network, ranks, call).unwrap_or_default();
            assert!(text.starts_with(&format!("`{call}` is refused: {why}")), "{why}: {text}");
        }
    }

    #[test]
    fn bytes_of_all_ranks_count_only_where_blocks_of_all_are_in_one_buffer() {
        use Operation::*;
        // There are four ranks. Between 1 GiB and 4 GiB firmware can count a single message, but not the blocks of all ranks.
        const GIB: u32 = 1 << 28;
        const MOST: u32 = 4 * GIB - 1;
        let call = |operation, count| Descriptor { count, tag: 7, root: 1, ..Descriptor::new(operation) };
        let counts = |operation, count| {
            let text = said(Network::Rdma, 4, call(operation, count)).unwrap_or_default();
            !text.contains("firmware counts to 4 GiB")
        };
        for operation in [AllGather, Scatter, Gather, ReduceScatter, AllToAll] {
            assert!(counts(operation, GIB - 1), "{operation:?}");
            for count in [GIB, 2 * GIB, MOST] {
                assert!(!counts(operation, count), "{operation:?} of {count}");
            }
        }
        for operation in [Broadcast, AllReduce, Reduce, Copy, Combine, Send, Recv] {
            for count in [GIB, MOST] {
                assert!(counts(operation, count), "{operation:?} of {count}");
            }
        }
        for operation in [Broadcast, Copy, Send, Recv] {
            assert_eq!(said(Network::Rdma, 4, call(operation, 2 * GIB)), None, "{operation:?}");
        }
        // Elements have four bytes, so a 32-bit count can exceed the limit.
        for operation in [Broadcast, AllReduce, Reduce, Copy, Combine, Send, Recv] {
            assert!(!counts(operation, MOST + 1), "{operation:?}");
            assert!(!counts(operation, u32::MAX), "{operation:?}");
        }
    }

    #[test]
    fn what_does_what_it_says_passes() {
        use Operation::*;
        let call = |operation, count| Descriptor { count, ..Descriptor::new(operation) };
        let tagged = |operation, count| Descriptor { tag: 7, root: 1, ..call(operation, count) };
        for (network, ranks, call) in [
            (Network::Udp, 2, call(Nop, 0)),
            (Network::Udp, 2, Descriptor { hosts: Hosts { first: true, ..Hosts::default() }, ..call(Copy, 1 << 20) }),
            (Network::Udp, 2, tagged(Send, 4096)),
            (Network::Udp, 2, tagged(Recv, 4096)),
            (Network::Udp, 2, Descriptor { streams: Streams { result: true, first: true }, ..tagged(Send, 8) }),
            (Network::Udp, 1, call(AllReduce, 1)),
            (Network::Udp, 3, call(AllReduce, 3)),
            (Network::Udp, 3, call(AllReduce, 300)),
            (Network::Rdma, 2, call(Broadcast, 1 << 20)),
            (Network::Rdma, 3, Descriptor { root: 2, ..call(Gather, 5000) }),
            (Network::Rdma, 2, call(AllReduce, 4096)),
            (Network::Rdma, 2, call(AllToAll, 1 << 20)),
            (Network::Rdma, 2, call(Barrier, 0)),
        ] {
            assert_eq!(said(network, ranks, call), None, "{call}");
        }
    }
}
