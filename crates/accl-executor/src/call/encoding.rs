//! How the tensors of a call are encoded: settings that ranks agree on, and the sizes that the layout of a call is made with.
//!
//! The codecs themselves are in accl-kernels, what is encoded when is the plan's matter, and which tensors to compress that of
//! whoever makes the call. Read [`Encoding`] first.

use std::fmt;
use std::sync::{Arc, OnceLock};

use accl_kernels::codec::{self, Codec, Summary, encodes};
use accl_schedule::{Coding, Role};
use accl_types::{Bytes, Collective, Dtype, Elems, Error, ReduceOp, Result};

use super::error_stats::Probe;
use accl_types::hash::{fold, hash_words};

/// Most elements of a tile: its float32 sums stay in the second-level cache beside what they are made of.
pub const TILE_ELEMS: u64 = 16_384;

/// As that, of a tensor whose codecs only cast: they are as fast as memory is, so that all that a tile is made of stays in the first-level
/// cache. With their headers, eight of 16 bits an element fit [`FRAME_BYTES`], and four of 32.
const CAST_TILE_ELEMS: u64 = 4080;

/// Frames have so many bytes of a message, unless `ACCL_SEGMENT_BYTES` says otherwise. A tile is no longer where its buckets allow it.
const FRAME_BYTES: u64 = 64 << 10;

/// As that, of the tensor that travels raw beside others: as the last one of a call it is waited for alone.
const RAW_TILE_ELEMS: u64 = 1024;

/// Bytes of a tile's header.
pub const TILE_HEADER_BYTES: usize = 16;

// Beside the words of two codecs there is room for part of the hash of all.
const _: () = assert!(2 * Summary::BITS <= u64::BITS - 8, "the words of two codecs leave no room for a hash");

/// In the order of their numbers.
const ROLES: [Role; 3] = [Role::IntraNode, Role::Reduce, Role::Result];

/// The codecs of the tensors at one position of a call's blocks.
#[derive(Clone, Debug)]
pub struct TensorCodecs {
    /// For parts of a sum between ranks of one host, where an algorithm treats them apart.
    pub intra_node: Arc<dyn Codec>,
    /// For parts of a sum.
    pub reduce: Arc<dyn Codec>,
    /// For what ranks end with.
    pub result: Arc<dyn Codec>,
    /// Tells the random numbers of one tensor from those of another.
    pub id: u64,
}

impl TensorCodecs {
    fn of(&self, role: Role) -> &Arc<dyn Codec> {
        match role {
            Role::IntraNode => &self.intra_node,
            Role::Reduce => &self.reduce,
            Role::Result => &self.result,
        }
    }

    fn grain(&self) -> u64 {
        let grains = [&self.intra_node, &self.reduce, &self.result].map(|codec| codec.grain() as u64);
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
                    tensor.intra_node,
                    tensor.reduce,
                    tensor.result,
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
        let raw = TensorCodecs { intra_node: raw.clone(), reduce: raw.clone(), result: raw, id: 0 };
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
    pub fn encoded_bytes(self: &Arc<Self>, position: u32, dtype: Dtype, elems: Elems) -> (Bytes, Bytes) {
        let typed = TypedCodecs { codecs: self.clone(), dtype };
        let of = |role| Bytes(typed.piece_bytes(role, position, elems.0));
        (of(Role::Reduce), of(Role::Result))
    }

    /// What ranks compare with every call; never 0. It names the settings of the first tensor, and has part of a hash of all.
    pub(crate) fn word(&self) -> u64 {
        let [reduce, result] = [Role::Reduce, Role::Result].map(|role| u64::from(self.codec(role, 0).summary().word()));
        // As many bits of the hash as there is room for.
        let word = u64::from(fold(self.hash)) << (2 * Summary::BITS) | result << Summary::BITS | reduce;
        if word == 0 { 1 << (2 * Summary::BITS) } else { word }
    }

    /// What a word says: of the first tensor, where there are several.
    pub(crate) fn describe_word(word: u64) -> String {
        if word == 0 {
            return "no codec".to_owned();
        }
        let unknown = || "a codec that this version does not know".to_owned();
        let describe = |word: u64| codec::from_word(word as u32).map_or_else(unknown, |summary| summary.to_string());
        let [reduce, result] = [word, word >> Summary::BITS].map(describe);
        if reduce == result { reduce } else { format!("{reduce} for sums and {result} for results") }
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
    /// What earlier encodings have lost, if it is kept.
    pub residuals: Option<Arc<Residuals>>,
    /// What is measured, if anything is: the same on all ranks, but for the statistics.
    pub probe: Option<Probe>,
}

/// Whether a call is encoded, and how.
#[derive(Clone, Debug, Default)]
pub enum Encoded {
    /// As its group does where nothing is said.
    #[default]
    GroupDefault,
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

/// Whether a call of this kind is encoded when it is asked to be; others travel as they are.
pub fn is_encoded(collective: Collective, dtype: Dtype, op: ReduceOp, world: u32) -> bool {
    let adds = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum);
    world > 1 && accl_schedule::encodes(collective) && encodes(dtype) && (adds || !collective.reduces())
}

/// The codecs of a call with the type of its tensors: what its layout depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TypedCodecs {
    pub codecs: Arc<Codecs>,
    pub(crate) dtype: Dtype,
}

impl Coding for TypedCodecs {
    fn grain(&self, piece: u32) -> u64 {
        self.codecs.tensor(piece).grain()
    }

    fn tile(&self, piece: u32) -> u64 {
        let casts = || ROLES.iter().all(|&role| self.codecs.codec(role, piece).summary().row().is_cast);
        let most = match () {
            () if piece as usize >= self.codecs.given() => RAW_TILE_ELEMS,
            () if casts() => CAST_TILE_ELEMS,
            () => TILE_ELEMS,
        };
        let grain = self.grain(piece);
        let elems = most - most % grain;
        let is_longer = |&role: &Role| self.tile_bytes(role, piece, elems) > FRAME_BYTES;
        if elems > grain && ROLES.iter().any(is_longer) { elems - grain } else { elems }
    }

    fn tile_bytes(&self, role: Role, piece: u32, elems: u64) -> u64 {
        if elems == 0 {
            return 0;
        }
        let body = self.codecs.codec(role, piece).encoded_bytes(self.dtype, elems as usize);
        (TILE_HEADER_BYTES + body) as u64
    }
}

fn hash_text(text: &str) -> u64 {
    hash_words(text.bytes().map(u64::from))
}

/// Settings of tensors that follow each other and have the same are named once.
fn describe(tensors: &[TensorCodecs]) -> String {
    let one = |tensor: &TensorCodecs| {
        let [intra_node, reduce, result] =
            [&tensor.intra_node, &tensor.reduce, &tensor.result].map(|codec| format!("{codec:?}"));
        if intra_node == reduce && reduce == result {
            reduce
        } else if intra_node == "raw" && reduce == result {
            format!("{reduce}, raw inside hosts")
        } else {
            format!("{intra_node} inside hosts, {reduce} for sums, {result} for results")
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
