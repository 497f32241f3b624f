//! Packets of components that execute whole calls, sent over the links of a group.
//!
//! Owns the step from such a component to the driver's lock. The group's state numbers and sends the frames.

use std::sync::{Arc, Weak};

use super::Driver;
use crate::offload::{PacketFrame, PacketLinks};
use crate::time;

/// The links of a group on a driver.
pub(crate) struct GroupLinks {
    driver: Weak<Driver>,
    group: u64,
}

impl GroupLinks {
    pub(crate) fn new(driver: &Arc<Driver>, group: u64) -> Arc<Self> {
        Arc::new(Self { driver: Arc::downgrade(driver), group })
    }
}

impl PacketLinks for GroupLinks {
    fn send(&self, frames: &[PacketFrame]) {
        let Some(driver) = self.driver.upgrade() else { return };
        let now = time::now();
        let is_unsent = driver.with_core(|core| {
            core.guarded(|core| {
                core.with_group(self.group, now, |group, context| {
                    let world = group.members().world();
                    for PacketFrame { to, taken, packets } in frames.iter().filter(|frame| frame.to.0 < world) {
                        group.send_packets(*to, *taken, packets, context);
                    }
                });
                core.net.flush_all();
                core.net.has_unsent()
            })
        });
        // After a panic in that code every group has failed; the driver thread reports it.
        if is_unsent.unwrap_or(true) {
            driver.wake();
        }
    }
}
