//! An endpoint in a forked child: an error at once that names the cause, and the parent's works on.
//!
//! Each test has a process of its own, and forks while its endpoint is busy.

use crate::case::case;
use crate::{LIMIT, listening, pair};
use ferrywire::{Endpoint, Error, ErrorKind, Peer, Wakeup};
use ferrywire_sys::fork::Withheld;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// Runs `body` in a forked child, which has to end well.
fn in_child(body: impl FnOnce()) {
    // SAFETY: the child runs what a child of a process with threads may, as long as no lock of the library is held
    // where it asks: that is what is tested. It never returns from here.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork failed");
    if child == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_ok();
        // SAFETY: ends the process at once, without the parent's handlers.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let start = Instant::now();
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if start.elapsed() > LIMIT {
            // SAFETY: our own child, which has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child failed: {status:#x}");
}

/// A forked child that sleeps, until this value is dropped.
struct Sleeping(libc::pid_t);

impl Sleeping {
    /// Returns once the fork handlers have run in the child.
    fn fork() -> Sleeping {
        Sleeping::fork_with(std::io::pipe().unwrap())
    }

    /// The same with a pipe that exists already.
    fn fork_with((mut started, mut starts): (PipeReader, PipeWriter)) -> Sleeping {
        // SAFETY: the child only makes system calls, and never returns from here.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork failed");
        if child == 0 {
            let _ = starts.write_all(b"x");
            std::thread::sleep(LIMIT);
            // SAFETY: ends the process at once, without the parent's handlers.
            unsafe { libc::_exit(0) };
        }
        drop(starts);
        started.read_exact(&mut [0]).unwrap();
        Sleeping(child)
    }
}

impl Drop for Sleeping {
    fn drop(&mut self) {
        // SAFETY: our own child, which has not been waited for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// The TCP sockets among the descriptors of a process, by the numbers that the kernel gives them.
fn tcp_sockets(process: impl std::fmt::Display) -> BTreeSet<String> {
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let sockets = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(9));
    let of_tcp: BTreeSet<String> = sockets.map(|inode| format!("socket:[{inode}]")).collect();
    let entries = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let open = entries
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()?.into_os_string().into_string().ok());
    open.filter(|file| of_tcp.contains(file)).collect()
}

#[track_caller]
fn forked<T: std::fmt::Debug>(result: Result<T, impl Into<Error> + std::fmt::Debug>) {
    let error: Error = result.expect_err("it works in a forked child").into();
    assert_eq!(error.kind(), ErrorKind::Usage);
    let Error::Forked { built_in, here } = error else { panic!("{error}") };
    assert_eq!((built_in, here), (std::os::unix::process::parent_id(), std::process::id()));
    assert!(error.to_string().contains(&format!("process {built_in}")), "{error}");
}

fn write_through(near: &Peer, ends: &[Endpoint; 2]) {
    let source = ends[0].register(vec![7u8; 1 << 20]).unwrap();
    let target = ends[1].alloc_host(1 << 20).unwrap();
    near.write(&source, 0, &target.descriptor(), 0, 1 << 20).unwrap().wait(LIMIT).unwrap();
    let mut found = vec![0; 1 << 20];
    target.read_at(0, &mut found).unwrap();
    assert!(found == vec![7; 1 << 20]);
}

#[test]
fn everything_is_refused_in_a_forked_child() {
    case!("").passes(|| {
        let pair = pair();
        let (near, far) = (pair.near.clone(), pair.far.clone());
        let region = pair.ends[1].alloc_host(1 << 20).unwrap();
        // SAFETY: the owner keeps the bytes, which nothing else touches.
        let owned = unsafe {
            let mut bytes = Box::new([0u8; 64]);
            pair.ends[1].register_with(bytes.as_mut_ptr(), 64, bytes)
        };
        let owned = owned.unwrap();
        let remote = region.descriptor();
        let waiting = far.recv(1, &region, 0, 64).unwrap();
        let source = pair.ends[0].register(vec![7u8; 1 << 20]).unwrap();
        let ended = near.notify(b"x").unwrap();
        ended.wait(LIMIT).unwrap();
        assert_eq!(far.wait_notification(LIMIT).unwrap(), b"x");
        let wakeup = Wakeup::new().unwrap();
        let mut writes = Vec::new();
        for round in 0..10 {
            writes.push(near.write(&source, 0, &remote, 64, (1 << 20) - 64).unwrap());
            let at_work = (pair.ends.clone(), near.clone(), far.clone(), region.clone(), owned.clone());
            in_child(|| {
                let (ends, near, far, region, owned) = at_work;
                forked(near.write(&source, 0, &remote, 0, 10));
                forked(near.read(&source, 0, &remote, 0, 10));
                forked(near.send(1, &source, 0, 10));
                forked(far.recv(1, &region, 0, 10));
                forked(near.notify(b"x"));
                forked(far.poll_notification());
                forked(far.wait_notification(LIMIT));
                forked(near.close(LIMIT));
                forked(waiting.wait(LIMIT));
                forked(waiting.wait_for(LIMIT, LIMIT));
                forked(waiting.poll().unwrap());
                waiting.cancel();
                assert_eq!(ended.wait(LIMIT), Ok(0));
                let address = ends[1].listen_addresses()[0];
                forked(ends[0].connect(address, LIMIT));
                forked(ends[0].connect_metadata(&ends[1].metadata(), LIMIT));
                forked(ends[1].accept(LIMIT));
                forked(ends[1].try_accept().unwrap());
                forked(ends[1].register(vec![1]));
                forked(ends[1].alloc_host(1));
                assert!(!ends[1].progress());
                let new = Wakeup::new().unwrap();
                far.arm(&new);
                waiting.arm(&new);
                ends[1].arm(&new);
                assert_eq!(new.wait(LIMIT), Ok(true));
                // The parent's wakes are not swallowed here.
                wakeup.clear();
                forked(region.clone().deregister());
                forked(ends[0].close(LIMIT));
                if round == 9 {
                    // An endpoint of the child's own works, with the parent's too.
                    let mine = Endpoint::builder().channels(1).build().unwrap();
                    let source = mine.register(vec![9u8; 64]).unwrap();
                    let peer = mine.connect(address, LIMIT).unwrap();
                    peer.write(&source, 0, &remote, 0, 64).unwrap().wait(LIMIT).unwrap();
                    peer.close(LIMIT).unwrap();
                    mine.close(LIMIT).unwrap();
                }
                drop((ends, near, far, region, owned));
            });
        }
        for write in &writes {
            write.wait(LIMIT).unwrap();
        }
        let mut found = [0; 65];
        region.read_at(0, &mut found).unwrap();
        assert_eq!((found[0], found[63], found[64]), (9, 9, 7));
        let sent = near.send(1, &source, 0, 64).unwrap();
        assert_eq!((waiting.wait(LIMIT), sent.wait(LIMIT)), (Ok(64), Ok(64)));
        write_through(&near, &pair.ends);
        pair.near.close(LIMIT).unwrap();
        pair.ends.iter().for_each(|end| end.close(LIMIT).unwrap());
    });
}

/// The peers in the metrics of this process that are connected, and the bytes that all peers have sent.
fn counted() -> (usize, u64) {
    let peers = ferrywire_metrics::process().peers;
    let sent = peers.iter().flat_map(|peer| &peer.channels).map(|channel| channel.tx_bytes);
    (peers.iter().filter(|peer| !peer.transport.is_empty()).count(), sent.sum())
}

/// Regression: a child showed its parent's peers as its own, with the counts they had at the fork.
#[test]
fn a_child_does_not_count_what_its_parent_has_moved() {
    case!("").passes(|| {
        let pair = pair();
        write_through(&pair.near, &pair.ends);
        let (peers, sent) = counted();
        assert!(peers == 2 && sent > 1 << 20, "{peers} peers have sent {sent} bytes");
        let address = pair.ends[1].listen_addresses()[0];
        let mut pair = Some(pair);
        in_child(|| {
            let mine = Endpoint::builder().channels(1).build().unwrap();
            let peer = mine.connect(address, LIMIT).unwrap();
            peer.notify(b"x").unwrap().wait(LIMIT).unwrap();
            drop(pair.take());
            let (peers, sent) = counted();
            assert!(peers == 1 && sent < 1 << 20, "{peers} peers have sent {sent} bytes");
            peer.close(LIMIT).unwrap();
            mine.close(LIMIT).unwrap();
        });
        assert!(counted().1 >= sent, "{sent}");
    });
}

/// Turns endpoints that have no threads.
fn turn(ends: &[Endpoint; 2]) {
    for end in ends {
        end.progress();
    }
}

/// The last handles are dropped in the child, and go on in the parent.
#[test]
fn the_last_handle_may_be_dropped_in_the_child() {
    case!("").passes(|| {
        for threads in [0, 2] {
            let build = |builder: ferrywire::Builder| builder.channels(2).threads(threads).build().unwrap();
            let address = "127.0.0.1:0".parse().unwrap();
            let mut ends = Some([build(Endpoint::builder().listen(address)), build(Endpoint::builder())]);
            let connected = {
                let ends = ends.as_ref().unwrap();
                let connecting = ends[1].start_connect(ends[0].listen_addresses()[0]).unwrap();
                loop {
                    turn(ends);
                    if let Some(peer) = connecting.poll() {
                        break peer.unwrap();
                    }
                }
            };
            let mut peer = Some(connected);
            in_child(|| {
                let (ends, peer) = (ends.take().unwrap(), peer.take().unwrap());
                let other = listening();
                drop((peer, ends));
                other.close(LIMIT).unwrap();
            });
            assert_eq!(peer.as_ref().unwrap().error(), None);
            let ends = ends.as_ref().unwrap();
            let far = ends[0].accept(LIMIT).unwrap();
            far.notify(b"x").unwrap();
            while peer.as_ref().unwrap().poll_notification().unwrap().is_none() {
                turn(ends);
            }
            // Without threads each needs the other to be turned.
            std::thread::scope(|scope| {
                for end in ends {
                    scope.spawn(|| end.close(LIMIT).unwrap());
                }
            });
        }
    });
}

/// Regression: connections that the parent closed stayed open because of the child's copies. The peer did not see the end,
/// so a close took up to 9 s, and the control thread was woken by their events all the time.
#[test]
fn a_child_that_lives_on_holds_no_connection_and_no_port_of_its_parent() {
    case!("").passes(|| {
        let pair = pair();
        let address = pair.ends[1].listen_addresses()[0];
        write_through(&pair.near, &pair.ends);
        let child = Sleeping::fork();
        assert!(tcp_sockets("self").len() >= 2 + 2 * 3, "two listeners, and both ends of three connections");
        assert_eq!(tcp_sockets(child.0), BTreeSet::new());
        write_through(&pair.near, &pair.ends);
        pair.far.close(LIMIT).unwrap();
        pair.ends.iter().for_each(|end| end.close(LIMIT).unwrap());
        drop(TcpListener::bind(address).expect("the child does not listen there"));
    });
}

/// Regression: the port of metrics, and the socket for `ferrywire watch`, lived on in the child after the parent's end: the port
/// was taken and silent, and `watch` waited for the socket.
#[test]
fn a_child_that_lives_on_does_not_hold_the_sockets_of_its_parents_metrics() {
    let metrics = case!("").with("FERRYWIRE_METRICS", "127.0.0.1:0");
    metrics.passes(|| {
        let pair = pair();
        let child = Sleeping::fork();
        let sockets = |process: &str| {
            let table = fs::read_to_string("/proc/self/net/unix").unwrap();
            let listed = table.lines().filter(|line| line.contains(&format!("/{}-", std::process::id())));
            let named = listed.filter_map(|line| line.split_whitespace().nth(6)).map(str::to_owned);
            let named: BTreeSet<String> = named.map(|number| format!("socket:[{number}]")).collect();
            let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
            let open = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
            open.filter(|link| link.to_str().is_some_and(|link| named.contains(link))).count()
        };
        assert_eq!(sockets("self"), 1, "the socket for watch");
        assert_eq!(sockets(&child.0.to_string()), 0);
        assert!(tcp_sockets("self").len() > 2 + 2 * 3, "a port of metrics");
        assert_eq!(tcp_sockets(child.0), BTreeSet::new());
        drop(pair);
    });
}

/// Lowers the descriptor limit to a few above the highest number in use, and takes what is left. The files are to be kept.
fn take_all_descriptors() -> Vec<File> {
    let open = fs::read_dir("/proc/self/fd").unwrap();
    let highest =
        open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u64>().ok()).max().unwrap();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointers are to a whole limit.
    let lowered = unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = highest + 4;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit)
    };
    assert_eq!(lowered, 0);
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// Regression: a child had no descriptor left for the empty file that replaces its parent's sockets, and kept all of them.
/// There is no endpoint here: its metrics thread waits in `accept`, and the descriptor that waits with it is free in a child.
#[test]
fn a_child_at_the_descriptor_limit_holds_no_socket_of_its_parent() {
    case!("").passes(|| {
        let listeners = [0, 0].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
        let withheld = listeners.each_ref().map(|listener| Withheld::new(listener.as_fd()));
        let pipe = std::io::pipe().unwrap();
        let files = take_all_descriptors();
        let child = Sleeping::fork_with(pipe);
        drop(files);
        assert_eq!(tcp_sockets(child.0), BTreeSet::new());
        for listener in &listeners {
            let link = fs::read_link(format!("/proc/{}/fd/{}", child.0, listener.as_raw_fd()));
            assert_eq!(link.unwrap().to_str(), Some("anon_inode:[eventfd]"), "the number stays in use");
        }
        drop((withheld, listeners));
        for address in addresses {
            drop(TcpListener::bind(address).expect("the child does not listen there"));
        }
    });
}
