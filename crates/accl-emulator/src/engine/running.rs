//! The running call: executes the steps of its program in order, each as far as possible.
//!
//! Owns the current step and its state. Data movement is in `mover`. Read [`Running::advance`] first.

use std::collections::VecDeque;

use accl_cclo::call::{ANY_TAG, Descriptor};
use accl_cclo::return_code::ReturnCode;
use accl_cclo::wire::{Header, MessageKind};

use crate::exchange::Elements;
use crate::fabric::Fabric;
use crate::mover::{EngineParts, Moving, NO_ADDRESS, Progress, Writing};
use crate::program::{ElementLocation, Move, Program, Say, Side, Sink, Source, Step};
use crate::receiver::Notice;
use crate::time::Counted;

/// The running call.
pub(super) struct Running {
    pub(super) control: usize,
    pub(super) call: Descriptor,
    pub(super) elements: Elements,
    pub(super) rank: u32,
    /// Identifier of the communicator in headers; `None` if headers name none.
    pub(super) communicator_id: Option<u32>,
    pub(super) counted: Counted,
    program: Program,
    step: Option<UnderWay>,
    /// Notice kept by [`Step::KeepAddress`].
    kept: Option<Notice>,
}

/// Program of a call, and its parameters.
pub(super) struct Prepared {
    pub(super) program: Program,
    pub(super) elements: Elements,
    pub(super) rank: u32,
    pub(super) communicator_id: Option<u32>,
}

/// State of the current step.
enum UnderWay {
    Moving(Moving),
    /// Data is being written to a peer; the given step continues afterwards.
    Writing(Writing, Option<Step>),
    Step(Step),
    Collecting {
        says: VecDeque<Say>,
        under_way: Vec<u32>,
        at_a_time: usize,
    },
    Summing {
        slots: Vec<(u32, ElementLocation)>,
        sum: ElementLocation,
        turns: usize,
        step: Step,
    },
}

/// Remainder of a step, and whether anything has moved; `None` if the step is complete.
type Left = Option<(UnderWay, bool)>;

impl Running {
    pub(super) fn new(
        control: usize,
        call: Descriptor,
        Prepared { program, elements, rank, communicator_id }: Prepared,
    ) -> Self {
        Self {
            control,
            call,
            elements,
            rank,
            communicator_id,
            counted: Counted::default(),
            program,
            step: None,
            kept: None,
        }
    }

    /// Advances as far as possible.
    ///
    /// # Errors
    /// The return code with which the call ends.
    pub(super) fn advance<F: Fabric>(&mut self, parts: &mut EngineParts<'_, F>) -> Result<Progress, ReturnCode> {
        let mut has_moved = false;
        loop {
            let Some(step) = self.step.take().or_else(|| self.program.next().map(UnderWay::Step)) else {
                return Ok(Progress::Done);
            };
            let hops = step.hops();
            match self.take_step(step, parts)? {
                None => {
                    parts.counted.hops += hops;
                    has_moved = true;
                }
                Some((step, moves)) => {
                    self.step = Some(step);
                    has_moved |= moves;
                    if !moves {
                        return Ok(Progress::Waits { has_moved });
                    }
                }
            }
        }
    }

    fn take_step<F: Fabric>(&mut self, step: UnderWay, parts: &mut EngineParts<'_, F>) -> Result<Left, ReturnCode> {
        let tag = self.call.tag;
        Ok(match step {
            UnderWay::Moving(mut moving) => match moving.advance(parts)? {
                Progress::Done => None,
                Progress::Waits { has_moved } => Some((UnderWay::Moving(moving), has_moved)),
            },
            UnderWay::Writing(mut writing, then) => match (writing.advance(parts)?, then) {
                (Progress::Done, None) => None,
                (Progress::Done, Some(step)) => Some((UnderWay::Step(step), true)),
                (Progress::Waits { has_moved }, then) => Some((UnderWay::Writing(writing, then), has_moved)),
            },
            UnderWay::Step(step) => self.begin(step, parts)?,
            UnderWay::Collecting { mut says, mut under_way, at_a_time } => {
                let mut has_moved = false;
                loop {
                    while under_way.len() < at_a_time
                        && let Some(next) = says.pop_front()
                    {
                        say(parts, tag, &next)?;
                        under_way.push(next.to);
                        has_moved = true;
                    }
                    let done = take_notice(parts, tag, MessageKind::Done, |rank| under_way.contains(&rank));
                    let Some(done) = done else { break };
                    parts.counted.received_bytes += u64::from(done.count);
                    under_way.retain(|rank| *rank != done.from);
                    has_moved = true;
                }
                (!under_way.is_empty()).then_some((UnderWay::Collecting { says, under_way, at_a_time }, has_moved))
            }
            UnderWay::Summing { mut slots, mut sum, mut turns, step } => {
                let Step::Sum { between, last, count, function, .. } = &step else { return Err(NO_ADDRESS) };
                let mut has_moved = false;
                while let Some(done) =
                    take_notice(parts, tag, MessageKind::Done, |from| slots.iter().any(|(rank, _)| *rank == from))
                {
                    let at = slots.iter().position(|(rank, _)| *rank == done.from).unwrap_or_default();
                    let (_, slot) = slots.swap_remove(at);
                    parts.counted.received_bytes += u64::from(done.count);
                    let to = if slots.is_empty() { *last } else { between[turns % between.len()] };
                    let what = Move {
                        count: *count,
                        first: Source::Memory(sum),
                        second: Some((Source::Memory(slot), *function)),
                        to: vec![Sink::Memory(to)],
                    };
                    Moving::new(what).advance(parts)?;
                    (sum, turns, has_moved) = (to, turns + 1, true);
                }
                (!slots.is_empty()).then_some((UnderWay::Summing { slots, sum, turns, step }, has_moved))
            }
        })
    }

