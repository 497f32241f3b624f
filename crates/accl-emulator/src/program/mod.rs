//! Firmware's handling of a call: a program of steps, executed in order.
//!
//! Owns the choice of protocol and steps for a call, and how firmware defects change them. Steps are generated as needed, so that a large call takes
//! no more memory than a small one. The steps are executed in `mover` and `engine`. Read [`program`] first.

mod eager;
mod rendezvous;
mod step;

use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::memory_map::Network;
use accl_cclo::return_code::ReturnCode;

pub use step::{ElementLocation, Faithful, Move, Program, Say, Setup, Side, Sink, Source, Step};
use step::{fail, steps};

/// Returns the program of a call. Config calls have no program.
pub fn program(call: &Descriptor, setup: &Setup) -> Program {
    let bytes = u64::from(call.count) * setup.element_bytes;
    let is_plain = !call.compression.is_any() && !call.streams.is_any();
    let is_large = bytes > setup.max_eager_bytes;
    let over_rdma = setup.network == Network::Rdma;
    if setup.world <= 1 {
        return eager::alone(call, setup);
    }
    let is_put = call.operation == Operation::Send && call.streams.result;
    if is_put && over_rdma && setup.loses_race {
        return steps([Step::Hang]);
    }
    let by_rendezvous = match call.operation {
        Operation::Copy | Operation::Combine | Operation::Config | Operation::Nop => false,
        Operation::AllToAll if !is_plain => return fail(ReturnCode::NOT_IMPLEMENTED),
        Operation::AllToAll | Operation::Barrier => true,
        _ => is_plain && is_large,
    };
    match (by_rendezvous, over_rdma) {
        (false, _) => eager::program(call, setup),
        (true, true) => rendezvous::program(call, setup),
        // In firmware, address messages do not get through over UDP and TCP.
        (true, false) if setup.faithful.to(2) => steps([Step::Hang]),
        (true, false) if call.operation == Operation::Barrier => rendezvous::program(call, setup),
        (true, false) => eager::program(call, setup),
    }
}
