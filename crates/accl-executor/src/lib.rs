//! The protocol of groups and calls, as data that goes in and comes out: plans, memory, messages, and what ends them.
//!
//! Owns what ranks say to each other about calls, and what follows from it. Knows no thread, lock, clock, system call or environment: the
//! time, a way to give the core away, who is told of an end and the [links](accl_wire::Link) are handed in, and whoever makes progress
//! calls [`group::Core::pass`]. Unsafe code stands in `memory`, which touches tensors, in `peers::net`, where frames lie in links, and
//! where a tensor is described. Each folder may use those before it, in this order: [`call`], [`plan`], [`memory`], [`peers`], [`exec`],
//! [`group`]. Read [`group::Core`] first, then [`group::Caller`].

pub mod call;
pub mod exec;
pub mod group;
pub mod memory;
pub mod peers;
pub mod plan;
