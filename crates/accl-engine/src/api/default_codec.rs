//! Encoding of calls that do not specify whether they are encoded.
//!
//! Owns the choice of calls, the codecs for each number of tensors, and the count of steps. Read [`DefaultCodec`]
//! first.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accl_kernels::codec::{self, Codec};
use accl_types::config::Config;
use accl_types::{Collective, Error, Result};

use crate::settings::codec_of;
use crate::sync::Mutex;
use accl_executor::call::{CallDesc, Codecs, Encoded, Encoding, TensorCodecs, TensorDesc, is_encoded};

/// Blocks with fewer elements are sent unencoded in groups that encode all calls.
const LEAST_ELEMS: u64 = 1024;

/// Default encoding of a group, for calls that do not specify whether they are encoded.
#[derive(Debug)]
pub(crate) struct DefaultCodec {
    codec: Arc<dyn Codec>,
    raw: Arc<dyn Codec>,
    /// Codecs created so far, by the number of a call's tensors.
    known: Mutex<HashMap<usize, Arc<Codecs>>>,
    /// Number of encoded calls so far that were not refused.
    steps: AtomicU64,
}

impl DefaultCodec {
    /// Creates the default encoding from a group's settings; `None` if such calls are not encoded.
    ///
    /// # Errors
    /// `Configuration` for an unknown codec, whether or not it is used. Also for a codec that needs error feedback,
    /// because a call that does not specify its encoding has none.
    pub(crate) fn of(config: &Config) -> Result<Option<Self>> {
        let codec = codec_of(config)?;
        if config.compress_all && codec.summary().row().needs_feedback {
            return Err(Error::configuration(format!(
                "compression: {codec:?} requires error feedback, which ordinary calls do not have; choose another \
                 codec, or set compressed_calls to hooks"
            )));
        }
        let raw = codec::parse("raw")?;
        let default = Self { codec, raw, known: Mutex::default(), steps: AtomicU64::new(0) };
        Ok(config.compress_all.then_some(default))
    }

    /// Returns whether such a call is encoded; all ranks decide alike from its description.
    pub(crate) fn is_for(&self, desc: &CallDesc, world: u32) -> bool {
        let is_small = |block: &[TensorDesc]| block.iter().map(TensorDesc::count_elems).sum::<u64>() < LEAST_ELEMS;
        let mut blocks = desc.inputs.iter().chain(desc.outputs.iter());
        // In an all_to_all no rank knows whether the other ranks described the call in the same way. Calls with
        // reserved sequence numbers are parts of other operations, such as sums of sparse tensors, which are sent
        // unencoded.
        matches!(desc.encoding, Encoded::GroupDefault)
            && desc.seq.is_none()
            && desc.collective != Collective::AllToAll
            && is_encoded(desc.collective, desc.dtype, desc.op, world)
            && desc.inputs.pieces().iter().chain(desc.outputs.pieces()).all(|piece| piece.dtype() == desc.dtype)
            && !blocks.any(is_small)
    }

    /// Returns the same call, encoded.
    ///
    /// # Errors
    /// The errors of [`Codecs::new`].
    pub(crate) fn encoded(&self, desc: &CallDesc, step: u64) -> Result<CallDesc> {
        let tensors = desc.outputs.get(0).map_or(1, <[TensorDesc]>::len);
        let known = self.known.lock().get(&tensors).cloned();
        let codecs = match known {
            Some(codecs) => codecs,
            None => {
                let of = |id| {
                    let [reduce, result] = [(); 2].map(|()| self.codec.clone());
                    TensorCodecs { intra_node: self.raw.clone(), reduce, result, id }
                };
                let codecs = Codecs::new((0..tensors as u64).map(of).collect())?;
                self.known.lock().insert(tensors, codecs.clone());
                codecs
            }
        };
        let encoding = Encoding { codecs, seed: 0, step, residuals: None, probe: None };
        Ok(CallDesc { encoding: encoding.into(), ..desc.clone() })
    }

    /// Returns the step of the next encoded call. It is the same on all ranks, because each rank counts its calls
    /// ([`DefaultCodec::count`]) and a group's calls follow one another.
    pub(crate) fn next_step(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Counts a call that was issued.
    pub(crate) fn count(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_codec_that_needs_error_feedback_is_not_for_all_calls_of_a_group() {
        let of = |codec: &str, compress_all| {
            let config = Config { codec: codec.to_owned(), compress_all, ..Config::default() };
            DefaultCodec::of(&config).map(|default| default.is_some())
        };
        assert!(!of("sign", false).unwrap() && of("mxfp4", true).unwrap());
        let error = of("sign,bucket=64", true).unwrap_err();
        assert!(error.message.contains("sign,bucket=64,meta=float32 requires error feedback"), "{}", error.message);
    }
}
