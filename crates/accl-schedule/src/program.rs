//! Base operations with their dependencies: what the executor runs.
//!
//! Owns the lowering of a [`Schedule`]: fused actions are split, hazards on chunks become dependencies, messages are
//! numbered per pair of ranks. Knows no bytes and no time. Read [`Program`] and [`Dep`] first.

use accl_types::Rank;

use crate::ir::{Action, Buf, Division, Finish, Order, Request, Schedule, Span};

/// One rank's operations in program order; dependencies point backwards only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The operations.
    pub ops: Vec<Op>,
    /// How `In` is cut.
    pub in_division: Division,
    /// How `Out` is cut.
    pub out_division: Division,
    /// Scratch chunk k has the size of this chunk of `In` or `Out`.
    pub scratch: Vec<(Buf, u32)>,
}

/// One operation. All spans of an operation have the same length in bytes, and byte k of the result depends on byte k
/// of the operands only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    /// What is done.
    pub kind: OpKind,
    /// Of a send or receive: the ordinal of this message among all from its sender to its receiver, from 0. Otherwise 0.
    pub edge: u32,
    /// What must happen before, each operation at most once, ascending.
    pub deps: Vec<Dep>,
}

/// The base operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Send `src` to a peer.
    Send {
        /// The payload.
        src: Span,
        /// The peer.
        to: Rank,
    },
    /// Receive into place.
    Recv {
        /// Where the payload goes.
        dst: Span,
        /// The peer.
        from: Rank,
    },
    /// Receive and reduce with `local`; `dst` may be `local`.
    RecvReduce {
        /// The result.
        dst: Span,
        /// This rank's operand.
        local: Span,
        /// The peer.
        from: Rank,
        /// Which operand comes first.
        order: Order,
        /// Whether this is the last reduction of these chunks.
        finish: Finish,
    },
    /// Copy; skipped where both sides are the same memory.
    Copy {
        /// The result.
        dst: Span,
        /// The source.
        src: Span,
    },
    /// Reduce in the order of `srcs`.
    Reduce {
        /// The result; may be one of the operands.
        dst: Span,
        /// The operands, at least two.
        srcs: Vec<Span>,
        /// Whether this is the last reduction of these chunks.
        finish: Finish,
    },
}

/// That an operation comes after an earlier one of the same rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dep {
    /// Index of the earlier operation.
    pub on: u32,
    /// Byte k of this operation may follow byte k of `on`; otherwise `on` must be complete before this one begins.
    pub stream: bool,
}

impl Schedule {
    /// Splits fused actions, finds dependencies and numbers messages. `request` is the one the schedule was built for;
    /// the dependencies hold whether or not the engine lets `In` and `Out` share memory.
    pub fn lower(&self, request: &Request) -> Program {
        let _ = (request, Action::Copy { dst: Span::empty(), src: Span::empty() });
        todo!()
    }
}
