//! Errors of endpoints that end, cannot be built, or cannot be reached.

use crate::case::case;
use crate::held_up::connected;
use crate::{LIMIT, builder, busy_time, listening, pair};
use ferrywire::limits::DRAIN_TIMEOUT;
use ferrywire::orchestrator::Target;
use ferrywire::{
    ConnectError, Endpoint, Error, Orchestrator, Peer, RefusalReason, Transfer, TransferError, Wakeup,
};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < LIMIT, "never came about: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Two endpoints that their caller polls; the first one listens.
fn without_threads() -> [Endpoint; 2] {
    let end = || builder().threads(0).channels(1);
    [end().listen("127.0.0.1:0".parse().unwrap()), end()].map(|end| end.build().unwrap())
}

/// Regression: while a peer did not answer, the thread that closed it, or its endpoint, polled without a pause.
#[test]
fn a_close_by_a_caller_that_polls_leaves_its_core_to_others() {
    let limit = Duration::from_secs(1);
    let closes: [fn(&Endpoint, &Peer, Duration); 2] =
        [|near, _, limit| drop(near.close(limit)), |_, peer, limit| drop(peer.close(limit))];
    for close in closes {
        let [near, far] = without_threads();
        let (peer, _there) = connected(&near, &far);
        // `far` has no threads and is not polled here, so `near` waits in vain for its Goodbye.
        let (begun, busy) = (Instant::now(), busy_time());
        close(&near, &peer, limit);
        let (took, busy) = (begun.elapsed(), busy_time() - busy);
        assert!(took > Duration::from_millis(500), "{took:?}");
        assert!(busy < took / 2, "busy for {busy:?} of {took:?}");
        [near, far].iter().for_each(|end| drop(end.close(Duration::ZERO)));
    }
}

/// Regression: calls whose timeout was over at once polled nothing, so what they asked for never came.
#[test]
fn calls_whose_timeout_is_over_at_once_poll_an_endpoint_without_threads() {
    [Duration::ZERO, Duration::from_nanos(1)].into_iter().for_each(polls_with);
}

fn polls_with(timeout: Duration) {
    let [near, far] = without_threads();
    let address = near.listen_addresses()[0];
    let pending = far.start_connect(address).unwrap();
    let mut accepted = None;
    eventually("it accepts", || {
        far.progress();
        accepted = near.accept(timeout).ok();
        accepted.is_some()
    });
    let mut connected = None;
    eventually("it connects", || {
        near.progress();
        connected = pending.wait(timeout).ok();
        connected.is_some()
    });
    let notified = connected.as_ref().unwrap().notify(b"here").unwrap();
    let mut received = None;
    eventually("it is notified", || {
        far.progress();
        received = accepted.as_ref().unwrap().wait_notification(timeout).ok();
        received.is_some()
    });
    assert_eq!(received.unwrap(), b"here");
    eventually("it has ended", || {
        near.progress();
        notified.wait(timeout).is_ok()
    });
    [near, far].iter().for_each(|end| drop(end.close(Duration::ZERO)));
}

/// An endpoint with a message in flight that has no receive: the endpoint cannot close before its timeout.
fn never_finished() -> (crate::Pair, Transfer) {
    let pair = pair();
    let source = pair.ends[0].alloc_host(1 << 20).unwrap();
    let sent = pair.near.send(1, &source, 0, 1 << 20).unwrap();
    (pair, sent)
}

/// A second close says what the first does, and not before it.
#[test]
fn a_second_close_waits_for_the_first_and_says_the_same() {
    let (pair, sent) = never_finished();
    thread::scope(|scope| {
        let first = scope.spawn(|| pair.ends[0].close(Duration::from_secs(2)));
        eventually("it closes", || matches!(pair.near.notify(b"x"), Err(TransferError::Closed)));
        let early = pair.ends[0].close(Duration::ZERO);
        assert!(matches!(early, Err(Error::Stalled { waited: Duration::ZERO, .. })), "{early:?}");
        let second = pair.ends[0].close(LIMIT);
        assert!(sent.poll().is_some(), "the second close came back before the end");
        assert!(matches!(second, Err(Error::Stalled { .. })), "{second:?}");
        assert_eq!(first.join().unwrap(), second);
        assert_eq!(pair.ends[0].close(LIMIT), second, "it is closed, and did not finish");
    });
    assert_eq!((pair.ends[1].close(LIMIT), pair.ends[1].close(Duration::ZERO)), (Ok(()), Ok(())));
}

