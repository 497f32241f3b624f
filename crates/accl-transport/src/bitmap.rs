//! The event bitmap of a process: a page on which its peers and its poller post which links have events.
//!
//! The page holds a bit for each link, and a state word that says which lines hold bits and whether the process sleeps.
//! A post writes memory twice. The result of the second write shows whether the posting side must wake the sleeper.
//! The page lies in shared memory that peers have mapped. If there is no shared memory, the page is private and links
//! over shared memory are not created.
//! Owns no descriptor that wakes. Read [`EventBits`] first.

use std::os::fd::{AsFd, BorrowedFd};

use accl_wire::{EventBitmap, Slot};
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

const _: () = assert!(LINES < 63 && size_of::<EventBits>() <= PAGE);

/// Content of the page. All zero is the initial state.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct EventBits<const N: usize = LINES> {
    /// [`LISTENS`], and the lines in which something was posted.
    state: AtomicU64,
    /// Keeps the lines apart from the state's cache line, which is polled again and again.
    _apart: [u64; 15],
    lines: [[AtomicU64; WORDS_OF_A_LINE]; N],
}

impl<const N: usize> EventBits<N> {
    pub(crate) fn new() -> Self {
        let line = |_| std::array::from_fn(|_| AtomicU64::new(0));
        EventBits { state: AtomicU64::new(0), _apart: [0; 15], lines: std::array::from_fn(line) }
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

    /// See [`EventBitmap::take`].
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

    /// See [`EventBitmap::listen`].
    pub(crate) fn listen(&self) -> bool {
        self.state.fetch_or(LISTENS, Ordering::AcqRel) & !LISTENS != 0
    }

    /// See [`EventBitmap::mute`].
    pub(crate) fn mute(&self) {
        // Relaxed: a peer that still sees the flag only wakes once too often.
        if self.state.load(Ordering::Relaxed) & LISTENS != 0 {
            self.state.fetch_and(!LISTENS, Ordering::Relaxed);
        }
    }
}

/// Location of a bitmap's page.
#[derive(Debug)]
enum PageLocation {
    Shared(Mapping, Fd),
    /// A page of this process alone, and the reason why it is not shared.
    Own(Box<EventBits>, String),
}

/// The bitmap of this process.
#[derive(Debug)]
pub(crate) struct ProcessBitmap {
    location: PageLocation,
    /// Fork generation that created the bitmap. In a forked child the page is the parent's.
    generation: u64,
}

impl ProcessBitmap {
    /// Creates an empty bitmap.
    pub(crate) fn new() -> ProcessBitmap {
        let location = shared().map_or_else(
            |why| PageLocation::Own(Box::new(EventBits::new()), why),
            |(page, fd)| PageLocation::Shared(page, fd),
        );
        ProcessBitmap { location, generation: fork_generation() }
    }

    fn bits(&self) -> &EventBits {
        match &self.location {
            PageLocation::Shared(page, _) => on(page),
            PageLocation::Own(bits, _) => bits,
        }
    }

    fn is_ours(&self) -> bool {
        self.generation == fork_generation()
    }

    /// Returns the descriptor that peers pass to [`PeerBitmap::open`].
    ///
    /// # Errors
    /// A clause with the reason why there is no descriptor.
    pub(crate) fn descriptor(&self) -> Result<BorrowedFd<'_>, String> {
        match &self.location {
            PageLocation::Shared(_, fd) => Ok(fd.as_fd()),
            PageLocation::Own(_, why) => Err(format!("no event bitmap in shared memory: {why}")),
        }
    }

    /// Posts an event of a link of this process. Returns `true` if the caller must wake the process.
    pub(crate) fn post(&self, slot: Slot) -> bool {
        self.is_ours() && self.bits().post(slot)
    }
}

impl EventBitmap for ProcessBitmap {
    fn take(&self, found: &mut dyn FnMut(Slot)) {
        if self.is_ours() {
            self.bits().take(found);
        }
    }

    fn listen(&self) -> bool {
        self.is_ours() && self.bits().listen()
    }

    fn mute(&self) {
        if self.is_ours() {
            self.bits().mute();
        }
    }
}

/// The bitmap of a peer.
#[derive(Debug)]
pub(crate) struct PeerBitmap(Mapping);

impl PeerBitmap {
    /// Maps the peer's page.
    ///
    /// # Errors
    /// A clause that names what does not fit or what the system refused.
    pub(crate) fn open(fd: BorrowedFd<'_>) -> Result<PeerBitmap, String> {
        let page = Mapping::open(fd, PAGE)?;
        fill(&page, fd)?;
        Ok(PeerBitmap(page))
    }

    /// Posts an event of one of the peer's links. Returns `true` if the caller must wake the peer.
    pub(crate) fn post(&self, slot: Slot) -> bool {
        on(&self.0).post(slot)
    }
}

fn on(page: &Mapping) -> &EventBits {
    // SAFETY: the page is mapped, aligned, filled and large enough, and valid in every bit pattern. It holds only
    // atomics, and bytes that no code reads or writes.
    unsafe { page.base().cast::<EventBits>().as_ref() }
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

    fn taken(bits: &EventBits) -> Vec<u32> {
        let mut slots = Vec::new();
        bits.take(&mut |slot| slots.push(slot.0));
        slots
    }

    #[test]
    fn what_is_posted_is_taken_once() {
        let bits = EventBits::<LINES>::new();
        let slots = [0, 1, 63, 64, 511, 512, 4097, SLOTS as u32 - 1];
        slots.iter().chain(&slots).for_each(|&slot| assert!(!bits.post(Slot(slot)), "no thread listens"));
        assert_eq!(taken(&bits), slots);
        assert_eq!(taken(&bits), []);
    }

    #[test]
    fn the_first_post_to_a_listener_wakes_it_and_the_next_do_not() {
        let bits = EventBits::<LINES>::new();
        assert!(!bits.listen());
        assert!(bits.post(Slot(700)));
        assert!(!bits.post(Slot(3)) && !bits.post(Slot(700)));
        bits.mute();
        assert_eq!(taken(&bits), [3, 700]);
        assert!(!bits.post(Slot(700)), "it does not listen any more");
        assert!(bits.listen(), "who begins to listen when something was posted must not sleep");
    }

    #[test]
    fn a_slot_out_of_range_belongs_to_no_link() {
        let bits = EventBits::<LINES>::new();
        bits.listen();
        assert!(!bits.post(Slot(SLOTS as u32)) && !bits.post(Slot(u32::MAX)));
        assert_eq!(taken(&bits), []);
    }

    #[test]
    fn a_peer_posts_on_the_page_of_this_process() {
        let bitmap = ProcessBitmap::new();
        let peer = PeerBitmap::open(bitmap.descriptor().unwrap()).unwrap();
        assert!(!bitmap.listen());
        assert!(peer.post(Slot(40)));
        let mut slots = Vec::new();
        bitmap.take(&mut |slot| slots.push(slot.0));
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
            let shared = Arc::new((EventBits::<1>::new(), Notify::new()));
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
