//! Encodings of the tensors of a call: the settings on which ranks agree, and the sizes from which the layout is made.
//!
//! The codecs themselves are in accl-kernels. The plan decides what is encoded when. The caller decides which tensors
//! to compress. Read [`Encoding`] first.

use std::fmt;
use std::sync::{Arc, OnceLock};

use accl_kernels::codec::{self, Codec, Summary, encodes};
use accl_schedule::{Coding, Role};
use accl_types::{Bytes, Collective, Dtype, Elems, Error, ReduceOp, Result};

use super::error_stats::Probe;
use super::tensor::MemoryKind;
use accl_types::hash::{fold, hash_words};

/// Maximum elements of a tile. Its float32 sums then stay in the second-level cache together with their inputs.
pub const TILE_ELEMS: u64 = 16_384;

/// Maximum elements of a tile of a tensor whose codecs only cast. Casts run at memory speed, so all inputs of such a
/// tile should stay in the first-level cache. With their headers, eight tiles of 16 bits an element fit
/// [`FRAME_BYTES`], or four of 32 bits.
const CAST_TILE_ELEMS: u64 = 4080;

/// Bytes of a message in one frame, unless `ACCL_SEGMENT_BYTES` is set. A tile is at most this long if its buckets
/// allow it.
const FRAME_BYTES: u64 = 64 << 10;

/// Maximum elements of a tile of the raw tensor that is added to a call. The tensor is the last one of a call, and
/// nothing overlaps with the wait for it.
const RAW_TILE_ELEMS: u64 = 1024;

/// Bytes of a tile's header.
pub const TILE_HEADER_BYTES: usize = 16;

// The words of two codecs must leave room for part of the hash of all codecs.
const _: () = assert!(2 * Summary::BITS <= u64::BITS - 8, "the words of two codecs leave no room for a hash");

/// All roles, in the order of their numbers.
const ROLES: [Role; 3] = [Role::IntraNode, Role::Reduce, Role::Result];

/// Codecs of the tensors at one position of a call's blocks.
#[derive(Clone, Debug)]
pub struct TensorCodecs {
    /// Codec for partial sums between ranks of one host, if the algorithm distinguishes them.
    pub intra_node: Arc<dyn Codec>,
    /// Codec for partial sums.
    pub reduce: Arc<dyn Codec>,
    /// Codec for final results.
    pub result: Arc<dyn Codec>,
    /// Number that makes the random numbers of this tensor differ from those for another tensor.
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

/// The codecs of a call. They are created once and used by many calls.
#[derive(Debug)]
pub struct Codecs {
    tensors: Vec<TensorCodecs>,
    /// Hash of the codec settings of each tensor and role, for tile headers.
    settings: Vec<[u32; 3]>,
    text: String,
    hash: u64,
    /// Whether [`Codecs::with_raw_tensor`] added the last tensor.
    has_raw: bool,
    with_raw: OnceLock<Arc<Codecs>>,
}

/// Codecs with equal settings encode identically.
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
    /// Creates codecs from one entry for each tensor of a block: usually one, more in coalesced calls.
    ///
    /// # Errors
    /// `Configuration` if `tensors` is empty, or if the buckets of one tensor's codecs do not fit a tile together.
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
                    "the buckets of {:?}, {:?} and {:?} align only every {} elements, but a tile has at most \
                     {TILE_ELEMS}; choose bucket sizes that divide each other",
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

    /// Returns the settings as text, which is the same for equal settings.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns these codecs with one more tensor, which is sent raw.
    pub(crate) fn with_raw_tensor(&self) -> Result<Arc<Self>> {
        if let Some(known) = self.with_raw.get() {
            return Ok(known.clone());
        }
        let raw = codec::parse("raw")?;
        let raw = TensorCodecs { intra_node: raw.clone(), reduce: raw.clone(), result: raw, id: 0 };
        let made = Self::made(self.tensors.iter().cloned().chain([raw]).collect(), true)?;
        Ok(self.with_raw.get_or_init(|| made).clone())
    }

    /// Returns the number of tensors of a block like [`Codecs::tensors`], without the added raw tensor.
    pub(crate) fn given(&self) -> usize {
        self.tensors.len() - usize::from(self.has_raw)
    }

    /// Returns the codecs of all tensors and roles. Equal ones may be repeated.
    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn Codec>> {
        self.tensors.iter().flat_map(|tensor| ROLES.map(|role| tensor.of(role)))
    }

    /// Returns the number of tensors of a block.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Returns the encoded bytes of a tensor of `elems` elements: as a partial sum, and as a result.
    pub fn encoded_bytes(self: &Arc<Self>, position: u32, dtype: Dtype, elems: Elems) -> (Bytes, Bytes) {
        let typed = TypedCodecs { codecs: self.clone(), dtype };
        let of = |role| Bytes(typed.piece_bytes(role, position, elems.0));
        (of(Role::Reduce), of(Role::Result))
    }

