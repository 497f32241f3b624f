//! Engines reproduce the ACCL project's emulators: given the recorded requests, they send the same packets, byte for byte, and the same replies. A
//! trace of this project's emulator can be replayed in the same way.

use std::fs;
use std::path::Path;

use crate::support::host::{Emulators, Host, Setup, free_ports, hosts, ports, run, signal, start, sum, words};
use crate::support::replay::replay;
use accl_cclo::control::Status;
use accl_cclo::memory_map::Network;
use serde_json::Value;

const NETWORKS: [(&str, Network); 3] = [("udp", Network::Udp), ("tcp", Network::Tcp), ("cyt_rdma", Network::Rdma)];

/// Returns the lines of a recording.
fn lines(name: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../accl-cclo/tests/recordings");
    let packed = fs::read(folder.join(format!("{name}.jsonl.xz"))).unwrap();
    let mut text = Vec::new();
    lzma_rs::xz_decompress(&mut packed.as_slice(), &mut text).unwrap();
    values(&String::from_utf8(text).unwrap())
}

fn values(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn engines_do_what_was_recorded() {
    for (name, network) in NETWORKS {
        for (kind, ranks) in [("2", 2), ("2-big", 2), ("3", 3)] {
            let name = format!("{name}-{kind}");
            replay(&name, &lines(&name), network, ranks);
        }
    }
}

#[test]
fn what_an_emulator_writes_down_is_whole_after_it_was_interrupted_and_can_be_replayed() {
    for (comms, network) in NETWORKS {
        let port = free_ports(12);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.jsonl");
        let options = format!("--ranks 3 --port {port} --comms {comms} --faithful --trace {}", path.display());
        let mut emulators = Emulators(vec![start(&words(&options))]);
        run(async {
            sum(&mut hosts(&ports(port, 3), &Setup::default()).await, 3000).await;
            let mut host = Host::connect(port).await;
            assert_eq!(host.ask_text("no JSON".to_owned()).await, accl_cclo::control::Reply::Status(Status::Not));
        });
        signal(&emulators.0[0], "INT");
        assert!(emulators.0[0].wait().unwrap().success());
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.ends_with('\n'));
        let mut lines = values(&text);
        assert!(lines.iter().enumerate().all(|(index, line)| line["n"] == index));
        assert_eq!(lines.pop().map(|line| line["request"].clone()), Some("no JSON".into()));
        assert!(lines.iter().filter(|line| line["kind"] == "wire").count() > 3);
        replay(comms, &lines, network, 3);
    }
}
