//! Wrong data, wrong secrets, busy and lost peers, Ctrl-C.

use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{GRACE, Serve, TIMEOUT_DEFAULT, ferrywire, first_error, json, results, run_within, text};
use crate::hosted::with_plugin;
use crate::lanes::children;
use serde_json::Value;

/// Options of a run that does not end by itself within a test.
const ENDLESS: &str = "--sizes 64K --seconds 600 --verify off";

fn mismatch(inject: &str, connect: &str) -> String {
    let serve = Serve::start(&format!("--once --inject {inject}"));
    let output = serve.connect(&format!("--iters 8 --warmup 1 --json - {connect}"));
    assert_eq!(output.status.code(), Some(1), "{inject}: {}", text(&output.stderr));
    let json = json(&output);
    assert_eq!(json["results"], Value::Array(Vec::new()), "no number for a size that did not verify");
    let found = first_error(&output);
    for part in ["data mismatch", "offset", "expected 0x", "found 0x"] {
        assert!(found.contains(part), "{found}");
    }
    // Only one that has met its peer ends.
    let (status, said) = serve.end();
    assert_eq!(status, Some(1));
    assert!(said.contains("data mismatch"), "{said}");
    found
}

#[test]
fn a_wrong_byte_fails_the_run() {
    for op in ["write", "read", "send"] {
        let said = mismatch("wrong-byte", &format!("--op {op} --sizes 100001"));
        assert!(said.contains("offset 100000:"), "{said}");
    }
    mismatch("wrong-byte", "--sizes 1");
    mismatch("wrong-byte", "--sizes 64K --blocks 7");
    mismatch("wrong-byte", "--sizes 64K --pattern bidir");
    mismatch("wrong-byte", "--sizes 8 --pattern latency");
    mismatch("wrong-byte", "--sizes 60000 --verify sample");
}

#[test]
fn old_data_fails_the_run() {
    for op in ["write", "read", "send"] {
        let said = mismatch("old-pattern", &format!("--op {op} --sizes 100001"));
        assert!(said.contains("the data of 1 iterations ago"), "{said}");
    }
    mismatch("old-pattern", "--sizes 1");
    mismatch("old-pattern", "--sizes 64K --blocks 7");
}

#[test]
fn a_skipped_write_fails_the_run() {
    for op in ["write", "send"] {
        let said = mismatch("skip-write", &format!("--op {op} --sizes 100001"));
        assert!(said.contains("never written"), "{said}");
    }
    mismatch("skip-write", "--sizes 1");
    mismatch("skip-write", "--sizes 64K --blocks 7");
}

/// Regression: the peer waited for others of its run, which waited for it, and the next run was refused as busy.
#[test]
fn a_panic_while_it_serves_ends_it_with_an_error() {
    let serve = Serve::start("--memory host --inject panic");
    let args = "--memory host --peer-memory host --sizes 4K --iters 5 --json -";
    let output = serve.connect_within(TIMEOUT_DEFAULT, args);
    assert_eq!(output.status.code(), Some(1));
    assert!(json(&output)["error"].is_string(), "{}", text(&output.stdout));
    let (status, said) = serve.end();
    assert_eq!(status, Some(1), "{said}");
    let expected = "error: internal error, please report: thread bench-peer panicked at ";
    assert!(said.starts_with(expected) && said.contains("as a test asked for"), "{said}");
}

/// The first knew only that another one had failed.
#[test]
fn the_peer_of_an_incast_that_failed_is_named() {
    let serve = Serve::start("--memory host --inject wrong-byte --inject-member 2");
    let args = "--pattern incast --peers 3 --memory host --peer-memory host --sizes 4K --iters 5 --json -";
    let output = serve.connect_within(TIMEOUT_DEFAULT, args);
    assert_eq!(output.status.code(), Some(1));
    let error = json(&output)["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.starts_with("peer 2 of the incast failed: ") && error.contains("data mismatch"), "{error}");
}

#[test]
fn finished_sizes_survive_a_later_failure() {
    let serve = Serve::start("--inject wrong-byte");
    // An empty message has no byte that could be wrong.
    let output = serve.connect("--sizes 0,64 --iters 8 --json -");
    assert_eq!(output.status.code(), Some(1));
    let json = json(&output);
    assert_eq!(json["results"].as_array().map(Vec::len), Some(1));
    assert!(json["error"].as_str().is_some_and(|error| error.contains("data mismatch")));
}

#[test]
fn the_secrets_of_both_ends_must_agree() {
    let serve = Serve::start_with("--listen 127.0.0.1:0", &[("FERRYWIRE_SECRET", "the right secret")]);
    let connect = |secret: &str| {
        let mut command =
            ferrywire(&format!("bench connect {} --sizes 4K --iters 5 --json -", serve.address));
        command.env("FERRYWIRE_SECRET", secret).output().expect("it runs")
    };
    let wrong = connect("the wrong secret");
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong.stderr).contains("secret"), "{}", text(&wrong.stderr));
    assert_eq!(serve.connect("--sizes 4K --iters 5").status.code(), Some(1), "no secret at all");
    results(&connect("the right secret"));
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "the right secret\n").expect("written");
    results(
        &serve.connect(&format!("--sizes 4K --iters 5 --json - --secret-file {}", file.path().display())),
    );
}

