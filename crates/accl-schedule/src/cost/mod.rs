//! What an algorithm costs: counts of messages and bytes, and the time that a machine needs for them.
//!
//! A row of the table gives its [`Cost`]: counts that follow from the world and its hosts alone, compared with the
//! schedules by a test. A [`Machine`] gives what each of them takes, in whole picoseconds, so that equal constants give
//! equal times on every processor. [`Prices`] brings both together for one group. How the constants are measured is the
//! engine's affair; the choice by them is in [`crate::Chooser`].

mod counts;
mod machine;
mod reach;
mod time;

pub use counts::{Arriving, Cost, Phase};
pub use machine::{CONSTANTS, Constant, Link, Machine, Network, Rates, SIZES};
pub use reach::{Among, Ends, Reach};
pub use time::{IntraNode, Placement, Prices};
