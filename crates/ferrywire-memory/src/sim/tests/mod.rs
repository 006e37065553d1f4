//! Tests of the simulated GPU. A test that sets faults uses a GPU of its own, since all tests run in one
//! process.

mod faults;
mod memory;
mod streams;
mod table;

use super::*;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::time::Duration;

/// Timeout of the tests' waits; long, since the machine may be stopped meanwhile.
const SOON: Duration = Duration::from_secs(300);
/// Environment variable that [`run_child`] sets in the child process.
const CHILD: &str = "FERRYWIRE_SIM_GPU_TEST_CHILD";

/// The task of a test's child process; `None` in the parent.
fn child_task() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// Runs one test of this program in a child process, where [`child_task`] is `task`.
fn run_child(test: &str, task: &str, environment: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([&format!("sim::tests::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, task)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

/// Asserts that the child has run its test, and that the test passed.
fn assert_passed(child: &Output) {
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

/// The signal that ended a child.
fn signal_of(output: &Output) -> Option<i32> {
    output.status.signal()
}

/// Bytes that differ from those around them at any distance.
fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut rng = ferrywire_sys::rng::Rng::new(seed);
    (0..bytes).map(|_| rng.number() as u8).collect()
}
