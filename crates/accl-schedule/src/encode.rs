//! Encoded programs: the result of encoding a schedule's messages.
//!
//! Owns the rule that turns any plain program into an encoded one: *encoding is a property of a version of a chunk*. A
//! rank encodes each version that it makes and sends once, keeps the bytes and sends them to all receivers. A receiver
//! keeps the bytes, forwards them unchanged, and adds their decoded values. From then on the version is the decoded
//! value of its bytes, also on the rank that made it. Sums that are never sent are not encoded: they are computed where
//! they are used, in one go, directly from the bytes of their operands. Chunks are sent one by one, so that each can be
//! processed as soon as its operands are there.
//!
//! Knows no codec and no bytes. [`crate::check`] proves that all ranks decode the same version.
//! Read [`Program::encoded`] first.

use accl_types::{Collective, Rank};
use smallvec::{SmallVec, smallvec};

use crate::algorithms::Algorithm;
use crate::ir::{Buf, Code, Finish, Order, Request, Role, Span};
use crate::program::{Lowering, OpKind, Places, Program};

impl Program {
    /// Returns this program of one rank with its messages encoded. `row` is the algorithm that it was lowered from.
    ///
    /// # Panics
    /// Panics for a collective for which [`encodes`] is false.
    pub fn encoded(&self, row: &Algorithm, request: &Request) -> Program {
        assert!(encodes(request.collective), "{} has no encoded programs", request.collective);
        let mut trace = Trace::new(self, row, request);
        for op in &self.ops {
            trace.op(&op.kind);
        }
        let places = Places::of(self.in_division, self.out_division, request);
        let mut emission = Emission {
            lowering: Lowering::new(places, request.world, 2 * trace.events.len()),
            places,
            rank: request.rank,
            versions: trace.finish(),
            codes: Vec::new(),
            sums: Vec::new(),
        };
        for event in &trace.events {
            emission.event(*event);
        }
        emission.keep_unsent();
        Program {
            ops: emission.lowering.ops,
            in_division: self.in_division,
            out_division: self.out_division,
            scratch: Vec::new(),
            codes: emission.codes,
            is_by_reference: false,
        }
    }
}

/// Whether messages of this collective can be encoded.
pub fn encodes(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll
    )
}

type VersionId = u32;

/// The contents of a chunk at one time.
struct Version {
    like: (Buf, u32),
    made: Made,
    /// The role in which it is sent or received.
    role: Option<Role>,
    /// Whether this rank sends it.
    sent: bool,
    /// The chunks of `Out` that hold it at the end.
    ends_in: SmallVec<[u32; 1]>,
    /// The chunk of its encoded bytes, once an operation makes them.
    code: Option<u32>,
}

enum Made {
    /// This rank's contribution, in a chunk of `In`.
    Original(u32),
    Received(Rank),
    /// The sum of `local` and what was received after it.
    Reduced {
        local: VersionId,
        incoming: VersionId,
        order: Order,
        finish: Finish,
    },
    /// The sum of several operands, in this order.
    Summed {
        operands: Vec<VersionId>,
        finish: Finish,
    },
}

#[derive(Clone, Copy)]
enum Event {
    Send(VersionId, Rank),
    Recv(VersionId, Rank),
    Make(VersionId),
}

/// Tracks the versions through a plain program.
struct Trace<'a> {
    program: &'a Program,
    request: &'a Request<'a>,
    by_host: bool,
    versions: Vec<Version>,
    events: Vec<Event>,
    at: [Vec<Option<VersionId>>; Buf::COUNT],
}

