//! The one hash that ranks compare, under the name that the protocol uses.

pub(crate) use accl_types::hash::{fold, hash_words};
