//! How the ranks of a group find each other in a store that may outlive them: sessions, and who agrees to what.
//!
//! Owns the keys and the order of questions; the texts are in [`texts`], connections are made by `accl-transport`. Read
//! [`Meeting`] first.
//!
//! **The difficulty.** A store survives the processes that wrote into it: elastic launchers start new processes over the
//! same store, with the same ranks and group names, and an old one may have died between any two of its questions. So
//! nothing that is found in the store says that its writer lives. Counting does not help either: ranks that died at
//! different moments leave different counts, and the restart counts of launchers are counted by each host alone.
//!
//! **Sessions.** Rank 0 *leads*. It makes up a name that nobody had before (its process's random identity and a counter)
//! and says it in the *notice*, the one key with a fixed name. A rank answers by writing its info under the session's
//! name. Who answers has read a name that is fresh, so it lived when the session began. When all have answered the leader
//! writes the *roster* of all infos; the notice is not written again, since another leader may have put its own there. A rank goes by a roster only if its own info of this very making is in it: then the
//! leader lived after the answer. What earlier processes left has another session's name, or lacks the reader.
//!
//! **The end is agreed, too.** Ranks that have the roster connect, and then count themselves in at the key `ready`. The
//! group is made when the count reaches the world; before that, no rank has returned, so that everybody can still start
//! over or fail together. Whoever ends a session early writes why and subtracts [`ENDED`] from the count, so that it can
//! never get there; the same counter says which of the two came first. It ends as
//! * *failed*, by a rank that gives up: all others fail with its cause;
//! * *moved*, by a rank that finds another process in its place of the roster, its dead predecessor as a rule: all come
//!   back and answer the leader's next session;
//! * *taken*, by a new rank 0 over what another one left: as moved for all, and an error for the other one if it lives.
//!
//! | died | what the others see |
//! |---|---|
//! | a rank, before it answered | the leader waits; the successor answers the same session |
//! | a rank, after it answered, before the roster | the successor overwrites the info |
//! | a rank, after the roster | connecting is refused; the successor is not in the roster and moves the session |
//! | the leader, at any time | its successor takes the session and starts another; who answered the old one follows the notice |
//! | anybody, after the group was made | it is lost like any peer, and the group fails |
//!
//! Where all ranks were there and no group is made, each counts itself in at `silent` with its last question, and the leader returns when all have, or
//! after two seconds: the store is its process's as a rule, and ends with it.
//!
//! A rank that cannot even publish an endpoint says so in place of its info. When all ranks have answered the leader writes that in place of the
//! roster, and all fail with it. The rank itself waits for this ten seconds at most. If not all have come by then, it leaves its cause under a fixed
//! name, as a hint: ranks that come later still wait for a group, and quote the hint if there is none at their deadline.
//!
//! A member of the job's own group that is seen to have gone, on a link that exists already, ends the making of a
//! sub-group at once: it will not come back into this job.
//!
//! **What ranks tell one another.** Devices of some kinds need to know those of the other ranks. With the roster, before it counts itself in,
//! each rank then writes what it tells under the session's name, and rank 0 writes all of it in one place. Once more when its device is set up:
//! no device lets packets in before those of all ranks are. Both are of that session: when that moves, all tell anew.
//!
//! **Several at once.** Threads of one process may make groups over the same keys: those that lead take turns, and one that
//! answers in another's place waits for the next session. A second living process with the same rank is found out when it stands in this rank's place
//! twice, since the second session began after this process was there. One that comes after the group was made hears
//! nothing: it may as well be the first of the next attempt, and waits for the others of it until its deadline.
//!
//! **Cost.** The leader reads one info a rank and writes the roster; every other rank asks a constant number of
//! questions. Who waits asks for two small values, in pauses that grow with the time waited, so that a long wait costs ten
//! questions a second.
//!
//! **Nothing is left.** With the group made, the leader deletes its notice, each its own info, and counts itself out at
//! `ready`; the last deletes that and the roster. Sessions that ended early are named in the next notices, and the leader
//! whose group is made deletes what is left of them. Who is still in one of them sees that the notice is another one's.

