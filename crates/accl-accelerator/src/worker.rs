//! The thread that follows the copies of all calls: it sees events come, reports arrived bytes, and enqueues copies back.
//!
//! This module owns when the thread asks for events and when it sleeps. Nothing wakes it when an event comes, so it asks:
//! without a pause for 50 us after anything has happened, and then after pauses that grow with the time it has waited. A
//! call behind long computing therefore costs a number of polls that grows with the logarithm of its time. `staging`
//! owns the copies of a call. Read [`Follower`] first.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use accl_engine::ExternalTask;
use accl_types::{Error, Result};
use parking_lot::Mutex;

use crate::copies::{Copier, Issued};
use crate::peers::PeerLauncher;
use crate::pinned::PinnedMemory;
use crate::streams::StreamEvent;
use crate::tiles::TileLauncher;

/// Time for which the thread polls without a pause after something has happened.
const SPIN: Duration = Duration::from_micros(50);

/// Part of the time waited so far by which an event may be seen late.
const LATENESS: u32 = 64;

/// Longest pause between two polls.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Copies to follow, with the task that they belong to; `None` for a call that was refused.
pub(crate) struct Job {
    pub(crate) task: Option<ExternalTask>,
    pub(crate) issuer: Issuer,
    pub(crate) issued: Issued,
}

/// Source of the work of a job on its streams.
#[derive(Debug)]
pub(crate) enum Issuer {
    Copies(Copier),
    Tiles(TileLauncher),
    Peers(PeerLauncher),
}

impl Issuer {
    /// Enqueues the work of a task up to number `ready`.
    fn issue(&mut self, task: &ExternalTask, ready: usize, issued: &mut Issued) -> Result<()> {
        match (self, task.combination(), task.reduction()) {
            (Issuer::Copies(copier), ..) => copier.issue(task.copies(), ready, issued),
            (Issuer::Tiles(launcher), Some(combination), _) => launcher.issue(combination, ready, issued),
            (Issuer::Peers(launcher), _, Some(reduction)) => launcher.issue(reduction, ready, issued),
            (Issuer::Tiles(_) | Issuer::Peers(_), ..) => Err(Error::internal("a task for kernels has no tiles")),
        }
    }

    /// Records an event behind everything that was enqueued.
    fn record(&mut self) -> Result<Box<dyn StreamEvent>> {
        match self {
            Issuer::Copies(copier) => copier.record(),
            Issuer::Tiles(launcher) => launcher.record(),
            Issuer::Peers(launcher) => launcher.record(),
        }
    }
}

/// Streams and memory that a call has used.
pub(crate) type Used = Box<dyn Any + Send>;

/// The thread, and what it is given.
#[derive(Debug)]
pub(crate) struct Follower {
    pinned: Arc<PinnedMemory>,
    inbox: Mutex<Inbox>,
    /// Set when there is something new for the thread.
    is_woken: AtomicBool,
    polls: AtomicU64,
}

#[derive(Default)]
struct Inbox {
    jobs: Vec<Job>,
    /// Streams and memory of calls that are over, for the thread to drop.
    over: Vec<Used>,
    thread: Option<JoinHandle<()>>,
    /// Why no new job is followed; `None` while jobs are.
    closed: Option<&'static str>,
}

/// Reason of calls that fail because the process exits.
const EXITS: &str = "the process exits";

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("jobs", &self.jobs.len()).finish_non_exhaustive()
    }
}

impl Follower {
    pub(crate) fn new(pinned: Arc<PinnedMemory>) -> Arc<Self> {
        let (inbox, is_woken, polls) = Default::default();
        Arc::new(Self { pinned, inbox, is_woken, polls })
    }

    pub(crate) fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Follows copies. Does not block. If there is no thread, their call fails.
    pub(crate) fn follow(self: &Arc<Self>, job: Job) {
        let mut inbox = self.inbox.lock();
        if let Some(why) = inbox.closed {
            drop(inbox);
            return refuse(job, why);
        }
        if inbox.thread.is_none() {
            let me = self.clone();
            match std::thread::Builder::new().name("accl-accelerator".to_owned()).spawn(move || me.run()) {
                Ok(thread) => inbox.thread = Some(thread),
                Err(error) => {
                    drop(inbox);
                    return refuse(job, &format!("no thread for the copies: {error}"));
                }
            }
        }
        inbox.jobs.push(job);
        let thread = inbox.thread.as_ref().map(|thread| thread.thread().clone());
        drop(inbox);
        self.unpark(thread.as_ref());
    }

    /// Drops what a call has used in the thread, if there is one.
    pub(crate) fn dispose(&self, used: Used) {
        let mut inbox = self.inbox.lock();
        let thread = inbox.thread.as_ref().filter(|_| inbox.closed.is_none()).map(|thread| thread.thread().clone());
        let Some(thread) = thread else {
            drop(inbox);
            return drop(used);
        };
        inbox.over.push(used);
        drop(inbox);
        self.unpark(Some(&thread));
    }

    /// Makes the thread look at all jobs. Does not block.
    pub(crate) fn wake(&self) {
        let thread = self.inbox.lock().thread.as_ref().map(|thread| thread.thread().clone());
        self.unpark(thread.as_ref());
    }

    fn unpark(&self, thread: Option<&Thread>) {
        // Release: the thread that takes the flag sees what happened before.
        if !self.is_woken.swap(true, Ordering::Release)
            && let Some(thread) = thread
        {
            thread.unpark();
        }
    }