/// Regression: the error named the timeout of the close that reported it, which had not waited at all.
#[test]
fn a_close_reports_the_wait_that_ended_a_dropped_peer() {
    let (pair, sent) = never_finished();
    drop((pair.near, sent));
    eventually("the dropped peer is closed", || pair.ends[0].peer_count() == 0);
    let closed = pair.ends[0].close(LIMIT);
    assert!(matches!(closed, Err(Error::Stalled { waited: DRAIN_TIMEOUT, .. })), "{closed:?}");
}

/// Regression: the error named the timeout of this call, although the endpoint's close had ended the peer.
#[test]
fn a_close_of_a_peer_reports_the_shorter_wait_of_the_endpoint() {
    const SHORT: Duration = Duration::from_millis(500);
    let (pair, _sent) = never_finished();
    thread::scope(|scope| {
        let alone = scope.spawn(|| pair.near.close(LIMIT));
        eventually("the peer is closed", || matches!(pair.near.notify(b"x"), Err(TransferError::Closed)));
        drop(pair.ends[0].close(SHORT));
        let closed = alone.join().unwrap();
        assert!(matches!(closed, Err(Error::Stalled { waited: SHORT, .. })), "{closed:?}");
    });
}

/// Regression: the error of an endpoint's close did not say which peer had not finished.
#[test]
fn closing_the_endpoint_names_the_peer_that_has_not_finished() {
    let (pair, _sent) = never_finished();
    let closed = pair.ends[0].close(Duration::from_millis(50));
    let Err(Error::Stalled { what, peer, .. }) = &closed else { panic!("{closed:?}") };
    assert_eq!(peer.as_ref(), Some(&pair.near.name()));
    assert!(what.contains(&pair.near.name()), "{what}");
}

/// Regression: closing the endpoint repeated the error of a peer's close; also where the other end is silent, and the close of
/// the peer returns before the peer is given up.
#[test]
fn errors_that_the_close_of_a_peer_reported_are_not_reported_again() {
    for answers in [true, false] {
        let builder = || Endpoint::builder().channels(1).listen("127.0.0.1:0".parse().unwrap());
        let there = builder().threads(usize::from(answers)).build().unwrap();
        let here = builder().build().unwrap();
        let (connecting, mut connected) = (here.start_connect(there.listen_addresses()[0]).unwrap(), None);
        eventually("they are connected", || {
            let _ = answers || there.progress();
            connected = connected.take().or_else(|| connecting.poll());
            connected.is_some()
        });
        let near = connected.unwrap().unwrap();
        let source = here.alloc_host(1 << 20).unwrap();
        let sent = near.send(1, &source, 0, 1 << 20).unwrap();
        let reported = near.close(Duration::from_millis(50));
        assert!(matches!(reported, Err(Error::Stalled { .. })), "{reported:?}");
        assert_eq!(here.close(LIMIT), Ok(()));
        assert!(sent.poll().is_some_and(|outcome| outcome.is_err()));
    }
}

/// Regression: the close of an endpoint returned the loss of a peer of long ago, of which its user had been told: the
/// handle was dropped after the peer had failed and before its channels were closed.
#[test]
fn closing_the_endpoint_does_not_repeat_a_loss_of_which_the_user_was_told() {
    for told_by in ["the peer", "the transfer", "a post", "a wakeup alone", "nothing"] {
        let wakeup = Wakeup::new().unwrap();
        let (there, here) = (Endpoint::builder().threads(1), Endpoint::builder().threads(0));
        let there = there.channels(1).listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let here = here.channels(1).build().unwrap();
        let near = here.connect(there.listen_addresses()[0], LIMIT).unwrap();
        let source = here.alloc_host(1 << 20).unwrap();
        let sent = near.send(1, &source, 0, 1 << 20).unwrap();
        let closing = thread::spawn(move || there.close(Duration::ZERO));
        let is_told = || match told_by {
            "the peer" => near.error().is_some(),
            "the transfer" => sent.poll().is_some(),
            "a post" => near.notify(b"x").is_err(),
            "a wakeup alone" => {
                near.arm(&wakeup);
                wakeup.wait(Duration::ZERO).unwrap()
            }
            _ => true,
        };
        eventually("the peer has failed", || {
            here.progress();
            is_told()
        });
        drop((near, sent));
        eventually("the peer is gone", || {
            here.progress();
            here.peer_count() == 0
        });
        let _ = closing.join().unwrap();
        let is_told = ["the peer", "the transfer", "a post"].contains(&told_by);
        assert_eq!(here.close(LIMIT).is_ok(), is_told, "{told_by}");
    }
}