mod texts;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use accl_types::{Error, Result};
use accl_wire::frame::Cause;

use crate::api::spec::GroupSpec;
use crate::session::store::Store;
use crate::sync::Mutex;
use accl_types::hash::hash_words;

pub(crate) use texts::RankInfo;
use texts::{
    Notice, Phase, Why, refusal_from_text, refusal_to_text, roster_from_text, roster_to_text, settings_differ,
    told_from_text, told_to_text,
};

/// Subtracted from the count of a session that is over. More than any world, twice.
const ENDED: i64 = 1 << 40;
/// Pauses between two questions: this part of the time waited so far, within these bounds.
const PAUSE_PART: u32 = 8;
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Between two looks for interrupts and for members that have gone.
const LOOK: Duration = Duration::from_millis(50);
/// How long the leader of a group that is not made waits until the others know why: the store is its process's as a rule, and ends with it.
const LAST_QUESTIONS: Duration = Duration::from_secs(2);
/// Who is connected waits so much longer than the deadline: a rank that is not may be about to say why.
const GRACE: Duration = Duration::from_secs(2);

/// What came of a session.
pub(crate) enum Outcome {
    Made,
    /// It is over without a group: gather again.
    Moved,
}

/// What the makings of one process know of each other.
#[derive(Default)]
pub(crate) struct Makings {
    /// How many groups this process has confirmed.
    confirmed: AtomicU64,
    /// Names and keys of the groups that a thread leads just now.
    led: Mutex<HashSet<String>>,
}

/// The making of one group by one rank. Whoever drops it before all have confirmed has given up, which tells the
/// others.
pub(crate) struct Meeting<'a> {
    spec: &'a GroupSpec,
    store: &'a dyn Store,
    mine: &'a RankInfo,
    /// What the session's names begin with.
    label: &'a str,
    /// All keys of this group begin so.
    keys: String,
    /// The session that this rank leads or has answered.
    session: Option<String>,
    /// How many sessions this rank has led.
    led: u64,
    makings: &'a Makings,
    /// How many groups this process had confirmed when this rank answered.
    confirmed_before: u64,
    /// What this rank leads, in `makings`.
    leads: Option<String>,
    /// Sessions that are over for this rank.
    past: HashSet<String>,
    /// Of the leader: sessions to clean up after, and their worlds.
    earlier: Vec<(String, u32)>,
    /// Who stood in this rank's place: identity and words.
    beaten_by: Vec<([u8; 16], String)>,
    /// The world that a leader has announced, if it is not ours.
    other_world: Option<u32>,
    began: Instant,
    deadline: Instant,
    looked: Instant,
    /// How often all ranks have told something in this session, and most often in any: keys to clean up.
    rounds: u32,
    most_rounds: u32,
    /// Whether the group's end needs no word to the others: it is made, or nobody was met.
    concluded: bool,
    /// The last session in which all ranks were there.
    complete: Option<String>,
    /// Why this rank cannot make the group, if it takes part to say so.
    refusal: Option<Cause>,
}

impl<'a> Meeting<'a> {
    /// Asks nothing yet. `label` begins the names of the sessions that this rank leads, for whoever looks at the store.
    pub(crate) fn new(
        spec: &'a GroupSpec,
        store: &'a dyn Store,
        mine: &'a RankInfo,
        label: &'a str,
        makings: &'a Makings,
        deadline: Instant,
    ) -> Self {
        let now = Instant::now();
        Self {
            spec,
            store,
            mine,
            label,
            // torch gives disjoint sub-groups of one parent the same name and keys: the ranks in the job tell them apart.
            keys: format!("accl/{:016x}", hash_words(spec.global_ranks.iter().copied())),
            session: None,
            led: 0,
            makings,
            confirmed_before: 0,
            leads: None,
            past: HashSet::new(),
            earlier: Vec::new(),
            beaten_by: Vec::new(),
            other_world: None,
            began: now,
            deadline,
            looked: now,
            rounds: 0,
            most_rounds: 0,
            concluded: false,
            complete: None,
            refusal: None,
        }
    }

