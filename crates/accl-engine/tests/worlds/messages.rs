//! Point-to-point messages: matching by peer and tag, any source, messages to oneself, many outstanding messages.

use std::time::Duration;

use accl_engine::{Blocks, Call, CallDesc, Mode, Waited};
use accl_testkit::{Fabric, Member, Rng, World, WorldOptions, calls, finish};
use accl_types::{Collective, Dtype, ErrorKind, Rank, ReduceOp};

fn cramped(world: u32) -> WorldOptions {
    WorldOptions::new(world).over(Fabric::Loopback(2)).with("segment_bytes", "1KiB").with("eager_bytes", "2KiB")
}

fn filled(seed: usize, count: usize) -> Vec<i64> {
    (0..count).map(|i| (seed * 1_000_003 + i) as i64).collect()
}

#[test]
fn messages_with_one_tag_arrive_in_issue_order() {
    World::new(cramped(2)).run("g", |member| {
        let sizes = [0, 1, 100, 5000, 3, 1000, 128];
        let data: Vec<_> = sizes.iter().enumerate().map(|(i, &n)| filled(i, n)).collect();
        if member.rank == 0 {
            let calls: Vec<_> = data.iter().map(|message| member.post_send(message, 1, 7).unwrap()).collect();
            calls.iter().for_each(|call| finish(call).unwrap());
        } else {
            for message in &data {
                let mut got = vec![-1; message.len()];
                finish(&member.post_recv(&mut got, Some(0), 7).unwrap()).unwrap();
                assert_eq!(&got, message);
            }
        }
    });
}

#[test]
fn tags_are_received_in_another_order_than_sent() {
    for count in [1, 10_000] {
        World::new(cramped(2)).run("g", |member| {
            if member.rank == 0 {
                let data: Vec<_> = (0..20).map(|tag| filled(tag, count)).collect();
                let calls: Vec<_> = (0..20).map(|tag| member.post_send(&data[tag], 1, tag as u32).unwrap()).collect();
                calls.iter().for_each(|call| finish(call).unwrap());
            } else {
                for tag in (0..20).rev() {
                    let mut got = vec![-1; count];
                    finish(&member.post_recv(&mut got, Some(0), tag).unwrap()).unwrap();
                    assert_eq!(got, filled(tag as usize, count), "tag {tag}");
                }
            }
        });
    }
}

#[test]
fn a_receive_from_any_source_returns_the_source() {
    World::new(cramped(4)).run("g", |member| {
        if member.rank == 0 {
            let mut seen = Vec::new();
            for _ in 1..4 {
                let mut got = vec![-1_i64; 300];
                let call = member.post_recv(&mut got, None, 3).unwrap();
                finish(&call).unwrap();
                let source = call.source_rank().unwrap();
                assert_eq!(got, filled(source.index(), 300));
                seen.push(source);
            }
            seen.sort_unstable();
            assert_eq!(seen, [1, 2, 3].map(Rank));
        } else {
            finish(&member.post_send(&filled(member.rank, 300), 0, 3).unwrap()).unwrap();
        }
    });
}

#[test]
fn a_message_to_oneself_arrives() {
    World::new(cramped(2)).run("g", |member| {
        for count in [0, 1, 4000] {
            let data = filled(member.rank, count);
            let send = member.post_send(&data, member.rank as u32, 0).unwrap();
            let mut got = vec![-1; count];
            finish(&member.post_recv(&mut got, Some(member.rank as u32), 0).unwrap()).unwrap();
            finish(&send).unwrap();
            assert_eq!(got, data);
        }
    });
}

#[test]
fn a_waiting_receive_blocks_neither_sends_nor_collectives() {
    World::new(cramped(2)).run("g", |member| {
        let other = 1 - member.rank as u32;
        let mut late = vec![-1_i64; 3000];
        let receive = member.post_recv(&mut late, Some(other), 99).unwrap();
        for _ in 0..10 {
            let mut data = vec![1.0_f32; 2000];
            member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|&x| x == 2.0));
        }
        finish(&member.post_send(&filled(member.rank, 3000), other, 99).unwrap()).unwrap();
        finish(&receive).unwrap();
        assert_eq!(late, filled(other as usize, 3000));
    });
}

