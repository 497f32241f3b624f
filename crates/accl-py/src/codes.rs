//! Checks at compile time that the bridge's enums have the codes of `accl-types`; contains nothing else.

use crate::bridge::ffi;

/// The enums of `accl-types`.
mod types {
    pub(super) use accl_types::config::ProfileNames;
    pub(super) use accl_types::{Collective, ErrorKind};
}

macro_rules! same_codes {
    ($($bridged:ident = $ours:ident { $($variant:ident)* })*) => {
        $(
            const _: () = {
                $(assert!(ffi::$bridged::$variant.repr == types::$ours::$variant as u8);)*
                // Exhaustive: if a variant is missing in the list below, this does not compile.
                #[allow(dead_code, reason = "only checked by the compiler")]
                const fn all_are_listed(value: types::$ours) {
                    match value { $(types::$ours::$variant => {})* }
                }
            };
        )*
    };
}

same_codes! {
    Kind = ErrorKind {
        InvalidArgument InvalidType Unsupported Configuration Mismatch Timeout PeerLost Network Rendezvous Protocol
        Device Exhausted Aborted Internal
    }
    Collective = Collective {
        AllReduce ReduceScatter AllGather Broadcast Reduce Gather Scatter AllToAll Barrier Send Recv
    }
    ProfileNames = ProfileNames { Accl Ccl Pg }
}