    /// Returns the word that ranks compare with every call; never 0. It identifies the settings of the first tensor,
    /// and contains part of a hash of all settings.
    pub(crate) fn word(&self) -> u64 {
        let [reduce, result] = [Role::Reduce, Role::Result].map(|role| u64::from(self.codec(role, 0).summary().word()));
        // The word contains as many bits of the hash as fit.
        let word = u64::from(fold(self.hash)) << (2 * Summary::BITS) | result << Summary::BITS | reduce;
        if word == 0 { 1 << (2 * Summary::BITS) } else { word }
    }

    /// Describes a word from [`Codecs::word`]. If there are several tensors, it describes the first.
    pub(crate) fn describe_word(word: u64) -> String {
        if word == 0 {
            return "no codec".to_owned();
        }
        let unknown = || "a codec unknown to this version".to_owned();
        let describe = |word: u64| codec::from_word(word as u32).map_or_else(unknown, |summary| summary.to_string());
        let [reduce, result] = [word, word >> Summary::BITS].map(describe);
        if reduce == result { reduce } else { format!("{reduce} for sums and {result} for results") }
    }

    pub(crate) fn tensor(&self, position: u32) -> &TensorCodecs {
        &self.tensors[position as usize]
    }

    /// Returns the hash of a codec's settings.
    pub(crate) fn settings(&self, role: Role, position: u32) -> u32 {
        self.settings[position as usize][role as usize]
    }

    pub(crate) fn codec(&self, role: Role, position: u32) -> &Arc<dyn Codec> {
        self.tensor(position).of(role)
    }
}

/// Residuals of error feedback: what earlier encodings of a call's tensors lost, to be added to what is encoded next
/// (Seide et al., 1-Bit Stochastic Gradient Descent, 2014; in both directions, Tang et al., DoubleSqueeze, 2019).
///
/// Each address points to as many float32 values as the tensor has elements, initially zeros. The call reads and writes
/// them until it completes. Until then their owner must keep them alive and must not access them.
#[derive(Clone, Debug, Default)]
pub struct Residuals {
    /// Residual addresses of this rank's contributions: one for each tensor of each block, block after block.
    pub contributions: Vec<usize>,
    /// Residual addresses of the sums that this rank finishes, one for each tensor; empty for none. A tile whose sum is
    /// all zeros is sent as zeros, and its part of the residual stays for a later call.
    pub sums: Vec<usize>,
    /// Addresses of bytes that say whether a contribution's residual is used, one for each of `contributions`. They lie in the
    /// memory of the residuals, and are read when a contribution is encoded; 0: it is not used. Empty: all are used. The host
    /// does not read them.
    pub used: Vec<usize>,
    /// Memory that holds all residuals.
    pub memory: MemoryKind,
    /// Owner who can move them; `None` if they stay where they are.
    pub owner: Option<Arc<dyn ResidualOwner>>,
}

/// Owner of residuals outside of host memory.
pub trait ResidualOwner: Send + Sync + fmt::Debug {
    /// Moves the residuals to host memory, because the host encodes the call, and returns where they are now, without
    /// [`Residuals::used`]. Runs in the thread that issues the call, without a lock.
    ///
    /// # Errors
    /// The reason why the call is refused.
    fn to_host(&self) -> Result<Residuals>;
}

/// Settings with which one call is encoded.
#[derive(Clone, Debug)]
pub struct Encoding {
    /// Codecs of the tensors.
    pub codecs: Arc<Codecs>,
    /// Seed of the random numbers, combined with tensor, element, rank, and how often a sum was encoded before.
    pub seed: u64,
    /// Number that no two calls on the same tensors share. It is combined with `seed`.
    pub step: u64,
    /// Residuals of earlier encodings, if the caller keeps them.
    pub residuals: Option<Arc<Residuals>>,
    /// Measurements to take, if any. They are the same on all ranks, except for the statistics object.
    pub probe: Option<Probe>,
}

/// Whether a call is encoded, and with which settings.
#[derive(Clone, Debug, Default)]
pub enum Encoded {
    /// The default of the group.
    #[default]
    GroupDefault,
    /// Tensors are sent unencoded.
    Never,
    /// These settings. Calls that cannot be encoded (integers, float64, operators other than sums, one rank) are sent
    /// unencoded.
    As(Encoding),
}

impl From<Encoding> for Encoded {
    fn from(encoding: Encoding) -> Self {
        Encoded::As(encoding)
    }
}

/// Returns whether a call of this kind is encoded on request. Other calls are sent unencoded.
pub fn is_encoded(collective: Collective, dtype: Dtype, op: ReduceOp, world: u32) -> bool {
    let adds = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum);
    world > 1 && accl_schedule::encodes(collective) && encodes(dtype) && (adds || !collective.reduces())
}

/// Codecs of a call and the dtype of its tensors. The layout of the call depends on both.
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

/// Describes the settings. Consecutive tensors with equal settings are listed once, with their number.
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
