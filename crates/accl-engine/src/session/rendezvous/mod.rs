//! Rendezvous: how the ranks of a group find each other in a store that may outlive them.
//!
//! Owns the keys, the order of store requests, and *sessions*: the rounds of the rendezvous. The text formats are in
//! [`texts`]; `accl-transport` makes connections. Read [`Meeting`] first.
//!
//! **The problem.** A store survives the processes that wrote into it. Elastic launchers start new processes over the
//! same store, with the same ranks and group names. An old process may have died between any two of its requests.
//! Therefore no entry in the store proves that its writer is alive. Counting does not help either. Ranks that died at
//! different moments leave different counts, and each host's launcher counts its own restarts.
//!
//! **Sessions.** Rank 0 is the *leader*. It makes up a session name that no process has used before, from its process's
//! random identity and a counter. It publishes that name in the *notice*, a key with a fixed name. A rank answers by
//! writing its info under the session's name. An answering rank has read a fresh name, so it was alive after the
//! session began.
//!
//! When all ranks have answered, the leader writes the *participant list* of all infos (key `roster`). It does not
//! write the notice again, because another leader may have replaced the notice. A rank accepts a list only if the list
//! contains its own info of this very attempt: then the leader was alive after the answer. Entries of earlier processes
//! have another session's name, or their list lacks the reader.
//!
//! **Agreed completion.** Ranks that have the list connect to each other, and then each adds 1 to the counter `ready`.
//! The group is created when the count reaches the world size. Until then no rank has returned, so all ranks can still
//! start over or fail together. A rank that ends a session early writes the reason and subtracts [`ENDED`] from the
//! count. The count can then never reach the world size. The same counter shows which of the two came first. A
//! session ends as
//! * *failed*, by a rank that gives up: all other ranks fail with its cause;
//! * *moved*, by a rank that finds another process in its slot of the list, usually its dead predecessor. All ranks
//!   return and answer the leader's next session;
//! * *taken*, by a new rank 0 that replaces an earlier one. The other ranks act as for *moved*; the earlier rank 0, if
//!   it is alive, fails.
//!
//! | died | what the others see |
//! |---|---|
//! | a rank, before it answered | the leader waits; the successor answers the same session |
//! | a rank, after it answered, before the list | the successor overwrites the info |
//! | a rank, after the list | connecting is refused; the successor is not in the list and moves the session |
//! | the leader, at any time | its successor takes the session and starts another; the other ranks follow the notice |
//! | any rank, after the group was created | it is lost like any peer, and the group fails |
//!
//! **Failure with all ranks present.** All ranks may have answered, and still no group is created. Then the last
//! request of each rank except the leader adds 1 to the counter `silent`. The leader returns when all of them have done
//! so, or after two seconds. It waits because the store usually belongs to its process and ends with it.
//!
//! **Refusals.** A rank that cannot even publish an endpoint writes a refusal in place of its info. When all ranks have
//! answered, the leader writes the refusal in place of the list, and all ranks fail with it. The refusing rank itself
//! waits for this at most ten seconds. If not all ranks have answered by then, it leaves its cause under a fixed key,
//! as a hint. Ranks that come later still wait for a group, and quote the hint if there is none at their deadline.
//!
//! **Lost members.** A rank may detect on a link that a member of the job's own group has left or is lost. The creation
//! of a sub-group with that member then ends at once, because the member will not come back into this job.
//!
//! **Exchanges.** Some kinds of devices, and libraries that do collectives, need data of the other ranks. Each rank
//! except rank 0 writes a text under the session's name, after it has the list and before it adds 1 to `ready`. Rank 0
//! then writes all texts, including its own, under one key. The ranks exchange texts once more when their devices are
//! set up: no device admits packets before the devices of all ranks are set up. Exchanges belong to the session. If the
//! session moves, all ranks exchange again.
//!
//! **Concurrent attempts.** Threads of one process may create groups over the same keys. Those that lead take turns; a
//! thread that answers in another's place waits for the next session. A second living process with the same rank is
//! detected when it is in this rank's slot twice, because the second session began after this process had arrived. A
//! process that comes after the group was created gets no error: it may be the first of the next attempt. It waits for
//! the other ranks until its deadline.
//!
//! **Cost.** The leader reads one info per rank and writes the list; every other rank makes a constant number of
//! requests. A waiting rank polls two small values, in pauses that grow with the time waited, so that a long wait costs
//! ten polls per second.
//!
//! **Clean-up.** Once the group is created, the leader deletes its notice, each other rank deletes its info, and each
//! rank adds 1 to `ready` again. The last rank deletes that counter and the list. Sessions that ended early are listed
//! in the next notices, and the leader whose group is created deletes what is left of them. A rank that is still in
//! such a session sees that the notice belongs to another one.
//!
//! This file is long because the argument for the protocol stands next to its two halves, the leader's and the others'.

