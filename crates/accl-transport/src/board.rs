//! The board of a process: a page on which its peers and its poller post which links have events.
//!
//! The page holds a bit for each link, and a state word that says which lines hold bits and whether the process sleeps.
//! A post writes memory twice. The result of the second write shows whether the posting side must wake the sleeper.
//! The page lies in shared memory that peers have mapped. If there is no shared memory, the page is private and links
//! over shared memory are not created.
//! Owns no descriptor that wakes. Read [`Notices`] first.

use std::os::fd::{AsFd, BorrowedFd};

use accl_wire::{NewsBoard, Slot};
use rustix::io::Errno;

use crate::fork::{Fd, fork_generation};
use crate::mapping::{Mapping, PAGE};
use crate::sync::{AtomicU64, Ordering};

/// Flag of the state: the process sleeps, or is about to. The side that posts first wakes it.
const LISTENS: u64 = 1 << 63;
/// Words of one cache line. One bit of the state says that one of them is not 0.
const WORDS_OF_A_LINE: usize = 8;
const BITS: usize = u64::BITS as usize;
/// Number of lines of words; the state needs a bit for each, and one for [`LISTENS`].
const LINES: usize = (PAGE - 128) / (WORDS_OF_A_LINE * size_of::<u64>());
/// Number of links that can have a slot.
pub(crate) const SLOTS: usize = LINES * WORDS_OF_A_LINE * BITS;

const _: () = assert!(LINES < 63 && size_of::<Notices>() <= PAGE);

/// Content of the page. All zero is the initial state.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Notices<const N: usize = LINES> {
    /// [`LISTENS`], and the lines in which something was posted.
    state: AtomicU64,
    /// Keeps the lines apart from the state's cache line, which is polled again and again.
    _apart: [u64; 15],
    lines: [[AtomicU64; WORDS_OF_A_LINE]; N],
}

impl<const N: usize> Notices<N> {
    pub(crate) fn new() -> Self {
        let line = |_| std::array::from_fn(|_| AtomicU64::new(0));
        Notices { state: AtomicU64::new(0), _apart: [0; 15], lines: std::array::from_fn(line) }
    }

    /// Returns the words that are not 0, with their byte offsets.
    #[cfg(all(test, not(accl_loom)))]
    pub(crate) fn words(&self) -> Vec<(usize, u64)> {
        let words = self.lines.as_flattened();
        let at = |word: &AtomicU64| std::ptr::from_ref(word).addr() - std::ptr::from_ref(self).addr();
        let all = std::iter::once(&self.state).chain(words).map(|word| (at(word), word.load(Ordering::Relaxed)));
        all.filter(|&(_, bits)| bits != 0).collect()
    }

    /// Posts an event of a link. Returns `true` if the caller must wake the process.
    pub(crate) fn post(&self, slot: Slot) -> bool {
        let (word, bit) = (slot.0 as usize / BITS, slot.0 as usize % BITS);
        let (line, word) = (word / WORDS_OF_A_LINE, word % WORDS_OF_A_LINE);
        // A peer chooses the slot; a slot that does not exist belongs to no link.
        let Some(words) = self.lines.get(line) else { return false };
        // Release: a reader of the bit also sees what was published before. The reader may take the bit before the
        // line's bit is set; it then finds nothing when it follows the line's bit.
        words[word].fetch_or(1 << bit, Ordering::Release);
        // The first post to a sleeper wakes it; later posts find the bit of the first.
        self.state.fetch_or(1 << line, Ordering::AcqRel) == LISTENS
    }

    /// See [`NewsBoard::take`].
    pub(crate) fn take(&self, found: &mut dyn FnMut(Slot)) {
        // Relaxed: what is posted meanwhile is seen the next time, or by `listen`.
        if self.state.load(Ordering::Relaxed) & !LISTENS == 0 {
            return;
        }
        let mut lines = self.state.fetch_and(LISTENS, Ordering::Acquire) & !LISTENS;
        while lines != 0 {
            let line = lines.trailing_zeros() as usize;
            lines &= lines - 1;
            let Some(words) = self.lines.get(line) else { continue };
            for (index, word) in words.iter().enumerate() {
                if word.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let mut bits = word.swap(0, Ordering::Acquire);
                while bits != 0 {
                    let bit = bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    found(Slot(((line * WORDS_OF_A_LINE + index) * BITS + bit) as u32));
                }
            }
        }
    }

    /// See [`NewsBoard::listen`].
    pub(crate) fn listen(&self) -> bool {
        self.state.fetch_or(LISTENS, Ordering::AcqRel) & !LISTENS != 0
    }

    /// See [`NewsBoard::mute`].
    pub(crate) fn mute(&self) {
        // Relaxed: a peer that still sees the flag only wakes once too often.
        if self.state.load(Ordering::Relaxed) & LISTENS != 0 {
            self.state.fetch_and(!LISTENS, Ordering::Relaxed);
        }
    }
}

/// Location of a board's page.
#[derive(Debug)]
enum Place {
    Shared(Mapping, Fd),
    /// A page of this process alone, and the reason why it is not shared.
    Own(Box<Notices>, String),
}

/// The board of this process.
#[derive(Debug)]
pub(crate) struct Board {
    place: Place,
    /// Fork generation that created the board. In a forked child the page is the parent's.
    generation: u64,
}

impl Board {
    /// Creates an empty board.
    pub(crate) fn new() -> Board {
        let place =
            shared().map_or_else(|why| Place::Own(Box::new(Notices::new()), why), |(page, fd)| Place::Shared(page, fd));
        Board { place, generation: fork_generation() }
    }

