//! The control session: gaps, forgeries, fences of channels that never existed, floods.

use super::evil::{Data, Evil, channel, data, dial, evil_config, goodbye};
use super::scene::{Scene, endpoint};
use super::{LIMIT, eventually};
use crate::{Error, LossCause, RemoteRegion, TransferError, limits};
use ferrywire_memory::MemoryLocation;
use ferrywire_proto::Identity;
use ferrywire_proto::handshake::testing::hello;
use ferrywire_proto::handshake::{Config, Initiator, Secure};
use ferrywire_proto::session::{ControlMessage, FenceCause, Frame, GoodbyeCause};
use ferrywire_proto::wire::Refusal;
use ferrywire_sys::socket;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// No good peer may wait this long because of other peers.
const HELD_UP: Duration = Duration::from_secs(5);
/// Number of slow rounds that fails the test.
const SLOW_MAX: usize = 3;

fn fence(channel: u16, generation: u32) -> ControlMessage {
    let (placed, refused, cause, reason) = (0, Vec::new(), FenceCause::Lost, String::from("evil"));
    ControlMessage::Fence { channel, generation, placed, refused, cause, reason }
}

#[test]
fn a_gap_in_the_control_messages_loses_the_peer() {
    let scene = Scene::new();
    let numbered =
        |number, received| Frame { received, numbered: Some((number, &ControlMessage::Drain)) }.encode();
    let evil_words: [(&str, Vec<u8>); 7] = [
        ("control message 2 arrived, but number 1 was due", numbered(2, 0)),
        ("control message 0 arrived, but number 1 was due", numbered(0, 0)),
        ("the peer acknowledges 5 control messages, but only 0 were sent", numbered(1, 5)),
        ("a control message of unknown kind 99", {
            let mut plain = numbered(1, 0);
            plain[0] = 99;
            plain
        }),
        ("malformed: a control message: 1 bytes too many", [&numbered(1, 0)[..], &[0]].concat()),
        ("malformed: a control message: ends", numbered(1, 0)[..9].to_vec()),
        ("malformed: a control message: ends", Vec::new()),
    ];
    for (cause, plain) in evil_words {
        let mut evil = Evil::new(&scene);
        evil.say_plain(&plain);
        evil.lost_for(cause);
        eventually("its channel is closed", || evil.data[0].heard().closed);
    }
    scene.unharmed();
}

#[test]
fn a_forged_control_message_loses_the_peer() {
    let scene = Scene::with_limit(Duration::from_secs(3));
    let mut evil = Evil::new(&scene);
    let mut sealed = evil.secure().seal(&[0; 9]).unwrap();
    sealed[5] ^= 1;
    evil.control.write_all(&sealed).unwrap();
    evil.lost_for("no sign of life");
    scene.unharmed();
}

/// An honest peer reports that it has finished only when it is asked. A report without a request must not
/// count: transfers may still be in flight.
#[test]
fn a_peer_that_says_it_has_finished_before_it_is_asked_has_not() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    evil.say(&ControlMessage::Drained);
    // The effect of a later message shows that the early report was read.
    evil.say(&fence(0, 0));
    evil.channel_lost_for("evil");
    let closed = evil.here.close(Duration::from_millis(100));
    assert!(matches!(closed, Err(Error::Stalled { .. })), "{closed:?}");
    scene.unharmed();
}

#[test]
fn fences_of_channels_that_do_not_exist_change_nothing() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    for (channel, generation) in [(1, 0), (u16::MAX, u32::MAX), (0, 7), (0, u32::MAX), (300, 1)] {
        evil.say(&fence(channel, generation));
    }
    for channel in [0, 9, u16::MAX] {
        evil.say(&ControlMessage::Expected { channel, generation: u32::MAX });
        let source = "1.2.3.4:5".parse().unwrap();
        evil.say(&ControlMessage::Dialling { channel, generation: u32::MAX, source });
    }
    let refused = (0..limits::WINDOW_FRAMES_MAX as u64).map(|number| (number, 1)).collect();
    evil.say(&ControlMessage::Fence {
        channel: 0,
        generation: 3,
        placed: u64::MAX,
        refused,
        cause: FenceCause::Lost,
        reason: "\u{1b}[2Jx".into(),
    });
    evil.send(data(scene.key() ^ 1, 0, 0), &[]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoRegion)]);
    evil.say(&goodbye());
    eventually("the victim has received the goodbye", || {
        matches!(evil.here.error(), Some(Error::PeerClosed { .. }))
    });
    scene.unharmed();
}