mod texts;

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use accl_types::{Error, Result};
use accl_wire::frame::Cause;

use crate::attempts::Attempts;
use crate::session::store::Store;
use crate::spec::GroupSpec;
use accl_types::hash::hash_words;

pub(crate) use texts::RankInfo;
use texts::{
    Notice, Phase, Why, participants_from_text, participants_to_text, refusal_from_text, refusal_to_text,
    settings_differ, texts_from_text, texts_to_text,
};

/// Subtracted from the count of a session that ended early; more than twice any world size.
const ENDED: i64 = 1 << 40;
/// Pauses between two requests: the time waited so far divided by `PAUSE_PART`, within these bounds.
const PAUSE_PART: u32 = 8;
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Interval of checks for interrupts and for members that are gone.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time that the leader waits, after a failure, until the other ranks know the reason. The store usually
/// belongs to the leader's process and ends with it.
const LAST_QUESTIONS: Duration = Duration::from_secs(2);
/// Extra time after the deadline that a connected rank waits: an unconnected rank may be about to report the reason.
const GRACE: Duration = Duration::from_secs(2);

/// Result of a session.
pub(crate) enum Outcome {
    Made,
    /// The session ended without a group: gather again.
    Moved,
}

/// One rank's attempt to create one group. Dropping it before all ranks have confirmed gives the attempt up and
/// notifies the other ranks.
pub(crate) struct Meeting<'a> {
    spec: &'a GroupSpec,
    store: &'a dyn Store,
    mine: &'a RankInfo,
    /// Prefix of the names of the sessions that this rank leads.
    label: &'a str,
    /// Prefix of all keys of this group.
    keys: String,
    /// The session that this rank leads or has answered.
    session: Option<String>,
    /// Number of sessions that this rank has led.
    led: u64,
    attempts: &'a Attempts,
    /// Number of groups that this process had confirmed when this rank answered.
    confirmed_before: u64,
    /// This rank's entry in `attempts`, if it leads.
    leads: Option<String>,
    /// Sessions that have ended for this rank.
    past: HashSet<String>,
    /// For the leader: sessions to clean up, with their world sizes.
    earlier: Vec<(String, u32)>,
    /// Processes that were in this rank's slot: identity and description.
    beaten_by: Vec<([u8; 16], String)>,
    /// World size that a leader has announced, if it differs from ours.
    other_world: Option<u32>,
    began: Instant,
    deadline: Instant,
    last_poll: Instant,
    /// Number of exchanges in this session, and the maximum of any session: their keys must be deleted.
    rounds: u32,
    most_rounds: u32,
    /// Whether the other ranks need no notification at the end: the group is created, or no rank was met.
    concluded: bool,
    /// The last session in which all ranks were present.
    complete: Option<String>,
    /// Why this rank cannot create the group, if it takes part only to report that.
    refusal: Option<Cause>,
}

impl<'a> Meeting<'a> {
    /// Creates an attempt without asking the store. `label` starts the names of the sessions that this rank leads, for
    /// people who read the store.
    pub(crate) fn new(
        spec: &'a GroupSpec,
        store: &'a dyn Store,
        mine: &'a RankInfo,
        label: &'a str,
        attempts: &'a Attempts,
        deadline: Instant,
    ) -> Self {
        let now = Instant::now();
        Self {
            spec,
            store,
            mine,
            label,
            // torch gives disjoint sub-groups of one parent the same name and keys; their ranks in the job distinguish
            // them.
            keys: format!("accl/{:016x}", hash_words(spec.global_ranks.iter().copied())),
            session: None,
            led: 0,
            attempts,
            confirmed_before: 0,
            leads: None,
            past: HashSet::new(),
            earlier: Vec::new(),
            beaten_by: Vec::new(),
            other_world: None,
            began: now,
            deadline,
            last_poll: now,
            rounds: 0,
            most_rounds: 0,
            concluded: false,
            complete: None,
            refusal: None,
        }
    }

    /// Takes part only to report why this rank cannot create the group: all ranks fail with that error.
    pub(crate) fn refusing(mut self, error: &Error) -> Self {
        self.refusal = Some(cause_of(self.spec, error));
        self
    }

