//! Generator of `docs/device-tables.md`, which shows this crate's tables to readers.

use std::net::Ipv4Addr;

use accl_types::{Collective, Dtype, Rank, ReduceOp};

use crate::design::Design;
use crate::device::FIRST_PORT;
use crate::hazards::HAZARDS;
use crate::offload::{CollectiveRequest, route};
use crate::parse::keys;
use crate::settings::{Peer, Settings};

const HEAD: &str = "# Devices: keys, routes, hazards\n\n\
    Generated from the tables of `crates/accl-cclo`; do not edit. [devices.md](devices.md) explains devices and how a group gets one.\n\n";

/// Renders the page as Markdown.
pub fn tables_page() -> String {
    let mut page = String::from(HEAD);
    page.push_str("## Keys of a device URL\n\n| key | accepted | meaning |\n|---|---|---|\n");
    for key in keys() {
        page.push_str(&format!("| `{}` | {} | {} |\n", key.name, key.accepted, key.about));
    }
    page.push_str(
        "\n## What runs where\n\n\
         The table shows whether device or host runs a collective of a group with a device. The choice depends only on the signature of the \
         call, so it is the same on all ranks. The host runs encoded calls, collectives that `sidestep` names, and calls with blocks of unequal \
         sizes.\n\n| collective | design | device | host |\n|---|---|---|---|\n",
    );
    for &collective in Collective::ALL {
        let is_all_to_all = collective == Collective::AllToAll;
        for design in if is_all_to_all { &[Design::CytRdma, Design::Udp][..] } else { &[Design::Udp][..] } {
            let words = match collective {
                Collective::AllToAll if *design == Design::Udp => "udp, tcp",
                Collective::AllToAll => "cyt_rdma",
                _ => "any",
            };
            let (device, host) = routes(collective, *design);
            page.push_str(&format!("| {collective} | {words} | {device} | {host} |\n"));
        }
    }
    page.push_str(
        "\n## Firmware defects\n\n\
         `accl emulator --faithful=4,7` takes the numbers of these hazards. The driver works around all of them on every kind of device. If it \
         cannot avoid a hazard, it refuses the call and names the number.\n\n\
         | number | when | firmware | the emulator, repaired | the driver |\n|---|---|---|---|---|\n",
    );
    for hazard in &HAZARDS {
        let wire = if hazard.is_on_wire { " (all emulators of a job must agree)" } else { "" };
        page.push_str(&format!(
            "| {} | {} | {} | {}{wire} | {} |\n",
            hazard.number, hazard.condition, hazard.faithful, hazard.repaired, hazard.workaround
        ));
    }
    page
}

/// Returns which cases of a collective the device runs and which the host runs, as two table cells.
fn routes(collective: Collective, design: Design) -> (String, String) {
    let peer = Peer { ip: Ipv4Addr::LOCALHOST, port: FIRST_PORT, session: 0 };
    let settings = Settings::new(design.network(), 0, vec![peer; 2]);
    let to = |op, dtype| {
        route(
            &CollectiveRequest { collective, dtype, op, root: Rank(0), block_bytes: 0, equal_blocks: true },
            &settings,
        )
    };
    if !collective.reduces() {
        return match to(ReduceOp::Sum, Dtype::F32) {
            Ok(_) => ("every dtype".to_owned(), "blocks of unequal sizes".to_owned()),
            Err(why) => ("-".to_owned(), format!("all: {why}")),
        };
    }
    let on_device = |op: ReduceOp| -> Vec<&'static str> {
        let dtypes = Dtype::ALL.iter().filter(|dtype| to(op, **dtype).is_ok());
        dtypes.map(|dtype| dtype.name()).collect()
    };
    let device: Vec<String> = ReduceOp::ALL
        .iter()
        .map(|op| (op, on_device(*op)))
        .filter(|(_, dtypes)| !dtypes.is_empty())
        .map(|(op, dtypes)| format!("{} of {}", op.name(), dtypes.join(", ")))
        .collect();
    (device.join("; "), "all other operators and dtypes".to_owned())
}
