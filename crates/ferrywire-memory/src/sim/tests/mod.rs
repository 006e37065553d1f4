//! Tests of the simulated GPU. Those that set faults use a GPU of their own, since all run in one process.

mod faults;
mod memory;
mod streams;
mod table;

use super::*;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::time::Duration;

/// Generous: the machine may be stopped meanwhile.
const SOON: Duration = Duration::from_secs(300);
/// Set in a child process made by [`run_child`].
const CHILD: &str = "FERRYWIRE_SIM_GPU_TEST_CHILD";

/// Whether this is the child of a test, and what it is to do.
fn child_task() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// Runs one test of this program in a process of its own, where [`child_task`] is `task`.
fn run_child(test: &str, task: &str, environment: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([&format!("sim::tests::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, task)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

/// The child ran its test, and that passed.
fn assert_passed(child: &Output) {
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

/// The signal that ended a child.
fn signal_of(output: &Output) -> Option<i32> {
    output.status.signal()
}

/// Bytes that differ from their neighbours at any distance.
fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut rng = ferrywire_sys::rng::Rng::new(seed);
    (0..bytes).map(|_| rng.number() as u8).collect()
}
