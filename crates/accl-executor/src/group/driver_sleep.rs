//! The protocol between a driver that sleeps in the poller and the threads that make progress meanwhile.
//!
//! Owns who receives events, and whether the driver must be woken. A sleeping driver has armed all links, so an event
//! wakes it. A *watcher* is a thread that polls the links in a loop. The first watcher of a sleep mutes events. The last
//! one arms the links again, or wakes the driver. Owns no link and no thread: `parking` acts on the links, and the
//! engine wakes the driver.
//!
//! | state | `sleep` | `wake` | `begin_watch` | `end_watch` | `note_progress` |
//! |---|---|---|---|---|---|
//! | `Awake` | `Asleep` | `Awake` | `Awake`, no watcher | not called | `Awake` |
//! | `Asleep` | not called | `Awake` | `Watched`, 1 watcher: mute events | not called | `Asleep`, with news |
//! | `Watched`, n > 1 watchers | not called | `Outlasted` | `Watched`, n + 1 | `Watched`, n - 1 | `Watched`, with news |
//! | `Watched`, 1 watcher | not called | `Outlasted` | `Watched`, 2 | `Asleep`: arm links first, or wake | `Watched`, with news |
//! | `Outlasted`, n > 1 watchers | `Watched` | `Outlasted` | `Outlasted`, same n | `Outlasted`, n - 1 | `Outlasted` |
//! | `Outlasted`, 1 watcher | `Watched` | `Outlasted` | `Outlasted`, same 1 | `Awake` | `Outlasted` |
//!
//! A driver that sleeps while watchers of its last sleep still poll leaves events on. They may wake it for nothing.
//!
//! *News* is progress of which the driver does not know: its call may be done.

use accl_types::Moment;

/// Whether a driver sleeps in the poller, and which threads poll the links in its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum DriverSleep {
    /// No driver sleeps, and no watcher polls.
    #[default]
    Awake,
    /// A driver sleeps, and events wake it.
    Asleep(Sleep),
    /// A driver sleeps, and watchers poll in its place.
    Watched(Sleep, Watchers),
    /// The driver woke, and watchers that began during its sleep still poll.
    Outlasted(Watchers),
}

/// A driver's sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sleep {
    /// Time at which the sleep ends without an event; [`Moment::FAR`] if only an event ends it.
    until: Moment,
    /// Whether there was progress of which the driver does not know.
    has_news: bool,
}

/// Number of threads that poll the links in place of a sleeping driver; at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Watchers(u32);

impl Watchers {
    fn less_one(self) -> Option<Self> {
        (self.0 > 1).then(|| Self(self.0 - 1))
    }
}

/// Whether a thread that polls the links counts as a watcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    /// No driver sleeps, so the thread is no watcher.
    None,
    /// The thread is the first watcher, and mutes events.
    First,
    /// The thread joins other watchers.
    Another,
}

/// Action for a sleeping driver when the last watcher stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeDecision {
    /// The driver keeps sleeping, and peers wake it.
    KeepAsleep,
    /// Calls may have completed meanwhile. A driver that waits for one must check it.
    CheckCall,
    /// The driver must be woken to poll again.
    Wake,
}

impl DriverSleep {
    fn sleep_mut(&mut self) -> Option<&mut Sleep> {
        match self {
            Self::Asleep(sleep) | Self::Watched(sleep, _) => Some(sleep),
            Self::Awake | Self::Outlasted(_) => None,
        }
    }

    /// Returns whether a driver sleeps.
    #[inline]
    pub(super) fn is_asleep(self) -> bool {
        matches!(self, Self::Asleep(_) | Self::Watched(..))
    }

    /// Returns whether a driver sleeps and only events can wake it, because no watcher polls.
    pub(super) fn is_unwatched(self) -> bool {
        matches!(self, Self::Asleep(_))
    }

    /// Returns whether a driver sleeps and exactly one watcher polls.
    pub(super) fn has_last_watcher(self) -> bool {
        matches!(self, Self::Watched(_, Watchers(1)))
    }