    /// Takes part only to let the others know why this rank cannot make the group: they and it fail with that.
    pub(crate) fn refusing(mut self, error: &Error) -> Self {
        self.refusal = Some(cause_of(self.spec, error));
        self
    }

    /// All ranks' infos in rank order. `look` is called now and then while this waits, and ends it with an error.
    ///
    /// # Errors
    /// `Timeout` listing the ranks that did not come; `Configuration` when settings differ; `Rendezvous` when the store
    /// fails or two processes claim one rank; the cause of a rank that gave up; what `look` says.
    pub(crate) fn gather(&mut self, look: &mut dyn FnMut() -> Result<()>) -> Result<Vec<RankInfo>> {
        let infos = if self.spec.world == 1 {
            vec![self.mine.clone()]
        } else if self.spec.rank.0 == 0 {
            self.lead(look)?
        } else {
            self.answer(look)?
        };
        self.complete.clone_from(&self.session);
        match infos.iter().position(|info| info.agreed != self.mine.agreed) {
            Some(rank) => Err(settings_differ(self.mine, &infos[rank], self.spec.rank.0, rank)),
            None => Ok(infos),
        }
    }

    /// A name that no other session has.
    pub(crate) fn session(&self) -> &str {
        self.session.as_deref().unwrap_or_default()
    }

    /// Whether the session goes on, for ranks that connect. Otherwise gather again.
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

    /// Tells all ranks something, and returns what they have told, in rank order; all ranks do as often, or none. `None`: the session is over,
    /// gather again.
    ///
    /// # Errors
    /// As [`Meeting::gather`]; `Rendezvous` when the store holds something else.
    pub(crate) fn exchange(&mut self, text: &str, look: &mut dyn FnMut() -> Result<()>) -> Result<Option<Vec<String>>> {
        let Some(session) = self.session.clone() else { return Ok(Some(vec![text.to_owned()])) };
        let rank = self.spec.rank.0;
        self.rounds += 1;
        self.most_rounds = self.most_rounds.max(self.rounds);
        let round = told(&self.keys, &session, self.rounds);
        let all = told_by_all(&round);
        if rank != 0 {
            self.store.set(&told_by(&round, rank), text.as_bytes())?;
        }
        let mut told = vec![text.to_owned()];
        let pace = Pace::new();
        loop {
            if rank != 0 {
                if let Some(text) = self.text(&all)? {
                    told = told_from_text(&text)?;
                    break;
                }
            } else if told.len() == self.spec.world as usize {
                self.store.set(&all, told_to_text(&told).as_bytes())?;
                break;
            } else if let Some(text) = self.text(&told_by(&round, told.len() as u32))? {
                told.push(text);
                continue;
            }
            let standing = if pace.is_long() { self.standing_of_mine(&session)? } else { self.standing(&session)? };
            match standing {
                Standing::Open | Standing::Over(Why::Complete) => {}
                Standing::Over(why) => return self.leave(why).map(|()| None),
            }
            if Instant::now() >= self.deadline + GRACE {
                return Err(self.untold(&round));
            }
            self.pause(&pace, look)?;
        }
        if told.len() != self.spec.world as usize || told[self.spec.rank.index()] != text {
            return Err(Error::rendezvous(
                "the store holds something that is not what the ranks of this group have told",
            ));
        }
        Ok(Some(told))
    }

