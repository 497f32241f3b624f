//! How the tensors of a call are encoded: settings that ranks agree on, and what a tile is on the wire.
//!
//! Owns the header and checksum of tiles, and the sizes that the layout of a call is made with. The codecs themselves are
//! in accl-kernels, what is encoded when is the plan's matter, and which tensors to compress that of whoever makes the call.
//! Read [`Encoding`] first.
//!
//! # A tile on the wire
//! Whole buckets, at most [`TILE_ELEMS`] elements of one tensor, little-endian:
//! ```text
//! 0   magic 0xACC1                     2 bytes
//! 2   flags: 1, there is a checksum    2
//! 4   number of elements               4
//! 8   hash of the codec's settings     4
//! 12  CRC32C of all the rest, or 0     4
//! 16  what the codec made of them, a multiple of 8 bytes
//! ```

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use accl_kernels::codec::{self, Codec, Summary, encodes};
use accl_schedule::{Coding, Role};
use accl_types::config::Config;
use accl_types::{Collective, Dtype, Error, ReduceOp, Result};

use crate::audit::Audit;
use crate::desc::{CallDesc, TensorDesc};
use crate::hash::{fold, hash_words};
use crate::sync::Mutex;

/// Most elements of a tile: its float32 sums stay in the second-level cache beside what they are made of.
pub const TILE_ELEMS: u64 = 16_384;

/// As that, of the tensor that travels raw beside others: as the last one of a call it is waited for alone.
const RAW_TILE_ELEMS: u64 = 1024;

/// Bytes of a tile's header.
pub const TILE_HEADER_BYTES: usize = 16;

/// In the order of their numbers.
const ROLES: [Role; 3] = [Role::Inner, Role::Up, Role::Down];

const MAGIC: u16 = 0xacc1;
const HAS_CHECKSUM: u16 = 1;

/// The codecs of the tensors at one position of a call's blocks.
#[derive(Clone, Debug)]
pub struct TensorCodecs {
    /// For parts of a sum between ranks of one host, where an algorithm treats them apart.
    pub inner: Arc<dyn Codec>,
    /// For parts of a sum.
    pub up: Arc<dyn Codec>,
    /// For what ranks end with.
    pub down: Arc<dyn Codec>,
    /// Tells the random numbers of one tensor from those of another.
    pub id: u64,
}

impl TensorCodecs {
    fn of(&self, role: Role) -> &Arc<dyn Codec> {
        match role {
            Role::Inner => &self.inner,
            Role::Up => &self.up,
            Role::Down => &self.down,
        }
    }

    fn grain(&self) -> u64 {
        let grains = [&self.inner, &self.up, &self.down].map(|codec| codec.grain() as u64);
        grains.into_iter().fold(1, least_common_multiple)
    }
}

/// The codecs of a call: made once, used by many calls.
#[derive(Debug)]
pub struct Codecs {
    tensors: Vec<TensorCodecs>,
    /// Of each tensor and role, for headers.
    settings: Vec<[u32; 3]>,
    text: String,
    hash: u64,
    /// The last tensor was added by [`Codecs::with_raw_tensor`].
    has_raw: bool,
    with_raw: OnceLock<Arc<Codecs>>,
}

/// Equal settings encode alike.
impl PartialEq for Codecs {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.text == other.text
    }
}

impl Eq for Codecs {}

impl std::hash::Hash for Codecs {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Codecs {
    /// One entry for each tensor of a block: one as a rule, more in coalesced calls.
    ///
    /// # Errors
    /// `Configuration` if there is none, or if the buckets of one tensor's codecs do not fit a tile together.
    pub fn new(tensors: Vec<TensorCodecs>) -> Result<Arc<Self>> {
        Self::made(tensors, false)
    }

    fn made(tensors: Vec<TensorCodecs>, has_raw: bool) -> Result<Arc<Self>> {
        if tensors.is_empty() {
            return Err(Error::configuration("an encoding needs the codecs of at least one tensor"));
        }
        for tensor in &tensors {
            if tensor.grain() > TILE_ELEMS {
                return Err(Error::configuration(format!(
                    "the buckets of {:?}, {:?} and {:?} meet every {} elements only, and a tile has {TILE_ELEMS} at most; \
                     give them buckets that divide each other",
                    tensor.inner,
                    tensor.up,
                    tensor.down,
                    tensor.grain()
                )));
            }
        }
        let of = |codec: &Arc<dyn Codec>| fold(hash_text(&format!("{codec:?}")));
        let settings = tensors.iter().map(|tensor| ROLES.map(|role| of(tensor.of(role)))).collect();
        let text = describe(&tensors);
        let hash = hash_text(&text);
        Ok(Arc::new(Self { tensors, settings, text, hash, has_raw, with_raw: OnceLock::new() }))
    }

