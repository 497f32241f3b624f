//! Engines of a test that reach each other directly.

use accl_emulator::Engine;

/// Advances until no engine can advance further. Calls `shown` with sender, receiver and bytes of each packet.
pub fn settle(engines: &mut [Engine], mut shown: impl FnMut(u32, u32, Vec<u8>)) {
    loop {
        let mut moved = false;
        for rank in 0..engines.len() {
            let mut sent = Vec::new();
            moved |= engines[rank].advance(&mut sent);
            moved |= !sent.is_empty();
            for (to, packet) in sent {
                engines[to as usize].take(rank as u32, &packet);
                shown(rank as u32, to, packet);
            }
        }
        if !moved {
            return;
        }
    }
}