    /// Returns all ranks' infos in rank order. `poll` is called now and then during the wait, and ends it by returning
    /// an error.
    ///
    /// # Errors
    /// * `Timeout` listing the ranks that did not arrive.
    /// * `Configuration` when settings differ.
    /// * `Rendezvous` when the store fails or two processes claim one rank.
    /// * The cause of a rank that gave up, and errors of `poll`.
    pub(crate) fn gather(&mut self, poll: &mut dyn FnMut() -> Result<()>) -> Result<Vec<RankInfo>> {
        let infos = if self.spec.world == 1 {
            vec![self.mine.clone()]
        } else if self.spec.rank.0 == 0 {
            self.lead(poll)?
        } else {
            self.answer(poll)?
        };
        self.complete.clone_from(&self.session);
        match infos.iter().position(|info| info.agreed != self.mine.agreed) {
            Some(rank) => Err(settings_differ(self.mine, &infos[rank], self.spec.rank.0, rank)),
            None => Ok(infos),
        }
    }

    /// Returns the name of the session, which no other session has.
    pub(crate) fn session(&self) -> &str {
        self.session.as_deref().unwrap_or_default()
    }

    /// Returns whether the session continues, for ranks that connect. If not, gather again.
    ///
    /// # Errors
    /// The cause of a rank that gave up; `Rendezvous`.
    pub(crate) fn goes_on(&mut self) -> Result<bool> {
        let Some(session) = self.session.clone() else { return Ok(true) };
        match self.standing_of_mine(&session)? {
            Standing::Open | Standing::Over(Why::Complete) => Ok(true),
            Standing::Over(why) => self.leave(why).map(|()| false),
        }
    }

    /// Sends a text to all ranks, and returns the texts of all ranks in rank order. All ranks must call this equally
    /// often. Returns `None` if the session has ended: gather again.
    ///
    /// # Errors
    /// The errors of [`Meeting::gather`]; `Rendezvous` when the store holds something else.
    pub(crate) fn exchange(&mut self, text: &str, poll: &mut dyn FnMut() -> Result<()>) -> Result<Option<Vec<String>>> {
        let Some(session) = self.session.clone() else { return Ok(Some(vec![text.to_owned()])) };
        let rank = self.spec.rank.0;
        self.rounds += 1;
        self.most_rounds = self.most_rounds.max(self.rounds);
        let round = exchange(&self.keys, &session, self.rounds);
        let all = exchanged_texts(&round);
        if rank != 0 {
            self.store.set(&exchanged_text(&round, rank), text.as_bytes())?;
        }
        let mut texts = vec![text.to_owned()];
        let pace = Pace::new();
        loop {
            if rank != 0 {
                if let Some(text) = self.text(&all)? {
                    texts = texts_from_text(&text)?;
                    break;
                }
            } else if texts.len() == self.spec.world as usize {
                self.store.set(&all, texts_to_text(&texts).as_bytes())?;
                break;
            } else if let Some(text) = self.text(&exchanged_text(&round, texts.len() as u32))? {
                texts.push(text);
                continue;
            }
            let standing = if pace.is_long() { self.standing_of_mine(&session)? } else { self.standing(&session)? };
            match standing {
                Standing::Open | Standing::Over(Why::Complete) => {}
                Standing::Over(why) => return self.leave(why).map(|()| None),
            }
            if Instant::now() >= self.deadline + GRACE {
                return Err(self.texts_missing(&round));
            }
            self.pause(&pace, poll)?;
        }
        if texts.len() != self.spec.world as usize || texts[self.spec.rank.index()] != text {
            return Err(Error::rendezvous("the store holds texts that the ranks of this group did not write"));
        }
        Ok(Some(texts))
    }

    /// Reports that this rank has everything that the group needs, and waits until all ranks have reported that.
    ///
    /// # Errors
    /// The errors of [`Meeting::gather`].
    pub(crate) fn confirm(&mut self, poll: &mut dyn FnMut() -> Result<()>) -> Result<Outcome> {
        let Some(session) = self.session.clone() else {
            self.concluded = true;
            return Ok(Outcome::Made);
        };
        let pace = Pace::new();
        self.attempts.confirmed.fetch_add(1, Ordering::SeqCst);
        let is_last = self.store.add(&ready(&self.keys, &session), 1)? == i64::from(self.spec.world);
        let mut standing = if is_last { Standing::Over(Why::Complete) } else { self.standing(&session)? };
        loop {
            match standing {
                Standing::Over(Why::Complete) => break,
                Standing::Over(why) => return self.leave(why).map(|()| Outcome::Moved),
                Standing::Open if Instant::now() >= self.deadline + GRACE => return Err(self.unconnected()),
                Standing::Open => self.pause(&pace, poll)?,
            }
            standing = if pace.is_long() { self.standing_of_mine(&session)? } else { self.standing(&session)? };
        }
        self.concluded = true;
        self.clean_up(&session).unwrap_or_else(|why| tracing::debug!("cannot delete keys from the store: {why}"));
        Ok(Outcome::Made)
    }