    /// The settings in words, the same for equal ones.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The same with one more tensor, which travels raw.
    pub(crate) fn with_raw_tensor(&self) -> Result<Arc<Self>> {
        if let Some(known) = self.with_raw.get() {
            return Ok(known.clone());
        }
        let raw = codec::parse("raw")?;
        let raw = TensorCodecs { inner: raw.clone(), up: raw.clone(), down: raw, id: 0 };
        let made = Self::made(self.tensors.iter().cloned().chain([raw]).collect(), true)?;
        Ok(self.with_raw.get_or_init(|| made).clone())
    }

    /// As [`Codecs::tensors`], without the one that was added.
    pub(crate) fn given(&self) -> usize {
        self.tensors.len() - usize::from(self.has_raw)
    }

    /// Number of tensors of a block.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Bytes that a tensor of so many elements becomes, as part of a sum and as a result.
    pub fn encoded_bytes(self: &Arc<Self>, position: u32, dtype: Dtype, elems: u64) -> (u64, u64) {
        let typed = TypedCodecs { codecs: self.clone(), dtype };
        (typed.piece_bytes(Role::Up, position, elems), typed.piece_bytes(Role::Down, position, elems))
    }

    /// What ranks compare with every call; never 0. It names the settings of the first tensor, and has part of a hash of all.
    pub(crate) fn word(&self) -> u64 {
        let [up, down] = [Role::Up, Role::Down].map(|role| u64::from(self.codec(role, 0).summary().word()));
        let hash = u64::from(fold(self.hash) as u16 | 1);
        hash << (2 * Summary::BITS) | down << Summary::BITS | up
    }

    /// What a word says: of the first tensor, where there are several.
    pub(crate) fn describe_word(word: u64) -> String {
        if word == 0 {
            return "no codec".to_owned();
        }
        let [up, down] = [word, word >> Summary::BITS].map(|word| Summary::from_word(word as u32));
        if up == down { format!("{up}") } else { format!("{up} up and {down} down") }
    }

    pub(crate) fn tensor(&self, position: u32) -> &TensorCodecs {
        &self.tensors[position as usize]
    }

    /// The hash of a codec's settings.
    pub(crate) fn settings(&self, role: Role, position: u32) -> u32 {
        self.settings[position as usize][role as usize]
    }

    pub(crate) fn codec(&self, role: Role, position: u32) -> &Arc<dyn Codec> {
        self.tensor(position).of(role)
    }
}

/// What earlier encodings of a call's tensors have lost, to be added to what is encoded next: error feedback (Seide et al.,
/// 1-Bit Stochastic Gradient Descent, 2014; on both ways, Tang et al., DoubleSqueeze, 2019).
///
/// Each address is that of as many float32 as the tensor has elements, zeros at first. They are read and written until the
/// call ends, and their owner leaves them alone and keeps them until then.
#[derive(Clone, Debug, Default)]
pub struct Residuals {
    /// Of this rank's contributions: of each tensor of each block, one block after the other.
    pub contributions: Vec<usize>,
    /// Of sums that this rank finishes, of each tensor; empty for none. A tile whose sum is all zeros is sent so, and its part waits.
    pub sums: Vec<usize>,
}

/// How one call is encoded.
#[derive(Clone, Debug)]
pub struct Encoding {
    /// With what.
    pub codecs: Arc<Codecs>,
    /// What random numbers are made from, together with tensor, element, rank and how often a sum was encoded before.
    pub seed: u64,
    /// As `seed`: a number that no two calls on the same tensors share.
    pub step: u64,
    /// What is carried over from call to call, if anything is.
    pub residuals: Option<Arc<Residuals>>,
    /// What is measured, if anything is: the same on all ranks, but for the ledger.
    pub audit: Option<Audit>,
}

/// Whether a call is encoded, and how.
#[derive(Clone, Debug, Default)]
pub enum Encoded {
    /// As is usual in its group.
    #[default]
    Usual,
    /// It travels as it is.
    Never,
    /// So. Calls that cannot be (integers, float64, other operators than sums, one rank) travel as they are.
    As(Encoding),
}

impl From<Encoding> for Encoded {
    fn from(encoding: Encoding) -> Self {
        Encoded::As(encoding)
    }
}

/// Blocks with fewer elements travel as they are in groups that encode all calls.
const LEAST_ELEMS: u64 = 1024;

/// What a group does with calls that do not say whether they are encoded.
#[derive(Debug)]
pub(crate) struct Usual {
    codec: Arc<dyn Codec>,
    raw: Arc<dyn Codec>,
    /// By the number of a call's tensors.
    known: Mutex<HashMap<usize, Arc<Codecs>>>,
    /// Calls so far that were not refused.
    steps: AtomicU64,
}

impl Usual {
    /// From a group's settings; `None`: such calls are not encoded.
    ///
    /// # Errors
    /// `Configuration` for what is no codec, whether or not it is used, and for one that needs error feedback: a call that
    /// does not say how it is encoded has none.
    pub(crate) fn of(config: &Config) -> Result<Option<Self>> {
        let codec = codec::parse(&config.codec)?;
        if config.compress_all && codec.summary().row().is_some_and(|row| row.needs_feedback) {
            return Err(Error::configuration(format!(
                "compression: {codec:?} is of use only with error feedback, which ordinary calls have not got; take another \
                 codec, or leave compressed_calls at hooks"
            )));
        }
        let raw = codec::parse("raw")?;
        let usual = Self { codec, raw, known: Mutex::default(), steps: AtomicU64::new(0) };
        Ok(config.compress_all.then_some(usual))
    }

