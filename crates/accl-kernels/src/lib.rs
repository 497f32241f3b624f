//! Arithmetic and copies on raw buffers: reductions of two or many buffers, scaling, packing and unpacking of strided
//! tensors, [`codec`]s. Start with [`Reducer`] and [`StridedView`].
//!
//! Owns the numeric rules (order of operands, rounding, NaN, signed zero) and the choice of instruction set. Knows
//! nothing of ranks, messages or threads. Any function may be called from any thread at any time.
//!
//! # Numbers
//! The bits of a result depend only on the operands. They do not depend on the instruction set, the position of an
//! element in its buffer, or the alignment. They do not depend on the calling thread's flush-to-zero or rounding mode
//! either. In particular:
//! * A product and a sum are never fused.
//! * float16 and bfloat16 are computed in float32 and rounded once, to nearest even, when stored.
//! * A NaN result is always the canonical quiet NaN (sign 0, payload 0). Processors return the payload of an operand.
//!   Which operand it is depends on how the compiler ordered them, so the payload could not be the same everywhere.
//! * MIN and MAX return NaN if an operand is NaN, and order -0 below +0. Denormals survive.
//! * Integer SUM and PRODUCT wrap.
//! * A bool operand is true if its byte is not zero, and a bool result is 0 or 1.
//!
//! Therefore each operation on two operands commutes, bit for bit. The order matters from three operands on.

mod arch;
pub mod codec;
mod copy;
mod dispatch;
mod float_env;
mod isa;
mod reduce;
mod scale;
mod strided;

pub use copy::{copy, copy_with_isa};
pub use dispatch::{available_isas, describe_isa};
pub use isa::Isa;
pub use reduce::{Finish, Reducer, supports};
pub use scale::{scale, scale_with_isa};
pub use strided::{StridedView, pack, unpack};
