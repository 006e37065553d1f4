//! Runs the tests of the VM in the VM.

use super::boot;
use std::path::Path;

const PROGRAM: &str = env!("CARGO_BIN_EXE_ferrywire");

/// The tests that the gate has time for.
#[test]
fn runs_leave_nothing_at_nics() {
    boot::pass_beside(
        &[Path::new(PROGRAM)],
        &[9000],
        400,
        &["kills::a_run_that", "kills::what_a_killed", "runs::"],
    );
}

#[test]
fn nor_do_a_hundred_kills_at_both_mtus() {
    match std::env::var_os("FERRYWIRE_LONG").is_some() {
        true => boot::pass_beside(&[Path::new(PROGRAM)], &[1500, 9000], 1800, &["kills::", "runs::"]),
        false => println!("SKIPPED: needs FERRYWIRE_LONG=1, since it takes minutes"),
    }
}