    /// Whether such a call is encoded: all ranks find the same from its description.
    pub(crate) fn is_for(&self, desc: &CallDesc, world: u32) -> bool {
        let is_small = |block: &[TensorDesc]| block.iter().map(TensorDesc::count_elems).sum::<u64>() < LEAST_ELEMS;
        let mut blocks = desc.inputs.iter().chain(desc.outputs.iter());
        // Of an all_to_all no rank knows whether the others gave it in the same way. Calls with reserved numbers are parts of
        // others, such as sums of sparse tensors, which travel as they are.
        matches!(desc.encoding, Encoded::Usual)
            && desc.seq.is_none()
            && desc.collective != Collective::AllToAll
            && applies(desc.collective, desc.dtype, desc.op, world)
            && desc.inputs.pieces().iter().chain(desc.outputs.pieces()).all(|piece| piece.dtype == desc.dtype)
            && !blocks.any(is_small)
    }

    /// The same call, encoded.
    ///
    /// # Errors
    /// Those of [`Codecs::new`].
    pub(crate) fn encoded(&self, desc: &CallDesc, step: u64) -> Result<CallDesc> {
        let tensors = desc.outputs.get(0).map_or(1, <[TensorDesc]>::len);
        let known = self.known.lock().get(&tensors).cloned();
        let codecs = match known {
            Some(codecs) => codecs,
            None => {
                let of = |id| {
                    let (up, down) = (self.codec.clone(), self.codec.clone());
                    TensorCodecs { inner: self.raw.clone(), up, down, id }
                };
                let codecs = Codecs::new((0..tensors as u64).map(of).collect())?;
                self.known.lock().insert(tensors, codecs.clone());
                codecs
            }
        };
        let encoding = Encoding { codecs, seed: 0, step, residuals: None, audit: None };
        Ok(CallDesc { encoding: encoding.into(), ..desc.clone() })
    }

    /// The number of a call that is about to be made. It is the same on all ranks, who count what they have made ([`Usual::count`]):
    /// calls of a group come one after the other.
    pub(crate) fn next_step(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// A call was made.
    pub(crate) fn count(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether a call of this kind is encoded when it is asked to be; others travel as they are.
pub(crate) fn applies(collective: Collective, dtype: Dtype, op: ReduceOp, world: u32) -> bool {
    let adds = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum);
    world > 1 && accl_schedule::encodes(collective) && encodes(dtype) && (adds || !collective.reduces())
}

/// The codecs of a call with the type of its tensors: what its layout depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TypedCodecs {
    pub(crate) codecs: Arc<Codecs>,
    pub(crate) dtype: Dtype,
}

impl Coding for TypedCodecs {
    fn grain(&self, piece: u32) -> u64 {
        self.codecs.tensor(piece).grain()
    }

    fn tile(&self, piece: u32) -> u64 {
        let most = if piece as usize >= self.codecs.given() { RAW_TILE_ELEMS } else { TILE_ELEMS };
        most - most % self.grain(piece)
    }

    fn tile_bytes(&self, role: Role, piece: u32, elems: u64) -> u64 {
        if elems == 0 {
            return 0;
        }
        let body = self.codecs.codec(role, piece).encoded_bytes(self.dtype, elems as usize);
        (TILE_HEADER_BYTES + body) as u64
    }
}

/// What is known of a tile before it comes, as its header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileHead {
    pub(crate) elems: u32,
    pub(crate) settings: u32,
    pub(crate) has_checksum: bool,
}

impl TileHead {
    fn bytes(self) -> [u8; 12] {
        let mut head = [0; 12];
        head[..2].copy_from_slice(&MAGIC.to_le_bytes());
        head[2..4].copy_from_slice(&if self.has_checksum { HAS_CHECKSUM } else { 0 }.to_le_bytes());
        head[4..8].copy_from_slice(&self.elems.to_le_bytes());
        head[8..].copy_from_slice(&self.settings.to_le_bytes());
        head
    }