    /// Says that this rank has all that the group needs, and waits until all ranks have said so.
    ///
    /// # Errors
    /// As [`Meeting::gather`].
    pub(crate) fn confirm(&mut self, look: &mut dyn FnMut() -> Result<()>) -> Result<Outcome> {
        let Some(session) = self.session.clone() else {
            self.concluded = true;
            return Ok(Outcome::Made);
        };
        let pace = Pace::new();
        self.makings.confirmed.fetch_add(1, Ordering::SeqCst);
        let is_last = self.store.add(&ready(&self.keys, &session), 1)? == i64::from(self.spec.world);
        let mut standing = if is_last { Standing::Over(Why::Complete) } else { self.standing(&session)? };
        loop {
            match standing {
                Standing::Over(Why::Complete) => break,
                Standing::Over(why) => return self.leave(why).map(|()| Outcome::Moved),
                Standing::Open if Instant::now() >= self.deadline + GRACE => return Err(self.unconnected()),
                Standing::Open => self.pause(&pace, look)?,
            }
            standing = if pace.is_long() { self.standing_of_mine(&session)? } else { self.standing(&session)? };
        }
        self.concluded = true;
        self.clean_up(&session).unwrap_or_else(|why| tracing::debug!("keys stay in the store: {why}"));
        Ok(Outcome::Made)
    }

    /// Of a rank that takes part to refuse: writes why for ranks that come when it has gone. They still wait for a group, since another process
    /// may have its place by then, and quote this when they have waited in vain.
    pub(crate) fn leave_hint(&self) {
        if let Some(cause) = self.refusal.as_ref().filter(|_| self.complete.is_none()) {
            // Without a hint the others name the rank alone.
            let _ = self.store.set(&refused(&self.keys, self.spec.rank.0), refusal_to_text(cause).as_bytes());
        }
    }

    /// Tells the others why there will be no group, unless they know.
    pub(crate) fn give_up(mut self, error: &Error) {
        self.end_with(&Why::Failed(cause_of(self.spec, error)));
    }

    // ---- rank 0

    fn lead(&mut self, look: &mut dyn FnMut() -> Result<()>) -> Result<Vec<RankInfo>> {
        if self.led == 0 {
            self.await_turn(look)?;
            self.take_over()?;
        }
        loop {
            let uuid = u128::from_be_bytes(self.mine.info.uuid);
            let session = format!("{}{uuid:032x}-{}-{}", self.label, self.mine.counter, self.led);
            self.led += 1;
            (self.session, self.rounds) = (Some(session.clone()), 0);
            self.say(&session, Phase::Gathering)?;
            if let Some(infos) = self.collect(&session, look)? {
                // The notice stays as it is: by now it may be another leader's.
                self.store.set(&roster(&self.keys, &session), roster_to_text(&infos).as_bytes())?;
                return Ok(infos);
            }
        }
    }

    /// Waits until no other thread of this process leads over the same keys: their notices would stand in each other's place.
    fn await_turn(&mut self, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let pace = Pace::new();
        let what = format!("{} {}", self.spec.name, self.keys);
        loop {
            if self.makings.led.lock().insert(what.clone()) {
                self.leads = Some(what);
                return Ok(());
            }
            if Instant::now() >= self.deadline {
                let text = "another thread of this process still makes a group over the same store and name";
                return Err(self.timed_out(text));
            }
            self.pause(&pace, look)?;
        }
    }

    /// Ends what an earlier leader left.
    fn take_over(&mut self) -> Result<()> {
        // What makes no sense is written over.
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

    /// The infos of all ranks; `None` when the session has moved.
    fn collect(&mut self, session: &str, look: &mut dyn FnMut() -> Result<()>) -> Result<Option<Vec<RankInfo>>> {
        let mut infos = vec![self.mine.clone()];
        let mut refusal = self.refusal.clone();
        let pace = Pace::new();
        // One after the other: while one is missing nothing can go on, and the rest is asked for when it has come.
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
            // Two that began at the same moment did not see each other's notice.
            if let Some(notice) = self.notice()?.filter(|notice| notice.uuid != self.mine.info.uuid) {
                self.leave_session(session);
                return Err(self.taken(&notice.process));
            }
            if Instant::now() >= self.deadline {
                return Err(self.incomplete(Some(session)));
            }
            self.pause(&pace, look)?;
        }
        if let Some(cause) = refusal {
            self.store.set(&roster(&self.keys, session), refusal_to_text(&cause).as_bytes())?;
            return self.refused(session, cause).map(|()| None);
        }
        Ok(Some(infos))
    }

