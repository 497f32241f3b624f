//! Shared memory between two processes of one host and user: a ring in each direction.
//!
//! Owns the memory ([`region`]), the limit on it ([`budget`]), the link itself ([`link`]) and the steps with which two
//! processes create a link ([`provider`]). Nothing here has a name in a file system.

pub(crate) mod budget;
mod link;
mod provider;
pub(crate) mod region;

pub(crate) use provider::ROW;

#[cfg(all(test, not(accl_loom)))]
mod tests {
    use accl_wire::{PROTOCOL_VERSION, Slot};

    use crate::bitmap::{EventBits, SLOTS};
    use crate::ring::arming::{DATA, ROOM, SideState};
    use crate::ring::{LINE, SLOTS as RING_SLOTS, TINY_BYTES, word_of};

    /// If this fails, raise [`PROTOCOL_VERSION`] and delete the previous version's snapshot.
    #[test]
    fn what_lies_in_shared_memory_is_of_its_version() {
        let bits: EventBits = EventBits::new();
        bits.listen();
        bits.post(Slot(700));
        let side = SideState::new();
        side.announce(DATA | ROOM, Some(Slot(700)));
        let lines = [
            format!("region of rings of 65536 bytes: {}", super::region::region_bytes(65536)),
            format!("{:?}", super::region::places(65536)),
            format!("slots {RING_SLOTS}, line {LINE}, tiny {TINY_BYTES}, word {:#018x}", word_of(5, 100, 2)),
            format!("armed for frames and room at 700: {:#x}", side.bits()),
            format!("bitmap of {SLOTS} slots, a thread listens and 700 was posted: {:?}", bits.words()),
        ];
        insta::assert_snapshot!(format!("protocol_version_{PROTOCOL_VERSION}"), lines.join("\n"));
    }
}