    /// Returns the number of watchers.
    pub(super) fn watchers(self) -> u32 {
        match self {
            Self::Watched(_, Watchers(count)) | Self::Outlasted(Watchers(count)) => count,
            Self::Awake | Self::Asleep(_) => 0,
        }
    }

    /// The driver goes to sleep until `until`, with all links armed.
    pub(super) fn sleep(&mut self, until: Moment) {
        debug_assert!(!self.is_asleep(), "{self:?}: only one driver sleeps, and once");
        let sleep = Sleep { until, has_news: false };
        *self = match *self {
            Self::Awake | Self::Asleep(_) => Self::Asleep(sleep),
            Self::Outlasted(watchers) | Self::Watched(_, watchers) => Self::Watched(sleep, watchers),
        };
    }

    /// The driver wakes.
    pub(super) fn wake(&mut self) {
        *self = match *self {
            Self::Awake | Self::Asleep(_) => Self::Awake,
            Self::Watched(_, watchers) | Self::Outlasted(watchers) => Self::Outlasted(watchers),
        };
    }

    /// A thread starts to poll the links in a loop.
    #[inline]
    pub(super) fn begin_watch(&mut self) -> Watch {
        match *self {
            Self::Awake | Self::Outlasted(_) => Watch::None,
            Self::Asleep(sleep) => {
                *self = Self::Watched(sleep, Watchers(1));
                Watch::First
            }
            Self::Watched(sleep, Watchers(count)) => {
                *self = Self::Watched(sleep, Watchers(count + 1));
                Watch::Another
            }
        }
    }

    /// A watcher stops. If it is the last one of a sleeping driver, it has armed the links before, or wakes the driver
    /// right after.
    pub(super) fn end_watch(&mut self) {
        debug_assert!(self.watchers() > 0, "{self:?}: no thread watches");
        *self = match *self {
            Self::Watched(sleep, watchers) => {
                watchers.less_one().map_or(Self::Asleep(sleep), |left| Self::Watched(sleep, left))
            }
            Self::Outlasted(watchers) => watchers.less_one().map_or(Self::Awake, Self::Outlasted),
            state @ (Self::Awake | Self::Asleep(_)) => state,
        };
    }

    /// A pass made progress.
    pub(super) fn note_progress(&mut self) {
        if let Some(sleep) = self.sleep_mut() {
            sleep.has_news = true;
        }
    }

    /// Returns, and clears, whether there is progress of which the sleeping driver does not know.
    #[inline]
    pub(super) fn take_news(&mut self) -> bool {
        self.sleep_mut().is_some_and(|sleep| std::mem::take(&mut sleep.has_news))
    }

