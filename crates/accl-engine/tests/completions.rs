//! Threads that run completion callbacks. Alone in its program, because it counts the threads of the process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use accl_engine::Engine;
use accl_testkit::{World, WorldOptions, finish};
use accl_types::config::Config;

const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for this test's turn: tests that count threads run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn completion_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread may end while its name is read.
    let name = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
    tasks.filter_map(name).filter(|name| name.trim() == "accl-complete").count()
}

#[test]
fn futures_that_end_together_do_not_start_a_thread_each() {
    let _alone = alone();
    const CALLS: usize = 500;
    let world = World::new(WorldOptions::new(2).timeout(PATIENCE));
    let most = world.run("g", |member| {
        if member.rank == 1 {
            member.barrier().unwrap();
            let sends: Vec<_> = (0..CALLS as u32).map(|tag| member.post_send(&[1_i64], 0, tag).unwrap()).collect();
            sends.iter().for_each(|call| finish(call).unwrap());
            return 0;
        }
        let mut data = vec![[0_i64]; CALLS];
        let calls = data.iter_mut().zip(0..).map(|(data, tag)| member.post_recv(data, Some(1), tag).unwrap());
        let calls: Vec<_> = calls.collect();
        let (sender, receiver) = mpsc::channel();
        for call in &calls {
            let sender = sender.clone();
            call.when_done(Box::new(move || sender.send(()).unwrap())).unwrap();
        }
        member.barrier().unwrap();
        // Threads stay for seconds after their last job, so every thread that was started is counted.
        (0..CALLS).for_each(|_| receiver.recv_timeout(PATIENCE).unwrap());
        let most = completion_threads();
        calls.iter().for_each(|call| finish(call).unwrap());
        most
    });
    assert!((1..=16).contains(&most[0]), "{most:?} threads");
}

/// Posts a chain of jobs. Each job waits for the next one, which is posted before it.
fn post_chain(engine: &Arc<Engine>, depth: usize) -> mpsc::Receiver<()> {
    let (done, last) = mpsc::channel();
    let mut before: Option<mpsc::Receiver<()>> = None;
    let mut jobs: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
    for index in 0..depth {
        let (sender, receiver) = mpsc::channel();
        let waits_for = before.replace(receiver);
        let done = done.clone();
        jobs.push(Box::new(move || {
            if let Some(before) = waits_for {
                before.recv_timeout(PATIENCE).unwrap();
            }
            // The last receiver may be gone.
            let _ = sender.send(());
            if index + 1 == depth {
                done.send(()).unwrap();
            }
        }));
    }
    // The job for which all others wait is queued last.
    jobs.into_iter().rev().for_each(|job| engine.spawn_blocking(job).unwrap());
    drop(before);
    last
}

#[test]
fn jobs_that_all_wait_for_the_last_in_the_queue_end() {
    let _alone = alone();
    let engine = accl_calibrate::engine(Config::default());
    post_chain(&engine, 40).recv_timeout(PATIENCE).unwrap();
    engine.shutdown();
}