impl<'a> Trace<'a> {
    fn new(program: &'a Program, row: &Algorithm, request: &'a Request<'a>) -> Trace<'a> {
        let by_host = row.composes_over_hosts();
        Trace { program, request, by_host, versions: Vec::new(), events: Vec::new(), at: Default::default() }
    }

    fn op(&mut self, kind: &OpKind) {
        match kind {
            OpKind::Send { src, to } => {
                for (buf, chunk) in src.chunks() {
                    let version = self.read(buf, chunk);
                    let role = self.role(*to, self.is_finished(version));
                    let state = &mut self.versions[version as usize];
                    state.sent = true;
                    // A partial sum is sent to one rank only; a version that all ranks end with has one role.
                    state.role.get_or_insert(role);
                    self.events.push(Event::Send(version, *to));
                }
            }
            OpKind::Recv { dst, from } => {
                for (buf, chunk) in dst.chunks() {
                    let version = self.receive(buf, chunk, *from);
                    self.write(buf, chunk, version);
                }
            }
            OpKind::RecvReduce { dst, local, from, order, finish } => {
                let pairs: Vec<_> = dst.chunks().zip(local.chunks()).collect();
                for ((buf, chunk), (local_buf, local_chunk)) in pairs {
                    let local = self.read(local_buf, local_chunk);
                    let incoming = self.receive(buf, chunk, *from);
                    let made = Made::Reduced { local, incoming, order: *order, finish: *finish };
                    self.make(buf, chunk, made);
                }
            }
            OpKind::Copy { dst, src } => {
                let pairs: Vec<_> = dst.chunks().zip(src.chunks()).collect();
                for ((buf, chunk), (from, of)) in pairs {
                    let version = self.read(from, of);
                    self.write(buf, chunk, version);
                }
            }
            OpKind::Reduce { dst, srcs, finish } => {
                for (position, (buf, chunk)) in dst.chunks().enumerate() {
                    let operand = |src: &Span| src.chunks().nth(position).map(|(from, of)| self.read(from, of));
                    let operands = srcs.iter().filter_map(operand).collect();
                    self.make(buf, chunk, Made::Summed { operands, finish: *finish });
                }
            }
            OpKind::Combine { .. } => unreachable!("the program is encoded already"),
        }
    }

    /// Records where versions end, and from that the roles of received versions.
    fn finish(&mut self) -> Vec<Version> {
        let ends =
            self.at[Buf::Out as usize].iter().zip(0u32..).filter_map(|(&version, chunk)| Some((version?, chunk)));
        for (version, chunk) in ends {
            self.versions[version as usize].ends_in.push(chunk);
        }
        for version in 0..self.versions.len() {
            if let Made::Received(from) = self.versions[version].made {
                let role = self.role(from, !self.versions[version].ends_in.is_empty());
                self.versions[version].role = Some(role);
            }
        }
        std::mem::take(&mut self.versions)
    }

    /// The role of what is sent to or received from `peer`. `finished` is only used for sums.
    fn role(&self, peer: Rank, finished: bool) -> Role {
        let collective = self.request.collective;
        let hosts = self.request.topology;
        match collective {
            Collective::AllGather | Collective::AllToAll => Role::Result,
            Collective::AllReduce if finished => Role::Result,
            _ if self.by_host && hosts.host_of(peer) == hosts.host_of(self.request.rank) => Role::IntraNode,
            _ => Role::Reduce,
        }
    }

    /// Whether a sent version is what all ranks end with. A received version is forwarded unchanged.
    fn is_finished(&self, version: VersionId) -> bool {
        match &self.versions[version as usize].made {
            Made::Original(_) => false,
            Made::Received(_) => true,
            Made::Reduced { finish, .. } | Made::Summed { finish, .. } => *finish == Finish::Yes,
        }
    }

    fn new_version(&mut self, like: (Buf, u32), made: Made) -> VersionId {
        self.versions.push(Version { like, made, role: None, sent: false, ends_in: smallvec![], code: None });
        self.versions.len() as u32 - 1
    }

    fn slot(&mut self, buf: Buf, chunk: u32) -> &mut Option<VersionId> {
        let chunks = &mut self.at[buf as usize];
        if chunks.len() <= chunk as usize {
            chunks.resize(chunk as usize + 1, None);
        }
        &mut chunks[chunk as usize]
    }

    fn read(&mut self, buf: Buf, chunk: u32) -> VersionId {
        if let Some(version) = *self.slot(buf, chunk) {
            return version;
        }
        // Only `In` has contents from the start; the checker refuses programs that read unwritten chunks.
        let version = self.new_version((buf, chunk), Made::Original(chunk));
        *self.slot(buf, chunk) = Some(version);
        version
    }

    fn write(&mut self, buf: Buf, chunk: u32, version: VersionId) {
        *self.slot(buf, chunk) = Some(version);
    }

    fn like(&self, buf: Buf, chunk: u32) -> (Buf, u32) {
        if buf == Buf::Scratch { self.program.scratch[chunk as usize] } else { (buf, chunk) }
    }

    fn receive(&mut self, buf: Buf, chunk: u32, from: Rank) -> VersionId {
        let version = self.new_version(self.like(buf, chunk), Made::Received(from));
        self.events.push(Event::Recv(version, from));
        version
    }

    fn make(&mut self, buf: Buf, chunk: u32, made: Made) {
        let version = self.new_version(self.like(buf, chunk), made);
        self.events.push(Event::Make(version));
        self.write(buf, chunk, version);
    }
}

/// Writes the encoded program.
struct Emission {
    lowering: Lowering,
    places: Places,
    rank: Rank,
    versions: Vec<Version>,
    codes: Vec<Code>,
    /// The number of encoded sums of each chunk.
    sums: Vec<((Buf, u32), u32)>,
}

impl Emission {
    fn event(&mut self, event: Event) {
        match event {
            Event::Send(version, to) => {
                let src = self.code(version);
                self.lowering.push(OpKind::Send { src, to });
            }
            Event::Recv(version, from) => {
                let dst = self.new_code(version);
                self.lowering.push(OpKind::Recv { dst: dst.clone(), from });
                for out in self.versions[version as usize].ends_in.clone() {
                    self.combine(smallvec![Span::chunk(Buf::Out, out)], smallvec![dst.clone()], Finish::No, 0);
                }
            }
            Event::Make(version) => {
                let state = &self.versions[version as usize];
                if state.sent {
                    self.code(version);
                } else if let [first, rest @ ..] = &state.ends_in.clone()[..] {
                    self.make(version, smallvec![Span::chunk(Buf::Out, *first)]);
                    for out in rest {
                        self.make(version, smallvec![Span::chunk(Buf::Out, *out)]);
                    }
                }
            }
        }
    }

