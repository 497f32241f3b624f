//! Worlds of processes for rank 0, the bench itself: started when first needed, one at a time.
//!
//! Read [`Worlds::get`] first.

use std::time::Duration;

use accl_types::Result;

use crate::process::Ranks;
use crate::rank::{Member, Order};

/// A running world, seen from rank 0.
pub struct World {
    // Before the processes, so that they see rank 0 leave before they are waited for.
    member: Member,
    ranks: Ranks,
}

impl World {
    /// Starts the other ranks and meets them.
    ///
    /// # Errors
    /// As [`Ranks::start`] and [`Member::join`].
    pub fn start(transport: &str, count: u32) -> Result<Self> {
        let ranks = Ranks::start(transport, count)?;
        let member = Member::join(ranks.place())?;
        Ok(Self { member, ranks })
    }

    /// Has all ranks carry out an order, and returns what its calls took together.
    ///
    /// # Errors
    /// As [`Member::lead`].
    pub fn run(&mut self, order: &Order) -> Result<Duration> {
        self.member.lead(order)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A rank that has failed would be waited for in vain.
        if !self.ranks.any_ended() {
            let _ = self.member.dismiss();
        }
    }
}

/// The world that is running, if any.
#[derive(Default)]
pub struct Worlds {
    running: Option<(String, u32, World)>,
}

impl Worlds {
    /// The world with this transport and number of ranks. Another one that is running ends first: its processes would
    /// share the cores.
    ///
    /// # Panics
    /// Panics when it cannot be started: a bench cannot go on.
    pub fn get(&mut self, transport: &str, ranks: u32) -> &mut World {
        let fits = |(of, count, _): &(String, u32, World)| of == transport && *count == ranks;
        if !self.running.as_ref().is_some_and(fits) {
            self.running = None;
            let world = World::start(transport, ranks)
                .unwrap_or_else(|error| panic!("a world of {ranks} ranks over {transport}: {error}"));
            self.running = Some((transport.to_owned(), ranks, world));
        }
        match &mut self.running {
            Some((_, _, world)) => world,
            None => unreachable!("a world was started"),
        }
    }
}