    /// For a refusing rank: writes its cause as a hint for ranks that arrive after it is gone. Those ranks still wait
    /// for a group, because another process may have this rank's slot by then. They quote the hint if they have waited
    /// in vain.
    pub(crate) fn leave_hint(&self) {
        if let Some(cause) = self.refusal.as_ref().filter(|_| self.complete.is_none()) {
            // Without a hint the other ranks name only the rank.
            let _ = self.store.set(&refused(&self.keys, self.spec.rank.0), refusal_to_text(cause).as_bytes());
        }
    }

    /// Reports to the other ranks why there will be no group, unless the session has already ended.
    pub(crate) fn give_up(mut self, error: &Error) {
        self.end_with(&Why::Failed(cause_of(self.spec, error)));
    }

    // ---- rank 0

    fn lead(&mut self, poll: &mut dyn FnMut() -> Result<()>) -> Result<Vec<RankInfo>> {
        if self.led == 0 {
            self.await_turn(poll)?;
            self.take_over()?;
        }
        loop {
            let uuid = u128::from_be_bytes(self.mine.info.uuid);
            let session = format!("{}{uuid:032x}-{}-{}", self.label, self.mine.counter, self.led);
            self.led += 1;
            (self.session, self.rounds) = (Some(session.clone()), 0);
            self.say(&session, Phase::Gathering)?;
            if let Some(infos) = self.collect(&session, poll)? {
                // The notice stays as it is: by now another leader may have replaced it.
                self.store.set(&participants(&self.keys, &session), participants_to_text(&infos).as_bytes())?;
                return Ok(infos);
            }
        }
    }

    /// Waits until no other thread of this process leads over the same keys: their notices would overwrite each other.
    fn await_turn(&mut self, poll: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let pace = Pace::new();
        let what = format!("{} {}", self.spec.name, self.keys);
        loop {
            if self.attempts.led.lock().insert(what.clone()) {
                self.leads = Some(what);
                return Ok(());
            }
            if Instant::now() >= self.deadline {
                let text = "another thread of this process, which is creating a group with the same store and name";
                return Err(self.timed_out(text));
            }
            self.pause(&pace, poll)?;
        }
    }

    /// Ends the session that an earlier leader left.
    fn take_over(&mut self) -> Result<()> {
        // An unreadable notice is overwritten.
        let notice = self.text(&self.notice_key())?.and_then(|text| Notice::from_text(&text).ok());
        let Some(notice) = notice else { return Ok(()) };
        self.earlier.extend(notice.earlier);
        self.earlier.push((notice.session.clone(), notice.world));
        let why = Why::Taken(self.mine.info.host_and_pid());
        self.end(&notice.session, i64::from(notice.world), &why)
    }

    fn say(&self, session: &str, phase: Phase) -> Result<()> {
        let (session, world) = (session.to_owned(), self.spec.world);
        let (uuid, process) = (self.mine.info.uuid, self.mine.info.host_and_pid());
        let notice = Notice { session, world, phase, uuid, process, earlier: self.earlier.clone() };
        self.store.set(&self.notice_key(), notice.to_text().as_bytes())
    }

    /// Collects the infos of all ranks; `None` when the session has moved.
    fn collect(&mut self, session: &str, poll: &mut dyn FnMut() -> Result<()>) -> Result<Option<Vec<RankInfo>>> {
        let mut infos = vec![self.mine.clone()];
        let mut refusal = self.refusal.clone();
        let pace = Pace::new();
        // One rank after the other: while one info is missing nothing can go on, so the others need not be requested.
        while infos.len() < self.spec.world as usize {
            let rank = infos.len() as u32;
            if let Some(text) = self.text(&info(&self.keys, session, rank))? {
                match refusal_from_text(&text)? {
                    None => infos.push(RankInfo::from_text(&text)?),
                    Some(cause) => {
                        infos.push(self.mine.clone());
                        refusal.get_or_insert(cause);
                    }
                }
                continue;
            }
            match self.standing(session)? {
                Standing::Open => {}
                Standing::Over(why) => {
                    self.leave(why)?;
                    return Ok(None);
                }
            }
            // Two leaders that began at the same moment did not see each other's notice.
            if let Some(notice) = self.notice()?.filter(|notice| notice.uuid != self.mine.info.uuid) {
                self.leave_session(session);
                return Err(self.taken(&notice.process));
            }
            if Instant::now() >= self.deadline {
                return Err(self.incomplete(Some(session)));
            }
            self.pause(&pace, poll)?;
        }
        if let Some(cause) = refusal {
            self.store.set(&participants(&self.keys, session), refusal_to_text(&cause).as_bytes())?;
            return self.refused(session, cause).map(|()| None);
        }
        Ok(Some(infos))
    }

