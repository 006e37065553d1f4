//! API for programs in other languages: waits for many objects at once, memory that the caller
//! owns, blocks in arrays, limits on time and on what a process has, processes that fork, and words at every end.

mod addresses;
#[path = "../plugin/affinity.rs"]
mod affinity;
mod any;
mod blocks;
mod bounded;
#[allow(dead_code, reason = "the plugin's own tests use all of it")]
#[path = "../../../ferrywire-tcpx-sim/tests/rules/case.rs"]
mod case;
mod cores;
mod dropped;
mod ends;
mod forks;
mod held_up;
mod lanes;
mod limits;
mod many;
mod metrics;
mod netns;
mod outcomes;
mod owners;
mod parallelism;
mod paths;
mod settings;
mod targets;
mod unmapped;
mod wakeups;
mod withdrawn;

use ferrywire::{Builder, Endpoint, Peer, limits::SIM_GPUS_MAX};
use ferrywire_net::tcp::{TcpTransport, ZeroCopyPolicy};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Longest any single wait may be, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(120);

/// Tells a run of these tests to send without copies.
const ZERO_COPY: &str = "FERRYWIRE_TEST_ZERO_COPY";

/// An endpoint's builder, over sockets that never copy large payload where [`ZERO_COPY`] says so.
fn builder() -> Builder {
    let tcp = || TcpTransport::default().zero_copy(ZeroCopyPolicy::Always);
    if sockets_copy() { Endpoint::builder() } else { Endpoint::builder().transport(Arc::new(tcp())) }
}

/// Keeps a simulated GPU for one test: there are fewer than tests that make one stand still.
fn only_user_of_gpu(index: u32) -> MutexGuard<'static, ()> {
    static USED: [Mutex<()>; SIM_GPUS_MAX] = [const { Mutex::new(()) }; SIM_GPUS_MAX];
    USED[index as usize].lock().unwrap_or_else(PoisonError::into_inner)
}

fn sockets_copy() -> bool {
    std::env::var_os(ZERO_COPY).is_none()
}

/// The tests of `held_up`, with memory that the kernel reads until the peer's host has it.
#[test]
fn held_up_holds_without_copies() {
    let mut again = Command::new(std::env::current_exe().unwrap());
    let run = again.args(["held_up::", "--test-threads=4"]).env(ZERO_COPY, "1").output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    let passed = said.matches("... ok").count();
    assert!(run.status.success() && passed > 10, "{passed} passed\n{said}");
}

fn listening() -> Endpoint {
    builder().listen("127.0.0.1:0".parse().unwrap()).channels(2).build().unwrap()
}

/// Time for which this thread has run.
fn busy_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Two endpoints, and each as the other sees it.
struct Pair {
    ends: [Endpoint; 2],
    near: Peer,
    far: Peer,
}

fn pair() -> Pair {
    let ends = [listening(), listening()];
    let near = ends[0].connect(ends[1].listen_addresses()[0], LIMIT).unwrap();
    let far = ends[1].accept(LIMIT).unwrap();
    Pair { ends, near, far }
}
