//! Runs over the simulated plugin: what arrives, and what is said when the plugin dies, on either end.

use std::io::{BufRead, Write};
use std::process::Stdio;

use crate::common::{Serve, ferrywire, first_error, json, results, run, text};
use serde_json::Value;

use crate::hosted::{ONE_HOST, connect, connect_when_free, serve, with_plugin};

const QUICK: &str = "--iters 10 --warmup 2 --json -";

#[test]
fn every_operation_and_size_is_verified() {
    let serve = serve("", "");
    for (op, channels) in [("write", 1), ("read", 4), ("send", 4), ("write", 4)] {
        let output = connect(
            &serve,
            &format!(
                "--op {op} --channels {channels} --sizes 0,1,4095,65537,524287,524289,3000001 {QUICK} --depth 4"
            ),
            "",
        );
        let results = results(&output);
        assert_eq!(results.len(), 7, "{op}");
        for result in &results {
            assert_eq!((&result["verified"], &result["transport"]), (&true.into(), &"plugin".into()));
            assert_eq!((&result["channels"], &result["window"]), (&channels.into(), &16.into()));
            assert_eq!(result["chunk_bytes"], 512 << 10);
            assert_eq!(result["extra"]["plugin"], "GPUDirectTCPX_v7 (v7)");
            let posted = ["max_outstanding_sends", "max_outstanding_receives"]
                .map(|most| result["extra"][most].as_u64());
            assert!(posted.into_iter().all(|most| most <= Some(16)), "{}", result["extra"]);
        }
        assert!(results[6]["extra"]["max_outstanding_sends"].as_u64() > Some(0) || op == "read");
    }
    assert!(!serve.stop().contains("error: "));
}

#[test]
fn memory_of_simulated_gpus_is_verified_in_every_mode_that_gathers() {
    for (unpack, op) in [("kernel", "write"), ("copy", "read"), ("host", "send")] {
        let serve = serve(&format!("--memory sim:1 --allow-same-host-gpu --unpack {unpack}"), ONE_HOST);
        let args = format!(
            "--memory sim:0 --peer-memory sim:1 --allow-same-host-gpu --unpack {unpack} --op {op} --depth 4 \
             --sizes 0,1,4097,524289,2000003 {QUICK}"
        );
        for result in results(&connect(&serve, &args, ONE_HOST)) {
            assert_eq!((&result["verified"], &result["unpack"]), (&true.into(), &unpack.into()));
            assert_eq!((&result["memory"], &result["peer_memory"]), (&"sim:0".into(), &"sim:1".into()));
            assert_eq!([&result["gpu"], &result["peer_gpu"]], [&Value::from("simulated GPU"); 2]);
        }
        let (memory, peer_memory) = if op == "send" { ("sim:0", "host") } else { ("host", "sim:1") };
        let args = format!(
            "--memory {memory} --peer-memory {peer_memory} --allow-same-host-gpu --unpack {unpack} \
             --sizes 1,700001 {QUICK}"
        );
        assert!(results(&connect(&serve, &args, ONE_HOST)).iter().all(|result| result["verified"] == true));
    }
}

/// Also where nothing was said.
#[test]
fn how_fragments_are_gathered_is_stored() {
    let args = format!("bench --memory sim --peer-memory sim --allow-same-host-gpu --sizes 64K {QUICK}");
    let mut command = ferrywire(&with_plugin(&args));
    let output = command.env("FERRYWIRE_TCPX_SIM", ONE_HOST).output().expect("it runs");
    assert_eq!(results(&output)[0]["unpack"], "kernel");
    let config = &json(&output)["config"];
    assert_eq!((&config["unpack"], &config["allow_same_host_gpu"]), (&"kernel".into(), &true.into()));
}

