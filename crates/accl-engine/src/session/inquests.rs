//! Inquests: what happened to peers that cannot be reached. A peer that disconnected cleanly is not lost, and other
//! processes may have received its disconnect message.
//!
//! Owns which processes to ask, the meaning of the answers, and when to ask again. Sends nothing and has no clock. Read
//! [`Inquests`] first.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use accl_types::{Error, Moment};
use accl_wire::EndpointInfo;
use accl_wire::frame::{Header, Kind};

use accl_executor::group::Fate;

/// Interval between rounds of questions about a peer that some processes still have a link to, and maximum number of
/// rounds.
pub(crate) const ROUND: Duration = Duration::from_millis(200);
const MAX_ROUNDS: u32 = 10;

/// Identity of a peer process.
type Uuid = [u8; 16];

/// A question to a process about what happened to a peer.
pub(crate) struct Question {
    pub(crate) number: u64,
    pub(crate) to: EndpointInfo,
    /// Header and payload of the question's frame.
    pub(crate) bytes: Vec<u8>,
}

/// Result of an inquest.
pub(crate) enum Found {
    /// The peer disconnected cleanly. `is_assumed` if no process is left that could know.
    Left { is_assumed: bool },
    /// The peer was lost without disconnecting; the error says why it cannot be reached.
    Lost(Error),
}

/// Unreachable peers that other processes are asked about, and the questions in flight.
#[derive(Default)]
pub(crate) struct Inquests {
    inquests: BTreeMap<Uuid, Inquest>,
    questions: HashMap<u64, Uuid>,
    found: Vec<(Uuid, Found)>,
}

struct Inquest {
    error: Error,
    /// Number of answers that are awaited.
    open: usize,
    /// Whether some process still has a link to the peer, which may be about to disconnect.
    is_somewhere: bool,
    rounds: u32,
    /// When the other processes are asked again; `None` while answers are awaited.
    again_at: Option<Moment>,
}

impl Inquests {
    /// Starts an inquest into a peer that cannot be reached because of `error`. If one is in progress, it continues:
    /// the processes that know may be gone when they are asked again.
    pub(crate) fn begin(&mut self, peer: Uuid, error: Error, now: Moment) {
        let inquest = || Inquest { error, open: 0, is_somewhere: false, rounds: 0, again_at: Some(now) };
        self.inquests.entry(peer).or_insert_with(inquest);
    }

    /// Returns when the next questions are due; `None` if none are.
    pub(crate) fn next(&self) -> Option<Moment> {
        self.inquests.values().filter_map(|inquest| inquest.again_at).min()
    }

    /// Records the answer to a question; `None` if there will be none.
    pub(crate) fn answer(&mut self, number: u64, fate: Option<Fate>, now: Moment) {
        let Some(uuid) = self.questions.remove(&number) else { return };
        let Some(inquest) = self.inquests.get_mut(&uuid) else { return };
        inquest.open -= 1;
        match fate.unwrap_or(Fate::Unknown) {
            Fate::Left => return self.end(uuid, Fate::Left),
            Fate::Lost => return self.end(uuid, Fate::Lost),
            Fate::Here => inquest.is_somewhere = true,
            Fate::Unknown => {}
        }
        if inquest.open > 0 {
            return;
        }
        if std::mem::take(&mut inquest.is_somewhere) && inquest.rounds < MAX_ROUNDS {
            inquest.again_at = Some(now + ROUND);
        } else {
            // The processes that could know are gone, too; usually the job is ending.
            let is_ending = inquest.rounds < MAX_ROUNDS;
            self.end(uuid, if is_ending { Fate::Unknown } else { Fate::Lost });
        }
    }

    /// Returns the questions that are due. `witnesses` returns the processes that could know what happened to a peer;
    /// `number` returns a new question number.
    pub(crate) fn ask(
        &mut self,
        now: Moment,
        mut witnesses: impl FnMut(&Uuid) -> Vec<EndpointInfo>,
        mut number: impl FnMut() -> u64,
    ) -> Vec<Question> {
        let mut asked = Vec::new();
        let mut unknown = Vec::new();
        for (uuid, inquest) in &mut self.inquests {
            if inquest.again_at.take_if(|at| *at <= now).is_none() {
                continue;
            }
            let witnesses = witnesses(uuid);
            inquest.rounds += 1;
            inquest.open = witnesses.len();
            if witnesses.is_empty() {
                unknown.push(*uuid);
            }
            for to in witnesses {
                let number = number();
                self.questions.insert(number, *uuid);
                let bytes = [&Header::new(Kind::Fate).to_bytes()[..], uuid].concat();
                asked.push(Question { number, to, bytes });
            }
        }
        unknown.into_iter().for_each(|uuid| self.end(uuid, Fate::Unknown));
        asked
    }

