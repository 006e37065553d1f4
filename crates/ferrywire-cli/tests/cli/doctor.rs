//! `ferrywire doctor`, on this host and with peers of every kind.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{
    GRACE, Serve, TIMEOUT_DEFAULT, end_within, ferrywire, first_error, json, run_within, text, unwritten,
};
use crate::compile::compile;
use crate::contained::Group;
use crate::docs;
use crate::driver::stand_in;
use crate::hosted::with_plugin;
use crate::launched::port;

const SECRET: &str = "a secret of both";

fn doctor(args: &str) -> Command {
    ferrywire(&format!("doctor --timeout 5 {args}"))
}

fn run(args: &str) -> Output {
    run_within(TIMEOUT_DEFAULT, &mut doctor(args))
}

/// The findings with this id, of a report whose exit status and error agree with it.
fn findings(output: &Output, id: &str) -> Vec<Value> {
    let report = json(output);
    let all = report["findings"].as_array().expect("findings").clone();
    let failed = all.iter().any(|finding| finding["level"] == "fail");
    assert_eq!(output.status.code(), Some(i32::from(failed)), "{report}");
    assert_eq!(report["error"].is_null(), !failed, "{report}");
    all.into_iter().filter(|finding| finding["id"] == id).collect()
}

fn only(output: &Output, id: &str) -> Value {
    let found = findings(output, id);
    assert_eq!(found.len(), 1, "{id}: {found:?}");
    found[0].clone()
}

#[test]
fn this_host_is_checked_whatever_it_has() {
    let output = run("--json");
    let report = json(&output);
    assert_eq!((&report["schema"], &report["peer"]), (&2.into(), &Value::Null));
    assert!(report["host"]["kernel"].is_string(), "{report}");
    for id in ["kernel-version", "cores", "memory", "open-files", "nics", "cuda-driver"] {
        let finding = only(&output, id);
        assert!(finding["evidence"].as_str().is_some_and(|text| !text.is_empty()), "{finding}");
    }
    for finding in report["findings"].as_array().expect("findings") {
        let level = finding["level"].as_str().expect("a level");
        let mended = finding["fix"].is_string();
        assert!(
            if ["warn", "fail"].contains(&level) { mended } else { level != "ok" || !mended },
            "{finding}"
        );
    }
    let (short, long) = (text(&run("").stdout), text(&run("-v").stdout));
    assert!(!short.lines().any(|line| line.starts_with(" ok ")), "{short}");
    assert!(long.lines().any(|line| line.starts_with(" ok ")), "{long}");
    assert!(short.contains(" ok (-v shows them)"), "{short}");
}

#[test]
fn a_serving_bench_is_visited_and_takes_runs_after_it() {
    let mut serve = Serve::start("--memory host");
    let said = serve.collect_errors();
    let output = run(&format!("{} --json", serve.address));
    assert_eq!(only(&output, "peer")["level"], "ok");
    assert_eq!(only(&output, "peer-bench")["level"], "ok");
    assert_eq!(only(&output, "path")["subject"], "lo");
    let peer = json(&output)["peer"].clone();
    assert_eq!(peer["addresses"][0], serve.address.as_str(), "{peer}");
    let channels = peer["channels"].as_array().expect("channels");
    assert!(channels.iter().any(|channel| channel["mss_bytes"].as_u64() > Some(0)), "{peer}");
    let run = serve.connect("--memory host --peer-memory host --sizes 4K --iters 3");
    assert!(run.status.success(), "{}", text(&run.stderr));
    let said = said.lock().expect("whole lines").join("\n");
    let notes = said
        .lines()
        .filter(|line| line.starts_with("note: ") && line.ends_with("connected and requested no run"));
    assert_eq!((notes.count(), said.lines().count()), (1, 1), "{said}");
}

/// Regression: a peer that requires encryption refused the visit, and no option could change that.
#[test]
fn a_peer_that_requires_encryption_is_visited() {
    let serve = Serve::start("--memory host --encrypt");
    let output = run(&format!("{} --json", serve.address));
    assert_eq!(only(&output, "peer")["level"], "ok");
    assert_eq!(only(&output, "peer-bench")["level"], "ok");
}

