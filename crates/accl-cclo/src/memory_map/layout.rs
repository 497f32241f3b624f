//! Positions of the tables that the host lays out: rx buffers, then communicators and arithmetic configs, each at an address of its own.

use super::registers::{TABLES_BEGIN, TABLES_END};

/// A table in exchange memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TableRegion {
    /// Offset from the start of exchange memory, in bytes.
    pub offset: u32,
    /// Length in words.
    pub words: usize,
}

/// Error for a table that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Size of the table in bytes.
    pub needs: usize,
    /// Bytes that are left.
    pub left: usize,
}

/// Allocates regions one after the other and never frees one, because firmware caches parts of tables by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableAllocator {
    next: u32,
}

impl Default for TableAllocator {
    fn default() -> Self {
        Self { next: TABLES_BEGIN }
    }
}

impl TableAllocator {
    /// Allocates the region of a table of `words` words.
    ///
    /// # Errors
    /// [`NoRoom`] if the table would reach into the registers after the tables; nothing is allocated then.
    pub fn take(&mut self, words: usize) -> Result<TableRegion, NoRoom> {
        let left = (TABLES_END - self.next) as usize;
        let needs = words.checked_mul(4).filter(|&needs| needs <= left);
        let needs = needs.ok_or(NoRoom { needs: words.saturating_mul(4), left })?;
        let region = TableRegion { offset: self.next, words };
        self.next += needs as u32;
        Ok(region)
    }
}

impl TableRegion {
    /// Returns the byte offset of the word with this index.
    pub fn word(self, index: usize) -> u32 {
        self.offset + 4 * index as u32
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ARITHMETIC_CONFIGS, ArithmeticConfig, Communicator, RxBuffer};
    use super::*;

    #[test]
    fn sixteen_buffers_and_two_ranks_lie_where_the_reference_says() {
        let mut allocator = TableAllocator::default();
        let buffers = allocator.take(16 * RxBuffer::COUNT).unwrap();
        assert_eq!((buffers.offset, buffers.word(16 * RxBuffer::COUNT)), (0x8, 0x1C8));
        assert_eq!(allocator.take(Communicator::word_count(2)).unwrap().offset, 0x1C8);
        let configs: Vec<u32> =
            ARITHMETIC_CONFIGS.iter().map(|config| allocator.take(config.word_count()).unwrap().offset).collect();
        assert_eq!(configs, [0x200, 0x224, 0x248, 0x26C, 0x290, 0x2B4]);
        assert_eq!(allocator.take(0).unwrap().offset, 0x2D8);
        assert_eq!(ArithmeticConfig::bytes().word_count(), 7);
    }

    #[test]
    fn what_would_reach_the_registers_is_refused_and_takes_nothing() {
        let mut allocator = TableAllocator::default();
        let all = (TABLES_END - TABLES_BEGIN) as usize / 4;
        assert_eq!(allocator.take(all + 1), Err(NoRoom { needs: 4 * all + 4, left: 4 * all }));
        assert_eq!(allocator.take(usize::MAX), Err(NoRoom { needs: usize::MAX, left: 4 * all }));
        assert_eq!(allocator.take(all).map(|region| region.offset), Ok(TABLES_BEGIN));
        assert_eq!(allocator.take(1), Err(NoRoom { needs: 4, left: 0 }));
    }
}