/// Regression: closing an endpoint returned no error while another thread waited for a peer that had become silent.
#[test]
fn closing_the_endpoint_reports_errors_though_a_thread_closes_one_peer() {
    let (there, here) = (Endpoint::builder().threads(0), Endpoint::builder().threads(1));
    let there = there.channels(1).listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let here = here.channels(1).build().unwrap();
    let (connecting, mut connected) = (here.start_connect(there.listen_addresses()[0]).unwrap(), None);
    eventually("they are connected", || {
        there.progress();
        connected = connected.take().or_else(|| connecting.poll());
        connected.is_some()
    });
    let near = connected.unwrap().unwrap();
    let source = here.alloc_host(1 << 20).unwrap();
    let _sent = near.send(1, &source, 0, 1 << 20).unwrap();
    thread::scope(|scope| {
        let all = scope.spawn(|| here.close(LIMIT));
        eventually("it closes", || matches!(near.notify(b"x"), Err(TransferError::Closed)));
        let reported = [near.close(Duration::from_millis(50)), all.join().unwrap()];
        assert!(
            reported.iter().all(|reported| matches!(reported, Err(Error::Stalled { .. }))),
            "{reported:?}"
        );
    });
}

/// With progress threads and without: without them the thread that waits for a peer makes all progress.
#[test]
fn a_wait_for_a_peer_ends_when_the_endpoint_closes() {
    for threads in [0, 1] {
        let builder = || Endpoint::builder().channels(1);
        let accepting = builder().threads(threads).listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let connecting = builder().build().unwrap();
        let first = Barrier::new(2);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let far = accepting.accept(LIMIT).unwrap();
                first.wait();
                (accepting.accept(LIMIT).map(|_| ()), far)
            });
            let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
            first.wait();
            // Without progress threads only a waiting thread answers.
            near.notify(b"are you there?").unwrap().wait(LIMIT).unwrap();
            thread::sleep(Duration::from_millis(50));
            assert_eq!(accepting.close(LIMIT), Ok(()));
            assert_eq!(waiting.join().unwrap().0, Err(ConnectError::Closed));
        });
    }
}

/// The names of the running threads of endpoints.
fn threads_of_ours() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| name.starts_with("ferrywire")).collect()
}

/// Bytes of address space in use.
fn space_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    pages * page_bytes()
}