#[test]
fn a_farewell_means_what_its_cause_says_whatever_its_words() {
    let scene = Scene::new();
    let reported = |cause, reason: &str| {
        let mut evil = Evil::new(&scene);
        evil.say(&ControlMessage::Goodbye { cause, reason: reason.into() });
        eventually("the victim has received the goodbye", || evil.here.error().is_some());
        evil.here.error().unwrap()
    };
    for words in ["closed", "gave up: the lanes", "without lanes: none"] {
        let closed = reported(GoodbyeCause::Closed, words);
        assert!(matches!(closed, Error::PeerClosed { .. }), "{words}: {closed:?}");
        for (cause, means) in [
            (GoodbyeCause::GaveUp, LossCause::GaveUp),
            (GoodbyeCause::LaneStalled, LossCause::LaneStalled),
            (GoodbyeCause::WithoutLanes, LossCause::LaneFailed),
        ] {
            let lost = reported(cause, words);
            assert!(
                matches!(&lost, Error::PeerLost { cause, why, .. } if *cause == means && why.contains(words)),
                "{words}: {lost:?}"
            );
        }
    }
    scene.unharmed();
}

#[test]
fn a_fence_that_claims_everything_placed_ends_only_its_own_transfers() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let source = scene.victim.alloc_host(1000).unwrap();
    let remote = RemoteRegion {
        owner: Identity(hello(1).identity),
        key: 1,
        len: 1000,
        location: MemoryLocation::Host,
    };
    let write = evil.here.write(&source, 0, &remote, 0, 1000).unwrap();
    eventually("the write is sent", || !evil.data[0].heard().frames.is_empty());
    evil.say(&ControlMessage::Fence {
        channel: 0,
        generation: 0,
        placed: u64::MAX,
        refused: vec![(0, 2), (u64::MAX, 1)],
        cause: FenceCause::Lost,
        reason: "evil".into(),
    });
    let error = write.wait(LIMIT).unwrap_err();
    assert!(matches!(&error, TransferError::AccessRefused { .. }), "{error:?}");
    evil.channel_lost_for("the peer lost the connection: evil");
    scene.unharmed();
}

#[test]
fn the_last_generation_of_a_channel_is_not_taken() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    evil.data[0].stream.shutdown(Shutdown::Both).unwrap();
    eventually("the channel is lost", || !evil.here.stats().lost_channels.is_empty());
    evil.say(&fence(0, 0));
    evil.is_heard();
    // The last generation has no successor, and each generation number is used once.
    let last = channel(evil.address, &evil.established, 0, u32::MAX);
    if let Ok(stream) = last {
        let _ = stream.shutdown(Shutdown::Both);
        evil.say(&fence(0, u32::MAX));
        evil.is_heard();
        assert!(
            channel(evil.address, &evil.established, 0, 0).is_err(),
            "generation 0 was accepted a second time"
        );
    }
    evil.control.shutdown(Shutdown::Both).unwrap();
    evil.lost_for("the peer's host closed the control connection");
    scene.unharmed();
}

#[test]
fn a_channel_cannot_be_taken_twice_nor_beyond_the_session() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let error = channel(evil.address, &evil.established, 1, 0).unwrap_err();
    assert!(error.to_string().contains("that the session does not have"), "{error}");
    let mut stream = channel(evil.address, &evil.established, 0, 0).expect("the peer has the session's key");
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "the same connection was accepted twice");
    let other = Evil::new(&scene);
    let key = other.established.data_key.clone();
    let mixed = dial(evil.address, Initiator::data(evil.established.session, key, 0, 9)).unwrap_err();
    assert!(mixed.to_string().contains("could not prove the session's key"), "{mixed}");
    evil.send(data(scene.key() ^ 1, 0, 0), &[]);
    assert_eq!(evil.data[0].answers(), [(0, Refusal::NoRegion)]);
    scene.unharmed();
}