    fn end(&mut self, uuid: Uuid, fate: Fate) {
        self.questions.retain(|_, about| *about != uuid);
        if let Some(Inquest { error, .. }) = self.inquests.remove(&uuid) {
            let found = match fate {
                Fate::Left => Found::Left { is_assumed: false },
                Fate::Unknown => Found::Left { is_assumed: true },
                Fate::Lost | Fate::Here => Found::Lost(error),
            };
            self.found.push((uuid, found));
        }
    }

    /// Returns the results since the last call.
    pub(crate) fn take_found(&mut self) -> Vec<(Uuid, Found)> {
        std::mem::take(&mut self.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Uuid = [9; 16];

    fn witness(pid: u32) -> EndpointInfo {
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
    fn ask(inquests: &mut Inquests, now: Moment) -> Vec<u64> {
        let mut number = 0;
        let next = || {
            number += 1;
            number
        };
        inquests.ask(now, |_| vec![witness(1), witness(2)], next).iter().map(|question| question.number).collect()
    }

    fn found(inquests: &mut Inquests) -> Option<bool> {
        inquests.take_found().pop().map(|(peer, found)| {
            assert_eq!(peer, PEER);
            matches!(found, Found::Left { .. })
        })
    }

    #[test]
    fn one_answer_that_knows_is_enough() {
        for (fate, has_left) in [(Fate::Left, true), (Fate::Lost, false)] {
            let (mut inquests, now) = (Inquests::default(), Moment::from_nanos(5));
            inquests.begin(PEER, Error::peer_lost("refused"), now);
            assert_eq!(ask(&mut inquests, now), [1, 2]);
            assert_eq!((found(&mut inquests), inquests.next()), (None, None));
            inquests.answer(1, Some(Fate::Unknown), now);
            inquests.answer(2, Some(fate), now);
            assert_eq!(found(&mut inquests), Some(has_left));
        }
    }

    #[test]
    fn who_still_has_a_link_is_asked_again_and_not_for_ever() {
        let (mut inquests, mut now) = (Inquests::default(), Moment::from_nanos(5));
        inquests.begin(PEER, Error::peer_lost("refused"), now);
        for round in 1..=MAX_ROUNDS {
            let asked = ask(&mut inquests, now);
            assert_eq!(asked, [1, 2], "round {round}");
            inquests.answer(1, Some(Fate::Here), now);
            inquests.answer(2, None, now);
            if round < MAX_ROUNDS {
                assert_eq!((found(&mut inquests), inquests.next()), (None, Some(now + ROUND)));
                now = now + ROUND;
            }
        }
        assert_eq!((found(&mut inquests), inquests.next()), (Some(false), None));
    }

    #[test]
    fn a_goodbye_that_nobody_heard_is_told_apart_from_one_that_was() {
        let (mut inquests, now) = (Inquests::default(), Moment::from_nanos(5));
        for (answer, is_heard) in [(Some(Fate::Left), true), (None, false), (Some(Fate::Unknown), false)] {
            inquests.begin(PEER, Error::peer_lost("refused"), now);
            ask(&mut inquests, now).into_iter().for_each(|number| inquests.answer(number, answer, now));
            let found = inquests.take_found().pop().map(|(_, found)| found);
            assert!(matches!(found, Some(Found::Left { is_assumed }) if is_assumed != is_heard), "{answer:?}");
        }
    }

    #[test]
    fn the_answer_of_who_knows_is_not_forgotten_when_the_peer_refuses_again() {
        let (mut inquests, now) = (Inquests::default(), Moment::from_nanos(5));
        inquests.begin(PEER, Error::peer_lost("refused"), now);
        assert_eq!(ask(&mut inquests, now), [1, 2]);
        inquests.begin(PEER, Error::peer_lost("refused"), now);
        assert!(inquests.ask(now, |_| Vec::new(), || 3).is_empty());
        assert_eq!(found(&mut inquests), None);
        inquests.answer(1, Some(Fate::Lost), now);
        assert_eq!(found(&mut inquests), Some(false));
    }

    #[test]
    fn a_peer_of_which_nobody_is_left_to_know_has_left() {
        let (mut inquests, now) = (Inquests::default(), Moment::from_nanos(5));
        inquests.begin(PEER, Error::peer_lost("refused"), now);
        assert!(inquests.ask(now, |_| Vec::new(), || 1).is_empty());
        assert_eq!(found(&mut inquests), Some(true));
        inquests.begin(PEER, Error::peer_lost("refused"), now);
        ask(&mut inquests, now).into_iter().for_each(|number| inquests.answer(number, None, now));
        assert_eq!(found(&mut inquests), Some(true));
    }
}