fn page_bytes() -> u64 {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

fn limit_space(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a limit of this process, given by value.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

/// Bytes of each thread's stack, far more than what else is allocated while an endpoint is built.
const STACK_BYTES: u64 = 1 << 30;

/// Some of its threads run when it turns out that there is no room for one more.
#[test]
fn an_endpoint_that_cannot_be_built_leaves_no_thread_and_no_port() {
    case!("").with("RUST_MIN_STACK", &STACK_BYTES.to_string()).passes(|| {
        for room in [0, 1, 2] {
            let free = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = free.local_addr().unwrap();
            drop(free);
            let builder = || Endpoint::builder().threads(2).channels(1).listen(address);
            limit_space(space_bytes() + room * STACK_BYTES + STACK_BYTES / 2);
            let built = builder().build();
            limit_space(libc::RLIM_INFINITY);
            let error = built.expect_err("there is no room for its threads");
            assert!(matches!(&error, Error::Io { what, .. } if what == "start a thread"), "{error}");
            drop(TcpListener::bind(address).expect("nobody listens there any more"));
            eventually("its threads have ended", || threads_of_ours().is_empty());
            let endpoint = builder().build().expect("there is room now, and the port is free");
            assert_eq!(endpoint.close(LIMIT), Ok(()));
            eventually("its threads have ended too", || threads_of_ours().is_empty());
        }
    });
}

/// The metadata of an endpoint that says it is reached there.
fn metadata_at(endpoint: &Endpoint, addresses: &[SocketAddr]) -> Vec<u8> {
    let own: usize = endpoint.reachable_addresses().iter().map(|each| 1 + each.to_string().len()).sum();
    let mut metadata = endpoint.metadata();
    metadata.truncate(metadata.len() - own);
    for address in addresses.iter().map(SocketAddr::to_string) {
        metadata.push(address.len() as u8);
        metadata.extend_from_slice(address.as_bytes());
    }
    metadata
}

/// Addresses at which the kernel accepts connections and no process answers.
fn dead(number: usize) -> Vec<TcpListener> {
    (0..number).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect()
}

fn addresses<'a>(of: impl IntoIterator<Item = &'a TcpListener>) -> Vec<SocketAddr> {
    of.into_iter().map(|listener| listener.local_addr().unwrap()).collect()
}

/// Eight addresses that do not answer use up the timeout of those behind them.
#[test]
fn one_timeout_is_for_all_addresses_of_an_endpoint() {
    let (accepting, connecting, dead) = (listening(), listening(), dead(8));
    let mut all = addresses(&dead);
    all.push(accepting.listen_addresses()[0]);
    let limit = Duration::from_secs(1);
    let error = connecting.connect_metadata(&metadata_at(&accepting, &all), limit).unwrap_err();
    assert!(matches!(error, ConnectError::Stalled { waited, .. } if waited == limit), "{error}");
    let mut last = accepting.metadata();
    last[1] ^= 1;
    let error = connecting.connect_metadata(&last, LIMIT).unwrap_err();
    assert!(matches!(&error, ConnectError::Refused { why, .. } if why.contains("restarted")), "{error}");
    // The withdrawn connections leave no peers.
    assert_eq!((accepting.peer_count(), connecting.peer_count()), (0, 0));
    let peer = accepting.try_accept();
    assert!(peer.is_none(), "{peer:?}");
}

/// Regression: the metadata had no address, because the loopback interface lists 127.0.0.1 alone. The name of a
/// host often stands for 127.0.1.1.
#[test]
fn metadata_of_an_endpoint_at_any_loopback_address_lead_to_it() {
    for address in ["127.0.1.1:0", "127.255.255.254:0"] {
        let accepting = Endpoint::builder().listen(address.parse().unwrap()).build().unwrap();
        let own = accepting.listen_addresses();
        assert_eq!(accepting.reachable_addresses(), own, "{address}");
        // Listens at an unlisted address too, so that both ends advertise one.
        let connecting = Endpoint::builder().listen("127.0.2.1:0".parse().unwrap()).build().unwrap();
        let near = connecting.connect_metadata(&accepting.metadata(), LIMIT).unwrap();
        let far = accepting.accept(LIMIT).unwrap();
        assert_eq!((near.identity(), far.identity()), (accepting.identity(), connecting.identity()));
        far.notify(b"there").unwrap().wait(LIMIT).unwrap();
        assert_eq!(near.wait_notification(LIMIT).unwrap(), b"there");
    }
}

/// Addresses that do not answer leave time for those that do.
#[test]
fn an_address_that_does_not_answer_has_its_share_of_the_time() {
    let (accepting, connecting, dead) = (listening(), listening(), dead(2));
    let mut all = addresses(&dead);
    all.push(accepting.listen_addresses()[0]);
    let limit = Duration::from_secs(9);
    let near = connecting.connect_metadata(&metadata_at(&accepting, &all), limit).unwrap();
    assert_eq!(near.identity(), accepting.identity());
}

/// A name may have several addresses, of which one belongs to another host, or to none.
#[test]
fn the_first_address_that_works_is_taken_and_else_the_most_specific_error() {
    let (accepting, connecting) = (listening(), listening());
    let stranger =
        Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).secret("another secret").build().unwrap();
    let silent = dead(1);
    let [right, other] = [&accepting, &stranger].map(|end| end.listen_addresses()[0]);
    let nobody = addresses(&dead(1))[0];
    let near = connecting.connect_any(&[nobody, other, right], LIMIT).unwrap();
    assert_eq!(near.identity(), accepting.identity());
    let error = |all: &[SocketAddr], limit| connecting.connect_any(all, limit).unwrap_err();
    let silent = silent[0].local_addr().unwrap();
    assert!(matches!(error(&[nobody], LIMIT), ConnectError::Unreachable { .. }));
    assert!(matches!(error(&[nobody, other], LIMIT), ConnectError::Refused { .. }));
    let late = error(&[nobody, silent], Duration::from_secs(1));
    assert!(matches!(&late, ConnectError::Stalled { what, .. } if what.contains("any of")), "{late}");
    assert!(matches!(error(&[], LIMIT), ConnectError::Invalid { .. }));
}

