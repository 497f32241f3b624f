//! Checks at compile time that the bridge's enums have the codes of `accl-types`; contains nothing else.

use crate::bridge::ffi;

/// The enums of `accl-types`.
mod types {
    pub(super) use accl_types::config::ProfileNames;
    pub(super) use accl_types::{Collective, Dtype, ErrorKind, ReduceOp};
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
    ReduceOp = ReduceOp { Sum Avg Product Min Max Band Bor Bxor PremulSum }
    Dtype = Dtype {
        Bool U8 I8 U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64 C32 C64 C128 F8E4M3Fn F8E5M2 F8E4M3FnUz F8E5M2FnUz
        F8E8M0Fnu F4E2M1FnX2 BC32 Bits8 Bits16
    }
}
