//! A tile of an encoded chunk as it is sent: header and checksum.
//!
//! This module owns the bytes in front of a codec's output. `call::encoding` decides how many elements a tile has. Read
//! [`TileHead`] first.
//!
//! # A tile on the wire
//! A tile has whole buckets of one tensor, at most [`TILE_ELEMS`](crate::call::TILE_ELEMS) elements. All numbers are
//! little endian.
//! ```text
//! 0   magic 0xACC1                            2 bytes
//! 2   flags: 1, there is a checksum           2
//! 4   number of elements                      4
//! 8   hash of the codec's settings            4
//! 12  CRC32C of all other bytes, or 0         4
//! 16  output of the codec, a multiple of 8 bytes
//! ```

use crate::call::TILE_HEADER_BYTES;

const MAGIC: u16 = 0xacc1;
const HAS_CHECKSUM: u16 = 1;

/// Expected header of a tile.
#[derive(Clone, Copy, Debug)]
pub struct TileHead {
    /// Number of elements.
    pub elems: u32,
    /// Hash of the codec's settings, which determine the meaning of the bytes.
    pub settings: u32,
    /// Whether the header contains a checksum of the tile's other bytes.
    pub has_checksum: bool,
}

/// Defect of a tile that has arrived.
#[derive(Debug)]
pub(crate) enum BadTile {
    /// Its bytes are not those that its sender wrote.
    Damaged(String),
    /// Its sender and this rank have chunks of different sizes.
    OtherSize {
        /// Number of bytes that the sender publishes.
        published: u64,
        /// Number of bytes of this rank.
        expected: u64,
    },
}

impl TileHead {
    /// Returns the number of elements that a tile gives.
    pub(super) fn elems_of(tile: &[u8]) -> u64 {
        tile.get(4..8).map_or(0, |bytes| u64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])))
    }

    fn bytes(self) -> [u8; 12] {
        let mut head = [0; 12];
        head[..2].copy_from_slice(&MAGIC.to_le_bytes());
        head[2..4].copy_from_slice(&if self.has_checksum { HAS_CHECKSUM } else { 0 }.to_le_bytes());
        head[4..8].copy_from_slice(&self.elems.to_le_bytes());
        head[8..].copy_from_slice(&self.settings.to_le_bytes());
        head
    }

    /// Writes the header of a tile whose body is complete.
    pub fn seal(self, tile: &mut [u8]) {
        tile[..12].copy_from_slice(&self.bytes());
        let checksum = if self.has_checksum { checksum(tile) } else { 0 };
        tile[12..TILE_HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Checks that a tile is the expected one and undamaged. Without a checksum, only the header is checked.
    ///
    /// # Errors
    /// Description of the problem.
    pub(crate) fn check(self, tile: &[u8]) -> std::result::Result<(), String> {
        if tile.len() < TILE_HEADER_BYTES {
            return Err(format!("it has {} bytes, expected at least {TILE_HEADER_BYTES} for its header", tile.len()));
        }
        let word = |at: usize| u32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]);
        let (magic, flags) = (word(0) as u16, (word(0) >> 16) as u16);
        if magic != MAGIC {
            return Err(format!("it begins with {magic:#06x}, expected {MAGIC:#06x}"));
        }
        if flags & !HAS_CHECKSUM != 0 {
            return Err(format!("it has flags unknown to this version ({flags:#06x})"));
        }
        if word(4) != self.elems {
            return Err(format!("it has {} elements, expected {}", word(4), self.elems));
        }
        if word(8) != self.settings {
            return Err("its settings differ from the settings of this call".to_owned());
        }
        // The sender decides whether there is a checksum: another kind of link may have brought the tile.
        let found = word(12);
        let expected = if flags & HAS_CHECKSUM != 0 { checksum(tile) } else { 0 };
        if found != expected {
            return Err(format!("its checksum is {found:#010x}, but its bytes give {expected:#010x}"));
        }
        Ok(())
    }
}

/// Returns the checksum of a tile without its checksum field.
fn checksum(tile: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&tile[..12]), &tile[TILE_HEADER_BYTES..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(has_checksum: bool) -> (TileHead, Vec<u8>) {
        let head = TileHead { elems: 1000, settings: 77, has_checksum };
        let mut tile: Vec<u8> = (0..216u32).map(|byte| (byte * 37) as u8).collect();
        head.seal(&mut tile);
        (head, tile)
    }

    #[test]
    fn every_flipped_bit_is_seen_where_there_is_a_checksum() {
        let (head, tile) = sealed(true);
        head.check(&tile).unwrap();
        for bit in 0..8 * tile.len() {
            let mut wrong = tile.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(head.check(&wrong).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn without_a_checksum_the_header_is_compared() {
        let (head, tile) = sealed(false);
        head.check(&tile).unwrap();
        for bit in 0..8 * TILE_HEADER_BYTES {
            let mut wrong = tile.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(head.check(&wrong).is_err(), "bit {bit}");
        }
    }

    /// Random bytes, and valid tiles with some bytes changed or cut off: `check` refuses each and does not panic.
    #[test]
    fn any_bytes_are_checked_and_only_a_sound_tile_is_taken() {
        let mut state = 1u64;
        let mut below = |limit: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % limit
        };
        let (head, sound) = sealed(true);
        for turn in 0..20_000 {
            let mut tile =
                if turn % 2 == 0 { sound.clone() } else { (0..below(300)).map(|_| below(256) as u8).collect() };
            if turn % 4 == 0 {
                tile.truncate(below(tile.len()));
            } else {
                for _ in 0..below(4).min(tile.len()) {
                    let at = below(tile.len());
                    tile[at] = [0, 0xff, below(256) as u8][below(3)];
                }
            }
            assert_eq!(head.check(&tile).is_ok(), tile == sound, "turn {turn}: {tile:?}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_tile_is_named() {
        let (head, tile) = sealed(true);
        let why = |at: usize, head: TileHead| {
            let mut wrong = tile.clone();
            wrong[at] ^= 1;
            head.check(&wrong).unwrap_err()
        };
        assert!(why(0, head).contains("begins with 0xacc0, expected 0xacc1"), "{}", why(0, head));
        assert!(why(4, head).contains("1001 elements, expected 1000"), "{}", why(4, head));
        assert!(why(8, head).contains("settings differ from the settings of this call"), "{}", why(8, head));
        assert!(why(100, head).contains("checksum"), "{}", why(100, head));
    }
}