    /// All ranks were there, and one of them cannot make the group.
    fn refused(&mut self, session: &str, cause: Cause) -> Result<()> {
        let why = Why::Failed(cause);
        self.complete = Some(session.to_owned());
        self.end(session, i64::from(self.spec.world), &why)?;
        self.leave(why)
    }

    // ---- the others

    fn answer(&mut self, look: &mut dyn FnMut() -> Result<()>) -> Result<Vec<RankInfo>> {
        let pace = Pace::new();
        loop {
            if let Some(infos) = self.follow()? {
                return Ok(infos);
            }
            if Instant::now() >= self.deadline {
                let session = self.session.clone();
                return Err(self.incomplete(session.as_deref()));
            }
            self.pause(&pace, look)?;
        }
    }

    /// One look at the notice, and what follows from it. The roster when it is there and has this rank.
    fn follow(&mut self) -> Result<Option<Vec<RankInfo>>> {
        let notice = self.notice()?;
        if notice.is_none() && self.session.is_some() {
            return self.made_without();
        }
        let notice = notice.filter(|notice| notice.phase != Phase::Over);
        if let Some(mine) = self.session.clone()
            && notice.as_ref().is_none_or(|notice| notice.session != mine)
        {
            // Its leader failed, or was replaced.
            let why = match self.standing(&mine)? {
                Standing::Open => Why::Moved,
                Standing::Over(why) => why,
            };
            // All ranks were there although this one has not seen it, and its leader waits for the last question of each.
            if matches!(why, Why::Failed(_)) && self.text(&roster(&self.keys, &mine))?.is_some() {
                self.complete = Some(mine);
            }
            self.leave(why)?;
        }
        let Some(notice) = notice else { return Ok(None) };
        if notice.world != self.spec.world {
            // As a rule a leader of another time, with fewer or more hosts.
            self.other_world = Some(notice.world);
            return Ok(None);
        }
        if self.past.contains(&notice.session) {
            return Ok(None);
        }
        if let Some(text) = self.text(&roster(&self.keys, &notice.session))? {
            return self.read_roster(&notice.session, &text);
        }
        if self.session.is_none() {
            // Why an earlier attempt failed is not why this one does; its leader may have died without a word.
            if let Standing::Over(_) = self.standing(&notice.session)? {
                self.past.insert(notice.session);
                return Ok(None);
            }
            let key = info(&self.keys, &notice.session, self.spec.rank.0);
            self.confirmed_before = self.makings.confirmed.load(Ordering::SeqCst);
            // Before the store is asked: the others hear of it also if that fails.
            (self.session, self.rounds) = (Some(notice.session), 0);
            let text = self.refusal.as_ref().map_or_else(|| self.mine.to_text(), refusal_to_text);
            self.store.set(&key, text.as_bytes())?;
        }
        Ok(None)
    }