    /// Fails the session: all ranks were present, and one of them cannot create the group.
    fn refused(&mut self, session: &str, cause: Cause) -> Result<()> {
        let why = Why::Failed(cause);
        self.complete = Some(session.to_owned());
        self.end(session, i64::from(self.spec.world), &why)?;
        self.leave(why)
    }

    // ---- the others

    fn answer(&mut self, poll: &mut dyn FnMut() -> Result<()>) -> Result<Vec<RankInfo>> {
        let pace = Pace::new();
        loop {
            if let Some(infos) = self.follow()? {
                return Ok(infos);
            }
            if Instant::now() >= self.deadline {
                let session = self.session.clone();
                return Err(self.incomplete(session.as_deref()));
            }
            self.pause(&pace, poll)?;
        }
    }

    /// Reads the notice once and acts on it. Returns the infos of all ranks when the list exists and contains this
    /// rank.
    fn follow(&mut self) -> Result<Option<Vec<RankInfo>>> {
        let notice = self.notice()?;
        if notice.is_none() && self.session.is_some() {
            return self.made_without();
        }
        let notice = notice.filter(|notice| notice.phase != Phase::Over);
        if let Some(mine) = self.session.clone()
            && notice.as_ref().is_none_or(|notice| notice.session != mine)
        {
            // The leader of this rank's session failed or was replaced.
            let why = match self.standing(&mine)? {
                Standing::Open => Why::Moved,
                Standing::Over(why) => why,
            };
            // All ranks were present, although this one has not read the list. The leader waits for the last request of
            // each rank.
            if matches!(why, Why::Failed(_)) && self.text(&participants(&self.keys, &mine))?.is_some() {
                self.complete = Some(mine);
            }
            self.leave(why)?;
        }
        let Some(notice) = notice else { return Ok(None) };
        if notice.world != self.spec.world {
            // Usually a leader of an earlier or later attempt, with fewer or more hosts.
            self.other_world = Some(notice.world);
            return Ok(None);
        }
        if self.past.contains(&notice.session) {
            return Ok(None);
        }
        if let Some(text) = self.text(&participants(&self.keys, &notice.session))? {
            return self.read_participants(&notice.session, &text);
        }
        if self.session.is_none() {
            // The failure of an earlier attempt does not concern this one. Its leader may have died without cleaning
            // up.
            if let Standing::Over(_) = self.standing(&notice.session)? {
                self.past.insert(notice.session);
                return Ok(None);
            }
            let key = info(&self.keys, &notice.session, self.spec.rank.0);
            self.confirmed_before = self.attempts.confirmed.load(Ordering::SeqCst);
            // Set before the request: even if it fails, giving up then notifies the other ranks.
            (self.session, self.rounds) = (Some(notice.session), 0);
            let text = self.refusal.as_ref().map_or_else(|| self.mine.to_text(), refusal_to_text);
            self.store.set(&key, text.as_bytes())?;
        }
        Ok(None)
    }

    fn read_participants(&mut self, session: &str, text: &str) -> Result<Option<Vec<RankInfo>>> {
        if let Some(cause) = refusal_from_text(text)? {
            return match self.session.as_deref() == Some(session) {
                true => self.refused(session, cause).map(|()| None),
                false => {
                    self.leave_session(session);
                    Ok(None)
                }
            };
        }
        let infos = participants_from_text(text)?;
        let Some(member) = infos.get(self.spec.rank.index()).filter(|_| infos.len() == self.spec.world as usize) else {
            return Err(Error::rendezvous(format!(
                "participant list: got {} ranks, expected {}",
                infos.len(),
                self.spec.world
            )));
        };
        if member.is_same_making(self.mine) && self.session.as_deref() == Some(session) {
            return Ok(Some(infos));
        }
        self.leave_session(session);
        let (uuid, words) = (member.info.uuid, member.info.host_and_pid());
        if uuid == self.mine.info.uuid {
            // The list contains another thread of this process, or an earlier attempt of this one.
            return Ok(None);
        }
        if self.beaten_by.iter().any(|(other, _)| *other == uuid) {
            return Err(self.taken(&words));
        }
        self.beaten_by.push((uuid, words));
        self.end(session, i64::from(self.spec.world), &Why::Moved)?;
        Ok(None)
    }

    // ---- sessions

    fn standing(&self, session: &str) -> Result<Standing> {
        let Some(count) = self.text(&ready(&self.keys, session))? else { return Ok(Standing::Open) };
        let count: i64 = count
            .parse()
            .map_err(|_| Error::rendezvous(format!("the store holds an invalid count of ranks: `{count}`")))?;
        if count >= i64::from(self.spec.world) {
            return Ok(Standing::Over(Why::Complete));
        }
        if count >= 0 {
            return Ok(Standing::Open);
        }
        // The reason was written before the count was changed.
        let why = self.store.get(&why_key(&self.keys, session))?;
        Ok(Standing::Over(why.map_or(Ok(Why::Moved), |why| Why::from_bytes(&why))?))
    }

