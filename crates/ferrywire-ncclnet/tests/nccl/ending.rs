//! Plugins that end the process by `exit`: one line reports it. An exit that the program wants is not
//! reported.

use std::io::BufRead;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use ferrywire_ncclnet::{Call, Library, SupervisedProcess, log};

use crate::compile::{alone, broken};

/// Environment variable with the task of [`a_program`].
const TASK: &str = "FERRYWIRE_TEST_ENDING";

/// Loads the plugin that the variable names, and makes it do what the case is about.
#[test]
#[ignore = "the other process of these tests"]
fn a_program() {
    let task = std::env::var(TASK).expect("a task");
    let (case, ending) = task.split_once(' ').expect("a case and an ending");
    let pipe = std::io::pipe().expect("a pipe");
    if ending == "supervised" {
        log::tee_to_fd(Some(pipe.1.as_raw_fd()));
    }
    let own = (ending == "replaced").then(in_place_of_the_pipe);
    // SAFETY: broken.c is part of these tests.
    let loaded = unsafe { Library::open(broken(case)).and_then(|library| library.load(None)) };
    let plugin = loaded.expect("loads");
    match ending {
        "accept" => {
            let (mut listen, _) = plugin.listen(0).expect("listens");
            std::thread::spawn(move || listen.accept().map(drop));
            while plugin.inflight_calls().first().is_none_or(|call| call.call != Call::Accept) {
                std::thread::yield_now();
            }
            std::process::exit(7);
        }
        "replaced" => {
            let written = own.and_then(|file| file.metadata().ok()).expect("a file").len();
            assert_eq!(written, 0, "lines are in a file of the program");
        }
        _ => drop(plugin.listen(0)),
    }
}

/// A file under the number of the pipe to the supervisor, as in a program that closes inherited descriptors.
fn in_place_of_the_pipe() -> std::fs::File {
    let supervisor = std::env::var("FERRYWIRE_PLUGIN_WATCHED").expect("a supervisor");
    let descriptor = supervisor.split(':').nth(1).and_then(|number| number.parse().ok()).expect("a number");
    let file = tempfile::tempfile().expect("a file");
    // SAFETY: this program does not use the pipe by itself.
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), descriptor) }, descriptor);
    file
}

/// The command that runs [`a_program`] with a task.
fn command(case: &str, ending: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "ending::a_program", "--ignored", "--nocapture"]);
    command.env(TASK, format!("{case} {ending}")).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Runs [`a_program`] with a task; returns its exit status and what ferrywire wrote to standard error.
fn ended(case: &str, ending: &str) -> (Option<i32>, Vec<String>) {
    let output = command(case, ending).stderr(Stdio::piped()).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let lines = said.lines().filter(|line| line.starts_with("ferrywire: "));
    (output.status.code(), lines.map(str::to_owned).collect())
}

const BY: &str = "ferrywire: plugin Broken plugin ended this process by exit";

#[test]
fn an_exit_inside_a_call_is_reported() {
    let lines = "the plugin logged last: the first line | no page is left: 1 | no page is left: 2";
    let reported = format!("{BY} in listen on device 0; {lines}");
    assert_eq!(ended("LISTEN_EXITS", "listen"), (Some(1), vec![reported]));
}

#[test]
fn an_exit_before_there_is_a_device_is_reported() {
    let reported = "in init; the plugin logged last: the manager is not running, giving up";
    let (code, said) = ended("INIT_EXITS", "listen");
    assert_eq!((code, said.len()), (Some(1), 1), "{said:?}");
    assert!(said[0].starts_with(&format!("{BY} {reported}")), "{said:?}");
}

#[test]
fn an_exit_on_a_thread_of_the_plugins_own_is_reported() {
    let reported = "on a thread of its own; the plugin logged last: too many fragments in one chunk";
    let (code, said) = ended("THREAD_EXITS", "listen");
    assert_eq!((code, said.len()), (Some(1), 1), "{said:?}");
    assert!(said[0].starts_with(&format!("{BY} {reported}")), "{said:?}");
}

#[test]
fn an_exit_that_the_program_wants_is_not_reported() {
    assert_eq!(ended("ACCEPT_BLOCKS", "accept"), (Some(7), Vec::new()));
    assert_eq!(ended("NOTHING", "listen"), (Some(0), Vec::new()));
}

#[test]
fn a_supervisor_reports_the_exit_itself() {
    assert_eq!(ended("LISTEN_EXITS", "supervised"), (Some(1), Vec::new()));
}

/// Runs [`a_program`] as a supervised process; returns its exit status, the reported cause, and the lines on
/// standard error.
fn watched(case: &str, ending: &str) -> (Option<i32>, Option<String>, usize) {
    let mut command = command(case, ending);
    command.stderr(Stdio::piped());
    let mut watched = SupervisedProcess::spawn(command).expect("it starts");
    let stderr = watched.child().stderr.take().expect("piped");
    let lines = std::io::BufReader::new(stderr).lines().map_while(Result::ok);
    let own = lines.filter(|line| line.starts_with("ferrywire: ")).count();
    let ended = watched.wait().expect("it ends");
    (ended.status.code(), ended.cause(), own)
}

#[test]
fn a_supervised_exit_is_reported_by_its_supervisor() {
    let lines = "the plugin logged last: the first line | no page is left: 1 | no page is left: 2";
    let cause = format!("the plugin ended its process by exit in listen on device 0; {lines}");
    assert_eq!(watched("LISTEN_EXITS", "listen"), (Some(1), Some(cause), 0));
    let (code, cause, own) = watched("INIT_CRASHES", "listen");
    let expected =
        "died by signal 11 (SIGSEGV); the plugin logged last: about to crash; likely: a defect of the plugin";
    assert!(code.is_none() && cause.as_ref().is_some_and(|cause| cause.starts_with(expected)), "{cause:?}");
    assert_eq!(own, 0);
    assert_eq!(watched("ACCEPT_BLOCKS", "accept"), (Some(7), None, 0));
    assert_eq!(watched("NOTHING", "listen"), (Some(0), None, 0));
}

/// Regression: the caller got an error, and no handle of the process that ran.
#[test]
fn a_process_whose_lines_cannot_be_read_is_not_started() {
    alone("ending::a_process_whose_lines_cannot_be_read_is_not_started", || {
        let pages = std::fs::read_to_string("/proc/self/statm").expect("a size");
        let pages: u64 = pages.split(' ').next().and_then(|size| size.parse().ok()).expect("a number");
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the pointers are to whole limits. Half a MiB more than is used has no room for a thread's stack.
        let refused = unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &mut limit), 0);
            let before = limit;
            limit.rlim_cur = pages * libc::sysconf(libc::_SC_PAGESIZE) as u64 + (512 << 10);
            assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &limit), 0);
            let refused = SupervisedProcess::spawn(Command::new("true"));
            assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &before), 0);
            refused
        };
        assert!(refused.is_err(), "a thread was started");
        // SAFETY: no memory is passed.
        let child = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) };
        assert_eq!(child, -1, "there is a child");
    });
}

/// Regression: the lines were written into whatever file had the number of the pipe.
#[test]
fn lines_are_not_written_into_a_file_in_place_of_the_pipe() {
    assert_eq!(watched("LOGS", "replaced"), (Some(0), None, 0));
}
