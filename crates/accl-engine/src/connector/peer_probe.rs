//! The peer probe: what happened to peers that cannot be reached. A peer that disconnected cleanly is not lost, and
//! other processes may have received its disconnect message.
//!
//! Owns which processes to ask, the meaning of the answers, and when to ask again. Sends nothing and has no clock. Read
//! [`PeerProbe`] first.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use accl_types::{Error, Moment};
use accl_wire::EndpointInfo;
use accl_wire::frame::{Header, Kind};

use accl_executor::group::PeerFate;

/// Interval between rounds of questions about a peer that some processes still have a link to, and maximum number of
/// rounds.
pub const ROUND: Duration = Duration::from_millis(200);
const MAX_ROUNDS: u32 = 10;

/// Identity of a peer process.
type Uuid = [u8; 16];

/// A question to a process about what happened to a peer.
pub struct Question {
    /// Number of the question, by which its answer is found.
    pub number: u64,
    /// The process that is asked.
    pub to: EndpointInfo,
    /// Header and payload of the question's frame.
    pub bytes: Vec<u8>,
}

/// Result of an inquiry.
pub enum Found {
    /// The peer disconnected cleanly.
    Left {
        /// Whether this is only assumed, because no process is left that could know.
        is_assumed: bool,
    },
    /// The peer was lost without disconnecting; the error says why it cannot be reached.
    Lost(Error),
}

/// Unreachable peers that other processes are asked about, and the questions in flight.
#[derive(Default)]
pub struct PeerProbe {
    inquiries: BTreeMap<Uuid, PeerInquiry>,
    questions: HashMap<u64, Uuid>,
    found: Vec<(Uuid, Found)>,
}

struct PeerInquiry {
    error: Error,
    /// Number of answers that are awaited.
    open: usize,
    /// Whether some process still has a link to the peer, which may be about to disconnect.
    is_somewhere: bool,
    rounds: u32,
    /// When the other processes are asked again; `None` while answers are awaited.
    again_at: Option<Moment>,
}

impl PeerProbe {
    /// Starts an inquiry about a peer that cannot be reached because of `error`. If one is in progress, it continues:
    /// the processes that know may be gone when they are asked again.
    pub fn begin(&mut self, peer: Uuid, error: Error, now: Moment) {
        let inquiry = || PeerInquiry { error, open: 0, is_somewhere: false, rounds: 0, again_at: Some(now) };
        self.inquiries.entry(peer).or_insert_with(inquiry);
    }

    /// Returns when the next questions are due; `None` if none are.
    pub fn next(&self) -> Option<Moment> {
        self.inquiries.values().filter_map(|inquiry| inquiry.again_at).min()
    }

    /// Records the answer to a question; `None` if there will be none.
    pub fn answer(&mut self, number: u64, fate: Option<PeerFate>, now: Moment) {
        let Some(uuid) = self.questions.remove(&number) else { return };
        let Some(inquiry) = self.inquiries.get_mut(&uuid) else { return };
        inquiry.open -= 1;
        match fate.unwrap_or(PeerFate::Unknown) {
            PeerFate::Left => return self.end(uuid, PeerFate::Left),
            PeerFate::Lost => return self.end(uuid, PeerFate::Lost),
            PeerFate::Here => inquiry.is_somewhere = true,
            PeerFate::Unknown => {}
        }
        if inquiry.open > 0 {
            return;
        }
        if std::mem::take(&mut inquiry.is_somewhere) && inquiry.rounds < MAX_ROUNDS {
            inquiry.again_at = Some(now + ROUND);
        } else {
            // The processes that could know are gone, too; usually the job is ending.
            let is_ending = inquiry.rounds < MAX_ROUNDS;
            self.end(uuid, if is_ending { PeerFate::Unknown } else { PeerFate::Lost });
        }
    }

    /// Returns the questions that are due. `neighbours` returns the processes that could know what happened to a
    /// peer; `number` returns a new question number.
    pub fn ask(
        &mut self,
        now: Moment,
        mut neighbours: impl FnMut(&Uuid) -> Vec<EndpointInfo>,
        mut number: impl FnMut() -> u64,
    ) -> Vec<Question> {
        let mut asked = Vec::new();
        let mut unknown = Vec::new();
        for (uuid, inquiry) in &mut self.inquiries {
            if inquiry.again_at.take_if(|at| *at <= now).is_none() {
                continue;
            }
            let neighbours = neighbours(uuid);
            inquiry.rounds += 1;
            inquiry.open = neighbours.len();
            if neighbours.is_empty() {
                unknown.push(*uuid);
            }
            for to in neighbours {
                let number = number();
                self.questions.insert(number, *uuid);
                let bytes = [&Header::new(Kind::PeerFate).to_bytes()[..], uuid].concat();
                asked.push(Question { number, to, bytes });
            }
        }
        unknown.into_iter().for_each(|uuid| self.end(uuid, PeerFate::Unknown));
        asked
    }

