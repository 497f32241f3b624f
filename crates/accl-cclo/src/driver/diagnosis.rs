//! Diagnosis of a call that does not end, from a device's memory.
//!
//! Owns what is read, in which order, and that nothing more is read once no time is left. A read of one word from a slow or distant device may take
//! as long as the whole report should. Read [`Diagnosis::read`] first.

use std::fmt;

use accl_types::Result;

use crate::bus::Bus;
use crate::memory_map::{self as map, Communicator, RxBuffer, RxStatus, TableRegion};
use crate::return_code::ReturnCode;
use crate::settings::Ranks;

/// Maximum numbers of ranks and of rx buffers that a message names. No more of them are read.
const MOST_RANKS: usize = 8;
const MOST_BUFFERS: usize = 4;
/// Leading words of an rx buffer that do not describe its message: its status, which was read before, and its address.
const BEFORE_MESSAGE: usize = 3;

/// State of a device on which a call does not end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// First rx buffers that are not idle, each with its index. Their addresses are not read.
    pub buffers: Vec<(usize, RxBuffer)>,
    /// Number of further rx buffers that are not idle.
    pub more_buffers: usize,
    /// Number of rx buffers that were read before time ran out.
    pub looked_at: usize,
    /// Total number of rx buffers.
    pub all: usize,
    /// Return code of the previous call; `None` if there was no time to read it.
    pub return_code: Option<ReturnCode>,
    /// Fault that the device itself reports; empty if it reports none.
    pub trouble: String,
    /// Pairs of a rank and the sequence number of the next message from it, by rank.
    pub expected: Vec<(u32, u32)>,
    /// Number of further ranks from which the engine may expect a message; only the first few ranks are read.
    pub more_ranks: usize,
    /// Whether time ran out before the sequence numbers of those first ranks were read.
    pub is_cut_off: bool,
}

impl Diagnosis {
    /// Reads the state of a device, in this order:
    /// * the rx buffers,
    /// * the return code,
    /// * the fault that the device reports,
    /// * the expected sequence numbers in the call's communicator: first from `root`, then from the ranks before this one in the ring.
    ///
    /// Before each read `go_on` returns whether there is time left.
    ///
    /// # Errors
    /// Same as [`Bus::read_register`].
    pub(super) fn read(
        bus: &mut dyn Bus,
        rx_table: TableRegion,
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
            let at = ranks.region.word(Communicator::inbound_at(rank as usize));
            seen.expected.push((rank, bus.read_register(at)?));
        }
        seen.expected.sort_unstable();
        Ok(seen)
    }

    /// Reads the next rx buffer. Returns `false` if time ran out.
    fn look_at_buffer(
        &mut self,
        bus: &mut dyn Bus,
        table: TableRegion,
        go_on: &mut impl FnMut() -> bool,
    ) -> Result<bool> {
        if !go_on() {
            return Ok(false);
        }
        let first = RxBuffer::COUNT * self.looked_at;
        let mut words = [0; RxBuffer::COUNT];
        words[0] = bus.read_register(table.word(first))?;
        // Most buffers are idle, and an idle buffer needs no further reads.
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
            (true, true) => {
                write!(f, "no time was left to read the sequence numbers that it expects from other ranks")?
            }
            (true, false) => write!(f, "it expects nothing")?,
            (false, true) => write!(
                f,
                "it expects {}, and no time was left to read the sequence numbers from others",
                named.join(" and ")
            )?,
            (false, false) => write!(f, "it expects {}", named.join(" and "))?,
        }
        if self.more_ranks > 0 && !self.is_cut_off {
            write!(f, " and messages from {} more ranks", self.more_ranks)?;
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
            write!(f, "; {} more rx buffers are not idle", self.more_buffers)?;
        }
        if self.looked_at < self.all {
            write!(f, "; no time was left to read more than {} of {} rx buffers", self.looked_at, self.all)?;
        } else if self.buffers.is_empty() {
            write!(f, "; its rx buffers are empty")?;
        }
        match self.return_code {
            None => write!(f, "; no time was left to read the return code of the previous call")?,
            Some(code) if !code.is_ok() => write!(f, "; the previous call ended with {code}")?,
            Some(_) => {}
        }
        if self.trouble.is_empty() { Ok(()) } else { write!(f, "; it reports: {}", self.trouble) }
    }
}
