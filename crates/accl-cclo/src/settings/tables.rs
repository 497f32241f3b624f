//! Tables that a driver lays out in exchange memory.

use accl_types::{Error, ErrorKind, Result};

use super::Settings;
use crate::memory_map::{
    ARITHMETIC_CONFIGS, ArithmeticConfig, Communicator, NoRoom, RxBuffer, TableAllocator, TableRegion,
};

/// Position of a communicator, its number of ranks (`count`) and this rank's index in it (`local`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ranks {
    pub(crate) region: TableRegion,
    pub(crate) count: u32,
    pub(crate) local: u32,
}

impl Ranks {
    /// Returns the other ranks, most likely cause of a wait first: the root, then the ranks before this one in the ring.
    pub(crate) fn others(&self, root: Option<u32>) -> Vec<u32> {
        let Self { count, local, .. } = *self;
        let root = root.filter(|root| *root < count && *root != local);
        let before = (1..count).map(|back| (local + count - back) % count);
        root.into_iter().chain(before.filter(|rank| Some(*rank) != root)).collect()
    }
}

/// Positions of a device's tables.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    pub(crate) rx_buffers: TableRegion,
    pub(crate) configs: Vec<(ArithmeticConfig, TableRegion)>,
    /// The communicator of all ranks.
    pub(crate) ranks: Ranks,
}

impl Tables {
    /// Computes the positions of the tables.
    ///
    /// # Errors
    /// The tables do not fit.
    pub(crate) fn lay_out(settings: &Settings) -> Result<Self> {
        let mut allocator = TableAllocator::default();
        let mut lay_out = || {
            let rx_buffers = allocator.take(settings.rx_buffers as usize * RxBuffer::COUNT)?;
            let communicator = allocator.take(Communicator::word_count(settings.peers.len()))?;
            let configs = configs().map(|config| Ok((config, allocator.take(config.word_count())?)));
            let configs = configs.collect::<std::result::Result<Vec<_>, NoRoom>>()?;
            Ok((rx_buffers, communicator, configs))
        };
        let (rx_buffers, communicator, configs) = lay_out().map_err(|NoRoom { needs, left }| {
            let (ranks, buffers) = (settings.peers.len(), settings.rx_buffers);
            Error::new(
                ErrorKind::Configuration,
                format!(
                    "the tables of {ranks} ranks and {buffers} rx buffers do not fit into the exchange memory of a device: {needs} \
                     bytes are needed, and {left} are left; use fewer rx buffers"
                ),
            )
        })?;
        let ranks = Ranks { region: communicator, count: settings.world(), local: settings.rank };
        Ok(Self { rx_buffers, configs, ranks })
    }

    /// Returns the communicator at this offset, or `None`.
    pub(crate) fn ranks_at(&self, offset: u32) -> Option<Ranks> {
        Some(self.ranks).filter(|ranks| ranks.region.offset == offset)
    }
}

fn configs() -> impl Iterator<Item = ArithmeticConfig> {
    ARITHMETIC_CONFIGS.into_iter().chain([ArithmeticConfig::bytes()])
}