    /// Returns whether a sleeping driver must poll again: for an earlier deadline, or because `is_unarmed` returns that
    /// something may happen that wakes no thread. Watchers arm their links when they stop.
    pub(super) fn must_wake(self, deadline: Option<Moment>, is_unarmed: impl FnOnce() -> bool) -> bool {
        let is_early = |until| deadline.is_some_and(|deadline| deadline < until);
        match self {
            Self::Awake | Self::Outlasted(_) => false,
            Self::Asleep(sleep) => is_unarmed() || is_early(sleep.until),
            Self::Watched(sleep, _) => is_early(sleep.until),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNTIL: Moment = Moment::from_nanos(100);
    const ASLEEP: DriverSleep = DriverSleep::Asleep(Sleep { until: UNTIL, has_news: false });
    const NEWS: DriverSleep = DriverSleep::Asleep(Sleep { until: UNTIL, has_news: true });

    const fn watched(count: u32, has_news: bool) -> DriverSleep {
        DriverSleep::Watched(Sleep { until: UNTIL, has_news }, Watchers(count))
    }

    const fn outlasted(count: u32) -> DriverSleep {
        DriverSleep::Outlasted(Watchers(count))
    }

    /// Applies an event of the table. `None` means that the table says "not called".
    fn after(mut state: DriverSleep, event: &str) -> Option<(DriverSleep, Watch)> {
        let mut watch = Watch::None;
        let is_asleep = state.is_asleep();
        match event {
            "sleep" if is_asleep => return None,
            "sleep" => state.sleep(UNTIL),
            "wake" => state.wake(),
            "begin_watch" => watch = state.begin_watch(),
            "end_watch" if state.watchers() == 0 => return None,
            "end_watch" => state.end_watch(),
            "note_progress" => state.note_progress(),
            _ => unreachable!("no event {event}"),
        }
        Some((state, watch))
    }

    #[test]
    fn every_transition_is_that_of_the_table() {
        use DriverSleep::Awake;
        const EVENTS: [&str; 5] = ["sleep", "wake", "begin_watch", "end_watch", "note_progress"];
        type Row = (DriverSleep, [Option<DriverSleep>; 5], Watch);
        let rows: [Row; 9] = [
            (Awake, [Some(ASLEEP), Some(Awake), Some(Awake), None, Some(Awake)], Watch::None),
            (ASLEEP, [None, Some(Awake), Some(watched(1, false)), None, Some(NEWS)], Watch::First),
            (NEWS, [None, Some(Awake), Some(watched(1, true)), None, Some(NEWS)], Watch::First),
            (
                watched(2, false),
                [None, Some(outlasted(2)), Some(watched(3, false)), Some(watched(1, false)), Some(watched(2, true))],
                Watch::Another,
            ),
            (
                watched(2, true),
                [None, Some(outlasted(2)), Some(watched(3, true)), Some(watched(1, true)), Some(watched(2, true))],
                Watch::Another,
            ),
            (
                watched(1, false),
                [None, Some(outlasted(1)), Some(watched(2, false)), Some(ASLEEP), Some(watched(1, true))],
                Watch::Another,
            ),
            (
                watched(1, true),
                [None, Some(outlasted(1)), Some(watched(2, true)), Some(NEWS), Some(watched(1, true))],
                Watch::Another,
            ),
            (
                outlasted(2),
                [
                    Some(watched(2, false)),
                    Some(outlasted(2)),
                    Some(outlasted(2)),
                    Some(outlasted(1)),
                    Some(outlasted(2)),
                ],
                Watch::None,
            ),
            (
                outlasted(1),
                [Some(watched(1, false)), Some(outlasted(1)), Some(outlasted(1)), Some(Awake), Some(outlasted(1))],
                Watch::None,
            ),
        ];
        for (state, targets, watch) in rows {
            for (event, target) in EVENTS.into_iter().zip(targets) {
                let seen = after(state, event);
                assert_eq!(seen.map(|(state, _)| state), target, "{state:?} {event}");
                let begins = event == "begin_watch";
                assert!(!begins || seen.is_some_and(|(_, seen)| seen == watch), "{state:?} {event}: {seen:?}");
            }
        }
    }

    #[test]
    fn news_is_taken_once_and_only_from_a_sleep() {
        for (mut state, has_news) in [
            (DriverSleep::Awake, false),
            (ASLEEP, false),
            (NEWS, true),
            (watched(1, false), false),
            (watched(2, true), true),
            (outlasted(1), false),
        ] {
            assert_eq!(state.take_news(), has_news, "{state:?}");
            assert!(!state.take_news(), "{state:?}");
        }
    }

    #[test]
    fn a_driver_is_woken_for_an_earlier_deadline_or_a_link_that_is_not_armed() {
        let (early, late) = (Some(Moment::from_nanos(99)), Some(UNTIL));
        let cases = [
            (DriverSleep::Awake, [false; 4]),
            (ASLEEP, [false, false, true, true]),
            (watched(1, true), [false, false, true, false]),
            (outlasted(1), [false; 4]),
        ];
        for (state, expected) in cases {
            let seen = [(None, false), (late, false), (early, false), (None, true)]
                .map(|(deadline, is_unarmed)| state.must_wake(deadline, || is_unarmed));
            assert_eq!(seen, expected, "{state:?}");
        }
    }
}
