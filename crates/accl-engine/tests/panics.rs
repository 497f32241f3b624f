//! A panic inside the engine is an internal error on every rank, and nobody waits for what it left undone.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use accl_engine::Mode;
use accl_testkit::{Member, World, WorldOptions, finish};
use accl_transport::loopback::{Capacity, LoopbackLink, pair};
use accl_transport::{Frame, Link, Place};
use accl_types::{ErrorKind, ReduceOp, Result};

/// A link that panics once when it is told to.
struct Explosive {
    link: LoopbackLink,
    armed: Arc<AtomicBool>,
}

// SAFETY: the link inside keeps the promise.
unsafe impl Link for Explosive {
    fn max_payload_bytes(&self) -> usize {
        self.link.max_payload_bytes()
    }
    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<Place<'_>>> {
        self.link.try_reserve(payload_bytes)
    }
    fn commit(&mut self) {
        self.link.commit();
    }
    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        assert!(!self.armed.swap(false, Ordering::SeqCst), "the test's link explodes");
        self.link.peek()
    }
    fn release(&mut self) {
        self.link.release();
    }
    fn flush(&mut self) -> Result<bool> {
        self.link.flush()
    }
    fn prepare_park(&mut self, wants_room: bool) -> bool {
        self.link.prepare_park(wants_room)
    }
    fn unpark(&mut self) {
        self.link.unpark();
    }
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.link.fds()
    }
    fn check_peer(&mut self) -> Result<()> {
        self.link.check_peer()
    }
    fn close(&mut self) {
        self.link.close();
    }
    fn transport(&self) -> &'static str {
        self.link.transport()
    }
    fn describe(&self) -> String {
        self.link.describe()
    }
}

fn explode(call: impl Fn(&Member) -> Result<()> + Sync) {
    let world = World::new(WorldOptions { adopt: false, ..WorldOptions::new(2).timeout(Duration::from_secs(5)) });
    let (a, b) = (&world.engines[0], &world.engines[1]);
    let (left, right) = pair(65536 + 256, Capacity::Frames(16), a.waker().unwrap(), b.waker().unwrap());
    let armed = Arc::new(AtomicBool::new(false));
    let started = AtomicBool::new(false);
    a.adopt_link(b.card().unwrap(), Box::new(Explosive { link: left, armed: armed.clone() })).unwrap();
    b.adopt_link(a.card().unwrap(), Box::new(right)).unwrap();
    let errors = world.run("g", |member| {
        member.barrier().unwrap();
        // Rank 0's next look at its link explodes, and what it needs of rank 1 comes after.
        if member.rank == 0 {
            armed.store(true, Ordering::SeqCst);
            started.store(true, Ordering::SeqCst);
        } else {
            while !started.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
        call(&member)
    });
    let error = errors[0].as_ref().expect_err("the call must fail where the link explodes");
    assert_eq!(error.kind, ErrorKind::Internal, "{error}");
    assert!(error.to_string().contains("the test's link explodes"), "{error}");
    // The other rank may have had all it needed before; otherwise it must not wait for ever. One that comes late is refused,
    // and told why.
    if let Err(error) = &errors[1] {
        let is_late = error.kind == ErrorKind::Aborted && error.to_string().contains("the test's link explodes");
        let kinds = [ErrorKind::Internal, ErrorKind::Timeout, ErrorKind::PeerLost];
        assert!(is_late || kinds.contains(&error.kind), "{:?}: {error}", error.kind);
    }
}

#[test]
fn a_panic_under_a_waiter_is_an_internal_error() {
    explode(|member| member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum));
}

#[test]
fn a_panic_under_the_background_thread_is_an_internal_error() {
    explode(|member| {
        let mut data = [1.0_f32; 4];
        let call = member.group.submit(member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Async))?;
        while !call.is_done() {
            std::thread::yield_now();
        }
        finish(&call)
    });
}