    /// Ends the thread, and waits for that.
    pub(crate) fn close(&self) {
        let thread = {
            let mut inbox = self.inbox.lock();
            inbox.closed = Some(EXITS);
            inbox.thread.take()
        };
        let Some(thread) = thread else { return };
        self.is_woken.store(true, Ordering::Release);
        thread.thread().unpark();
        // A thread that has panicked has failed its calls.
        let _ = thread.join();
    }

    fn run(&self) {
        self.pinned.enter_thread();
        let mut followed = Followed { follower: self, jobs: Vec::new() };
        let jobs = &mut followed.jobs;
        let mut last = Instant::now();
        loop {
            let is_woken = self.is_woken.swap(false, Ordering::Acquire);
            if is_woken {
                let mut inbox = self.inbox.lock();
                jobs.append(&mut inbox.jobs);
                let over = std::mem::take(&mut inbox.over);
                if inbox.closed.is_some() {
                    break;
                }
                drop(inbox);
                drop(over);
            }
            self.polls.fetch_add(1, Ordering::Relaxed);
            let mut has_moved = is_woken;
            jobs.extract_if(.., |job| job.turn(&mut has_moved)).for_each(Job::end);
            if is_woken {
                self.pinned.free_excess();
            }
            if has_moved {
                last = Instant::now();
            } else if jobs.iter().all(|job| job.issued.events.is_empty() && !job.issued.is_held_up) {
                // Nothing can happen by itself.
                std::thread::park();
            } else {
                pause(last.elapsed());
            }
        }
    }
}

/// The jobs that the thread follows. When the thread ends, also by a panic, calls fail, and memory of copies in flight stays.
struct Followed<'a> {
    follower: &'a Follower,
    jobs: Vec<Job>,
}

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        let why = if std::thread::panicking() { "the thread that follows them has panicked" } else { EXITS };
        let (late, over) = {
            let mut inbox = self.follower.inbox.lock();
            inbox.closed.get_or_insert(why);
            (std::mem::take(&mut inbox.jobs), std::mem::take(&mut inbox.over))
        };
        drop(over);
        self.jobs.drain(..).chain(late).for_each(|job| refuse(job, why));
    }
}

/// Waits after nothing has happened for `idle`.
fn pause(idle: Duration) {
    if idle < SPIN {
        std::thread::yield_now();
    } else {
        std::thread::park_timeout((idle / LATENESS).clamp(SPIN / 2, LONGEST_PAUSE));
    }
}

/// Fails the call of a job that is not followed. Its memory is kept for ever if copies may be in flight.
fn refuse(job: Job, why: &str) {
    let Job { task, issued, issuer } = job;
    let is_in_flight = issued.may_be_in_flight();
    match issuer {
        Issuer::Peers(launcher) if is_in_flight => std::mem::forget(launcher),
        issuer => drop(issuer),
    }
    match task {
        Some(task) if is_in_flight => {
            task.abandon(Error::device(format!("copies of the device may still be in flight: {why}")));
        }
        Some(task) => task.fail(why),
        None => {}
    }
    if is_in_flight {
        std::mem::forget(issued);
    }
}

impl Job {
    /// Reports copies that have been made, and enqueues copies that are ready. Returns whether the job is over.
    fn turn(&mut self, has_moved: &mut bool) -> bool {
        let before = (self.issued.count, self.issued.events.len());
        let made = self.take_events();
        let Some(task) = &self.task else {
            *has_moved |= self.issued.events.len() != before.1;
            return self.issued.events.is_empty();
        };
        if let Some(made) = made {
            if let (Issuer::Tiles(launcher), Some(combination)) = (&mut self.issuer, task.combination()) {
                launcher.collect(combination, made);
            }
            task.note_made(made);
        }
        let ready = task.ready_copies();
        if self.issued.failure.is_none() && !task.is_cancelled() && ready > self.issued.count {
            self.issued.failure = self.issuer.issue(task, ready, &mut self.issued).err();
            if self.issued.failure.is_some() {
                self.issued.follow_unknown(|| self.issuer.record());
            }
        }
        *has_moved |= before != (self.issued.count, self.issued.events.len());
        let is_over = self.issued.failure.is_some() || task.is_cancelled() || task.made_copies() == task.units();
        let is_over = is_over && self.issued.events.is_empty();
        *has_moved |= is_over;
        is_over
    }

    /// Gives the task of a job back that is over.
    fn end(self) {
        let Self { task, issuer, mut issued } = self;
        match issuer {
            Issuer::Tiles(launcher) => launcher.end(issued.has_unknown),
            Issuer::Copies(copier) => drop(copier),
            // Windows that kernels may still use serve no other call.
            Issuer::Peers(launcher) if issued.has_unknown => std::mem::forget(launcher),
            Issuer::Peers(launcher) => drop(launcher),
        }
        match (task, issued.failure.take()) {
            // No event shows when these copies have been made, so their memory stays.
            (None, _) if issued.has_unknown => std::mem::forget(issued),
            (None, _) => {}
            (Some(task), Some(error)) if issued.has_unknown => task.abandon(error),
            (Some(task), Some(error)) => task.fail_with(error),
            (Some(task), None) if task.is_cancelled() => drop(task),
            (Some(task), None) => task.done(),
        }
    }

    /// Takes the events that have come. Returns the number of copies that they end.
    fn take_events(&mut self) -> Option<usize> {
        let mut made = None;
        while let Some((count, event)) = self.issued.events.front() {
            match event.has_come() {
                Ok(true) => made = Some(*count),
                Ok(false) => break,
                // No event shows any more when the copies have been made.
                Err(error) => {
                    self.issued.failure.get_or_insert(error);
                    self.issued.has_unknown = true;
                    self.issued.events.clear();
                    break;
                }
            }
            self.issued.events.pop_front();
        }
        made
    }
}