#[test]
fn a_busy_bench_names_the_peer_of_its_run() {
    let serve = Serve::start("--memory host");
    let run_args =
        format!("bench connect {} --memory host --peer-memory host --sizes 4K --seconds 600", serve.address);
    let mut other =
        ferrywire(&run_args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut visits = (0..60).map(|_| run(&format!("{} --json", serve.address)));
    let busy = visits.find(|output| json(output)["peer"]["busy"].is_string());
    assert!(other.try_wait().expect("it can be waited for").is_none(), "the run goes on");
    let _ = other.kill();
    let _ = other.wait();
    let finding = only(&busy.expect("the run has begun"), "peer-bench");
    assert_eq!(finding["level"], "note", "{finding}");
}

#[test]
fn a_peer_that_is_not_there_is_reported() {
    let free = format!("127.0.0.1:{}", port());
    let output = run(&format!("{free} --json"));
    let finding = only(&output, "peer-reachable");
    assert_eq!(finding["level"], "fail");
    assert!(finding["fix"].as_str().is_some_and(|fix| fix.contains("bench serve")), "{finding}");
    assert!(first_error(&output).starts_with(&format!("error: peer {free}: ")), "{}", text(&output.stderr));
}

/// Regression: the lookup had no timeout, and its failure left out the findings about this host.
#[test]
fn a_peer_whose_name_is_not_found_is_one_finding_among_the_others() {
    let output = run("no-such-host.invalid --json");
    let finding = only(&output, "peer-name");
    assert_eq!(
        (&finding["level"], &finding["subject"]),
        (&"fail".into(), &"peer no-such-host.invalid:7420".into())
    );
    assert!(finding["fix"].as_str().is_some_and(|fix| fix.contains("IP address")), "{finding}");
    only(&output, "kernel-version");
    assert_eq!(json(&output)["peer"], Value::Null);
}

#[test]
fn a_wrong_secret_is_reported_and_a_right_one_taken() {
    let serve = Serve::start_with("--listen 127.0.0.1:0 --memory host", &[("FERRYWIRE_SECRET", SECRET)]);
    let visit = |secret: &str| {
        let mut command = doctor(&format!("{} --json", serve.address));
        run_within(TIMEOUT_DEFAULT, command.env("FERRYWIRE_SECRET", secret))
    };
    let wrong = visit("a secret of nobody");
    let finding = only(&wrong, "peer-greeting");
    assert_eq!(finding["level"], "fail");
    assert!(finding["fix"].as_str().is_some_and(|fix| fix.contains("--secret-file")), "{finding}");
    assert_eq!(only(&visit(SECRET), "peer-bench")["level"], "ok");
}

#[test]
fn a_peer_that_is_not_ferrywire_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let _ = socket.and_then(|mut socket| socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
        }
    });
    let output = run(&format!("{address} --json"));
    let finding = only(&output, "peer-greeting");
    assert_eq!(finding["level"], "fail", "{finding}");
}

#[test]
fn an_endpoint_without_a_bench_is_let_be() {
    let endpoint =
        ferrywire::Endpoint::builder().listen(([127, 0, 0, 1], 0).into()).build().expect("an endpoint");
    let output = run(&format!("{} --json", endpoint.listen_addresses()[0]));
    assert_eq!(only(&output, "peer")["level"], "ok");
    assert_eq!(only(&output, "peer-bench")["level"], "note");
}

#[test]
fn a_bad_plugin_is_a_finding_and_a_good_one_too() {
    let bad = only(&run("--plugin /etc/passwd --json"), "plugin");
    assert_eq!(bad["level"], "fail");
    assert!(bad["evidence"].as_str().is_some_and(|text| text.contains("not a shared library")), "{bad}");
    let good = doctor("--json --plugin").arg(compile("plugin.c", &["VERSION=7"])).output();
    let good = good.expect("the command starts");
    let good = only(&good, "plugin");
    assert_eq!(good["level"], "ok", "{good}");
}

/// Whether a process runs whose environment has this text.
fn runs_with(text: &str) -> bool {
    let processes = std::fs::read_dir("/proc").expect("processes").flatten();
    let environments = processes.filter_map(|process| std::fs::read(process.path().join("environ")).ok());
    environments.into_iter().any(|environment| String::from_utf8_lossy(&environment).contains(text))
}

