//! The rows' stated costs compared with their schedules.

use accl_schedule::cost::{Arriving, Cost, Reach};
use accl_schedule::{ALGORITHMS, Algorithm, CallShape, Layout, OpKind, Part, Request, Topology};
use accl_types::{Collective, Elems, Rank};

/// Bytes of the largest buffer: divisible by every number of chunks that small worlds have.
const BYTES: u64 = 12_252_240;

/// The work of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Work {
    sent: u64,
    received: u64,
    sent_bytes: u64,
    received_bytes: u64,
    reduced_bytes: u64,
}

impl Work {
    fn messages(self) -> u64 {
        self.sent + self.received
    }

    fn bytes(self) -> u64 {
        self.sent_bytes + self.received_bytes
    }
}

/// The work of all ranks.
#[derive(Debug, Default)]
struct Counted {
    ranks: Vec<Work>,
    all: Reach,
    all_bytes: u64,
    uplink_bytes: u64,
    copied: u64,
    operands: u32,
    operand_bytes: u64,
}

fn count(row: &Algorithm, topology: &Topology) -> Counted {
    let world = topology.world();
    let mut counted = Counted::default();
    let hosts = topology.host_count() as usize;
    let (mut crossing, mut crossing_bytes) = (vec![[0u64; 2]; hosts], vec![[0u64; 2]; hosts]);
    for rank in 0..world {
        let request = Request { collective: row.collective, world, rank: Rank(rank), root: Rank(0), topology };
        let program = (row.build)(&request).lower(&request);
        let (inputs, outputs) = blocks(row.collective, world, rank);
        let layout = Layout::new(
            &program,
            &CallShape { elem_bytes: 1, in_blocks: &inputs, out_blocks: &outputs, coding: None, part: Part::WHOLE },
        );
        let mut work = Work::default();
        let mut copied = 0;
        for op in &program.ops {
            match &op.kind {
                OpKind::Send { src, to } => {
                    let bytes = layout.bytes(src);
                    work.sent += 1;
                    work.sent_bytes += bytes;
                    counted.all_bytes += bytes;
                    let (from, to) = (topology.host_of(Rank(rank)), topology.host_of(*to));
                    if from == to {
                        counted.all.intra_node += 1;
                        continue;
                    }
                    counted.all.inter_node += 1;
                    for (host, way) in [(from, 0), (to, 1)] {
                        crossing[host as usize][way] += 1;
                        crossing_bytes[host as usize][way] += bytes;
                    }
                }
                OpKind::Recv { dst, .. } => {
                    work.received += 1;
                    work.received_bytes += layout.bytes(dst);
                }
                OpKind::RecvReduce { dst, .. } => {
                    work.received += 1;
                    work.received_bytes += layout.bytes(dst);
                    work.reduced_bytes += layout.bytes(dst);
                }
                OpKind::Copy { dst, .. } => copied += layout.bytes(dst),
                OpKind::Reduce { dst, srcs, .. } => {
                    counted.operands = counted.operands.max(srcs.len() as u32);
                    counted.operand_bytes = counted.operand_bytes.max(layout.bytes(dst));
                }
                OpKind::Combine { .. } => unreachable!("no plain program encodes"),
            }
        }
        counted.copied = counted.copied.max(copied);
        counted.ranks.push(work);
    }
    counted.all.uplink = crossing.into_iter().flatten().max().unwrap_or(0);
    counted.uplink_bytes = crossing_bytes.into_iter().flatten().max().unwrap_or(0);
    counted
}

fn blocks(collective: Collective, world: u32, rank: u32) -> (Vec<Vec<Elems>>, Vec<Vec<Elems>>) {
    let whole = || vec![vec![Elems(BYTES)]];
    let one = || vec![vec![Elems(BYTES / u64::from(world))]];
    let each = || vec![vec![Elems(BYTES / u64::from(world))]; world as usize];
    let at_root = |blocks: Vec<Vec<Elems>>| if rank == 0 { blocks } else { Vec::new() };
    match collective {
        Collective::AllReduce => (whole(), whole()),
        Collective::Reduce => (whole(), at_root(whole())),
        Collective::Broadcast => (Vec::new(), whole()),
        Collective::ReduceScatter => (each(), one()),
        Collective::AllGather => (one(), each()),
        Collective::Gather => (one(), at_root(each())),
        Collective::Scatter => (at_root(each()), one()),
        Collective::AllToAll => (each(), each()),
        Collective::Barrier | Collective::Send | Collective::Recv => (Vec::new(), Vec::new()),
    }
}

/// The same numbers, from the row.
fn stated(cost: &Cost) -> (Work, Reach, u64, u64) {
    let mut work = Work::default();
    let mut all = Reach::default();
    let (mut all_bytes, mut uplink_bytes) = (0, 0);
    for phase in &cost.phases {
        let (sent, received) = phase.messages();
        let bytes = phase.part.of_bytes(BYTES);
        work.sent += u64::from(sent);
        work.received += u64::from(received);
        work.sent_bytes += u64::from(sent) * bytes;
        work.received_bytes += u64::from(received) * bytes;
        if phase.arriving == Arriving::Reduced {
            work.reduced_bytes += u64::from(received) * bytes;
        }
        all.intra_node += phase.all.intra_node;
        all.inter_node += phase.all.inter_node;
        all.uplink += phase.all.uplink;
        all_bytes += phase.all.sum() * bytes;
        uplink_bytes += phase.all.uplink * bytes;
    }
    (work, all, all_bytes, uplink_bytes)
}

