//! A C++ program calls the backend's table as NIXL does, and with invalid arguments; under AddressSanitizer if the
//! compiler has it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// A case that runs longer than this hangs.
const HANGS_AFTER_S: &str = "240";

fn compile(into: &Path, sanitized: bool) -> Output {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = std::env::current_exe().unwrap().parent().unwrap().join("libplugin_ferrywire.a");
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    compiler
        .args(["-std=c++17", "-g", "-O1", "-Wall", "-Werror", "-Wno-invalid-offsetof", "-rdynamic", "-o"])
        .arg(into);
    if sanitized {
        compiler.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]);
    }
    // The C++ side is compiled again, so that AddressSanitizer checks it too.
    compiler.arg(here.join("tests/nixl/driver/driver.cpp")).arg(here.join("shim/shim.cpp")).arg(library);
    // System libraries that Rust's standard library needs.
    compiler.args(["-lgcc_s", "-lutil", "-lrt", "-lm", "-ldl", "-lc", "-pthread"]);
    compiler.output().expect("a C++ compiler, which the backend is built with")
}

fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let sanitized = folder.join("sanitized-driver");
        if compile(&sanitized, true).status.success() {
            return sanitized;
        }
        println!("SKIPPED: AddressSanitizer, which this compiler does not have");
        plain_driver().to_owned()
    })
}

fn plain_driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let plain = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver");
        let output = compile(&plain, false);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        plain
    })
}

fn run(arguments: &[&str]) {
    run_with_log(arguments, std::env::var("FERRYWIRE_LOG").ok().as_deref());
}

/// Runs the program and returns its log.
fn run_with_log(arguments: &[&str], level: Option<&str>) -> String {
    run_program(driver(), arguments, level)
}

fn run_program(program: &Path, arguments: &[&str], level: Option<&str>) -> String {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", HANGS_AFTER_S]).arg(program).args(arguments).env_remove("FERRYWIRE_LOG");
    let output = command.envs(level.map(|level| ("FERRYWIRE_LOG", level))).output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let good = format!("{}: good\n", arguments[0]);
    assert!(output.status.success() && said.ends_with(&good), "{}: {said}{errors}", output.status);
    errors.into_owned()
}

#[test]
fn the_record_is_what_nixl_expects() {
    run(&["record"]);
}

#[test]
fn bytes_and_notifications_arrive() {
    run(&["arrive"]);
}

#[test]
fn many_registrations_are_one_transfer() {
    run(&["many"]);
}

#[test]
fn an_agent_that_ends_sends_its_notification_first() {
    run(&["bye"]);
}

#[test]
fn an_agent_reaches_itself() {
    run(&["itself"]);
}

#[test]
fn misuse_gives_errors() {
    run(&["misuse"]);
}

#[test]
fn parameters_are_tolerated_or_named() {
    run(&["parameters"]);
}

#[test]
fn releasing_never_blocks() {
    run(&["release"]);
}

#[test]
fn a_peer_is_removed_and_added_again_in_mid_transfer() {
    run(&["again"]);
}

#[test]
fn memory_is_deregistered_in_mid_transfer() {
    run(&["deregister"]);
}

#[test]
fn any_name_of_an_agent_will_do() {
    run(&["names"]);
}

/// Regression: a transfer that a forked child posted before there was a connection stayed in progress for ever.
#[test]
fn a_forked_child_gets_errors() {
    run(&["forked"]);
}

/// Regression: a child that deregistered memory or released a transfer waited for ever for a lock that another thread
/// of its parent had held.
#[test]
fn a_forked_child_waits_for_no_lock_of_its_parent() {
    // AddressSanitizer has locks of its own, which another thread may hold at a fork too.
    let log = run_program(plain_driver(), &["locks"], None);
    assert!(log.contains("forked from it"), "{log}");
}

#[test]
fn a_read_whose_notification_cannot_be_sent_has_failed() {
    run(&["unnotified"]);
}

#[test]
fn a_dead_peer_is_an_error_on_every_handle() {
    run(&["dead"]);
}

/// Regression: a line that could not be written ended the thread that logged it, and transfers never ended.
#[test]
fn a_log_that_cannot_be_written_is_no_obstacle() {
    run(&["unlogged"]);
}

#[test]
fn why_what_was_posted_failed_is_logged_unless_that_is_silenced() {
    for level in [None, Some("warn")] {
        let log = run_with_log(&["dead"], level);
        assert!(log.contains(" WARN ") && log.contains("cannot connect"), "{level:?}: {log}");
    }
    let log = run_with_log(&["dead"], Some("error"));
    assert!(!log.contains(" WARN ") && log.contains("moves host memory over TCP"), "{log}");
    assert_eq!(run_with_log(&["dead"], Some("off")), "");
}

#[test]
fn a_thousand_rounds_leave_nothing_behind() {
    run(&["rounds", "1000"]);
}