    fn end(&mut self, uuid: Uuid, fate: PeerFate) {
        self.questions.retain(|_, about| *about != uuid);
        if let Some(PeerInquiry { error, .. }) = self.inquiries.remove(&uuid) {
            let found = match fate {
                PeerFate::Left => Found::Left { is_assumed: false },
                PeerFate::Unknown => Found::Left { is_assumed: true },
                PeerFate::Lost | PeerFate::Here => Found::Lost(error),
            };
            self.found.push((uuid, found));
        }
    }

    /// Returns the results since the last call.
    pub fn take_found(&mut self) -> Vec<(Uuid, Found)> {
        std::mem::take(&mut self.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Uuid = [9; 16];

    fn neighbour(pid: u32) -> EndpointInfo {
        EndpointInfo {
            version: accl_wire::PROTOCOL_VERSION,
            uuid: [pid as u8; 16],
            pid,
            uid: 0,
            hostname: String::new(),
            host_id: String::new(),
            addresses: Vec::new(),
            unix_name: String::new(),
            transports: Vec::new(),
            lanes: 1,
        }
    }

    /// Asks two other processes. Returns the numbers of the questions; empty if none are due.
    fn ask(peer_probe: &mut PeerProbe, now: Moment) -> Vec<u64> {
        let mut number = 0;
        let next = || {
            number += 1;
            number
        };
        peer_probe.ask(now, |_| vec![neighbour(1), neighbour(2)], next).iter().map(|question| question.number).collect()
    }

    fn found(peer_probe: &mut PeerProbe) -> Option<bool> {
        peer_probe.take_found().pop().map(|(peer, found)| {
            assert_eq!(peer, PEER);
            matches!(found, Found::Left { .. })
        })
    }

    #[test]
    fn one_answer_that_knows_is_enough() {
        for (fate, has_left) in [(PeerFate::Left, true), (PeerFate::Lost, false)] {
            let (mut peer_probe, now) = (PeerProbe::default(), Moment::from_nanos(5));
            peer_probe.begin(PEER, Error::peer_lost("refused"), now);
            assert_eq!(ask(&mut peer_probe, now), [1, 2]);
            assert_eq!((found(&mut peer_probe), peer_probe.next()), (None, None));
            peer_probe.answer(1, Some(PeerFate::Unknown), now);
            peer_probe.answer(2, Some(fate), now);
            assert_eq!(found(&mut peer_probe), Some(has_left));
        }
    }

    #[test]
    fn who_still_has_a_link_is_asked_again_and_not_for_ever() {
        let (mut peer_probe, mut now) = (PeerProbe::default(), Moment::from_nanos(5));
        peer_probe.begin(PEER, Error::peer_lost("refused"), now);
        for round in 1..=MAX_ROUNDS {
            let asked = ask(&mut peer_probe, now);
            assert_eq!(asked, [1, 2], "round {round}");
            peer_probe.answer(1, Some(PeerFate::Here), now);
            peer_probe.answer(2, None, now);
            if round < MAX_ROUNDS {
                assert_eq!((found(&mut peer_probe), peer_probe.next()), (None, Some(now + ROUND)));
                now = now + ROUND;
            }
        }
        assert_eq!((found(&mut peer_probe), peer_probe.next()), (Some(false), None));
    }

    #[test]
    fn an_unreceived_disconnect_differs_from_a_received_one() {
        let (mut peer_probe, now) = (PeerProbe::default(), Moment::from_nanos(5));
        for (answer, is_received) in [(Some(PeerFate::Left), true), (None, false), (Some(PeerFate::Unknown), false)] {
            peer_probe.begin(PEER, Error::peer_lost("refused"), now);
            ask(&mut peer_probe, now).into_iter().for_each(|number| peer_probe.answer(number, answer, now));
            let found = peer_probe.take_found().pop().map(|(_, found)| found);
            assert!(matches!(found, Some(Found::Left { is_assumed }) if is_assumed != is_received), "{answer:?}");
        }
    }

    #[test]
    fn the_answer_of_who_knows_is_not_forgotten_when_the_peer_refuses_again() {
        let (mut peer_probe, now) = (PeerProbe::default(), Moment::from_nanos(5));
        peer_probe.begin(PEER, Error::peer_lost("refused"), now);
        assert_eq!(ask(&mut peer_probe, now), [1, 2]);
        peer_probe.begin(PEER, Error::peer_lost("refused"), now);
        assert!(peer_probe.ask(now, |_| Vec::new(), || 3).is_empty());
        assert_eq!(found(&mut peer_probe), None);
        peer_probe.answer(1, Some(PeerFate::Lost), now);
        assert_eq!(found(&mut peer_probe), Some(false));
    }

    #[test]
    fn a_peer_that_no_process_can_know_of_has_left() {
        let (mut peer_probe, now) = (PeerProbe::default(), Moment::from_nanos(5));
        peer_probe.begin(PEER, Error::peer_lost("refused"), now);
        assert!(peer_probe.ask(now, |_| Vec::new(), || 1).is_empty());
        assert_eq!(found(&mut peer_probe), Some(true));
        peer_probe.begin(PEER, Error::peer_lost("refused"), now);
        ask(&mut peer_probe, now).into_iter().for_each(|number| peer_probe.answer(number, None, now));
        assert_eq!(found(&mut peer_probe), Some(true));
    }
}