#[test]
fn a_run_whose_ends_gather_differently_is_refused() {
    let serve = serve("--memory sim:1 --allow-same-host-gpu --unpack copy", ONE_HOST);
    let args = "--peer-memory sim:1 --allow-same-host-gpu --sizes 4K --iters 5";
    let refused = connect(&serve, args, ONE_HOST);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        first_error(&refused)
            .contains("--unpack must be equal at both ends (got kernel in the run, copy here): start serve with --unpack kernel"),
        "{}",
        first_error(&refused)
    );
    // In host memory nothing is gathered.
    results(&connect(&serve, "--sizes 4K --iters 5 --json -", ONE_HOST));
}

#[test]
fn a_wrong_byte_in_gpu_memory_is_found() {
    let serve = serve("--memory sim --allow-same-host-gpu --once --inject wrong-byte", ONE_HOST);
    let args = "--memory sim --peer-memory sim --allow-same-host-gpu --sizes 100001 --iters 4 --json -";
    let output = connect(&serve, args, ONE_HOST);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        first_error(&output).contains("data mismatch at size 100001, offset 100000"),
        "{}",
        first_error(&output)
    );
    assert_eq!(serve.end().0, Some(1));
}

#[test]
fn data_that_is_not_gathered_is_not_verified() {
    let args =
        "bench --memory sim --peer-memory sim --allow-same-host-gpu --unpack none --verify off --sizes 64K";
    let mut command = ferrywire(&with_plugin(&format!("{args} --iters 5 --json -")));
    let output = command.env("FERRYWIRE_TCPX_SIM", ONE_HOST).output().expect("it runs");
    let result = &results(&output)[0];
    assert_eq!((&result["verified"], &result["unpack"]), (&serde_json::Value::Null, &"none".into()));
}

/// The process that works with the plugin is one more that needs it.
#[test]
fn loopback_mode_over_a_plugin_has_one_secret_in_every_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("secret");
    std::fs::write(&file, [b'k', 0, 0xFF, 1, 2, 3, 4, 5]).expect("written");
    let demo = || ferrywire(&with_plugin("bench --sizes 4K --iters 5 --json -"));
    results(&demo().env("FERRYWIRE_SECRET", "the right secret").output().expect("it runs"));
    results(&demo().arg("--secret-file").arg(&file).output().expect("it runs"));
    // Nothing that can be read twice.
    let mut once = demo();
    let mut child = once
        .arg("--secret-file=/dev/stdin")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    child.stdin.take().expect("piped").write_all(b"a secret from a pipe").expect("it reads");
    results(&child.wait_with_output().expect("it ends"));
}