    /// Like [`Meeting::standing`], for this rank's session. If a leader replaced the session, created its group and
    /// cleaned up, only the notice shows it.
    fn standing_of_mine(&self, session: &str) -> Result<Standing> {
        let standing = self.standing(session)?;
        if !matches!(standing, Standing::Open) {
            return Ok(standing);
        }
        let notice = self.notice()?;
        if notice.as_ref().is_some_and(|notice| notice.session == session) {
            return Ok(Standing::Open);
        }
        // The notice is also deleted when this session has completed.
        let standing = self.standing(session)?;
        if !matches!(standing, Standing::Open) {
            return Ok(standing);
        }
        let process = notice.map_or_else(|| "which has joined the group".to_owned(), |notice| notice.process);
        Ok(Standing::Over(Why::Taken(process)))
    }

    /// Ends a session unless it has ended.
    fn end(&self, session: &str, world: i64, why: &Why) -> Result<()> {
        if let Standing::Over(_) = self.standing(session)? {
            return Ok(());
        }
        let key = why_key(&self.keys, session);
        self.store.set(&key, &why.to_bytes())?;
        if self.store.add(&ready(&self.keys, session), -ENDED)? + ENDED >= world {
            // The last rank's confirmation came first.
            self.store.set(&key, &Why::Complete.to_bytes())?;
        }
        Ok(())
    }

    /// Leaves this rank's session after it has ended. On success, the rank may meet the others in another session.
    fn leave(&mut self, why: Why) -> Result<()> {
        if let Some(session) = self.session.clone() {
            self.leave_session(&session);
        }
        match why {
            // The session has ended with this cause; this rank has nothing to add.
            Why::Failed(cause) => Err(gave_up(&cause)),
            Why::Taken(process) if self.spec.rank.0 == 0 => Err(self.taken(&process)),
            Why::Taken(_) | Why::Moved | Why::Complete => Ok(()),
        }
    }

    /// Leaves a session: nothing more in it concerns this rank.
    fn leave_session(&mut self, session: &str) {
        self.past.insert(session.to_owned());
        if self.session.as_deref() == Some(session) {
            self.session = None;
            if self.spec.rank.0 == 0 {
                self.earlier.push((session.to_owned(), self.spec.world));
            } else {
                // An info that stays is harmless garbage.
                let _ = self.store.delete(&info(&self.keys, session, self.spec.rank.0));
                for round in 1..=self.rounds {
                    let round = exchange(&self.keys, session, round);
                    let _ = self.store.delete(&exchanged_text(&round, self.spec.rank.0));
                }
            }
        }
    }

    /// Deletes keys after the group was created. A rank that dies in here leaves a few keys that no process reads.
    fn clean_up(&mut self, session: &str) -> Result<()> {
        let (rank, world) = (self.spec.rank.0, self.spec.world);
        for (session, world) in std::mem::take(&mut self.earlier) {
            self.delete_session(&session)?;
            for rank in 1..world {
                self.store.delete(&info(&self.keys, &session, rank))?;
                self.delete_exchanged_text(&session, rank)?;
            }
        }
        // Before the list is deleted: a rank that finds the notice but no list answers. If this leader was stopped for
        // long, the notice may belong to another leader by now.
        let is_ours = rank == 0 && self.notice()?.is_some_and(|notice| notice.session == session);
        if is_ours && !self.store.delete(&self.notice_key())? {
            // Otherwise the next attempt of this process would wait for this session to end.
            self.say(session, Phase::Over)?;
        }
        if rank != 0 {
            self.store.delete(&info(&self.keys, session, rank))?;
            self.delete_exchanged_text(session, rank)?;
        }
        if self.store.add(&ready(&self.keys, session), 1)? == 2 * i64::from(world) {
            self.store.delete(&participants(&self.keys, session))?;
            self.delete_exchanged_texts(session)?;
            self.store.delete(&ready(&self.keys, session))?;
        }
        Ok(())
    }

    fn delete_session(&self, session: &str) -> Result<()> {
        self.store.delete(&participants(&self.keys, session))?;
        self.delete_exchanged_texts(session)?;
        self.store.delete(&why_key(&self.keys, session))?;
        self.store.delete(&silent(&self.keys, session))?;
        self.store.delete(&ready(&self.keys, session)).map(drop)
    }

