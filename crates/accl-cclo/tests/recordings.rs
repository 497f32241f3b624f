//! Replays recordings of the ACCL project's emulators. Requests and packets must be parsed and written back byte for byte, and replies as equal JSON
//! values.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use accl_cclo::control::{Reply, Request};
use accl_cclo::memory_map::{Network, REGISTERS, TABLES_BEGIN, TABLES_END};
use accl_cclo::wire::{Header, Joined, Joiner, MessageKind, WORD_BYTES, packets};
use serde_json::Value;

const NETWORKS: [(&str, Network); 3] = [("udp", Network::Udp), ("tcp", Network::Tcp), ("cyt_rdma", Network::Rdma)];

/// Returns the text of a recording.
fn text_of(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings").join(format!("{name}.jsonl.xz"));
    let packed = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut text = Vec::new();
    lzma_rs::xz_decompress(&mut packed.as_slice(), &mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// Returns the lines of a recording.
fn lines(name: &str) -> Vec<Value> {
    text_of(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn recordings() -> impl Iterator<Item = (String, Network)> {
    NETWORKS.into_iter().flat_map(|(name, network)| ["2", "2-big", "3"].map(|kind| (format!("{name}-{kind}"), network)))
}

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// Returns the recorded text of a request, with its fields in the recorded order.
fn request_text(line: &str) -> &str {
    let begin = line.find("\"request\":").unwrap() + "\"request\":".len();
    &line[begin..line.find(",\"reply\":").unwrap()]
}

#[test]
fn requests_are_written_as_they_were_recorded() {
    let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
    for (name, _) in recordings() {
        let text = text_of(&name);
        for line in text.lines().filter(|line| line.contains("\"kind\":\"ctrl\"")) {
            let recorded = request_text(line);
            let request = Request::from_json(recorded.as_bytes()).unwrap_or_else(|bad| panic!("{name}: {bad}: {line}"));
            assert_eq!(request.to_json(), recorded, "{name}");
            if let Request::ReadRegister { offset } | Request::WriteRegister { offset, .. } = request {
                let is_known = REGISTERS.iter().any(|register| register.offset == offset);
                assert!(is_known || (TABLES_BEGIN..TABLES_END).contains(&offset), "{name}: {offset:#x}");
            }
            let kind = serde_json::from_str::<Value>(recorded).unwrap()["type"].as_u64().unwrap();
            *seen.entry(kind).or_default() += 1;
        }
    }
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6], "every type of request was recorded");
}

#[test]
fn replies_have_the_values_that_were_recorded() {
    for (name, _) in recordings() {
        for line in lines(&name).iter().filter(|line| line["kind"] == "ctrl") {
            let recorded = &line["reply"];
            let reply = Reply::from_json(recorded.to_string().as_bytes()).unwrap_or_else(|why| panic!("{name}: {why}"));
            let written: Value = serde_json::from_str(&reply.to_json()).unwrap();
            assert_eq!(written, *recorded, "{name}: {}", line["n"]);
        }
    }
}

/// Part of a message that has arrived so far.
#[derive(Default)]
struct UnderWay {
    packets: Vec<Vec<u8>>,
    payload: Vec<u8>,
}

#[test]
fn packets_are_cut_as_they_were_recorded() {
    let mut kinds: BTreeMap<(u8, u8), usize> = BTreeMap::new();
    for (name, network) in recordings() {
        let mut joiners: BTreeMap<(String, String), (Joiner, UnderWay)> = BTreeMap::new();
        let mut writes: Vec<(u64, bool, usize)> = Vec::new();
        for line in lines(&name).iter().filter(|line| line["kind"] == "wire") {
            let (topic, sender) = (line["topic"].as_str().unwrap(), line["sender"].as_str().unwrap());
            let packet = bytes_of(line["hex"].as_str().unwrap());
            let entry = joiners.entry((topic.to_owned(), sender.to_owned()));
            let (joiner, under_way) = entry.or_insert_with(|| (Joiner::new(network), UnderWay::default()));
            match joiner.join(&packet).unwrap_or_else(|bad| panic!("{name} {}: {bad:?}", line["n"])) {
                Joined::Write { address, is_host, data } => {
                    // Each packet of a write names its own address, so each packet is compared as a separate write here.
                    let header = write_header(address, is_host, data.len(), topic);
                    let queue_pair = topic.parse().unwrap();
                    let own = packets(network, &header, data, queue_pair).next().unwrap().to_bytes();
                    assert_eq!(own[..8], packet[..8], "{name} {}", line["n"]);
                    assert_eq!(own[12..], packet[12..], "{name} {}", line["n"]);
                    writes.push((address, is_host, data.len()));
                }
                Joined::Message { header, data, is_last, .. } => {
                    assert_eq!(u32::from(header.destination), topic.parse::<u32>().unwrap(), "{name}");
                    let written = header.to_bytes();
                    assert_eq!(Header::from_bytes(&written), Some(header));
                    under_way.payload.extend(data);
                    under_way.packets.push(packet.clone());
                    if is_last {
                        let UnderWay { packets: recorded, payload } = std::mem::take(under_way);
                        let own: Vec<Vec<u8>> = packets(network, &header, &payload, header.destination)
                            .map(|packet| packet.to_bytes())
                            .collect();
                        assert_eq!(own.len(), recorded.len(), "{name} {}", line["n"]);
                        for (own, recorded) in own.iter().zip(&recorded) {
                            // If the payload is shorter than a word, the padding holds unrelated data from before the message.
                            let len = if payload.len() < WORD_BYTES {
                                own.len() - own.len() % WORD_BYTES - WORD_BYTES + payload.len() % WORD_BYTES
                            } else {
                                own.len()
                            };
                            let len = if network == Network::Udp { len } else { own.len() };
                            assert_eq!(own.len(), recorded.len(), "{name} {}", line["n"]);
                            assert_eq!(own[..len], recorded[..len], "{name} {}", line["n"]);
                        }
                        *kinds.entry((network as u8, header.kind.number())).or_default() += 1;
                    }
                }
            }
        }
        assert!(joiners.values().all(|(joiner, _)| !joiner.is_under_way()), "{name}");
        assert_eq!(network == Network::Rdma, !writes.is_empty(), "{name}");
    }
    let rdma = Network::Rdma as u8;
    for kind in [MessageKind::Eager, MessageKind::Address, MessageKind::Done] {
        assert!(kinds.contains_key(&(rdma, kind.number())), "{kind:?} was recorded");
    }
    assert!(kinds.contains_key(&(Network::Udp as u8, 0)) && kinds.contains_key(&(Network::Tcp as u8, 0)));
}

fn write_header(address: u64, is_host: bool, bytes: usize, topic: &str) -> Header {
    Header {
        count: bytes as u32,
        tag: 0,
        source: 0,
        sequence: 0,
        stream: 0,
        destination: topic.parse().unwrap(),
        kind: MessageKind::Rendezvous,
        is_host,
        address,
        communicator: 0,
        packet_number: 0,
    }
}