    fn read_roster(&mut self, session: &str, text: &str) -> Result<Option<Vec<RankInfo>>> {
        if let Some(cause) = refusal_from_text(text)? {
            return match self.session.as_deref() == Some(session) {
                true => self.refused(session, cause).map(|()| None),
                false => {
                    self.leave_session(session);
                    Ok(None)
                }
            };
        }
        let infos = roster_from_text(text)?;
        let Some(member) = infos.get(self.spec.rank.index()).filter(|_| infos.len() == self.spec.world as usize) else {
            return Err(Error::rendezvous(format!("a roster of {} ranks for {}", infos.len(), self.spec.world)));
        };
        if member.is_same_making(self.mine) && self.session.as_deref() == Some(session) {
            return Ok(Some(infos));
        }
        self.leave_session(session);
        let (uuid, words) = (member.info.uuid, member.info.host_and_pid());
        if uuid == self.mine.info.uuid {
            // Another thread's, or one of before.
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
        let count: i64 =
            count.parse().map_err(|_| Error::rendezvous(format!("the store holds `{count}` for a count of ranks")))?;
        if count >= i64::from(self.spec.world) {
            return Ok(Standing::Over(Why::Complete));
        }
        if count >= 0 {
            return Ok(Standing::Open);
        }
        // It was written before the count was changed.
        let why = self.store.get(&why_key(&self.keys, session))?;
        Ok(Standing::Over(why.map_or(Ok(Why::Moved), |why| Why::from_bytes(&why))?))
    }

    /// As [`Meeting::standing`], for the session of this rank: a leader that replaced it and made its group has cleaned up, and
    /// then only the notice tells.
    fn standing_of_mine(&self, session: &str) -> Result<Standing> {
        let standing = self.standing(session)?;
        if !matches!(standing, Standing::Open) {
            return Ok(standing);
        }
        let notice = self.notice()?;
        if notice.as_ref().is_some_and(|notice| notice.session == session) {
            return Ok(Standing::Open);
        }
        // The notice goes also when this session has come to its end.
        let standing = self.standing(session)?;
        if !matches!(standing, Standing::Open) {
            return Ok(standing);
        }
        let process = notice.map_or_else(|| "which is in the group".to_owned(), |notice| notice.process);
        Ok(Standing::Over(Why::Taken(process)))
    }

    /// Ends a session unless it is over.
    fn end(&self, session: &str, world: i64, why: &Why) -> Result<()> {
        if let Standing::Over(_) = self.standing(session)? {
            return Ok(());
        }
        let key = why_key(&self.keys, session);
        self.store.set(&key, &why.to_bytes())?;
        if self.store.add(&ready(&self.keys, session), -ENDED)? + ENDED >= world {
            // The last rank was faster.
            self.store.set(&key, &Why::Complete.to_bytes())?;
        }
        Ok(())
    }

    /// This rank's session is over. Without an error it may meet the others in another one.
    fn leave(&mut self, why: Why) -> Result<()> {
        if let Some(session) = self.session.clone() {
            self.leave_session(&session);
        }
        match why {
            // Who hears of it has nothing to add.
            Why::Failed(cause) => Err(gave_up(&cause)),
            Why::Taken(process) if self.spec.rank.0 == 0 => Err(self.taken(&process)),
            Why::Taken(_) | Why::Moved | Why::Complete => Ok(()),
        }
    }

    /// Nothing in this session is for this rank any more.
    fn leave_session(&mut self, session: &str) {
        self.past.insert(session.to_owned());
        if self.session.as_deref() == Some(session) {
            self.session = None;
            if self.spec.rank.0 == 0 {
                self.earlier.push((session.to_owned(), self.spec.world));
            } else {
                // An info that stays is garbage, no harm.
                let _ = self.store.delete(&info(&self.keys, session, self.spec.rank.0));
                for round in 1..=self.rounds {
                    let round = told(&self.keys, session, round);
                    let _ = self.store.delete(&told_by(&round, self.spec.rank.0));
                }
            }
        }
    }

    /// With the group made. Who dies in here leaves a few keys that nobody looks at.
    fn clean_up(&mut self, session: &str) -> Result<()> {
        let (rank, world) = (self.spec.rank.0, self.spec.world);
        for (session, world) in std::mem::take(&mut self.earlier) {
            self.delete_session(&session)?;
            for rank in 1..world {
                self.store.delete(&info(&self.keys, &session, rank))?;
                self.delete_told_by(&session, rank)?;
            }
        }
        // Before the roster: who finds the notice and no roster answers. It may be another leader's by now, if this one was
        // stopped for long.
        let is_ours = rank == 0 && self.notice()?.is_some_and(|notice| notice.session == session);
        if is_ours && !self.store.delete(&self.notice_key())? {
            // Or the next making of this process would wait for this one to end.
            self.say(session, Phase::Over)?;
        }
        if rank != 0 {
            self.store.delete(&info(&self.keys, session, rank))?;
            self.delete_told_by(session, rank)?;
        }
        if self.store.add(&ready(&self.keys, session), 1)? == 2 * i64::from(world) {
            self.store.delete(&roster(&self.keys, session))?;
            self.delete_told_by_all(session)?;
            self.store.delete(&ready(&self.keys, session))?;
        }
        Ok(())
    }

    fn delete_session(&self, session: &str) -> Result<()> {
        self.store.delete(&roster(&self.keys, session))?;
        self.delete_told_by_all(session)?;
        self.store.delete(&why_key(&self.keys, session))?;
        self.store.delete(&silent(&self.keys, session))?;
        self.store.delete(&ready(&self.keys, session)).map(drop)
    }

    fn delete_told_by(&self, session: &str, rank: u32) -> Result<()> {
        let rounds = 1..=self.most_rounds;
        rounds
            .map(|round| told(&self.keys, session, round))
            .try_for_each(|round| self.store.delete(&told_by(&round, rank)).map(drop))
    }

    fn delete_told_by_all(&self, session: &str) -> Result<()> {
        let rounds = 1..=self.most_rounds;
        rounds
            .map(|round| told(&self.keys, session, round))
            .try_for_each(|round| self.store.delete(&told_by_all(&round)).map(drop))
    }

    /// Ends this rank's session; errors of the store are none of who gives up.
    fn end_with(&mut self, why: &Why) {
        if std::mem::replace(&mut self.concluded, true) {
            return;
        }
        if let Some(session) = self.session.clone() {
            let _ = self.end(&session, i64::from(self.spec.world), why);
            self.leave_session(&session);
        }
        // The notice may be another leader's by now.
        if let Some((session, world)) = self.earlier.pop()
            && let Ok(Some(notice)) = self.notice()
            && (notice.session == session && notice.uuid == self.mine.info.uuid)
        {
            let notice = Notice { world, phase: Phase::Over, earlier: std::mem::take(&mut self.earlier), ..notice };
            let _ = self.store.set(&self.notice_key(), notice.to_text().as_bytes());
        }
        self.ask_no_more();
    }

    /// This rank has no more questions. The leader's process has the store as a rule, and may end once this returns, so it waits until no other one
    /// has any.
    fn ask_no_more(&mut self) {
        let Some(session) = self.complete.take() else { return };
        let key = silent(&self.keys, &session);
        if self.spec.rank.0 != 0 {
            let _ = self.store.add(&key, 1);
            return;
        }
        let (begin, pace, others) = (Instant::now(), Pace::new(), i64::from(self.spec.world) - 1);
        while begin.elapsed() < LAST_QUESTIONS {
            // A store that fails has nobody who waits for it.
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

    fn pause(&mut self, pace: &Pace, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            look()?;
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
            "rank {} is taken by another process, {process}; give every process a rank of its own",
            self.spec.rank
        ))
    }

    /// The notice goes with the group made only. It was made although this rank had answered: another one with its rank
    /// confirmed after that.
    fn made_without<T>(&mut self) -> Result<Option<T>> {
        if let Some(session) = self.session.clone() {
            self.leave_session(&session);
        }
        // It was a thread of this process, as it seems, and this one's turn comes.
        if self.makings.confirmed.load(Ordering::SeqCst) != self.confirmed_before {
            return Ok(None);
        }
        Err(self.taken("which is in the group"))
    }

    /// The deadline passed before all had told what the others need.
    fn untold(&self, round: &str) -> Error {
        let is_missing = |rank: &u32| self.store.get(&told_by(round, *rank)).is_ok_and(|text| text.is_none());
        let mut missing: Vec<String> = (1..self.spec.world).filter(is_missing).map(|rank| rank.to_string()).collect();
        if missing.is_empty() {
            missing.push("0".to_owned());
        }
        let missing = missing.join(", ");
        self.timed_out(&format!(
            "what all ranks tell of their devices: ranks {missing} have not; raise the timeout, or see what they say"
        ))
    }

    fn unconnected(&self) -> Error {
        self.timed_out("all ranks to be connected with each other; raise the timeout, or see what the others say")
    }

    /// The deadline passed before all were there.
    fn incomplete(&self, session: Option<&str>) -> Error {
        let (mine, world) = (self.spec.rank.0, self.spec.world);
        let is_missing = |rank: &u32| match session {
            // A store that fails now has been heard of before.
            Some(session) => *rank != mine && *rank != 0 && !self.has_info(session, *rank),
            None => *rank == 0,
        };
        let missing: Vec<String> = (0..world).filter(is_missing).map(|rank| rank.to_string()).collect();
        // A rank that has given up ended the session, and then took its info back: it came, and knows who did not.
        if let Some(session) = session
            && let Ok(Standing::Over(Why::Failed(cause))) = self.standing(session)
        {
            return gave_up(&cause);
        }
        if missing.is_empty() {
            // The last info came between the last look and this one.
            return self.timed_out(
                "the group to be complete: the last rank came only when the time was up; raise the timeout",
            );
        }
        let what = format!("the group to be complete: {} of {world} ranks are missing: ", missing.len());
        let mut what = what + &missing.join(", ");
        if mine == 0 && missing.len() + 1 == world as usize {
            what += " (they have not come; or the group is made already and another process has rank 0, too)";
        }
        if session.is_none() {
            what += &format!(
                " (the others wait for it; or the group is made already and another process has rank {mine}, too)"
            );
        }
        if let Some(other) = self.other_world {
            what += &format!(" (a rank 0 was there for a world of {other})");
        }
        if let Some((_, process)) = self.beaten_by.last() {
            what += &format!(" (rank {mine} is taken in its group, by {process})");
        }
        if let Some(cause) = (0..world).filter(|&rank| rank != mine).find_map(|rank| self.hint(rank)) {
            what += &format!(" (rank {} was here and failed: {})", cause.origin, cause.text);
        }
        self.timed_out(&(what + "; start them, or raise the timeout"))
    }

    /// Why a rank could not make the group that has gone since.
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
        let text = "its making ended without a reason".to_owned();
        let cause = Cause { kind: accl_types::ErrorKind::Internal, origin: self.spec.rank, text };
        self.end_with(&Why::Failed(cause));
        if let Some(what) = self.leads.take() {
            self.makings.led.lock().remove(&what);
        }
    }
}