/// Regression: a connect by metadata returned the error of the last address, at which nothing listened.
#[test]
fn metadata_that_lead_nowhere_give_the_most_specific_error_of_their_addresses() {
    let (accepting, connecting) = (listening(), listening());
    let stranger =
        Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).secret("another secret").build().unwrap();
    let closed = addresses(&dead(1))[0];
    let refused = |end: &Endpoint, restarted: bool| {
        let mut metadata = metadata_at(end, &[end.listen_addresses()[0], closed]);
        metadata[1] ^= u8::from(restarted);
        match connecting.connect_metadata(&metadata, LIMIT).unwrap_err() {
            ConnectError::Refused { address, reason, why } => (address, reason, why),
            other => panic!("{other}"),
        }
    };
    let (address, reason, _) = refused(&stranger, false);
    assert_eq!((address, reason), (stranger.listen_addresses()[0].to_string(), RefusalReason::Secret));
    let (address, _, why) = refused(&accepting, true);
    assert_eq!(address, accepting.listen_addresses()[0].to_string());
    assert!(why.contains("restarted"), "{why}");
}

/// Regression: only the error of a target's last address was returned, whatever the first ones had answered.
#[test]
fn a_target_that_is_not_connected_gives_the_most_specific_error_of_its_addresses() {
    let builders = vec![("near".to_owned(), builder().channels(2))];
    let orchestrator = Orchestrator::start(builders, LIMIT).unwrap();
    let stranger =
        Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).secret("another secret").build().unwrap();
    let other = stranger.listen_addresses()[0];
    let (silent, closed) = (dead(1), addresses(&dead(1))[0]);
    let silent = addresses(&silent)[0];
    let short = Duration::from_secs(1);
    let error = |addresses: &[SocketAddr], timeout| {
        let target = Target { endpoint: 0, addresses: addresses.to_vec() };
        match orchestrator.connect(&[target], timeout).unwrap_err() {
            ConnectError::Phase { error, target: Some(0), .. } => *error,
            other => panic!("{other}"),
        }
    };
    for (second, timeout) in [(closed, LIMIT), (silent, 10 * short)] {
        let error = error(&[other, second], timeout);
        let ConnectError::Refused { address, reason, .. } = &error else { panic!("{error}") };
        assert_eq!((address, *reason), (&other.to_string(), RefusalReason::Secret));
    }
    let late = error(&[silent, closed], short);
    let all = format!("{:?}", [silent, closed]);
    assert!(matches!(&late, ConnectError::Stalled { what, .. } if what.contains(&all)), "{late}");
}