    /// Writes the header of a tile whose body is there.
    pub(crate) fn seal(self, tile: &mut [u8]) {
        tile[..12].copy_from_slice(&self.bytes());
        let checksum = if self.has_checksum { checksum(tile) } else { 0 };
        tile[12..TILE_HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Looks whether a tile is what was expected and came whole. Without a checksum, only the header can tell.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub(crate) fn check(self, tile: &[u8]) -> std::result::Result<(), String> {
        if tile.len() < TILE_HEADER_BYTES {
            return Err(format!("it has {} bytes, and a header alone has {TILE_HEADER_BYTES}", tile.len()));
        }
        let word = |at: usize| u32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]);
        let (magic, flags) = (word(0) as u16, (word(0) >> 16) as u16);
        if magic != MAGIC {
            return Err(format!("it begins with {magic:#06x} where a tile begins with {MAGIC:#06x}"));
        }
        if flags & !HAS_CHECKSUM != 0 {
            return Err(format!("it has flags that this version does not know ({flags:#06x})"));
        }
        if word(4) != self.elems {
            return Err(format!("it has {} elements where {} are expected", word(4), self.elems));
        }
        if word(8) != self.settings {
            return Err("its settings are not those of this call".to_owned());
        }
        // Whether there is one is for its maker to say: it may have come by way of another kind of link.
        let found = word(12);
        let expected = if flags & HAS_CHECKSUM != 0 { checksum(tile) } else { 0 };
        if found != expected {
            return Err(format!("its checksum is {found:#010x}, and that of what came {expected:#010x}"));
        }
        Ok(())
    }
}

/// Over all of a tile but the checksum itself.
fn checksum(tile: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&tile[..12]), &tile[TILE_HEADER_BYTES..])
}

fn hash_text(text: &str) -> u64 {
    hash_words(text.bytes().map(u64::from))
}

/// Settings of tensors that follow each other and have the same are named once.
fn describe(tensors: &[TensorCodecs]) -> String {
    let one = |tensor: &TensorCodecs| {
        let [inner, up, down] = [&tensor.inner, &tensor.up, &tensor.down].map(|codec| format!("{codec:?}"));
        if inner == up && up == down {
            up
        } else if inner == "raw" && up == down {
            format!("{up}, raw inside hosts")
        } else {
            format!("inner {inner}, up {up}, down {down}")
        }
    };
    let mut parts: Vec<(String, usize)> = Vec::new();
    for text in tensors.iter().map(one) {
        match parts.last_mut() {
            Some((last, count)) if *last == text => *count += 1,
            Some(_) | None => parts.push((text, 1)),
        }
    }
    let part = |(text, count): (String, usize)| if count == 1 { text } else { format!("{count} x {text}") };
    parts.into_iter().map(part).collect::<Vec<_>>().join("; ")
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

impl fmt::Display for Codecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
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

    /// Random bytes, and sound tiles with some bytes changed or cut off: whoever gets them sees it, and goes on.
    #[test]
    fn whatever_comes_is_looked_at_and_only_a_sound_tile_is_taken() {
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
    fn a_codec_that_needs_error_feedback_is_not_for_all_calls_of_a_group() {
        let of = |codec: &str, compress_all| {
            let config = Config { codec: codec.to_owned(), compress_all, ..Config::default() };
            Usual::of(&config).map(|usual| usual.is_some())
        };
        assert!(!of("sign", false).unwrap() && of("mxfp4", true).unwrap());
        let error = of("sign,bucket=64", true).unwrap_err();
        assert!(
            error.message.contains("sign,bucket=64,meta=float32 is of use only with error feedback"),
            "{}",
            error.message
        );
    }

    #[test]
    fn what_is_wrong_with_a_tile_is_named() {
        let (head, tile) = sealed(true);
        let why = |at: usize, head: TileHead| {
            let mut wrong = tile.clone();
            wrong[at] ^= 1;
            head.check(&wrong).unwrap_err()
        };
        assert!(why(0, head).contains("begins with 0xacc0 where a tile begins with 0xacc1"), "{}", why(0, head));
        assert!(why(4, head).contains("1001 elements where 1000 are expected"), "{}", why(4, head));
        assert!(why(8, head).contains("settings are not those of this call"), "{}", why(8, head));
        assert!(why(100, head).contains("checksum"), "{}", why(100, head));
    }
}
