//! The protocol of groups and calls, driven by data: plans, memory, messages, completion and failure.
//!
//! This crate owns the messages that ranks exchange about calls, and their consequences. It knows no thread, lock,
//! clock, system call or environment. The engine passes in the time, a function that yields the core, the observers of
//! completion and the [links](accl_wire::Link). The thread that makes progress calls [`group::Core::pass`].
//!
//! Unsafe code exists in `memory`, which accesses tensors, in `peers::net`, where frames lie in links, and where a
//! tensor is described. Each folder may use the folders before it, in this order: [`call`], [`plan`], [`memory`],
//! [`peers`], [`exec`], [`group`]. Read [`group::Core`] first, then [`group::Caller`].

pub mod call;
pub mod exec;
pub mod group;
pub mod memory;
pub mod peers;
pub mod plan;