    fn delete_exchanged_text(&self, session: &str, rank: u32) -> Result<()> {
        let rounds = 1..=self.most_rounds;
        rounds
            .map(|round| exchange(&self.keys, session, round))
            .try_for_each(|round| self.store.delete(&exchanged_text(&round, rank)).map(drop))
    }

    fn delete_exchanged_texts(&self, session: &str) -> Result<()> {
        let rounds = 1..=self.most_rounds;
        rounds
            .map(|round| exchange(&self.keys, session, round))
            .try_for_each(|round| self.store.delete(&exchanged_texts(&round)).map(drop))
    }

    /// Ends this rank's session. Store errors are ignored, because this rank gives up anyway.
    fn end_with(&mut self, why: &Why) {
        if std::mem::replace(&mut self.concluded, true) {
            return;
        }
        if let Some(session) = self.session.clone() {
            let _ = self.end(&session, i64::from(self.spec.world), why);
            self.leave_session(&session);
        }
        // By now the notice may belong to another leader.
        if let Some((session, world)) = self.earlier.pop()
            && let Ok(Some(notice)) = self.notice()
            && (notice.session == session && notice.uuid == self.mine.info.uuid)
        {
            let notice = Notice { world, phase: Phase::Over, earlier: std::mem::take(&mut self.earlier), ..notice };
            let _ = self.store.set(&self.notice_key(), notice.to_text().as_bytes());
        }
        self.ask_no_more();
    }

    /// Reports that this rank makes no more requests. The leader waits until no other rank has any: the store usually
    /// belongs to its process, which may end once this returns.
    fn ask_no_more(&mut self) {
        let Some(session) = self.complete.take() else { return };
        let key = silent(&self.keys, &session);
        if self.spec.rank.0 != 0 {
            let _ = self.store.add(&key, 1);
            return;
        }
        let (begin, pace, others) = (Instant::now(), Pace::new(), i64::from(self.spec.world) - 1);
        while begin.elapsed() < LAST_QUESTIONS {
            // If the store fails, no rank is waiting for it.
            let Ok(count) = self.store.add(&key, 0) else { return };
            if count >= others {
                let _ = self.store.delete(&key);
                return;
            }
            pace.pause();
        }
    }

    // ---- questions

    fn notice_key(&self) -> String {
        format!("{}/leader", self.keys)
    }