/// Random messages between random pairs, all posted before any wait.
#[test]
fn random_exchanges_arrive_whole() {
    for seed in 0..10 {
        World::new(cramped(4)).run("g", |member| {
            // All ranks draw the same messages: sender, receiver, tag and count.
            let mut rng = Rng::new(seed);
            let plan: Vec<(usize, usize, u32, usize)> = (0..60)
                .map(|_| {
                    let pair = (rng.below(4) as usize, rng.below(4) as usize);
                    (pair.0, pair.1, rng.below(3) as u32, rng.below(2000) as usize)
                })
                .collect();
            let sends: Vec<Vec<i64>> = plan.iter().enumerate().map(|(i, m)| filled(i, m.3)).collect();
            let mut receives: Vec<Vec<i64>> = plan.iter().map(|m| vec![-1; m.3]).collect();
            let mut calls = Vec::new();
            for (i, (from, to, tag, _)) in plan.iter().enumerate() {
                if *from == member.rank {
                    calls.push(member.post_send(&sends[i], *to as u32, *tag).unwrap());
                }
                if *to == member.rank {
                    calls.push(member.post_recv(&mut receives[i], Some(*from as u32), *tag).unwrap());
                }
            }
            calls.iter().for_each(|call| finish(call).unwrap_or_else(|error| panic!("seed {seed}: {error}")));
            for (i, message) in plan.iter().enumerate().filter(|(_, message)| message.1 == member.rank) {
                assert_eq!(receives[i], sends[i], "seed {seed}, message {i} of {} elements", message.3);
            }
        });
    }
}

#[test]
fn a_wait_that_times_out_leaves_the_receive_running() {
    World::new(cramped(2)).run("g", |member| {
        if member.rank == 0 {
            let mut got = vec![-1_i64; 10];
            let call = member.post_recv(&mut got, Some(1), 0).unwrap();
            match call.wait(Some(Duration::from_millis(20)), &mut || false) {
                Waited::TimedOut(error) => assert_eq!(error.kind, ErrorKind::Timeout, "{error}"),
                other => panic!("{other:?}"),
            }
            member.barrier().unwrap();
            finish(&call).unwrap();
            assert_eq!(got, filled(5, 10));
        } else {
            member.barrier().unwrap();
            finish(&member.post_send(&filled(5, 10), 0, 0).unwrap()).unwrap();
        }
    });
}

/// Returns how often both ranks together examine messages, for `count` sends that all wait for their receives.
fn steps_of(count: usize, order: Order) -> u64 {
    // Without an eager window, every message waits for its receiver. With much room, no progress pass tries in vain.
    let options = WorldOptions::new(2).over(Fabric::Loopback(1 << 20)).with("eager_bytes", "0");
    let steps = World::new(options.timeout(Duration::from_secs(120))).run("g", |member| {
        let data: Vec<[i64; 1]> = (0..count as i64).map(|tag| [tag]).collect();
        if member.rank == 0 {
            if order == Order::ReceivesFirst {
                member.barrier().unwrap();
            }
            let sends: Vec<_> =
                data.iter().zip(0..).map(|(data, tag)| member.post_send(data, 1, tag).unwrap()).collect();
            if order != Order::ReceivesFirst {
                member.barrier().unwrap();
            }
            sends.iter().for_each(|call| finish(call).unwrap());
        } else {
            if order != Order::ReceivesFirst {
                member.barrier().unwrap();
            }
            let mut got = vec![[-1_i64]; count];
            let mut receives: Vec<_> = got.iter_mut().zip(0_u32..).collect();
            if order != Order::AsSent {
                receives.reverse();
            }
            let receives: Vec<_> =
                receives.into_iter().map(|(got, tag)| member.post_recv(got, Some(0), tag).unwrap()).collect();
            if order == Order::ReceivesFirst {
                member.barrier().unwrap();
            }
            receives.iter().for_each(|call| finish(call).unwrap());
            assert_eq!(got, data);
        }
        member.group.message_steps()
    });
    steps.iter().sum()
}

