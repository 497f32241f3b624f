//! Why a call does not end, as far as a device's memory says.

use std::fmt;

use accl_types::Result;

use crate::bus::Bus;
use crate::memory_map::{self as map, Communicator, Place, RankEntry, RxBuffer, RxStatus};
use crate::return_code::ReturnCode;

/// Ranks and rx buffers that a message names.
const MOST_RANKS: usize = 8;
const MOST_BUFFERS: usize = 4;

/// What is read of a device that a call does not come back from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// All ranks, with the numbers of the messages that are next.
    pub communicator: Communicator,
    /// Of the call before.
    pub return_code: ReturnCode,
    /// The rx buffers that are not idle, with the index of each.
    pub buffers: Vec<(usize, RxBuffer)>,
    /// How many rx buffers were looked at before there was no time left.
    pub looked_at: usize,
    /// How many there are.
    pub all: usize,
    /// What the device itself says is wrong, if it says anything.
    pub trouble: String,
}

impl Diagnosis {
    /// Reads it: what the engine waits for first, then the rx buffers for as long as `go_on` says that there is time left.
    ///
    /// # Errors
    /// As [`Bus::read_register`].
    pub fn read(
        bus: &mut dyn Bus,
        rx_table: Place,
        communicator: Place,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<Self> {
        let words = (0..communicator.words).map(|index| bus.read_register(communicator.word(index)));
        let ranks = words.collect::<Result<Vec<u32>>>()?;
        let communicator = Communicator::from_words(&ranks).unwrap_or(Communicator { local: 0, ranks: Vec::new() });
        let return_code = ReturnCode(bus.read_register(map::RETURN_CODE.offset)?);
        let all = rx_table.words / RxBuffer::COUNT;
        let (mut buffers, mut looked_at) = (Vec::new(), 0);
        while looked_at < all && go_on() {
            let first = RxBuffer::COUNT * looked_at;
            let mut words = [bus.read_register(rx_table.word(first))?; RxBuffer::COUNT];
            // Most are idle, and say nothing more.
            if RxStatus::from_word(words[0]) != Some(RxStatus::Idle) {
                for (index, word) in words.iter_mut().enumerate().skip(1) {
                    *word = bus.read_register(rx_table.word(first + index))?;
                }
                buffers.push((looked_at, RxBuffer::from_words(&words)));
            }
            looked_at += 1;
        }
        let trouble = if go_on() { bus.about()?.map(|about| about.trouble) } else { None };
        Ok(Self { communicator, return_code, buffers, looked_at, all, trouble: trouble.unwrap_or_default() })
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = (0..).zip(&self.communicator.ranks).filter(|(rank, _)| *rank != self.communicator.local);
        let next: Vec<String> =
            others.map(|(rank, RankEntry { inbound, .. })| format!("seq {inbound} from rank {rank}")).collect();
        let named = &next[..next.len().min(MOST_RANKS)];
        write!(f, "it expects {}", if named.is_empty() { "nothing".to_owned() } else { named.join(" and ") })?;
        if next.len() > named.len() {
            write!(f, " and something from {} ranks more", next.len() - named.len())?;
        }
        let named = &self.buffers[..self.buffers.len().min(MOST_BUFFERS)];
        for (index, buffer) in named {
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
        if self.buffers.len() > named.len() {
            write!(f, "; {} rx buffers more are not idle", self.buffers.len() - named.len())?;
        }
        if self.looked_at < self.all {
            write!(f, "; there was no time to look at more than {} of {} rx buffers", self.looked_at, self.all)?;
        } else if self.buffers.is_empty() {
            write!(f, "; its rx buffers are empty")?;
        }
        if self.trouble.is_empty() { Ok(()) } else { write!(f, "; it says: {}", self.trouble) }
    }
}
