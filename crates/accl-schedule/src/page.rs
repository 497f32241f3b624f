//! The page `docs/algorithms.md`, written from the table so that the two cannot differ.

use accl_types::{Collective, Rank};

use crate::algorithms::{ALGORITHMS, Algorithm, Encodes, Sums};
use crate::check::check_algorithm;
use crate::choose::choice_text;
use crate::topology::Topology;

const HEAD: &str = "# Algorithms

Generated from the table in `crates/accl-schedule/src/algorithms/mod.rs`; do not edit. The command
`ACCL_BLESS=1 cargo test -p accl-schedule` updates this page.

An algorithm is a pure function: from (world, rank, root, hosts) it computes that rank's list of operations on symbolic
chunks. A checker proves for every row:

* The collective's postcondition holds, and all ranks compute the same expression.
* Sends match receives, every chunk is written before it is read, and no deadlock occurs.
* Steps and bytes match the formulas below.
* In compressed calls the same holds, and all ranks decode the same bytes ([compression](compression.md)).

The checker covers worlds 1 to 17 with every root, and larger ones up to 1024.

The columns of the tables:

* **steps**: the longest chain of messages in which each message is sent after the previous one has arrived. Messages
  are pipelined segment by segment, so the steps of a chain or of a small ring overlap.
* **bytes**: the bytes that the busiest rank sends or receives, whichever is more. The unit is the call's largest buffer
  (the output of all_gather and gather, the input of reduce_scatter, scatter and all_to_all).
* **adds**: *together* if one rank collects the contributions and adds them up at once, otherwise *in turn*. This
  decides [how often sums of 16-bit floats are rounded](#how-often-sums-of-16-bit-floats-are-rounded).
* n is the world size, h the number of hosts, p the largest power of two that is at most n.

Set an algorithm with `ACCL_ALGORITHM=<collective>=<name>` or `ACCL_ALGORITHM=<collective>=<name>:<min>-<max>`; the last
entry that fits a call's size wins. An unknown name is an error that lists the known names, with the nearest one. An
algorithm that cannot run in the group is also an error. A new algorithm is one file and one line: see
[adding an algorithm](adding-an-algorithm.md).
";

const ROUNDING: &str = "
## How often sums of 16-bit floats are rounded

float16 and bfloat16 are added in float32. A partial sum is rounded when it is stored or sent. So a sum is rounded once
for each link of the longest chain of additions. The table has the checker's counts on one host. If a count is 1, the
sum is the float32 sum in the order of ranks, rounded once. AVG divides before the last rounding. PREMUL_SUM also rounds
each product.

";

/// The page `docs/algorithms.md`.
pub fn algorithms_page() -> String {
    let mut page = HEAD.to_owned();
    for &collective in Collective::ALL.iter().filter(|collective| !collective.is_point_to_point()) {
        let (adds, line) = if collective.reduces() { ("adds | ", "---|") } else { ("", "") };
        page.push_str(&format!(
            "\n## {collective}\n\n| name | id | steps | bytes | {adds}requires | wins | source |\n|---|---|---|---|{line}---|---|---|\n"
        ));
        for row in ALGORITHMS.iter().filter(|row| row.collective == collective) {
            page.push_str(&format!(
                "| `{}` | {} | {} | {} | {}{} | {} | {} |\n",
                row.name,
                row.id,
                row.steps_formula,
                row.bytes_formula,
                match row.sums {
                    Sums::Together => "together | ",
                    Sums::InTurn if collective.reduces() => "in turn | ",
                    Sums::InTurn => "",
                },
                requirements(row),
                row.wins,
                row.source
            ));
        }
    }
    page.push_str("\n## Which algorithm is used\n\n");
    page.push_str(&choice_text());
    page.push_str("\n## Steps and bytes\n\nSteps and bytes for some world sizes on one host.\n\n");
    let worlds = [2, 4, 7, 16, 100, 1024];
    page.push_str("| collective | name |");
    worlds.iter().for_each(|world| page.push_str(&format!(" n = {world} |")));
    page.push_str("\n|---|---|");
    worlds.iter().for_each(|_| page.push_str("---|"));
    page.push('\n');
    for row in ALGORITHMS.iter().filter(|row| row.requires.is_empty()) {
        page.push_str(&format!("| {} | `{}` |", row.collective, row.name));
        for world in worlds {
            let topology = Topology::flat(world);
            let (steps, bytes) = ((row.steps)(world, &topology), (row.bytes)(world, &topology).to_f64());
            page.push_str(&format!(" {steps}, {bytes:.2} |"));
        }
        page.push('\n');
    }
    page.push_str(ROUNDING);
    let worlds = [2, 3, 4, 7, 8, 16];
    page.push_str("| collective | name |");
    worlds.iter().for_each(|world| page.push_str(&format!(" n = {world} |")));
    page.push_str("\n|---|---|");
    worlds.iter().for_each(|_| page.push_str("---|"));
    page.push('\n');
    for row in ALGORITHMS.iter().filter(|row| row.collective.reduces() && row.requires.is_empty()) {
        page.push_str(&format!("| {} | `{}` |", row.collective, row.name));
        for world in worlds {
            // A row that the checker refuses fails in its own tests.
            let checked = check_algorithm(row, Rank(0), &Topology::flat(world));
            page.push_str(&checked.map_or_else(|why| format!(" {why} |"), |report| format!(" {} |", report.roundings)));
        }
        page.push('\n');
    }
    page
}

fn requirements(row: &Algorithm) -> String {
    let equal = if row.needs_equal_blocks { "blocks of equal size" } else { "" };
    let encodes = match row.encodes {
        Encodes::No if crate::encodes(row.collective) => "uncompressed calls",
        Encodes::Often => "`ACCL_ALGORITHM`, if calls are compressed",
        Encodes::No | Encodes::Twice => "",
    };
    [row.requires, equal, encodes].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", ")
}