    fn begin<F: Fabric>(&mut self, step: Step, parts: &mut EngineParts<'_, F>) -> Result<Left, ReturnCode> {
        let tag = self.call.tag;
        Ok(match step {
            Step::Move(what) => Some((UnderWay::Moving(Moving::new(what)), true)),
            Step::Say(what) => {
                say(parts, tag, &what)?;
                None
            }
            Step::Serve { mut writes, count, side } => {
                let is_one = |from| writes.iter().any(|(rank, _)| *rank == from);
                match take_notice(parts, tag, MessageKind::Address, is_one) {
                    None if writes.is_empty() => None,
                    None => Some((UnderWay::Step(Step::Serve { writes, count, side }), false)),
                    Some(notice) => {
                        let at = writes.iter().position(|(rank, _)| *rank == notice.from).unwrap_or_default();
                        let (to, location) = writes.swap_remove(at);
                        let (from, is_host, side) = side.of(location, notice.is_host);
                        let writing = Writing::new(parts, to, (notice.address, is_host), notice.tag, from, count)?;
                        // The addresses of all ranks arrive at the same time, so the wait for them counts as one hop.
                        parts.counted.hops += u64::from(writes.is_empty());
                        let then = (!writes.is_empty()).then_some(Step::Serve { writes, count, side });
                        Some((UnderWay::Writing(writing, then), true))
                    }
                }
            }
            Step::KeepAddress { from } => match take_notice(parts, tag, MessageKind::Address, |rank| rank == from) {
                Some(notice) => {
                    self.kept = Some(notice);
                    None
                }
                None => Some((UnderWay::Step(step), false)),
            },
            Step::WriteBehind { to, source, behind, count } => {
                let Some(kept) = self.kept else { return Err(NO_ADDRESS) };
                let behind = behind.checked_mul(parts.elements.uncompressed as u64);
                let address = behind.and_then(|behind| kept.address.checked_add(behind)).ok_or(NO_ADDRESS)?;
                let writing = Writing::new(parts, to, (address, kept.is_host), tag, source, count)?;
                Some((UnderWay::Writing(writing, None), true))
            }
            Step::AwaitDone { from } => match take_notice(parts, tag, MessageKind::Done, |rank| rank == from) {
                Some(done) => {
                    parts.counted.received_bytes += u64::from(done.count);
                    None
                }
                None => Some((UnderWay::Step(step), false)),
            },
            Step::AwaitWord { from } => match take_notice(parts, tag, MessageKind::Address, |rank| rank == from) {
                Some(_) => None,
                None => Some((UnderWay::Step(step), false)),
            },
            Step::Collect { says, at_a_time } => {
                parts.counted.hops += says.len().div_ceil(at_a_time.max(1)) as u64;
                Some((UnderWay::Collecting { says: says.into(), under_way: Vec::new(), at_a_time }, true))
            }
            Step::Sum { ref slots, own, .. } => {
                Some((UnderWay::Summing { slots: slots.clone(), sum: own, turns: 0, step }, true))
            }
            Step::Hang => Some((UnderWay::Step(step), false)),
            Step::Fail(code) => return Err(code),
        })
    }
}

impl Side {
    /// Returns the location that data is read from, whether it goes to host memory, and the side for the next data.
    fn of(self, from: ElementLocation, is_said_host: bool) -> (ElementLocation, bool, Self) {
        match self {
            Self::Said => (from, is_said_host, self),
            Self::Host => (from, true, self),
            Self::Sticky { is_host } => {
                let is_host = is_host || is_said_host;
                (from, is_host, Self::Sticky { is_host })
            }
            Self::Exchanged => (ElementLocation { is_host: is_said_host, ..from }, from.is_host, self),
        }
    }
}

impl UnderWay {
    /// Returns how often the step waits for a peer until it completes. Moves, collections and [`Step::Serve`] count their own hops.
    fn hops(&self) -> u64 {
        match self {
            Self::Moving(_) | Self::Writing(..) | Self::Collecting { .. } => 0,
            Self::Summing { .. } => 1,
            Self::Step(step) => match step {
                Step::KeepAddress { .. } | Step::AwaitDone { .. } | Step::AwaitWord { .. } => 1,
                Step::Serve { .. }
                | Step::Move(_)
                | Step::Say(_)
                | Step::WriteBehind { .. }
                | Step::Collect { .. }
                | Step::Sum { .. }
                | Step::Hang
                | Step::Fail(_) => 0,
            },
        }
    }
}

/// Removes and returns the first notice of this kind from these ranks that matches the call.
fn take_notice<F>(
    parts: &mut EngineParts<'_, F>,
    tag: u32,
    kind: MessageKind,
    from: impl Fn(u32) -> bool,
) -> Option<Notice> {
    let any_takes_all = parts.any_takes_all;
    let takes = |theirs: u32| theirs == tag || (tag == ANY_TAG && any_takes_all);
    let is_it = |notice: &Notice| notice.kind == kind && takes(notice.tag) && from(notice.from);
    parts.receiver.take_notice(parts.communicator_id, is_it)
}

/// Announces an address to a peer.
fn say<F: Fabric>(parts: &mut EngineParts<'_, F>, tag: u32, what: &Say) -> Result<(), ReturnCode> {
    let peer = parts.exchange.rank(parts.communicator, what.to).ok_or(NO_ADDRESS)?;
    let header = Header {
        count: what.count,
        tag,
        kind: MessageKind::Address,
        is_host: what.is_host,
        address: what.address,
        ..parts.header(&peer, 0)
    };
    parts.send(&peer, &header, &[]);
    Ok(())
}