/// Whether and why a row states a bound instead of an exact count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound {
    /// The counts are exact.
    Exact,
    /// A message that crosses the wrap after the last rank is sent in two parts; bytes are exact.
    CutMessages,
    /// Messages of a phase differ in size, because ranks were folded or a subtree is not full; the row states the
    /// largest.
    LargestMessage,
}

fn bound(row: &Algorithm, topology: &Topology) -> Bound {
    let world = topology.world();
    let hosts = topology.smallest_host() < topology.largest_host();
    match row.name {
        "two_level" if hosts && row.id != 7 && row.id != 63 => Bound::LargestMessage,
        "circulant" => Bound::CutMessages,
        "recursive_halving" if !world.is_power_of_two() => Bound::LargestMessage,
        "binomial" if row.needs_equal_blocks && !world.is_power_of_two() => Bound::LargestMessage,
        _ => Bound::Exact,
    }
}

/// Whether `stated` is at least `counted`, and exceeds it by at most `num / den` of it.
fn is_bound(stated: u64, counted: u64, num: u64, den: u64) -> bool {
    stated >= counted && (stated - counted) * den <= counted * num
}

fn check(row: &Algorithm, topology: &Topology) -> Result<(), String> {
    let world = topology.world();
    let counted = count(row, topology);
    let cost = (row.cost)(world, topology);
    let (work, all, all_bytes, uplink_bytes) = stated(&cost);
    let bound = bound(row, topology);
    let alike = |what: &str, stated: u64, counted: u64| match stated == counted {
        true => Ok(()),
        false => Err(format!("{what}: stated {stated}, counted {counted}")),
    };

    alike("bytes copied", cost.copied.of_bytes(BYTES), counted.copied)?;
    alike("operands", cost.operands.into(), counted.operands.into())?;
    alike("bytes of an operand", cost.operand.of_bytes(BYTES), counted.operand_bytes)?;
    let chain: u32 = cost.phases.iter().map(|phase| phase.chain.sum()).sum();
    let steps = (row.steps)(world, topology);
    // With several hosts, the row states the path with the most hops between hosts, which need not be the longest.
    if chain > steps || topology.host_count() == 1 && chain < steps {
        return Err(format!("chain of {chain} messages, documented {steps}"));
    }

    let most = |of: fn(&Work) -> u64| counted.ranks.iter().map(of).max().unwrap_or(0);
    if bound == Bound::CutMessages {
        let cuts = cost.phases.len() as u64;
        if !(all.sum()..=all.sum() + cuts).contains(&counted.all.sum()) {
            return Err(format!("messages: stated {all:?}, counted {:?}", counted.all));
        }
        if !(work.messages()..=work.messages() + cuts).contains(&most(|work| work.messages())) {
            return Err("messages of the busiest rank".to_owned());
        }
    } else {
        alike("messages on a host", all.intra_node, counted.all.intra_node)?;
        alike("messages between hosts", all.inter_node, counted.all.inter_node)?;
        alike("messages of the busiest rank", work.messages(), most(|work| work.messages()))?;
        // The busiest host of one phase may differ from the busiest host of another.
        if !is_bound(all.uplink, counted.all.uplink, 1, 1) {
            return Err(format!("uplink: stated {all:?}, counted {:?}", counted.all));
        }
    }
    if bound == Bound::LargestMessage {
        let bytes = [(all_bytes, counted.all_bytes), (work.bytes(), most(|work| work.bytes()))];
        if let Some(wrong) = bytes.into_iter().find(|&(stated, counted)| !is_bound(stated, counted, 1, 1)) {
            return Err(format!("bytes: stated and counted {wrong:?}"));
        }
    } else {
        alike("bytes of all ranks", all_bytes, counted.all_bytes)?;
        alike("bytes of the busiest rank", work.bytes(), most(|work| work.bytes()))?;
        if !is_bound(uplink_bytes, counted.uplink_bytes, 1, 1) {
            return Err(format!("bytes of an uplink: stated {uplink_bytes}, counted {}", counted.uplink_bytes));
        }
        if bound == Bound::Exact && !counted.ranks.contains(&work) {
            return Err(format!("no rank does {work:?}"));
        }
    }
    Ok(())
}

#[test]
fn every_row_costs_what_its_schedules_do() {
    for row in ALGORITHMS {
        for world in 2..=17 {
            for topology in topologies(world).iter().filter(|topology| (row.applies)(world, topology)) {
                if let Err(why) = check(row, topology) {
                    panic!("{} {} {topology:?}: {why}", row.collective, row.name);
                }
            }
        }
    }
}

#[test]
fn one_rank_alone_has_no_messages() {
    let alone = Topology::flat(1);
    for row in ALGORITHMS.iter().filter(|row| (row.applies)(1, &alone)) {
        assert_eq!((row.cost)(1, &alone).phases, [], "{} {}", row.collective, row.name);
    }
}

/// Hosts of equal and of different sizes, contiguous and interleaved.
fn topologies(world: u32) -> Vec<Topology> {
    vec![
        Topology::flat(world),
        Topology::new((0..world).map(|rank| rank * 2 / world).collect()),
        Topology::new((0..world).map(|rank| rank / 4).collect()),
        Topology::new((0..world).map(|rank| rank % 3).collect()),
        Topology::new((0..world).collect()),
    ]
}