/// When, and in which order, the receives for outstanding sends are posted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    AsSent,
    Reversed,
    ReceivesFirst,
}

#[test]
fn outstanding_messages_cost_steps_in_proportion_to_their_number() {
    for order in [Order::AsSent, Order::Reversed, Order::ReceivesFirst] {
        let (few, many) = (steps_of(1_000, order), steps_of(10_000, order));
        println!("{order:?}: {few} steps for 1,000 messages, {many} for 10,000");
        assert!(many <= 12 * few, "{order:?}: {few} steps for 1,000 messages, {many} for 10,000");
    }
}

/// Posts `CROWD` calls on rank 0 before rank 1 takes them. Returns how many of them complete nevertheless.
fn over_before_they_are_taken(post: impl Fn(&Member, usize) -> Call + Sync) -> usize {
    let options = WorldOptions::new(2).over(Fabric::Loopback(1 << 20)).with("eager_bytes", "16KiB");
    let posted = std::sync::Barrier::new(2);
    let over = World::new(options.timeout(Duration::from_secs(60))).run("g", |member| {
        if member.rank == 1 {
            posted.wait();
        }
        let calls: Vec<_> = (0..CROWD).map(|index| post(&member, index)).collect();
        let over = calls.iter().filter(|call| call.is_done()).count();
        if member.rank == 0 {
            posted.wait();
        }
        calls.iter().for_each(|call| finish(call).unwrap());
        over
    });
    over[0]
}

const CROWD: usize = 3000;

#[test]
fn a_sender_cannot_be_any_number_of_empty_messages_ahead() {
    let over = over_before_they_are_taken(|member, _| match member.rank {
        0 => member.post_send::<u8>(&[], 1, 5).unwrap(),
        _ => member.post_recv::<u8>(&mut [], Some(0), 5).unwrap(),
    });
    assert!((1..=200).contains(&over), "{over} of {CROWD} were over with a window of 16 KiB");
}

#[test]
fn a_sender_cannot_be_any_number_of_tiny_messages_ahead() {
    let over = over_before_they_are_taken(|member, index| match member.rank {
        // The data outlives its call.
        0 => member.post_send(Box::leak(Box::new([index as u8])), 1, 5).unwrap(),
        _ => member.post_recv(Box::leak(Box::new([0_u8])), Some(0), 5).unwrap(),
    });
    assert!((1..=200).contains(&over), "{over} of {CROWD} were over with a window of 16 KiB");
}

#[test]
fn a_root_cannot_be_any_number_of_empty_broadcasts_ahead() {
    let over = over_before_they_are_taken(|member, _| {
        let mut desc = CallDesc::new(Collective::Broadcast, Dtype::U8);
        desc.outputs = Blocks::of(calls::write::<u8>(&mut []));
        desc.mode = Mode::Async;
        member.group.submit(desc).unwrap()
    });
    assert!((1..=200).contains(&over), "{over} of {CROWD} were over with a window of 16 KiB");
}

#[test]
fn collectives_go_on_while_a_window_is_full_of_empty_messages() {
    for eager in ["0", "1KiB"] {
        let options = WorldOptions::new(3).over(Fabric::Shm).with("eager_bytes", eager);
        World::new(options.timeout(Duration::from_secs(60))).run("g", |member| {
            let next = (member.rank as u32 + 1) % 3;
            let sends: Vec<_> = (0..500).map(|_| member.post_send::<u8>(&[], next, 1).unwrap()).collect();
            for count in [0, 1, 5000] {
                let mut data = vec![1.0_f32; count];
                member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|&x| x == 3.0));
                member.barrier().unwrap();
            }
            let from = (member.rank as u32 + 2) % 3;
            for _ in 0..500 {
                finish(&member.post_recv::<u8>(&mut [], Some(from), 1).unwrap()).unwrap();
            }
            sends.iter().for_each(|call| finish(call).unwrap());
        });
    }
}
