use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use accl_types::Result;

use super::{Driver, Peer, Settings};
use crate::bus::{Bus, Memory};
use crate::call::{ConfigFunction, Descriptor, Operation};
use crate::control::About;
use crate::memory_map::{DataType, Network};

/// A device that does nothing. Its calls end immediately while `ends` is true.
#[derive(Clone, Default)]
struct Card {
    /// Self-description; only an emulator has one.
    about: Option<About>,
    /// Number of words that were read.
    reads: Arc<AtomicUsize>,
    ends: Arc<AtomicBool>,
    /// Functions of the config calls.
    configured: Arc<Mutex<Vec<u32>>>,
    kept: Arc<AtomicUsize>,
}

impl Bus for Card {
    fn read_register(&mut self, _: u32) -> Result<u32> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        Ok(0)
    }

    fn write_register(&mut self, _: u32, _: u32) -> Result<()> {
        Ok(())
    }

    fn allocate(&mut self, _: Memory, _: u64) -> Result<u64> {
        Ok(0)
    }

    fn read_memory(&mut self, _: Memory, _: u64, _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn write_memory(&mut self, _: Memory, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        if call.operation == Operation::Config {
            self.configured.lock().unwrap().push(call.function);
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<bool> {
        Ok(self.ends.load(Ordering::Relaxed))
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        Ok(Box::new(self.clone()))
    }

    fn keep_buffers(&mut self) {
        self.kept.fetch_add(1, Ordering::Relaxed);
    }

    fn about(&mut self) -> Result<Option<About>> {
        Ok(self.about.clone())
    }

    fn describe(&self) -> String {
        "emulator at h:1".to_owned()
    }
}

fn about() -> About {
    About {
        version: "0.1.0".to_owned(),
        ranks: 2,
        rank: 0,
        network: Network::Udp,
        hazards: Vec::new(),
        clock_hz: 250_000_000,
        link_bits_per_second: 1,
        hop_ps: 0,
        missing: Vec::new(),
        trouble: String::new(),
        owner: String::new(),
        owner_s: 0,
        process: 0,
        served: [0, 0],
    }
}

fn opened(about: About) -> Result<Driver<Card>> {
    opened_among(2, about)
}

fn opened_among(ranks: u32, about: About) -> Result<Driver<Card>> {
    let peer = |session| Peer { ip: [127, 0, 0, 1].into(), port: 5500, session };
    let peers = (0..ranks).map(peer).collect();
    let card = Card { about: Some(about), ..Card::default() };
    card.ends.store(true, Ordering::Relaxed);
    Driver::open(card, Settings::new(Network::Udp, 0, peers), || false)
}

#[test]
fn an_emulator_that_is_another_than_was_asked_for_is_refused_before_anything_starts() {
    assert!(opened(about()).is_ok());
    for (about, why) in [
        (
            About { network: Network::Rdma, ..about() },
            "was started for cyt_rdma, but `design` requests udp; add `design=cyt_rdma`, or start it with another `--comms`",
        ),
        (About { ranks: 3, ..about() }, "was started for 3 ranks, but there are 2; start it with another `--ranks`"),
        (
            About { rank: 1, ..about() },
            "serves rank 1, but this is rank 0; correct the address of this rank's emulator",
        ),
    ] {
        assert_eq!(opened(about).err().unwrap().message, format!("emulator at h:1 {why}"));
    }
}

#[test]
fn what_a_device_says_is_wrong_is_part_of_why_a_call_does_not_end() {
    let mut driver = opened(About { trouble: "no packet of rank 1 has come".to_owned(), ..about() }).unwrap();
    assert_eq!(
        driver.give_up("has not ended in 300 ms", || true).message,
        "emulator at h:1: a call has not ended in 300 ms; it expects seq 0 from rank 1; its rx buffers are empty; it reports: no packet of rank 1 \
         has come; the device takes no more calls until it is reset"
    );
}

#[test]
fn a_diagnosis_among_many_ranks_ends_when_its_time_is_over() {
    let ranks = 64;
    // The time limit is a number of reads, since each word takes one read. The device's self-description takes none.
    let within = |time: usize| {
        let mut driver = opened_among(ranks, About { ranks, ..about() }).unwrap();
        let reads = driver.bus().reads.clone();
        reads.store(0, Ordering::Relaxed);
        let text = driver.give_up("has not ended", || reads.load(Ordering::Relaxed) < time).message;
        assert!(
            reads.load(Ordering::Relaxed) <= time,
            "{} words were read in the time of {time}",
            reads.load(Ordering::Relaxed)
        );
        text
    };
    let text = within(10);
    for said in [
        "no time was left to read the sequence numbers that it expects from other ranks",
        "no time was left to read more than 10 of 16 rx buffers",
        "no time was left to read the return code of the previous call",
    ] {
        assert!(text.contains(said), "{text}");
    }
    let text = within(19);
    let said = "it expects seq 0 from rank 62 and seq 0 from rank 63, and no time was left to read the sequence numbers from others; its rx buffers are empty;";
    assert!(text.contains(said), "{text}");
    let text = within(1000);
    assert!(
        text.contains(" and seq 0 from rank 63 and messages from 55 more ranks; its rx buffers are empty;"),
        "{text}"
    );
}

fn set_up(card: &Card) -> Driver<Card> {
    card.ends.store(true, Ordering::Relaxed);
    let peers = vec![Peer { ip: [127, 0, 0, 1].into(), port: 5500, session: 0 }];
    Driver::set_up(card.clone(), Settings::new(Network::Udp, 0, peers), || true).unwrap()
}

#[test]
fn buffers_of_a_card_go_back_once_a_reset_has_ended_what_writes_to_them() {
    let card = Card::default();
    let mut driver = set_up(&card);
    driver.enable_packets(|| true).unwrap();
    card.configured.lock().unwrap().clear();
    drop(driver);
    assert_eq!(*card.configured.lock().unwrap(), [ConfigFunction::Reset.number()]);
    assert_eq!(card.kept.load(Ordering::Relaxed), 0);
}

#[test]
fn a_card_that_does_not_come_back_to_a_reset_keeps_its_buffers() {
    let card = Card::default();
    let mut driver = set_up(&card);
    driver.enable_packets(|| true).unwrap();
    card.ends.store(false, Ordering::Relaxed);
    drop(driver);
    assert_eq!(card.kept.load(Ordering::Relaxed), 1);
}

#[test]
fn a_card_whose_call_is_under_way_is_not_waited_for_and_keeps_its_buffers() {
    let card = Card::default();
    let mut driver = set_up(&card);
    driver.enable_packets(|| true).unwrap();
    card.ends.store(false, Ordering::Relaxed);
    let call = driver.call(Operation::Copy, DataType::F32, DataType::F32, 4).unwrap();
    driver.start(&call).unwrap();
    card.configured.lock().unwrap().clear();
    drop(driver);
    assert_eq!(*card.configured.lock().unwrap(), [0u32; 0]);
    assert_eq!(card.kept.load(Ordering::Relaxed), 1);
}

#[test]
fn no_call_starts_before_packets_are_let_in() {
    let mut driver = set_up(&Card::default());
    let call = driver.call(Operation::Copy, DataType::F32, DataType::F32, 4).unwrap();
    let text = driver.start(&call).unwrap_err().message;
    assert!(text.ends_with("was issued before packets were enabled"), "{text}");
}