    /// Copies contributions that this rank keeps and never sends.
    fn keep_unsent(&mut self) {
        for version in 0..self.versions.len() as u32 {
            let state = &self.versions[version as usize];
            if matches!(state.made, Made::Original(_)) && !state.sent {
                for out in state.ends_in.clone() {
                    self.make(version, smallvec![Span::chunk(Buf::Out, out)]);
                }
            }
        }
    }

    /// The encoded bytes of a version, made now unless they exist.
    fn code(&mut self, version: VersionId) -> Span {
        if let Some(code) = self.versions[version as usize].code {
            return Span::chunk(Buf::Code, code);
        }
        let code = self.new_code(version);
        let mut outs = self.versions[version as usize].ends_in.clone().into_iter();
        let mut dsts: SmallVec<[Span; 2]> = smallvec![code.clone()];
        dsts.extend(outs.next().map(|out| Span::chunk(Buf::Out, out)));
        self.make(version, dsts);
        for out in outs {
            self.combine(smallvec![Span::chunk(Buf::Out, out)], smallvec![code.clone()], Finish::No, 0);
        }
        code
    }

    fn new_code(&mut self, version: VersionId) -> Span {
        let state = &mut self.versions[version as usize];
        let Some(role) = state.role else { unreachable!("a sent or received version has a role") };
        let code = self.codes.len() as u32;
        state.code = Some(code);
        self.codes.push(Code { like: state.like, role });
        Span::chunk(Buf::Code, code)
    }

    /// Computes a version that was not received.
    fn make(&mut self, version: VersionId, dsts: SmallVec<[Span; 2]>) {
        let state = &self.versions[version as usize];
        let is_encoded = state.sent;
        let (finish, is_sum) = match &state.made {
            Made::Original(_) | Made::Received(_) => (Finish::No, false),
            Made::Reduced { finish, .. } | Made::Summed { finish, .. } => (*finish, true),
        };
        let pass = if is_sum && is_encoded { self.next_pass(state.like) } else { 0 };
        let mut operands = Vec::new();
        self.operands(version, true, &mut operands);
        let srcs = operands.into_iter().map(|(span, _)| span).collect();
        self.combine(dsts, srcs, finish, pass);
    }

    fn combine(&mut self, dsts: SmallVec<[Span; 2]>, srcs: SmallVec<[Span; 2]>, finish: Finish, pass: u32) {
        self.lowering.push(OpKind::Combine { dsts, srcs, finish, pass });
    }

    fn next_pass(&mut self, (buf, chunk): (Buf, u32)) -> u32 {
        let place = self.places.place(buf, chunk);
        let known = self.sums.iter().position(|(known, _)| *known == place);
        let index = known.unwrap_or_else(|| {
            self.sums.push((place, 0));
            self.sums.len() - 1
        });
        self.sums[index].1 += 1;
        self.sums[index].1
    }

    /// Collects the operands of a version, each with the rank that it came from. Sums that are not encoded are split
    /// into their operands. If `open`, this version is being computed, so it is split in any case.
    fn operands(&self, version: VersionId, open: bool, found: &mut Vec<(Span, Rank)>) {
        let state = &self.versions[version as usize];
        if let Some(code) = state.code.filter(|_| !open) {
            let from = if let Made::Received(from) = state.made { from } else { self.rank };
            found.push((Span::chunk(Buf::Code, code), from));
            return;
        }
        match &state.made {
            Made::Original(chunk) => found.push((Span::chunk(Buf::In, *chunk), self.rank)),
            Made::Received(_) => unreachable!("a received version has encoded bytes"),
            Made::Reduced { local, incoming, order, .. } => {
                let start = found.len();
                self.operands(*local, false, found);
                let mut last = Vec::new();
                self.operands(*incoming, false, &mut last);
                for (span, from) in last {
                    let position = position_of(&found[start..], from, *order);
                    found.insert(start + position, (span, from));
                }
            }
            Made::Summed { operands, .. } => {
                operands.iter().for_each(|operand| self.operands(*operand, false, found));
            }
        }
    }
}

/// Position among `operands` of one that came from rank `from`. Contributions that come directly from their ranks are
/// put in rank order, whatever the order in which they are awaited. Others are appended.
fn position_of(operands: &[(Span, Rank)], from: Rank, order: Order) -> usize {
    let is_sorted = operands.windows(2).all(|pair| pair[0].1 < pair[1].1);
    let position = operands.partition_point(|(_, other)| *other < from);
    let agrees = (position == 0) == (order == Order::IncomingFirst);
    if is_sorted && agrees { position } else { operands.len() }
}