#[test]
fn a_configuration_beyond_our_limits_is_brought_within_them() {
    let scene = Scene::new();
    let config = Config { window: u32::MAX, chunk_bytes: 1, ..evil_config() };
    let evil = Evil::with(&scene, config);
    let stats = evil.here.stats();
    assert!(stats.window <= limits::WINDOW_FRAMES_MAX, "a window of {} frames", stats.window);
    // A silent peer is sent a window of frames and no more.
    let source = scene.victim.alloc_host(1 << 20).unwrap();
    let remote = RemoteRegion {
        owner: Identity(hello(1).identity),
        key: 1,
        len: 1 << 20,
        location: MemoryLocation::Host,
    };
    let write = evil.here.write(&source, 0, &remote, 0, 1 << 20).unwrap();
    eventually("a window is full", || {
        evil.data[0].heard().frames.len() >= limits::WINDOW_FRAMES_MAX.min(stats.window)
    });
    thread::sleep(Duration::from_millis(100));
    let frames = evil.data[0].heard().frames.len();
    assert!(frames <= limits::WINDOW_FRAMES_MAX, "{frames} frames in flight");
    write.cancel();
    scene.unharmed();
}

#[test]
fn a_flood_of_control_messages_delays_no_other_peer() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let mut sealed = Vec::new();
    for number in 1..=1_000_000 {
        let frame = Frame { received: 0, numbered: Some((number, &ControlMessage::Drain)) };
        sealed.extend(evil.secure().seal(&frame.encode()).unwrap());
    }
    let stop = Arc::new(AtomicBool::new(false));
    let (ended, mut control) = (stop.clone(), evil.control.try_clone().unwrap());
    let flooder = thread::spawn(move || {
        for batch in sealed.chunks(256 << 10) {
            if ended.load(Ordering::SeqCst) || control.write_all(batch).is_err() {
                return false;
            }
        }
        true
    });
    // A few rounds may be slow because this process was stopped meanwhile.
    let (mut slow, mut rounds) = (0, 0);
    while !flooder.is_finished() && slow < SLOW_MAX {
        let start = Instant::now();
        assert!(scene.victim.peer_count() >= 2);
        let fresh = endpoint();
        fresh.connect(scene.address(), LIMIT).unwrap().close(LIMIT).unwrap();
        drop(scene.victim.accept(LIMIT).unwrap());
        (slow, rounds) = (slow + usize::from(start.elapsed() > HELD_UP), rounds + 1);
    }
    stop.store(true, Ordering::SeqCst);
    let whole = flooder.join().unwrap();
    assert!(slow < SLOW_MAX, "{slow} fresh peers took longer than {HELD_UP:?}");
    assert!(rounds > 1 || whole, "{rounds}");
    scene.unharmed();
}

/// More requests and answers than sockets and the victim's limit hold.
const QUESTIONS: u64 = 1_000_000;

/// Requests that are written at once.
const BATCH: usize = 256;

/// Makes the victim answer for as long as it reads, and reads none of the answers. Counts the batches taken.
/// Returns whether all were taken.
fn ask_without_end(control: &mut TcpStream, secure: &mut Secure, taken: &AtomicU64) -> bool {
    /// By how many messages the claimed count of received answers lags behind the answers sent: few, so that
    /// the victim keeps few.
    const BEHIND: u64 = 8192;
    control.set_write_timeout(Some(LIMIT)).unwrap();
    let source = "1.2.3.4:5".parse().unwrap();
    let question = ControlMessage::Dialling { channel: 0, generation: 1, source };
    let mut seal = |number: u64| {
        let received = number.saturating_sub(BEHIND);
        secure.seal(&Frame { received, numbered: Some((number, &question)) }.encode()).unwrap()
    };
    let numbers: Vec<u64> = (1..=QUESTIONS).collect();
    numbers.chunks(BATCH).all(|batch| {
        let sealed: Vec<u8> = batch.iter().flat_map(|number| seal(*number)).collect();
        taken.fetch_add(1, Ordering::SeqCst);
        control.write_all(&sealed).is_ok()
    })
}