/// Regression: doctor loaded the driver in its own process, and hung or crashed with it.
#[test]
fn a_driver_that_hangs_or_crashes_is_one_finding_among_the_others() {
    for (how, limit, words) in [("HANGS", 1, "longer than 1 s"), ("CRASHES", 30, "SIGABRT")] {
        let folder = stand_in(&[how]).display().to_string();
        let mut command = ferrywire(&format!("doctor --timeout {limit} --json"));
        let output = run_within(TIMEOUT_DEFAULT, command.env("LD_LIBRARY_PATH", &folder));
        let finding = only(&output, "cuda-driver");
        assert_eq!(finding["level"], "fail", "{finding}");
        assert!(finding["evidence"].as_str().is_some_and(|text| text.contains(words)), "{finding}");
        for id in ["kernel-version", "cores", "memory", "open-files", "nics"] {
            only(&output, id);
        }
        assert!(!runs_with(&folder), "the process that loaded the driver is left");
    }
}

#[test]
fn a_driver_that_works_is_asked_once_for_all_of_its_gpus() {
    let mut command = doctor("--json");
    let output = run_within(TIMEOUT_DEFAULT, command.env("LD_LIBRARY_PATH", stand_in(&[])));
    let finding = only(&output, "cuda-driver");
    assert_eq!(
        (&finding["level"], &finding["evidence"]),
        (&"ok".into(), &"driver for CUDA 12.4, 2 GPUs".into())
    );
}

/// Regression: only the first connection showed that the plugin's daemon was missing.
#[test]
fn a_plugin_without_its_daemon_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let found = || {
        let mut command = doctor(&with_plugin("--json"));
        command.env("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", folder.path());
        let output = run_within(TIMEOUT_DEFAULT, &mut command);
        assert_eq!(only(&output, "plugin")["level"], "ok");
        only(&output, "plugin-manager")
    };
    let missing = found();
    assert_eq!(missing["level"], "warn", "{missing}");
    assert!(missing["fix"].as_str().is_some_and(|fix| fix.contains("RxDM")), "{missing}");
    std::fs::write(folder.path().join("get_gpu_fd_0000:04:00.0"), "").expect("a file");
    assert_eq!(found()["level"], "ok");
}

#[test]
fn a_quota_of_cpu_time_is_reported() {
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() < 2) {
        return println!("SKIPPED: needs two cores");
    }
    let Some(group) = Group::with_one_core() else {
        return println!("SKIPPED: needs to make a control group with a quota of CPU time");
    };
    let finding = only(&run_within(TIMEOUT_DEFAULT, &mut group.ferrywire("doctor --json")), "cpu-quota");
    assert_eq!(finding["level"], "warn", "{finding}");
}

#[test]
fn variables_that_no_command_takes_are_reported() {
    let mut command = doctor("--json");
    command.env("FERRYWIRE_SIZES", "many").env("FERRYWIRE_NIX", "eth0").env("NCCL_SOCKET_IFNAME", "no-such");
    let output = run_within(TIMEOUT_DEFAULT, &mut command);
    let bad = only(&output, "bad-variable");
    assert!(bad["evidence"].as_str().is_some_and(|text| text.contains("many")), "{bad}");
    assert_eq!(only(&output, "unknown-variable")["subject"], "FERRYWIRE_NIX");
    assert_eq!(only(&output, "nccl-nics")["level"], "warn");
}

/// Regression: only values that the parser refuses were reported, and a missing secret file ended the diagnosis. What
/// another option may make valid is a warning.
#[test]
fn variables_with_which_bench_does_not_begin_are_reported() {
    let cases = [
        ("FERRYWIRE_SECRET", "abc", "at least 8 bytes", "fail"),
        ("FERRYWIRE_DEPTH", "0", "--depth must be at least 1", "warn"),
        ("FERRYWIRE_CONFIG", "/nonexistent", "--config /nonexistent: ", "fail"),
        ("FERRYWIRE_SECRET_FILE", "/nonexistent", "--secret-file /nonexistent: ", "fail"),
        ("FERRYWIRE_PEERS", "3", "--peers", "warn"),
        ("FERRYWIRE_LISTEN", "10.0.0.2:eth0", "--listen 10.0.0.2:eth0: not an address", "warn"),
    ];
    for (name, value, words, level) in cases {
        let output = run_within(TIMEOUT_DEFAULT, doctor("--json").env(name, value));
        let finding = only(&output, "bad-variable");
        assert_eq!(finding["level"], level, "{name}: {finding}");
        assert!(finding["evidence"].as_str().is_some_and(|text| text.contains(words)), "{name}: {finding}");
    }
    let mut fit = doctor("--json");
    fit.env("FERRYWIRE_SECRET", SECRET)
        .env("FERRYWIRE_DEPTH", "2")
        .env("FERRYWIRE_LISTEN", "no-such.invalid");
    assert_eq!(findings(&fit.output().expect("the command starts"), "bad-variable"), Vec::<Value>::new());
}

