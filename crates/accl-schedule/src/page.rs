//! The page `docs/algorithms.md`, written from the table so that the two cannot differ.

use accl_types::{Collective, Rank};

use crate::algorithms::{ALGORITHMS, Algorithm, Encodes, Sums};
use crate::check::check_algorithm;
use crate::choose::choice_text;
use crate::topology::Topology;

const HEAD: &str = "# Algorithms

Generated from the table in `crates/accl-schedule/src/algorithms/mod.rs`; do not edit (`ACCL_BLESS=1 cargo test -p
accl-schedule` writes it anew).

An algorithm is a pure function from (world, rank, root, hosts) to the list of what that rank does with symbolic chunks.
A checker proves for every row that the collective's post-condition holds, that sends and receives match, that nothing
is read before it is written, that nothing waits in a circle, that all ranks compute the same expression, and that steps
and bytes are those below: for worlds 1 to 17 with every root, and for larger ones up to 1024. Of calls that are compressed it
proves the same, and that all ranks decode the same bytes ([compression](compression.md)).

* **steps**: the longest chain of messages in which each is sent after the one before has arrived. Messages are
  pipelined segment by segment, so that the steps of a chain or a ring of few ranks overlap.
* **bytes**: what the busiest rank sends or receives, whichever is more, as a multiple of the largest buffer of the call
  (the output of all_gather and gather, the input of reduce_scatter, scatter and all_to_all).
* **adds**: whether contributions are added up *together*, by a rank that has collected them, or *in turn*; see below how often
  sums of 16-bit floats are rounded by that.
* n is the world, h the number of hosts, p the largest power of two that is at most n.

Set one with `ACCL_ALGORITHM=<collective>=<name>` or `ACCL_ALGORITHM=<collective>=<name>:<min>-<max>`; the last entry
that fits a call's size wins. An unknown name is an error that names the nearest one, and so is one that cannot run in
the group. A new algorithm is one file and one line: see [adding an algorithm](adding-an-algorithm.md).
";

const ROUNDING: &str = "
## How often sums of 16-bit floats are rounded

float16 and bfloat16 are added in float32 and rounded when a partial sum is stored or sent: as often as the longest chain of
additions has links, here as the checker counts them on one host. Where a figure is 1 the sum is that of float32 in the order of
ranks, rounded once. AVG divides before the last rounding; PREMUL_SUM rounds each product besides.

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
    page.push_str("\n## Which one is taken\n\n");
    page.push_str(&choice_text());
    page.push_str("\n## In figures\n\nSteps and bytes for some worlds of one host.\n\n");
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
        Encodes::No if crate::encodes(row.collective) => "calls that are not compressed",
        Encodes::Often => "to be named where calls are compressed",
        Encodes::No | Encodes::Twice => "",
    };
    [row.requires, equal, encodes].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", ")
}
