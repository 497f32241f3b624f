//! Why a call does not end, as far as a device's memory says.

use std::fmt;

use accl_types::Result;

use crate::bus::Bus;
use crate::memory_map::{self as map, Communicator, Place, RankEntry, RxBuffer, RxStatus};
use crate::return_code::ReturnCode;

/// What is read of a device that a call does not come back from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// All ranks, with the numbers of the messages that are next.
    pub communicator: Communicator,
    /// The rx buffers that are not idle, with the index of each.
    pub buffers: Vec<(usize, RxBuffer)>,
    /// Of the call before.
    pub return_code: ReturnCode,
}

impl Diagnosis {
    /// Reads it.
    ///
    /// # Errors
    /// As [`Bus::read_register`].
    pub fn read(bus: &mut dyn Bus, rx_table: Place, communicator: Place) -> Result<Self> {
        let mut words = |place: Place| -> Result<Vec<u32>> {
            (0..place.words).map(|index| bus.read_register(place.word(index))).collect()
        };
        let (table, ranks) = (words(rx_table)?, words(communicator)?);
        let return_code = ReturnCode(bus.read_register(map::RETURN_CODE.offset)?);
        let (entries, _) = table.as_chunks::<{ RxBuffer::COUNT }>();
        let buffers = entries.iter().map(RxBuffer::from_words).enumerate();
        let buffers = buffers.filter(|(_, buffer)| buffer.status() != Some(RxStatus::Idle));
        let communicator = Communicator::from_words(&ranks).unwrap_or(Communicator { local: 0, ranks: Vec::new() });
        Ok(Self { communicator, buffers: buffers.collect(), return_code })
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = (0..).zip(&self.communicator.ranks).filter(|(rank, _)| *rank != self.communicator.local);
        let next: Vec<String> =
            others.map(|(rank, RankEntry { inbound, .. })| format!("message {inbound} from rank {rank}")).collect();
        write!(f, "it expects {}", if next.is_empty() { "nothing".to_owned() } else { next.join(" and ") })?;
        if self.buffers.is_empty() {
            return write!(f, "; its rx buffers are empty");
        }
        for (index, buffer) in &self.buffers {
            let RxBuffer { sequence, source, tag, bytes, .. } = buffer;
            match buffer.status() {
                Some(RxStatus::Full) => write!(
                    f,
                    "; rx buffer {index} holds message {sequence} of rank {source} with tag {tag:#x} and {bytes} bytes"
                )?,
                Some(RxStatus::Filling) => write!(f, "; rx buffer {index} is being filled")?,
                Some(RxStatus::Idle) => {}
                Some(RxStatus::Failed) | None => write!(f, "; rx buffer {index} has status {}", buffer.status)?,
            }
        }
        Ok(())
    }
}