/// A changed secret used to be taken by the next start only.
#[test]
fn a_changed_secret_file_is_taken_while_it_serves() {
    takes_a_changed_secret("");
}

/// The child process that runs the plugin has the secret from its parent.
#[test]
fn a_changed_secret_file_is_taken_by_the_child_with_the_plugin() {
    takes_a_changed_secret(&with_plugin(""));
}

/// `options` are for both ends.
fn takes_a_changed_secret(options: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    // As Kubernetes lays out a Secret: it exchanges the link `..data`.
    for (name, secret) in [("old", "the old secret"), ("new", "the new secret")] {
        std::fs::create_dir(path(name)).expect("a folder");
        std::fs::write(path(name).join("key"), secret).expect("written");
    }
    symlink("old", path("..data")).expect("a link");
    symlink("..data/key", path("key")).expect("a link");
    let mut serve = Serve::start(&format!("--secret-file {} {options}", path("key").display()));
    let lines = serve.collect_errors();
    let warnings =
        || lines.lock().expect("whole lines").iter().filter(|line| line.starts_with("warning: ")).count();
    let connect = |secret: &str| {
        let mut command =
            ferrywire(&format!("bench connect {} --sizes 4K --iters 5 --json - {options}", serve.address));
        run_within(TIMEOUT_DEFAULT, command.env("FERRYWIRE_SECRET", secret))
    };
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < TIMEOUT_DEFAULT + GRACE, "{what}: {:?}", lines.lock());
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    results(&connect("the old secret"));
    assert_eq!(connect("the new secret").status.code(), Some(1));
    symlink("new", path("..data_tmp")).expect("a link");
    std::fs::rename(path("..data_tmp"), path("..data")).expect("exchanged");
    until("the new secret is accepted", &|| connect("the new secret").status.success());
    results(&connect("the old secret"));
    // Regression: a child that replaced one which had died accepted the new secret alone, and other ends follow later.
    for child in children(serve.child.id()) {
        // SAFETY: a signal to a process that `serve` has started, and has not waited for.
        assert_eq!(unsafe { libc::kill(child as i32, libc::SIGKILL) }, 0, "{child} is there");
        until("another child serves", &|| connect("the new secret").status.success());
        results(&connect("the old secret"));
    }
    std::fs::write(path("new").join("key"), "short").expect("written");
    until("the file is bad", &|| warnings() > 0);
    for secret in ["the old secret", "the new secret"] {
        results(&connect(secret));
    }
    assert_eq!(warnings(), 1, "{:?}", lines.lock());
}

/// Wherever it has it from, and whatever else names one.
#[test]
fn both_ends_of_loopback_mode_have_one_secret() {
    let folder = tempfile::tempdir().expect("a folder");
    let [secret, other, config] = ["secret", "other", "config"].map(|name| folder.path().join(name));
    std::fs::write(&secret, "the right secret").expect("written");
    std::fs::write(&other, "the wrong secret").expect("written");
    std::fs::write(&config, format!("secret-file = {secret:?}\n")).expect("written");
    let demo = || ferrywire("bench --memory host --peer-memory host --sizes 4K --iters 5 --json -");
    results(&demo().arg("--secret-file").arg(&secret).output().expect("it runs"));
    results(&demo().arg("--config").arg(&config).output().expect("it runs"));
    let mut two = demo();
    two.arg("--secret-file").arg(&secret).env("FERRYWIRE_SECRET_FILE", &other);
    results(&two.env("FERRYWIRE_SECRET", "another wrong secret").output().expect("it runs"));
    // No text, as from a generator of keys.
    std::fs::write(&secret, [0, 0xFF, b'k', 0xC0, 0, 7, 0xEE, 0x80, 1, b'e']).expect("written");
    results(&demo().env("FERRYWIRE_SECRET_FILE", &secret).output().expect("it runs"));
    // As a variable that was filled from a file.
    results(&demo().env("FERRYWIRE_SECRET", "the right secret\n").output().expect("it runs"));
}