/// An error of this rank, as the others learn of it.
fn cause_of(spec: &GroupSpec, error: &Error) -> Cause {
    Cause { kind: error.kind, origin: spec.rank, text: error.message.clone() }
}

/// The error of a rank that hears that another one could not make the group.
fn gave_up(cause: &Cause) -> Error {
    let text = format!("rank {} could not make the group: {}", cause.origin, cause.text);
    Error::new(cause.kind, text).with_peer(cause.origin)
}

enum Standing {
    Open,
    Over(Why),
}

fn info(keys: &str, session: &str, rank: u32) -> String {
    format!("{keys}/{session}/info/{rank}")
}

fn roster(keys: &str, session: &str) -> String {
    format!("{keys}/{session}/roster")
}

/// What keys begin with of what is told in this round of a session.
fn told(keys: &str, session: &str, round: u32) -> String {
    format!("{keys}/{session}/told/{round}")
}

fn told_by(round: &str, rank: u32) -> String {
    format!("{round}/{rank}")
}

fn told_by_all(round: &str) -> String {
    format!("{round}/all")
}

fn ready(keys: &str, session: &str) -> String {
    format!("{keys}/{session}/ready")
}

/// The count of ranks that ask nothing more in a session that is over without a group.
fn silent(keys: &str, session: &str) -> String {
    format!("{keys}/{session}/silent")
}

fn why_key(keys: &str, session: &str) -> String {
    format!("{keys}/{session}/why")
}

/// Why a rank could not make the group; of no session.
fn refused(keys: &str, rank: u32) -> String {
    format!("{keys}/refused/{rank}")
}

/// Pauses that grow with the time waited.
struct Pace(Instant);

impl Pace {
    fn new() -> Self {
        Self(Instant::now())
    }

    /// Whether the wait has lasted for so long that a question more does not count.
    fn is_long(&self) -> bool {
        self.0.elapsed() >= LOOK
    }

    fn pause(&self) {
        std::thread::sleep((self.0.elapsed() / PAUSE_PART).clamp(SHORTEST_PAUSE, LONGEST_PAUSE));
    }
}