#[test]
fn a_peer_that_never_reads_its_control_connection_is_not_heard_and_then_lost() {
    let scene = Scene::with_limit(Duration::from_secs(5));
    let mut evil = Evil::new(&scene);
    thread::scope(|scope| {
        let Evil { control, established, here, .. } = &mut evil;
        let asks = scope.spawn(|| ask_without_end(control, &mut established.secure, &AtomicU64::new(0)));
        while here.error().is_none() && !asks.is_finished() {
            scene.good_peer_is_served();
        }
        assert!(!asks.join().unwrap(), "the victim answered all requests: {:?}", here.error());
    });
    evil.lost_for("the peer does not read the control connection: ");
    let error = evil.here.error().unwrap().to_string();
    let waiting: Vec<usize> = error.split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(waiting[0] > limits::CONTROL_UNREAD_BYTES_MAX / 2, "{error}");
    assert!(waiting[0] < 2 * limits::CONTROL_UNREAD_BYTES_MAX, "{error}");
    scene.unharmed();
}

#[test]
fn a_peer_that_reads_its_control_connection_late_is_heard_again() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    let mut answers = evil.control.try_clone().unwrap();
    let taken = AtomicU64::new(0);
    thread::scope(|scope| {
        let Evil { control, established, here, .. } = &mut evil;
        let asks = scope.spawn(|| ask_without_end(control, &mut established.secure, &taken));
        // The victim has stopped reading when no batch was taken for a while.
        let (mut before, mut looks) = (0, 0);
        while looks < 50 && !asks.is_finished() {
            thread::sleep(Duration::from_millis(10));
            let now = taken.load(Ordering::SeqCst);
            looks = if now == before { looks + 1 } else { 0 };
            before = now;
        }
        assert!(
            looks == 50 && before < QUESTIONS / BATCH as u64,
            "the victim did not stop reading: {before} batches"
        );
        thread::spawn(move || while answers.read(&mut [0; 64 << 10]).is_ok_and(|count| count > 0) {});
        assert!(asks.join().unwrap(), "{:?}", here.error());
    });
    evil.said = QUESTIONS;
    evil.say(&goodbye());
    eventually("the victim has received the goodbye", || {
        matches!(evil.here.error(), Some(Error::PeerClosed { .. }))
    });
    scene.unharmed();
}

/// Number of lost channels, each with a window of refusals: together more than the kernel buffers and a peer
/// may leave unread.
const LONG_FENCES: u32 = 600;

/// Dials the channel's next connection, again while the victim closes one that came too early.
fn next_channel(evil: &Evil, generation: u32) -> Data {
    let mut next = None;
    eventually("the next connection is taken", || {
        let Ok(stream) = channel(evil.address, &evil.established, 0, generation) else { return false };
        let mut data = Data::new(stream);
        data.send(self::data(0, 0, 0), &[]);
        eventually("the connection is answered or closed", || {
            data.heard().acknowledged > 0 || data.heard().closed
        });
        let taken = data.heard().acknowledged > 0;
        next = taken.then_some(data);
        taken
    });
    next.unwrap()
}

#[test]
fn a_peer_to_which_we_have_much_to_say_ourselves_is_heard_though_it_reads_late() {
    let scene = Scene::new();
    let mut evil = Evil::new(&scene);
    // Make the kernel buffer as little as possible.
    socket::set_int(evil.control.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 1).unwrap();
    for generation in 0..LONG_FENCES {
        evil.data[0].flood(data(scene.key() ^ 1, 0, 0), &[], limits::WINDOW_FRAMES_MAX as u64, |_, _| ());
        evil.data[0].answers();
        evil.data[0].stream.shutdown(Shutdown::Both).unwrap();
        evil.say(&fence(0, generation));
        evil.data[0] = next_channel(&evil, generation + 1);
    }
    evil.say(&goodbye());
    eventually("the victim has received the goodbye", || {
        matches!(evil.here.error(), Some(Error::PeerClosed { .. }))
    });
    scene.unharmed();
}
