//! Descriptors that groups cost a process. Alone in its program, because other tests open descriptors, too.

use std::time::Duration;

use accl_testkit::{Fabric, Member, World, WorldOptions};
use accl_types::ReduceOp;

fn sum_ones(member: &Member, count: usize) {
    let mut data = vec![1.0_f32; count];
    member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert!(data.iter().all(|&x| x == member.world as f32));
}

#[test]
fn groups_cost_neither_threads_nor_descriptors() {
    let world = World::new(WorldOptions::new(2).over(Fabric::Shm).timeout(Duration::from_secs(30)));
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let mut groups = vec![world.run("first", |member| member)];
    world.run("warm", |member| sum_ones(&member, 10));
    let before = count("/proc/self/fd");
    for index in 0..200 {
        groups.push(world.run(&format!("g{index}"), |member| {
            sum_ones(&member, 10);
            member
        }));
    }
    // Threads of the test come and go, so only descriptors are counted.
    let after = count("/proc/self/fd");
    assert!(after <= before + 4, "{before} descriptors before and {after} after 200 groups");
    for members in groups.iter().rev().step_by(20) {
        std::thread::scope(|scope| members.iter().for_each(|member| drop(scope.spawn(|| sum_ones(member, 5)))));
    }
}