/// Regression: doctor took the word of the other commands for the name of a NIC.
#[test]
fn the_variable_of_nics_may_be_auto() {
    let output = run_within(TIMEOUT_DEFAULT, doctor("--json").env("FERRYWIRE_NICS", "auto"));
    only(&output, "nics");
}

/// Regression: doctor advised to unset the variable that turns encryption of NCCL's connections on.
#[test]
fn documented_variables_are_known() {
    let root = docs::root();
    let mut pages = vec![root.join("SECURITY.md")];
    docs::files(&root.join("docs"), ".md", &mut pages);
    docs::files(&root.join("crates/ferrywire-nccl/src"), ".rs", &mut pages);
    let mut names = BTreeSet::new();
    for page in pages.iter().map(|page| docs::read(page)) {
        let is_of_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        let words = page.split(|c| !is_of_name(c)).filter(|word| word.starts_with("FERRYWIRE_"));
        // C's error codes are no variables, and neither are beginnings of names.
        let words = words.filter(|word| !word.starts_with("FERRYWIRE_ERROR_") && !word.ends_with('_'));
        names.extend(words.map(str::to_owned));
    }
    assert!(names.contains("FERRYWIRE_NCCL_ENCRYPT") && names.len() > 10, "{names:?}");
    // Some name files, which are made.
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = doctor("--json");
    command.current_dir(folder.path()).envs(names.iter().map(|name| (name, "lo")));
    let output = run_within(TIMEOUT_DEFAULT, &mut command);
    assert_eq!(findings(&output, "unknown-variable"), Vec::<Value>::new());
}

#[test]
fn a_former_variable_beside_todays_is_reported() {
    let found = |former: &str| {
        let mut command = doctor("--json");
        command.env("FERRYWIRE_TIMEOUT", "9").env("FERRYWIRE_DEADLINE", former);
        run_within(TIMEOUT_DEFAULT, &mut command)
    };
    let finding = only(&found("8"), "former-variable");
    assert_eq!((&finding["level"], &finding["subject"]), (&"warn".into(), &"FERRYWIRE_DEADLINE".into()));
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    assert!(evidence.ends_with("FERRYWIRE_TIMEOUT is 9: FERRYWIRE_TIMEOUT counts"), "{finding}");
    assert!(!text(&found("9").stdout).contains("former-variable"));
}

#[test]
fn what_makes_no_sense_is_bad_usage() {
    for args in
        ["--no-such-flag", "host:port", "--nics no-such-nic", "--timeout 0", "--secret-file /nonexistent"]
    {
        let output = run_within(TIMEOUT_DEFAULT, &mut ferrywire(&format!("doctor {args}")));
        assert_eq!(output.status.code(), Some(2), "{args}: {}", text(&output.stderr));
    }
    let help = text(&ferrywire("doctor --help").output().expect("the command starts").stdout);
    for part in ["ADDR:PORT", "--json", "--nics", "--plugin", "--timeout", "--secret-file", "Exit status"] {
        assert!(help.contains(part), "{part}: {help}");
    }
}

#[test]
fn a_report_that_cannot_be_written_is_a_failure() {
    // A resource that this host lacks may be a failure too.
    if run("").status.success() {
        unwritten(&mut doctor("--json"));
    }
}

/// Regression: a signal while `ip` was asked for routes was no reason to stop, and the exit status was 0.
#[test]
fn a_signal_while_routes_are_read_ends_the_command_as_interrupted() {
    let serve = Serve::start("--memory host");
    let folder = tempfile::tempdir().expect("a folder");
    let (ip, asked) = (folder.path().join("ip"), folder.path().join("asked"));
    std::fs::write(&ip, "#!/bin/sh\n: > \"${0%/*}/asked\"\nexec sleep 600\n").expect("written");
    std::fs::set_permissions(&ip, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").expect("a path"));
    let mut command = ferrywire(&format!("doctor --timeout 60 {}", serve.address));
    command.env("PATH", path).stdout(Stdio::piped()).stderr(Stdio::piped());
    let doctor = command.spawn().expect("it starts");
    let until = Instant::now() + GRACE;
    while !asked.exists() {
        assert!(Instant::now() < until, "it asks for no route");
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = Command::new("kill").args(["-TERM", &doctor.id().to_string()]).status();
    assert!(killed.expect("kill runs").success());
    let output = end_within(TIMEOUT_DEFAULT, doctor);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(143), ""));
}
