//! The cost of an algorithm: counts of messages and bytes, and the time that a machine needs for them.
//!
//! A row of the table gives its [`Cost`]: counts that follow only from the world and its hosts. A test compares them
//! with the schedules. A [`Machine`] gives the time of each, in whole picoseconds, so that equal constants give equal
//! times on every processor. [`Prices`] combines both for one group. Measuring the constants is not done here;
//! [`crate::Chooser`] chooses by them.

mod counts;
mod machine;
mod reach;
mod time;

pub use counts::{Arriving, Cost, Phase};
pub use machine::{CONSTANTS, Constant, Link, Machine, Network, Rates, SIZES};
pub use reach::{Among, Ends, Reach};
pub use time::{IntraNode, Placement, Prices};