#[test]
fn a_secret_in_the_environment_goes_before_the_files() {
    let right = [("FERRYWIRE_SECRET", "the right secret")];
    let folder = tempfile::tempdir().expect("a folder");
    let [wrong, config] = ["wrong", "config"].map(|name| folder.path().join(name));
    std::fs::write(&wrong, "the wrong secret").expect("written");
    std::fs::write(&config, format!("secret-file = {wrong:?}\n")).expect("written");
    let options = format!("--sizes 4K --iters 5 --config {} --json -", config.display());
    let listen = format!("--listen 127.0.0.1:0 --config {}", config.display());
    for serve in [Serve::start_with("--listen 127.0.0.1:0", &right), Serve::start_with(&listen, &right)] {
        let connect = || ferrywire(&format!("bench connect {} {options}", serve.address));
        results(&connect().envs(right).output().expect("it runs"));
        let refused = connect().envs(right).arg("--secret-file").arg(&wrong).output().expect("it runs");
        assert_eq!(refused.status.code(), Some(1), "what was typed goes first");
        assert_eq!(connect().output().expect("it runs").status.code(), Some(1), "the file is left");
    }
    // The other peers of an incast have it from the same place.
    results(&ferrywire(&format!("bench --pattern incast {options}")).envs(right).output().expect("it runs"));
}

#[test]
fn a_secret_may_be_any_bytes() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), b"\xff\xfe of no text").expect("written");
    let demo = || ferrywire("bench --memory host --peer-memory host --sizes 4K --iters 5 --json -");
    results(&demo().arg("--secret-file").arg(file.path()).output().expect("it runs"));
    let secret = std::ffi::OsStr::from_bytes(b"\xff\xfe of no text");
    let output = demo().env("FERRYWIRE_SECRET", secret).output().expect("it runs");
    results(&output);
    assert_eq!(json(&output)["config"]["secret"], true);
}

#[test]
fn listening_on_loopback_says_so() {
    let mut serve = Serve::start("");
    let said = crate::common::read_line(&mut serve.stdout);
    assert!(said.contains("other hosts cannot reach loopback") && said.contains("--listen"), "{said}");
}

#[test]
fn a_one_time_secret_comes_with_the_command_to_paste() {
    pasted("--listen 0.0.0.0:0", "");
}

/// The line had no --gpus: it measured one of them, and said that all was well.
#[test]
fn the_command_to_paste_is_for_as_many_gpus() {
    let Some(result) = pasted("--listen 0.0.0.0:0 --gpus 0-1 --memory sim", "--memory sim") else { return };
    assert_eq!(result["config"]["gpus"], serde_json::json!([0, 1]), "{result}");
}

/// Regression: the line had no --encrypt, so the end that printed it refused the run.
#[test]
fn the_command_to_paste_encrypts_where_serve_requires_it() {
    let Some(result) = pasted("--listen 0.0.0.0:0 --encrypt", "") else { return };
    assert_eq!(result["config"]["encryption"], "required", "{result}");
}

/// Runs the command line that `serve` prints; returns its results.
fn pasted(serve: &str, more: &str) -> Option<serde_json::Value> {
    let mut serve = Serve::start_with(serve, &[]);
    assert!(crate::common::read_line(&mut serve.stdout).contains("on the other host run:"));
    // Without a NIC beyond loopback there is no such line to read.
    if serve.address.starts_with("127.") {
        println!("SKIPPED: needs a NIC with an address");
        return None;
    }
    let line = crate::common::read_line(&mut serve.stdout);
    let words: Vec<&str> = line.split_whitespace().take_while(|word| *word != "#").collect();
    let secret = words[0].strip_prefix("FERRYWIRE_SECRET=").expect("a secret");
    assert_eq!(words[1], "ferrywire", "{line}");
    let mut command = ferrywire(&format!("{} --sizes 4K --iters 5 --json - {more}", words[2..].join(" ")));
    let output = command.env("FERRYWIRE_SECRET", secret).output().expect("it runs");
    results(&output);
    Some(json(&output))
}

/// A connect that has begun; gives it with its standard error, read up to the first finished size.
fn begun(serve: &Serve, args: &str) -> (Child, BufReader<std::process::ChildStderr>) {
    let mut command = ferrywire(&format!("bench connect {} -v --json - {args}", serve.address));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("connect starts");
    let mut errors = BufReader::new(child.stderr.take().expect("piped"));
    let (mut line, mut said) = (String::new(), String::new());
    while !line.starts_with("finished") {
        line.clear();
        let more = errors.read_line(&mut line).expect("text") > 0;
        assert!(more, "it ended before it had finished a size: {said}");
        said += &line;
    }
    (child, errors)
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().expect("kill runs");
    assert!(status.success());
}