    fn notices(&self) -> &Notices {
        match &self.place {
            Place::Shared(page, _) => on(page),
            Place::Own(notices, _) => notices,
        }
    }

    fn is_ours(&self) -> bool {
        self.generation == fork_generation()
    }

    /// Returns the descriptor that peers pass to [`PeerBoard::open`].
    ///
    /// # Errors
    /// A clause with the reason why there is no descriptor.
    pub(crate) fn descriptor(&self) -> Result<BorrowedFd<'_>, String> {
        match &self.place {
            Place::Shared(_, fd) => Ok(fd.as_fd()),
            Place::Own(_, why) => Err(format!("no event bitmap in shared memory: {why}")),
        }
    }

    /// Posts an event of a link of this process. Returns `true` if the caller must wake the process.
    pub(crate) fn post(&self, slot: Slot) -> bool {
        self.is_ours() && self.notices().post(slot)
    }
}

impl NewsBoard for Board {
    fn take(&self, found: &mut dyn FnMut(Slot)) {
        if self.is_ours() {
            self.notices().take(found);
        }
    }

    fn listen(&self) -> bool {
        self.is_ours() && self.notices().listen()
    }

    fn mute(&self) {
        if self.is_ours() {
            self.notices().mute();
        }
    }
}

/// The board of a peer.
#[derive(Debug)]
pub(crate) struct PeerBoard(Mapping);

impl PeerBoard {
    /// Maps the peer's page.
    ///
    /// # Errors
    /// A clause that names what does not fit or what the system refused.
    pub(crate) fn open(fd: BorrowedFd<'_>) -> Result<PeerBoard, String> {
        let page = Mapping::open(fd, PAGE)?;
        fill(&page, fd)?;
        Ok(PeerBoard(page))
    }

    /// Posts an event of one of the peer's links. Returns `true` if the caller must wake the peer.
    pub(crate) fn post(&self, slot: Slot) -> bool {
        on(&self.0).post(slot)
    }
}

fn on(page: &Mapping) -> &Notices {
    // SAFETY: the page is mapped, aligned, filled and large enough, and valid in every bit pattern. It holds only
    // atomics, and bytes that no code reads or writes.
    unsafe { page.base().cast::<Notices>().as_ref() }
}

fn shared() -> Result<(Mapping, Fd), String> {
    let (page, fd) = Mapping::create("accl-board", PAGE)?;
    fill(&page, fd.as_fd())?;
    Ok((page, fd))
}

fn fill(page: &Mapping, fd: BorrowedFd<'_>) -> Result<(), String> {
    match page.fill(0, PAGE) {
        Err(Errno::INVAL) => page.fill_all(fd),
        filled => filled.map_err(|why| format!("cannot allocate {PAGE} bytes of shared memory: {why}")),
    }
}

#[cfg(all(test, not(accl_loom)))]
mod tests {
    use super::*;

    fn taken(notices: &Notices) -> Vec<u32> {
        let mut slots = Vec::new();
        notices.take(&mut |slot| slots.push(slot.0));
        slots
    }

    #[test]
    fn what_is_posted_is_taken_once() {
        let notices = Notices::<LINES>::new();
        let slots = [0, 1, 63, 64, 511, 512, 4097, SLOTS as u32 - 1];
        slots.iter().chain(&slots).for_each(|&slot| assert!(!notices.post(Slot(slot)), "nobody listens"));
        assert_eq!(taken(&notices), slots);
        assert_eq!(taken(&notices), []);
    }

    #[test]
    fn the_first_post_to_a_listener_wakes_it_and_the_next_do_not() {
        let notices = Notices::<LINES>::new();
        assert!(!notices.listen());
        assert!(notices.post(Slot(700)));
        assert!(!notices.post(Slot(3)) && !notices.post(Slot(700)));
        notices.mute();
        assert_eq!(taken(&notices), [3, 700]);
        assert!(!notices.post(Slot(700)), "it does not listen any more");
        assert!(notices.listen(), "who begins to listen when something was posted must not sleep");
    }

    #[test]
    fn a_slot_that_there_is_not_is_nobodys() {
        let notices = Notices::<LINES>::new();
        notices.listen();
        assert!(!notices.post(Slot(SLOTS as u32)) && !notices.post(Slot(u32::MAX)));
        assert_eq!(taken(&notices), []);
    }

    #[test]
    fn a_peer_posts_on_the_page_of_this_process() {
        let board = Board::new();
        let peer = PeerBoard::open(board.descriptor().unwrap()).unwrap();
        assert!(!board.listen());
        assert!(peer.post(Slot(40)));
        let mut slots = Vec::new();
        board.take(&mut |slot| slots.push(slot.0));
        assert_eq!(slots, [40]);
    }
}

#[cfg(all(test, accl_loom))]
mod loom_tests {
    use loom::sync::{Arc, Notify};

    use super::*;

    /// Two peers post to a process that sleeps when nothing was posted. It finds both posts in every interleaving.
    #[test]
    fn loom_no_post_is_lost_to_a_sleeper() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shared = Arc::new((Notices::<1>::new(), Notify::new()));
            let peers: Vec<_> = (0..2)
                .map(|peer| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || {
                        if shared.0.post(Slot(peer * 64)) {
                            shared.1.notify();
                        }
                    })
                })
                .collect();
            let mut found = 0;
            while found < 2 {
                shared.0.take(&mut |_| found += 1);
                if found == 2 {
                    break;
                }
                if !shared.0.listen() {
                    shared.1.wait();
                }
                shared.0.mute();
            }
            peers.into_iter().for_each(|peer| peer.join().unwrap());
        });
    }
}
