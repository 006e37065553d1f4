//! Host memory over the plugin: every size and shape, and how full its windows get.

use crate::case::case;
use crate::ends::{Ends, LIMIT, contents, pattern, plugin};
use std::time::Duration;

const CHUNK: usize = 512 << 10;

#[test]
fn writes_of_every_size_arrive() {
    case!("").passes(|| {
        let ends = Ends::new();
        let around = |at: usize| [at - 1, at, at + 1];
        let mut sizes = vec![0, 1, 7, 777, 12_345];
        sizes.extend([4096, 65_536, CHUNK, 2 * CHUNK, 16 * CHUNK].into_iter().flat_map(around));
        sizes.push((64 << 20) - 13);
        for (salt, bytes) in sizes.into_iter().enumerate() {
            ends.write(bytes, salt as u64);
        }
        ends.close();
    });
}

/// Regression: the control thread panicked when it added to the time that a lane may take.
#[test]
fn lanes_that_may_take_any_time_are_set_up() {
    case!("").passes(|| {
        let ends = Ends::with(|builder| builder.plugin(plugin().setup_timeout(Duration::MAX)));
        ends.write(CHUNK, 1);
        ends.close();
    });
}

#[test]
fn windows_are_used_and_never_exceeded() {
    case!("").passes(|| {
        let ends = Ends::with(|builder| builder.channels(1).chunk_bytes(64 << 10));
        for chunks in [17, 33, 128] {
            ends.write(chunks * (64 << 10), chunks as u64);
        }
        for peer in [&ends.near, &ends.far] {
            let stats = peer.stats();
            assert_eq!(stats.transport, "plugin");
            for channel in &stats.channels {
                let lane = channel.lane.as_ref().unwrap();
                assert_eq!((lane.plugin.as_str(), lane.version.as_str()), ("GPUDirectTCPX_v7", "v7"));
                assert_eq!(lane.device_name, "lo");
                assert!(lane.max_outstanding_sends <= 16 && lane.max_outstanding_receives <= 16, "{lane:?}");
                assert_eq!(lane.closing_results, 0);
            }
        }
        let most = |peer: &ferrywire::Peer| peer.stats().channels[0].lane.clone().unwrap();
        assert!(most(&ends.near).max_outstanding_sends > 4, "{:?}", most(&ends.near));
        assert!(most(&ends.far).max_outstanding_receives > 1, "{:?}", most(&ends.far));
        ends.close();
    });
}

/// Messages of so many chunks per channel. The plugin counts bytes itself, and logs them when it closes.
#[test]
fn windows_go_round_and_what_is_reported_is_what_the_plugin_moved() {
    for chunks in [17, 33, 128] {
        case!("stats=on").passes(|| {
            let ends = Ends::with(|builder| builder.channels(1).chunk_bytes(64 << 10));
            let bytes = chunks * (64 << 10);
            // Gives the bytes that were reported, which it has found in their place.
            ends.write(bytes, chunks as u64);
            let far = ends.far.clone();
            ends.close();
            let most = far.stats().channels[0].lane.as_ref().unwrap().max_outstanding_receives;
            assert!((2..=16).contains(&most), "{most}");
            let lines = ferrywire_ncclnet::log::last_lines();
            let received = lines.iter().find(|line| {
                line.text.contains("stats: comm=")
                    && line.text.contains("side=Recv")
                    && !line.text.contains("bytes=0 ")
            });
            let said = &received.expect("the end that received tells").text;
            assert!(said.contains(&format!(" bytes={bytes} ")), "{said}");
            let posted = |name: &str| {
                said.split_once(name).unwrap().1.split(' ').next().unwrap().parse::<usize>().unwrap()
            };
            assert_eq!(posted(" posted="), posted(" finished="), "{said}");
            assert!(posted(" posted=") >= chunks, "{said}");
        });
    }
}

#[test]
fn reads_messages_and_notifications_go_over_it_too() {
    case!("").passes(|| {
        let ends = Ends::new();
        let bytes = 5_000_001;
        let there = ends.accepting.register(pattern(bytes, 1)).unwrap();
        let here = ends.connecting.register(vec![0; bytes]).unwrap();
        let read = ends.near.read(&here, 0, &there.descriptor(), 0, bytes as u64).unwrap();
        assert_eq!(read.wait(LIMIT), Ok(bytes as u64));
        assert!(contents(&here) == pattern(bytes, 1));

        let message = ends.connecting.register(pattern(bytes, 2)).unwrap();
        let room = ends.accepting.register(vec![0; bytes]).unwrap();
        let receive = ends.far.recv(7, &room, 0, bytes as u64).unwrap();
        let send = ends.near.send(7, &message, 0, bytes as u64).unwrap();
        assert_eq!((receive.wait(LIMIT), send.wait(LIMIT)), (Ok(bytes as u64), Ok(bytes as u64)));
        assert!(contents(&room) == pattern(bytes, 2));

        let target = ends.accepting.register(vec![0; bytes]).unwrap();
        let write = ends.near.write_notify(&message, 0, &target.descriptor(), 0, bytes as u64, b"there");
        assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"there");
        assert!(contents(&target) == pattern(bytes, 2), "the notification came before its bytes");
        write.unwrap().wait(LIMIT).unwrap();
        ends.near.notify(b"alone").unwrap().wait(LIMIT).unwrap();
        assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"alone");
        ends.close();
    });
}

#[test]
fn an_owner_of_memory_is_dropped_when_the_plugin_has_let_go_of_it() {
    struct Tells(Vec<u8>, std::sync::mpsc::Sender<Vec<u8>>);
    impl Drop for Tells {
        fn drop(&mut self) {
            self.0.fill(0xEE);
            self.1.send(std::mem::take(&mut self.0)).unwrap();
        }
    }
    case!("").passes(|| {
        let ends = Ends::new();
        let bytes = 3_000_000;
        let (sender, reported) = std::sync::mpsc::channel();
        let owned = |endpoint: &ferrywire::Endpoint| {
            let mut owner = Box::new(Tells(pattern(bytes, 3), sender.clone()));
            let base = owner.0.as_mut_ptr();
            // SAFETY: the owner keeps the bytes, whose place on the heap does not change.
            unsafe { endpoint.register_with(base, bytes, owner) }.unwrap()
        };
        for _ in 0..5 {
            let (source, target) = (owned(&ends.connecting), owned(&ends.accepting));
            let write = ends.near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
            drop(source);
            assert_eq!(write.wait(LIMIT), Ok(bytes as u64));
            drop(target);
            for _ in 0..2 {
                let after = reported.recv_timeout(LIMIT).expect("an owner is not dropped");
                assert!(after.iter().all(|byte| *byte == 0xEE));
            }
        }
        ends.close();
    });
}