#[test]
fn a_second_connect_is_refused_as_busy_and_ctrl_c_ends_the_first() {
    let mut serve = Serve::start("");
    let (first, _errors) = begun(&serve, "--sizes 8,1M --iters 100000 --verify off");
    let second = serve.connect("--sizes 4K --iters 5");
    assert_eq!(second.status.code(), Some(1));
    assert!(first_error(&second).contains("busy with a run of"), "{}", first_error(&second));
    let reported = serve.next_error();
    assert!(
        reported.contains("refused a run of 127.0.0.1:") && reported.contains("busy with a run of"),
        "{reported}"
    );
    signal(&first, "-INT");
    let output = first.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130));
    let json = json(&output);
    assert_eq!(json["error"], "interrupted");
    assert_eq!(json["results"].as_array().map(Vec::len), Some(1), "what was finished is there");
    results(&serve.connect("--sizes 4K --iters 5 --json -"));
    let said = serve.next_error();
    // Which of the two depends on how much was still to be sent.
    assert!(said.contains("interrupted") || said.contains("closed the connection"), "{said}");
}

#[test]
fn ctrl_c_ends_a_serve_and_its_peer_names_the_lost_end() {
    let serve = Serve::start("");
    let (connect, _errors) = begun(&serve, "--sizes 8,1M --iters 100000 --verify off");
    let address = serve.address.clone();
    signal(&serve.child, "-INT");
    assert_eq!(serve.end().0, Some(130));
    let output = connect.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1));
    let error = json(&output)["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains(&address), "{error}");
}

/// Both ends drive: what either lets go of looked to the other like a mistake in its descriptors.
#[test]
fn ctrl_c_in_both_directions_reaches_the_other_end() {
    let both_ways = "--memory host --peer-memory host --pattern bidir --sizes 8,1M --seconds 2 --verify off";
    let mut serve = Serve::start("--memory host");
    let (connect, _errors) = begun(&serve, both_ways);
    signal(&connect, "-INT");
    let output = connect.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(json(&output)["results"].as_array().map(Vec::len), Some(3), "what was finished is there");
    let said = serve.next_error();
    assert!(said.ends_with(": interrupted"), "{said}");
    let (connect, _errors) = begun(&serve, both_ways);
    signal(&serve.child, "-INT");
    assert_eq!(serve.end().0, Some(130));
    let output = connect.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1));
    let error = json(&output)["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.ends_with(": interrupted"), "{error}");
}

#[test]
fn a_killed_connect_is_one_error_and_serve_goes_on() {
    let mut serve = Serve::start("");
    let (mut connect, _errors) = begun(&serve, "--sizes 8,1M --iters 100000 --verify off");
    connect.kill().expect("killed");
    connect.wait().expect("ended");
    // The engine may need its peer timeout to be sure that the peer is gone.
    let mut again = serve.connect("--sizes 4K --iters 5 --json -");
    while first_error(&again).contains("busy") {
        again = serve.connect("--sizes 4K --iters 5 --json -");
    }
    results(&again);
    // Runs that started too early are reported, too.
    let is_busy = |line: &str| line.contains("refused a run of ") && line.contains("busy with a run of");
    let mut said = serve.next_error();
    while is_busy(&said) {
        said = serve.next_error();
    }
    assert!(said.starts_with("error: "), "{said}");
    let rest = serve.stop();
    assert!(rest.lines().all(|line| !line.starts_with("error: ") || is_busy(line)), "{rest}");
}

/// Regression: the error advised to start the other end first, and to correct the address that had been right.
#[test]
fn the_error_for_a_killed_serve_has_no_advice_for_a_first_connection() {
    let mut serve = Serve::start("");
    let (connect, _errors) = begun(&serve, "--sizes 8,1M --iters 100000 --verify off");
    serve.child.kill().expect("killed");
    serve.child.wait().expect("ended");
    let output = connect.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1));
    let error = json(&output)["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains(&format!("lost peer {}", serve.address)), "{error}");
    assert!(!error.contains("start the other end first"), "{error}");
}

#[test]
fn ctrl_c_ends_loopback_mode() {
    let mut command = ferrywire(&format!("bench {ENDLESS} -v"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut errors = BufReader::new(child.stderr.take().expect("piped"));
    // Effective values are printed before the run begins and after Ctrl-C is caught.
    crate::common::read_line(&mut errors);
    signal(&child, "-INT");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
}
