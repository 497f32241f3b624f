//! Why a call does not end, as far as a device's memory says.
//!
//! Owns what is read of it, in which order, and that nothing more is read once there is no time left: a device that is far away or slow takes as
//! long for each word as for all that is said of it. Read [`Diagnosis::read`] first.

use std::fmt;

use accl_types::Result;

use super::tables::Ranks;
use crate::bus::Bus;
use crate::memory_map::{self as map, Communicator, Place, RxBuffer, RxStatus};
use crate::return_code::ReturnCode;

/// Ranks and rx buffers that a message names. No more of them are read than are named.
const MOST_RANKS: usize = 8;
const MOST_BUFFERS: usize = 4;
/// Words of an rx buffer that say nothing of a message: its status, which was read before, and its address.
const BEFORE_MESSAGE: usize = 3;

/// What is read of a device that a call does not come back from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The first rx buffers that are not idle, with the index of each; their addresses are not read.
    pub buffers: Vec<(usize, RxBuffer)>,
    /// How many more are not idle.
    pub more_buffers: usize,
    /// How many rx buffers were looked at before there was no time left.
    pub looked_at: usize,
    /// How many there are.
    pub all: usize,
    /// With what the call before has ended; `None`: there was no time to read it.
    pub return_code: Option<ReturnCode>,
    /// What the device itself says is wrong, if it says anything.
    pub trouble: String,
    /// The numbers of the messages that are next, with the rank that each comes from, by rank.
    pub expected: Vec<(u32, u32)>,
    /// From how many ranks more it may expect something: nobody looks at more than a few.
    pub more_ranks: usize,
    /// There was no time to read all that is expected of those few.
    pub is_cut_off: bool,
}

impl Diagnosis {
    /// Reads it: the rx buffers first, then the return code, what the device says of itself, and what the engine waits for in the communicator
    /// of its call, from `root` first and then from those before it in the ring. Before each read `go_on` is asked whether there is time left.
    ///
    /// # Errors
    /// As [`Bus::read_register`].
    pub(super) fn read(
        bus: &mut dyn Bus,
        rx_table: Place,
        ranks: Ranks,
        root: Option<u32>,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<Self> {
        let all = rx_table.words / RxBuffer::COUNT;
        let others = ranks.others(root);
        let mut seen = Self {
            buffers: Vec::new(),
            more_buffers: 0,
            looked_at: 0,
            all,
            return_code: None,
            trouble: String::new(),
            expected: Vec::new(),
            more_ranks: others.len().saturating_sub(MOST_RANKS),
            is_cut_off: false,
        };
        while seen.looked_at < all && seen.look_at_buffer(bus, rx_table, &mut go_on)? {
            seen.looked_at += 1;
        }
        if go_on() {
            seen.return_code = Some(ReturnCode(bus.read_register(map::RETURN_CODE.offset)?));
        }
        if go_on() {
            seen.trouble = bus.about()?.map(|about| about.trouble).unwrap_or_default();
        }
        for rank in others.into_iter().take(MOST_RANKS) {
            if !go_on() {
                seen.is_cut_off = true;
                break;
            }
            let at = ranks.place.word(Communicator::inbound_at(rank as usize));
            seen.expected.push((rank, bus.read_register(at)?));
        }
        seen.expected.sort_unstable();
        Ok(seen)
    }

    /// Whether there was time for the next rx buffer.
    fn look_at_buffer(&mut self, bus: &mut dyn Bus, table: Place, go_on: &mut impl FnMut() -> bool) -> Result<bool> {
        if !go_on() {
            return Ok(false);
        }
        let first = RxBuffer::COUNT * self.looked_at;
        let mut words = [0; RxBuffer::COUNT];
        words[0] = bus.read_register(table.word(first))?;
        // Most are idle, and say nothing more.
        if RxStatus::from_word(words[0]) == Some(RxStatus::Idle) {
            return Ok(true);
        }
        if self.buffers.len() == MOST_BUFFERS {
            self.more_buffers += 1;
            return Ok(true);
        }
        for (index, word) in words.iter_mut().enumerate().skip(BEFORE_MESSAGE) {
            if !go_on() {
                return Ok(false);
            }
            *word = bus.read_register(table.word(first + index))?;
        }
        self.buffers.push((self.looked_at, RxBuffer::from_words(&words)));
        Ok(true)
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named: Vec<String> =
            self.expected.iter().map(|(rank, inbound)| format!("seq {inbound} from rank {rank}")).collect();
        match (named.is_empty(), self.is_cut_off) {
            (true, true) => write!(f, "there was no time to read what it expects from other ranks")?,
            (true, false) => write!(f, "it expects nothing")?,
            (false, true) => {
                write!(f, "it expects {}, and there was no time to read what from others", named.join(" and "))?
            }
            (false, false) => write!(f, "it expects {}", named.join(" and "))?,
        }
        if self.more_ranks > 0 && !self.is_cut_off {
            write!(f, " and something from {} ranks more", self.more_ranks)?;
        }
        for (index, buffer) in &self.buffers {
            let RxBuffer { sequence, source, tag, bytes, .. } = buffer;
            match buffer.status() {
                Some(RxStatus::Full) => write!(
                    f,
                    "; rx buffer {index} holds seq {sequence} from rank {source} with tag {tag:#x} and {bytes} bytes"
                )?,
                Some(RxStatus::Filling) => write!(f, "; rx buffer {index} is being filled")?,
                Some(RxStatus::Idle) => {}
                Some(RxStatus::Failed) | None => write!(f, "; rx buffer {index} has status {}", buffer.status)?,
            }
        }
        if self.more_buffers > 0 {
            write!(f, "; {} rx buffers more are not idle", self.more_buffers)?;
        }
        if self.looked_at < self.all {
            write!(f, "; there was no time to look at more than {} of {} rx buffers", self.looked_at, self.all)?;
        } else if self.buffers.is_empty() {
            write!(f, "; its rx buffers are empty")?;
        }
        match self.return_code {
            None => write!(f, "; there was no time to read with what the call before has ended")?,
            Some(code) if !code.is_ok() => write!(f, "; the call before has ended with {code}")?,
            Some(_) => {}
        }
        if self.trouble.is_empty() { Ok(()) } else { write!(f, "; it says: {}", self.trouble) }
    }
}
