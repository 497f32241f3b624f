//! Every row of the table against the symbolic checker.

use accl_schedule::check::{BlockSizes, Case, check_algorithm, check_sample};
use accl_schedule::{ALGORITHMS, Algorithm, Topology};
use accl_types::Rank;

/// Worlds checked completely, with every root.
const WORLDS: std::ops::RangeInclusive<u32> = 1..=17;
/// Larger worlds checked completely, with some roots.
const LARGER: [u32; 6] = [32, 33, 64, 100, 255, 256];
/// Worlds checked completely if programs are short, otherwise on some ranks.
const LARGEST: [u32; 2] = [1000, 1024];

fn roots(row: &Algorithm, world: u32) -> Vec<u32> {
    if !row.collective.is_rooted() {
        return vec![0];
    }
    if WORLDS.contains(&world) { (0..world).collect() } else { vec![0, world / 3, world - 1] }
}

fn check(row: &Algorithm, topology: &Topology) {
    for root in roots(row, topology.world()) {
        if let Err(why) = check_algorithm(row, Rank(root), topology) {
            panic!("{} {} root {root} {topology:?}: {why}", row.collective, row.name);
        }
    }
}

/// Hosts of equal and of different sizes, contiguous and interleaved.
fn topologies(world: u32) -> Vec<Topology> {
    let mut topologies = vec![Topology::flat(world)];
    for hosts in [2, 3, 4, 5, 8] {
        topologies.push(Topology::new((0..world).map(|rank| rank * hosts / world).collect()));
        topologies.push(Topology::new((0..world).map(|rank| rank % hosts).collect()));
    }
    topologies.push(Topology::new((0..world).map(|rank| u32::from(rank == 0)).collect()));
    topologies.push(Topology::new((0..world).map(|rank| (rank + 1).ilog2()).collect()));
    topologies.push(Topology::new((0..world).collect()));
    topologies
}

#[test]
fn every_row_holds_in_every_small_world_with_every_root() {
    for row in ALGORITHMS {
        for world in WORLDS {
            for topology in topologies(world).iter().filter(|topology| (row.applies)(world, topology)) {
                check(row, topology);
                if row.requires.is_empty() {
                    break; // a row without a condition ignores hosts
                }
            }
        }
    }
}

#[test]
fn every_row_holds_in_larger_worlds() {
    for row in ALGORITHMS {
        for world in LARGER {
            let topology = large_topology(row, world);
            check(row, &topology);
        }
    }
}

#[test]
fn every_row_holds_in_the_largest_worlds() {
    for row in ALGORITHMS {
        for world in LARGEST {
            let topology = large_topology(row, world);
            let case = Case {
                collective: row.collective,
                world,
                root: Rank(world / 3),
                topology: &topology,
                blocks: if row.needs_equal_blocks { BlockSizes::Equal } else { BlockSizes::Different },
            };
            let build = |rank| (row.build)(&case.request(rank)).lower(&case.request(rank));
            // A rank that is not the root, because the root of a flat collective has many more operations than the
            // others.
            let typical = build(world / 2);
            let spans = typical.ops.iter().flat_map(|op| op.kind.reads().iter().chain(op.kind.writes()));
            if typical.ops.len() as u32 + spans.map(|span| span.chunk_count()).sum::<u32>() < 2500 {
                check(row, &topology);
                continue;
            }
            let ranks: Vec<u32> =
                [0, 1, 2, 3, 5, 8, 13, 100, world / 3, world / 2, world / 2 + 1, world - 2, world - 1].into();
            let programs: Vec<_> = ranks.iter().map(|&rank| build(rank)).collect();
            if let Err(why) = check_sample(&case, &ranks, &programs) {
                panic!("{} {} {world}: {why}", row.collective, row.name);
            }
        }
    }
}

fn large_topology(row: &Algorithm, world: u32) -> Topology {
    if row.requires.is_empty() {
        Topology::flat(world)
    } else {
        Topology::new((0..world).map(|rank| rank / 12).collect())
    }
}
