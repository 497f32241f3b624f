//! Replays the recorded requests of hosts, and compares the engines' replies and packets with the recording.

use std::collections::{BTreeMap, VecDeque};

use accl_cclo::control::{Reply, Request, Status};
use accl_cclo::memory_map::Network;
use accl_cclo::wire::WORD_BYTES;
use accl_emulator::{Engine, Faithful};
use serde_json::Value;

use super::settle::settle;

/// Recorded packets by sender and receiver, with their line numbers.
type Recorded = BTreeMap<(u32, u32), VecDeque<(u64, Vec<u8>)>>;

struct ReplayWorld {
    engines: Vec<Engine>,
    /// All packets sent, by sender and receiver.
    packets: BTreeMap<(u32, u32), VecDeque<Vec<u8>>>,
}

impl ReplayWorld {
    fn new(ranks: usize, network: Network) -> Self {
        let engines = (0..ranks).map(|_| Engine::new(network, Faithful::all())).collect();
        Self { engines, packets: BTreeMap::new() }
    }

    /// Advances until no engine can advance further.
    fn settle(&mut self) {
        settle(&mut self.engines, |from, to, packet| self.packets.entry((from, to)).or_default().push_back(packet));
    }
}

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// Replays the recorded lines on engines that reproduce all hazards.
pub fn replay(name: &str, lines: &[Value], network: Network, ranks: usize) {
    let mut world = ReplayWorld::new(ranks, network);
    let mut recorded: Recorded = BTreeMap::new();
    // A poll that was too early in the recording may find the end of the call here. These ends are counted by rank.
    let mut early = vec![0; ranks];
    for line in lines {
        let place = format!("{name} {}: {}", line["n"], line["scene"]);
        if line["kind"] == "wire" {
            let to = line["topic"].as_str().unwrap().parse().unwrap();
            let from = line["sender"].as_str().unwrap().parse().unwrap();
            let packet = bytes_of(line["hex"].as_str().unwrap());
            recorded.entry((from, to)).or_default().push_back((line["n"].as_u64().unwrap(), packet));
            continue;
        }
        let rank = line["rank"].as_u64().unwrap() as usize;
        let request = Request::from_json(line["request"].to_string().as_bytes()).unwrap();
        let wanted = Reply::from_json(line["reply"].to_string().as_bytes()).unwrap();
        let is_poll = matches!(request, Request::Poll { .. });
        if is_poll && early[rank] > 0 && wanted == Reply::Status(Status::Good) {
            early[rank] -= 1;
            continue;
        }
        let reply = world.engines[rank].answer(&request);
        world.settle();
        if is_poll && wanted == Reply::Status(Status::Not) {
            early[rank] += usize::from(reply == Reply::Status(Status::Good));
            continue;
        }
        let is_same = reply == wanted;
        let differs = match (&reply, &wanted) {
            (Reply::Memory(own), Reply::Memory(wanted)) => {
                own.iter().zip(wanted).position(|(own, wanted)| own != wanted)
            }
            _ => None,
        };
        let runs = world.engines[rank].running();
        assert!(is_same, "{place}: rank {rank} at {differs:?}, {}; {runs:?} runs", request.to_json());
    }
    for (pair, recorded) in recorded {
        let own = world.packets.remove(&pair).unwrap_or_default();
        for (at, ((number, recorded), own)) in recorded.iter().zip(&own).enumerate() {
            // If the payload is shorter than a word, the padding holds unrelated data from before the message.
            let header = if network == Network::Udp { WORD_BYTES } else { 0 };
            let count = u32::from_le_bytes([own[0], own[1], own[2], own[3]]) as usize;
            let len = if header > 0 && count < WORD_BYTES { header + count } else { own.len() };
            assert_eq!(own.len(), recorded.len(), "{name} packet {at} of {pair:?}, {number}");
            assert_eq!(own[..len], recorded[..len], "{name} packet {at} of {pair:?}, {number}");
        }
        assert_eq!(own.len(), recorded.len(), "{name}: {pair:?}");
    }
    assert!(world.packets.is_empty(), "{name}: {:?} were never sent", world.packets.keys());
}