/// Passes on what one end says to the other, until one has nothing more to say.
fn pass_on(from: &TcpStream, to: &TcpStream) {
    let (mut from, mut to, mut buffer, start) = (from, to, [0; 4096], Instant::now());
    // Ends that go on talking are a failure, and no reason to hang.
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() || start.elapsed() > LONG_TALK {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Longer than a farewell takes.
const LONG_TALK: Duration = Duration::from_secs(20);

/// A late answer is dropped, and leaves no unknown peer.
#[test]
fn a_timed_out_connect_is_withdrawn() {
    is_withdrawn(|connecting, late| {
        let limit = Duration::from_millis(300);
        let error = connecting.endpoints()[0].connect(late.local_addr().unwrap(), limit).unwrap_err();
        assert!(matches!(error, ConnectError::Stalled { waited, .. } if waited == limit), "{error}");
        late.accept().unwrap().0
    });
}

/// Regression: an attempt that was dropped went on, and a peer appeared at the other end.
#[test]
fn a_dropped_connect_is_withdrawn() {
    is_withdrawn(|connecting, late| {
        let pending = connecting.endpoints()[0].start_connect(late.local_addr().unwrap()).unwrap();
        let (asked, _) = late.accept().unwrap();
        drop(pending);
        asked
    });
}

/// Regression: as for an attempt that was dropped.
#[test]
fn the_connects_of_a_failed_phase_are_withdrawn() {
    is_withdrawn(|connecting, late| {
        let target = Target { endpoint: 0, addresses: vec![late.local_addr().unwrap()] };
        let error = connecting.connect(&[target], Duration::from_millis(300)).unwrap_err();
        assert!(matches!(error, ConnectError::Phase { .. }), "{error}");
        late.accept().unwrap().0
    });
}

/// Gives up a connect before the other end answers, lets it answer over the connection that was made, and finds no peer at
/// either end.
fn is_withdrawn(give_up: impl FnOnce(&Orchestrator, &TcpListener) -> TcpStream) {
    let (accepting, late) = (listening(), dead(1));
    let connecting = Orchestrator::start(vec![("near".into(), builder())], LIMIT).unwrap();
    let asked = give_up(&connecting, &late[0]);
    let answers = TcpStream::connect(accepting.listen_addresses()[0]).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| pass_on(&asked, &answers));
        scope.spawn(|| pass_on(&answers, &asked));
    });
    let peer = accepting.try_accept();
    assert!(peer.is_none(), "{peer:?}");
    assert_eq!((accepting.peer_count(), connecting.endpoints()[0].peer_count()), (0, 0));
}

/// Ten times, in the three steps that the documentation gives, while a peer stays connected and others come.
#[test]
fn a_secret_is_exchanged_without_a_gap() {
    let secret = |number: u32| format!("secret number {number:04}").into_bytes();
    let builder = || Endpoint::builder().secret(secret(0)).threads(1).channels(1);
    let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let near = builder().build().unwrap();
    let address = far.listen_addresses()[0];
    let (lasting, there) = (near.connect(address, LIMIT).unwrap(), far.accept(LIMIT).unwrap());
    let meet = || {
        let peer = near.connect(address, LIMIT).unwrap();
        far.accept(LIMIT).unwrap().close(LIMIT).unwrap();
        drop(peer);
        lasting.notify(b"still here").unwrap().wait(LIMIT).unwrap();
        assert_eq!(there.wait_notification(LIMIT).unwrap(), b"still here");
    };
    for (old, new) in (0..10).map(|number| (secret(number), secret(number + 1))) {
        for (current, also) in [(&old, Some(&new)), (&new, Some(&old)), (&new, None)] {
            for endpoint in [&far, &near] {
                endpoint.set_secret(current.clone(), also.cloned()).unwrap();
                meet();
            }
        }
    }
    // An endpoint that starts in mid-exchange.
    let next =
        builder().also_accepted_secret(secret(10)).listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let lasting = near.connect(next.listen_addresses()[0], LIMIT).unwrap();
    next.accept(LIMIT).unwrap().close(LIMIT).unwrap();
    drop(lasting);
    for (without, other) in [(Endpoint::builder(), secret(0)), (builder(), b"short".to_vec())] {
        let refused = without.also_accepted_secret(other).build().unwrap_err();
        assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
    }
    let late = Endpoint::builder().secret(secret(0)).threads(1).build().unwrap();
    let refused = late.connect(address, LIMIT).unwrap_err();
    assert!(matches!(refused, ConnectError::Refused { reason: RefusalReason::Secret, .. }), "{refused}");
    assert!(matches!(far.set_secret(*b"short", None), Err(Error::Invalid { .. })));
}

/// Regression: twice the size, which the kernel takes, overflowed where a connection was prepared.
#[test]
fn a_socket_buffer_that_no_kernel_has_is_refused() {
    for bytes in [0, 1 << 31, 1 << 63, usize::MAX] {
        let refused = Endpoint::builder().socket_buffer_bytes(bytes).build();
        assert!(
            matches!(&refused, Err(Error::Invalid { what, .. }) if what == "socket buffer bytes"),
            "{bytes}"
        );
    }
}