/// The result of a bench that reads `options` and the number of its iterations from a pipe.
fn with_config_on_a_pipe(args: &str, options: &str) -> Value {
    let mut child = ferrywire(&format!("bench --memory host --config /dev/stdin --json - {args}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let options = format!("sizes = [\"4K\"]\niters = 5\n{options}");
    child.stdin.take().expect("piped").write_all(options.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let sizes: Vec<_> = results(&output).iter().map(|result| result["size_bytes"].clone()).collect();
    assert_eq!(sizes, [4096], "{args}");
    let config = json(&output)["config"].clone();
    assert_eq!(config["iters"], 5, "{args}");
    config
}

/// Regression: the file was read three times, and an option of a pipe got lost without a word.
#[test]
fn a_config_file_may_be_a_pipe() {
    assert_eq!(with_config_on_a_pipe("", "encrypt = \"required\"")["encryption"], "required");
}

/// Regression: the child that works with the plugin read the file again, and found an empty pipe.
#[test]
fn a_config_file_may_be_a_pipe_also_with_a_plugin() {
    assert_eq!(with_config_on_a_pipe(&with_plugin(""), "window = 8")["window"], 8);
}

#[test]
fn loopback_mode_shows_the_environment_and_its_origin() {
    let mut command =
        ferrywire(&with_plugin("bench -v --transport plugin --chunk 64K --window 8 --sizes 300001"));
    command.args(["--iters", "5", "--json", "-"]).env("NCCL_SOCKET_NTHREADS", "2");
    let output = command.output().expect("it runs");
    let result = &results(&output)[0];
    assert_eq!((&result["chunk_bytes"], &result["window"]), (&(64 << 10).into(), &8.into()));
    let said = text(&output.stderr);
    for line in
        ["NCCL_DYNAMIC_CHUNK_SIZE = 524288 (set by ferrywire)", "NCCL_SOCKET_NTHREADS = 2 (set by the user)"]
    {
        assert!(said.contains(line), "{line}: {said}");
    }
    let stored = &json(&output)["config"]["plugin_environment"]["NCCL_SOCKET_NTHREADS"];
    assert_eq!(*stored, serde_json::json!(["2", "the user"]));
    assert!(said.contains("transport plugin, not encrypted: --plugin names "), "{said}");
}

/// Checks the one-line error of a plugin that fails at the connecting end; the next run succeeds.
fn fails_at_connect(fault: &str, expected: &[&str]) {
    let serve = serve("", "");
    let switches = format!("fault_call=isend,call_fault={fault},call_fault_after=30");
    let output = connect(&serve, "--sizes 0,64K --iters 100 --timeout 3 --json -", &switches);
    assert_eq!(output.status.code(), Some(1), "{fault}: {}", text(&output.stderr));
    let said = json(&output);
    let error = said["error"].as_str().unwrap_or_default();
    assert!(expected.iter().all(|part| error.contains(part)), "{fault}: {error}");
    assert_eq!(said["results"].as_array().map(Vec::len), Some(1), "what was finished is there");
    assert_eq!(error.lines().count(), 1);
    results(&connect_when_free(&serve, &format!("--sizes 64K {QUICK}")));
}

#[test]
fn a_plugin_that_exits_fails_one_run_only() {
    let parts = ["libferrywire_tcpx_sim.so", "exit status 1", "at size 64K", "call_fault: exit(1)"];
    fails_at_connect("exit", &parts);
}

#[test]
fn a_plugin_that_crashes_fails_the_run_and_not_the_other_end() {
    fails_at_connect(
        "crash",
        &["libferrywire_tcpx_sim.so", "signal 11 (SIGSEGV)", "the plugin logged last", "likely: "],
    );
}

#[test]
fn a_plugin_that_hangs_fails_the_run_and_not_the_other_end() {
    fails_at_connect("hang", &["isend", "has not returned"]);
}

/// A plugin that fails at the serving end: one error line, and a fresh child takes the next peer.
fn fails_at_serve(fault: &str, expected: &[&str]) {
    let switches = format!("fault_call=irecv,call_fault={fault},call_fault_after=30");
    let mut serve = serve("--timeout 3", &switches);
    let output = connect(&serve, "--sizes 1M --iters 100 --json -", "");
    assert_eq!(output.status.code(), Some(1), "{fault}: {}", text(&output.stderr));
    let said = serve.next_error();
    assert!(expected.iter().all(|part| said.contains(part)), "{fault}: {said}");
    serve.listens_again();
    // Fewer receives than the fresh one has left until it fails too.
    results(&connect(&serve, "--sizes 64K --iters 3 --warmup 1 --json -", ""));
    assert!(!serve.stop().contains("error: "), "one error for one failure");
}

#[test]
fn a_serving_plugin_that_exits_is_started_anew() {
    fails_at_serve("exit", &["exit status 1", "during a run of 127.0.0.1", "call_fault: exit(1)"]);
}

#[test]
fn a_serving_plugin_that_crashes_is_started_anew() {
    fails_at_serve("crash", &["signal 11 (SIGSEGV)", "during a run of 127.0.0.1", "likely: "]);
}

#[test]
fn a_serving_plugin_that_hangs_is_started_anew() {
    fails_at_serve("hang", &["irecv", "has not returned"]);
}

#[test]
fn a_plugin_that_fails_at_the_start_is_one_line_on_either_end() {
    for (fault, part) in [("exit", "exit status 1"), ("crash", "SIGSEGV"), ("error", "init")] {
        let switches = format!("fault_call=init,call_fault={fault}");
        for args in ["bench serve --listen 127.0.0.1:0", "bench connect 127.0.0.1:9"] {
            let mut command = ferrywire(&with_plugin(args));
            let output = command.env("FERRYWIRE_TCPX_SIM", &switches).output().expect("it runs");
            assert_eq!(output.status.code(), Some(1), "{args}");
            let said = text(&output.stderr);
            assert!(said.lines().any(|line| line.starts_with("error: ") && line.contains(part)), "{said}");
        }
    }
}

#[test]
fn both_ends_need_the_plugin() {
    let plain = Serve::start("");
    let refused = connect(&plain, "--sizes 4K --iters 5", "");
    assert_eq!(refused.status.code(), Some(1));
    assert!(first_error(&refused).contains("over no plugin at the end that accepts"));
    assert!(text(&refused.stderr).contains("the same --transport, --plugin PATH"));
    let hosting = serve("", "");
    let refused = hosting.connect("--sizes 4K --iters 5");
    assert_eq!(refused.status.code(), Some(1));
    assert!(first_error(&refused).contains("over no plugin at the end that connects"));
    results(&connect(&hosting, "--sizes 4K --iters 5 --json -", ""));
}

#[test]
fn memory_that_serve_does_not_offer_and_one_host_are_refused() {
    let hosting = serve("", "");
    let refused = connect(&hosting, "--peer-memory sim --sizes 4K --iters 5", "");
    assert_eq!(refused.status.code(), Some(1));
    assert!(first_error(&refused).contains("--memory sim:0"), "{}", first_error(&refused));
    let refused = connect(&hosting, "--memory sim --sizes 4K --iters 5", "");
    assert_eq!(refused.status.code(), Some(1));
    assert!(first_error(&refused).contains("both ends are on one host"), "{}", first_error(&refused));
}

#[test]
fn ctrl_c_ends_both_processes_of_an_end() {
    let serve = serve("", "");
    let args = with_plugin(&format!(
        "bench connect {} -v --depth 1 --sizes 8,16M --seconds 600 --iters 1000000",
        serve.address
    ));
    let mut command = ferrywire(&args);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.arg("--warmup=1").spawn().expect("it starts");
    let mut errors = std::io::BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    // Effective values come before anything runs.
    errors.read_line(&mut line).expect("text");
    // SAFETY: a signal to a child of this process that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    // The other process of it held the same standard error: it ends with it.
    std::io::copy(&mut errors, &mut std::io::sink()).expect("the end");
    let pid = serve.child.id();
    // SAFETY: as above.
    unsafe { libc::kill(pid as i32, libc::SIGINT) };
    assert_eq!(serve.end().0, Some(130));
}

#[test]
fn bad_combinations_say_what_to_change() {
    for (args, part) in [
        ("bench --transport plugin", "--plugin PATH"),
        ("bench --plugin /nonexistent.so", "no such file"),
        ("bench --plugin /", "this is a directory"),
        ("bench --unpack copy", "--plugin PATH"),
        ("bench serve --plugin /nonexistent.so", "no such file"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args}");
        assert!(first_error(&output).contains(part), "{args}: {}", first_error(&output));
    }
    for (args, part) in [
        ("bench --transport tcp", "leave one of them out"),
        ("bench --unpack none", "--verify off"),
        ("bench --window 1000", "between 1 and 128"),
        ("bench --window 17", "must be at most 16, the requests that GPUDirectTCPX_v7 takes"),
        ("bench --chunk 1G", "--chunk must be at most 4M (got 1G)"),
        ("bench --memory floppy", "no such kind"),
        ("bench --crc --memory sim", "--crc"),
    ] {
        let output = run(&with_plugin(args));
        assert_eq!(output.status.code(), Some(2), "{args}");
        assert!(first_error(&output).contains(part), "{args}: {}", first_error(&output));
    }
}

#[test]
fn help_names_the_options_of_plugins() {
    for args in ["bench --help", "bench serve --help", "bench connect --help"] {
        let help = text(&run(args).stdout);
        for option in ["--plugin <PATH>", "--unpack <", "--allow-same-host-gpu", "--memory <", "--window <"] {
            assert!(help.contains(option), "{args}: {option}");
        }
        assert!(!help.to_lowercase().contains("supervised"));
    }
}
