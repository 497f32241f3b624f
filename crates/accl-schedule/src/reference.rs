//! Programs by reference: messages that say where bytes lie, in memory that all ranks of the call can read.
//!
//! Owns the rule that turns any plain program into such a program. A rank *publishes* a chunk before it sends it: it
//! copies the chunk to memory that the others read, once, and sends a reference to the copy. The receiver reads the
//! copy where it needs it: it copies, or reduces with other operands, in the plain program's order, so all results have
//! the same bits. It passes a reference on unchanged. Published chunks lie in chunks of `Code`.
//!
//! At its end a program has two barriers. When a rank has passed the first one, all ranks have read. When it has passed the
//! second one, all ranks have passed the first one: so they lived, and their memory was what they had published, when this
//! rank read it.
//!
//! Knows no addresses and no bytes. [`crate::check`] proves that the results and their order are the plain program's, and
//! that a rank ends only after both. Read [`Program::by_reference`] first.

use std::collections::HashMap;

use smallvec::{SmallVec, smallvec};

use crate::ir::{Action, Buf, Code, Finish, Order, Request, Role, Span};
use crate::patterns::Team;
use crate::program::{Lowering, OpKind, Places, Program};

impl Program {
    /// Returns this plain program of one rank with references as messages.
    ///
    /// # Panics
    /// Panics for a program that is encoded or by reference already.
    pub fn by_reference(&self, request: &Request) -> Program {
        let places = Places::of(self.in_division, self.out_division, request);
        let mut emission = Emission {
            plain: self,
            lowering: Lowering::new(places, request.world, 2 * self.ops.len()),
            codes: Vec::new(),
            published: HashMap::new(),
        };
        for op in &self.ops {
            emission.op(&op.kind);
        }
        emission.barrier(request);
        emission.barrier(request);
        Program {
            ops: emission.lowering.ops,
            in_division: self.in_division,
            out_division: self.out_division,
            scratch: self.scratch.clone(),
            codes: emission.codes,
            is_by_reference: true,
        }
    }
}

/// Writes a program by reference.
struct Emission<'a> {
    plain: &'a Program,
    lowering: Lowering,
    codes: Vec<Code>,
    /// The chunk of `Code` that holds the contents of a chunk.
    published: HashMap<(Buf, u32), u32>,
}

impl Emission<'_> {
    fn op(&mut self, kind: &OpKind) {
        match kind {
            OpKind::Send { src, to } => {
                for chunk in src.chunks() {
                    let src = self.publish(chunk);
                    self.lowering.push(OpKind::Send { src, to: *to });
                }
            }
            OpKind::Recv { dst, from } => {
                for chunk in dst.chunks() {
                    let code = self.new_code(chunk);
                    self.lowering.push(OpKind::Recv { dst: Span::chunk(Buf::Code, code), from: *from });
                    self.published.insert(chunk, code);
                    // Temporary memory is not filled: what needs the chunk reads the published copy.
                    if chunk.0 != Buf::Scratch {
                        self.combine(chunk, smallvec![Span::chunk(Buf::Code, code)], Finish::No);
                    }
                }
            }
            OpKind::RecvReduce { dst, local, from, order, finish } => {
                for (chunk, (buf, of)) in dst.chunks().zip(local.chunks()) {
                    let code = Span::chunk(Buf::Code, self.new_code(chunk));
                    self.lowering.push(OpKind::Recv { dst: code.clone(), from: *from });
                    let local = self.operand((buf, of));
                    let srcs = match order {
                        Order::IncomingFirst => smallvec![code, local],
                        Order::LocalFirst => smallvec![local, code],
                    };
                    self.published.remove(&chunk);
                    self.combine(chunk, srcs, *finish);
                }
            }
            OpKind::Copy { dst, src } => {
                for (chunk, from) in dst.chunks().zip(src.chunks()) {
                    let src = self.operand(from);
                    match self.published.get(&from).copied() {
                        Some(code) => self.published.insert(chunk, code),
                        None => self.published.remove(&chunk),
                    };
                    self.combine(chunk, smallvec![src], Finish::No);
                }
            }
            OpKind::Reduce { dst, srcs, finish } => {
                for (position, chunk) in dst.chunks().enumerate() {
                    let of_src = |src: &Span| src.chunks().nth(position).map(|chunk| self.operand(chunk));
                    let srcs = srcs.iter().filter_map(of_src).collect();
                    self.published.remove(&chunk);
                    self.combine(chunk, srcs, *finish);
                }
            }
            OpKind::Combine { .. } => unreachable!("the program is not plain"),
        }
    }

    /// The span from which an operation reads a chunk.
    fn operand(&self, chunk: (Buf, u32)) -> Span {
        match self.published.get(&chunk).filter(|_| chunk.0 == Buf::Scratch) {
            Some(&code) => Span::chunk(Buf::Code, code),
            None => Span::chunk(chunk.0, chunk.1),
        }
    }

    /// The published copy of a chunk, made now unless it exists.
    fn publish(&mut self, chunk: (Buf, u32)) -> Span {
        if let Some(&code) = self.published.get(&chunk) {
            return Span::chunk(Buf::Code, code);
        }
        let code = self.new_code(chunk);
        self.combine((Buf::Code, code), smallvec![Span::chunk(chunk.0, chunk.1)], Finish::No);
        self.published.insert(chunk, code);
        Span::chunk(Buf::Code, code)
    }

    fn new_code(&mut self, chunk: (Buf, u32)) -> u32 {
        let like = if chunk.0 == Buf::Scratch { self.plain.scratch[chunk.1 as usize] } else { chunk };
        self.codes.push(Code { like, role: Role::Result });
        self.codes.len() as u32 - 1
    }

    fn combine(&mut self, (buf, chunk): (Buf, u32), srcs: SmallVec<[Span; 2]>, finish: Finish) {
        let dsts = smallvec![Span::chunk(buf, chunk)];
        self.lowering.push(OpKind::Combine { dsts, srcs, finish, pass: 0 });
    }

    /// Adds a dissemination barrier behind everything.
    fn barrier(&mut self, request: &Request) {
        let team = Team::world(request);
        let mut distance = 1;
        while distance < team.size() {
            self.lowering.action(Action::Fence);
            self.lowering.push(OpKind::Send { src: Span::empty(), to: team.rank(team.after(distance)) });
            self.lowering.push(OpKind::Recv { dst: Span::empty(), from: team.rank(team.before(distance)) });
            distance *= 2;
        }
    }
}