    fn notice(&self) -> Result<Option<Notice>> {
        self.text(&self.notice_key())?.map(|text| Notice::from_text(&text)).transpose()
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        Ok(self.store.get(key)?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn pause(&mut self, pace: &Pace, poll: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        if self.last_poll.elapsed() >= POLL_INTERVAL {
            self.last_poll = Instant::now();
            poll()?;
        }
        pace.pause();
        Ok(())
    }

    // ---- errors

    fn timed_out(&self, what: &str) -> Error {
        Error::timeout(format!("Timed out waiting {}ms for {what}", self.began.elapsed().as_millis()))
    }

    fn taken(&self, process: &str) -> Error {
        Error::rendezvous(format!(
            "rank {} is already used by another process, {process}; give each process its own rank",
            self.spec.rank
        ))
    }

    /// Handles a missing notice: it is deleted only when the group is created. If the group was created although this
    /// rank had answered, another process with its rank confirmed afterwards.
    fn made_without<T>(&mut self) -> Result<Option<T>> {
        if let Some(session) = self.session.clone() {
            self.leave_session(&session);
        }
        // Probably another thread of this process created the group, and this thread takes its turn.
        if self.attempts.confirmed.load(Ordering::SeqCst) != self.confirmed_before {
            return Ok(None);
        }
        Err(self.taken("which has joined the group"))
    }

    /// Returns the error for a deadline that passed before all ranks had sent their texts.
    fn texts_missing(&self, round: &str) -> Error {
        let is_missing = |rank: &u32| self.store.get(&exchanged_text(round, *rank)).is_ok_and(|text| text.is_none());
        let mut missing: Vec<String> = (1..self.spec.world).filter(is_missing).map(|rank| rank.to_string()).collect();
        if missing.is_empty() {
            missing.push("0".to_owned());
        }
        let missing = missing.join(", ");
        self.timed_out(&format!(
            "the texts of all ranks for offloaded collectives: ranks {missing} have not sent theirs; raise the timeout, \
             or check their logs"
        ))
    }

    fn unconnected(&self) -> Error {
        self.timed_out("all ranks to connect to each other; raise the timeout, or check the logs of the other ranks")
    }

    /// Returns the error for a deadline that passed before all ranks were present.
    fn incomplete(&self, session: Option<&str>) -> Error {
        let (mine, world) = (self.spec.rank.0, self.spec.world);
        let is_missing = |rank: &u32| match session {
            // A failing store has been reported before.
            Some(session) => *rank != mine && *rank != 0 && !self.has_info(session, *rank),
            None => *rank == 0,
        };
        let missing: Vec<String> = (0..world).filter(is_missing).map(|rank| rank.to_string()).collect();
        // A rank that gave up ended the session and then deleted its info. It had arrived, and knows which ranks did
        // not.
        if let Some(session) = session
            && let Ok(Standing::Over(Why::Failed(cause))) = self.standing(session)
        {
            return gave_up(&cause);
        }
        if missing.is_empty() {
            // The last info arrived between the last request and this one.
            return self
                .timed_out("the group to be complete: the last rank arrived only at the deadline; raise the timeout");
        }
        let what = format!("the group to be complete: {} of {world} ranks are missing: ", missing.len());
        let mut what = what + &missing.join(", ");
        if mine == 0 && missing.len() + 1 == world as usize {
            what += " (they have not arrived, or the group already exists and another process also has rank 0)";
        }
        if session.is_none() {
            what += &format!(
                " (the other ranks wait for it, or the group already exists and another process also has rank {mine})"
            );
        }
        if let Some(other) = self.other_world {
            what += &format!(" (a rank 0 was present with world size {other})");
        }
        if let Some((_, process)) = self.beaten_by.last() {
            what += &format!(" (in its group, rank {mine} is already used by {process})");
        }
        if let Some(cause) = (0..world).filter(|&rank| rank != mine).find_map(|rank| self.hint(rank)) {
            what += &format!(" (rank {} arrived and failed: {})", cause.origin, cause.text);
        }
        self.timed_out(&(what + "; start them, or raise the timeout"))
    }

    /// Returns why a rank that is gone could not create the group, if it left a hint.
    fn hint(&self, rank: u32) -> Option<Cause> {
        let text = self.text(&refused(&self.keys, rank)).ok()??;
        refusal_from_text(&text).ok()?
    }

    fn has_info(&self, session: &str, rank: u32) -> bool {
        self.store.get(&info(&self.keys, session, rank)).is_ok_and(|info| info.is_some())
    }
}

impl Drop for Meeting<'_> {
    fn drop(&mut self) {
        let text = "its creation ended without a reason".to_owned();
        let cause = Cause { kind: accl_types::ErrorKind::Internal, origin: self.spec.rank, text };
        self.end_with(&Why::Failed(cause));
        if let Some(what) = self.leads.take() {
            self.attempts.led.lock().remove(&what);
        }
    }
}

/// Returns an error of this rank in the form that the other ranks receive.
fn cause_of(spec: &GroupSpec, error: &Error) -> Cause {
    Cause { kind: error.kind, origin: spec.rank, text: error.message.clone() }
}

/// Returns the error of a rank that learns that another rank could not create the group.
fn gave_up(cause: &Cause) -> Error {
    let text = format!("rank {} could not create the group: {}", cause.origin, cause.text);
    Error::new(cause.kind, text).with_peer(cause.origin)
}

enum Standing {
    Open,
    Over(Why),
}

fn info(keys: &str, session: &str, rank: u32) -> String {
    format!("{keys}/{session}/info/{rank}")
}

fn participants(keys: &str, session: &str) -> String {
    format!("{keys}/{session}/roster")
}

/// Returns the prefix of the keys of an exchange round in a session.
fn exchange(keys: &str, session: &str, round: u32) -> String {
    format!("{keys}/{session}/told/{round}")
}

fn exchanged_text(round: &str, rank: u32) -> String {
    format!("{round}/{rank}")
}

fn exchanged_texts(round: &str) -> String {
    format!("{round}/all")
}

fn ready(keys: &str, session: &str) -> String {
    format!("{keys}/{session}/ready")
}

/// Returns the key that counts the ranks that make no more requests, in a session that ended without a group.
fn silent(keys: &str, session: &str) -> String {
    format!("{keys}/{session}/silent")
}

fn why_key(keys: &str, session: &str) -> String {
    format!("{keys}/{session}/why")
}

/// Returns the key under which a rank writes why it could not create the group; it belongs to no session.
fn refused(keys: &str, rank: u32) -> String {
    format!("{keys}/refused/{rank}")
}

/// Pauses that grow with the time waited.
struct Pace(Instant);

impl Pace {
    fn new() -> Self {
        Self(Instant::now())
    }

    /// Returns whether the wait has lasted long enough that an additional request does not matter.
    fn is_long(&self) -> bool {
        self.0.elapsed() >= POLL_INTERVAL
    }

    fn pause(&self) {
        std::thread::sleep((self.0.elapsed() / PAUSE_PART).clamp(SHORTEST_PAUSE, LONGEST_PAUSE));
    }
}
