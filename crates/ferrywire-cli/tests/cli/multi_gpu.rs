//! Several endpoints in one process, by the real command over loopback.

use std::time::Duration;

use serde_json::Value;

use crate::common::{Serve, TIMEOUT_DEFAULT, ferrywire, first_error, json, results, run, run_within, text};
use crate::driver;
use crate::hosted::{ONE_HOST, with_plugin};
use crate::tree::Tree;

const QUICK: &str = "--iters 6 --warmup 1 --json -";

fn pair(row: &Value) -> (&str, &str) {
    let name = |at: usize| row["extra"]["pair"][at].as_str().unwrap_or_default();
    (name(0), name(1))
}

#[test]
fn every_pattern_between_several_gpus() {
    let serve = Serve::start("--gpus 0-2 --memory sim");
    for (pattern, rows) in [("unidir", 3), ("bidir", 9), ("all-to-all", 9), ("incast", 3), ("latency", 3)] {
        let args = format!(
            "--gpus 0,2,5 --memory sim --peer-memory sim --pattern {pattern} --sizes 8,70001 {QUICK}"
        );
        let found = results(&serve.connect(&args));
        let totals = if pattern == "bidir" { 3 } else { 1 };
        assert_eq!(found.len(), 2 * (rows + totals), "{pattern}");
        for row in &found {
            assert_eq!((&row["verified"], &row["pattern"]), (&true.into(), &pattern.into()));
            assert_eq!([&row["gpu"], &row["peer_gpu"]], [&row["extra"]["pair"][0], &row["extra"]["pair"][1]]);
        }
        let all = &found[rows];
        assert_eq!(pair(all), ("all", "all"), "{pattern}");
        let one = &found[0];
        assert_eq!(pair(one), ("sim:0", "sim:0"), "{pattern}");
        let sum: u64 = (0..rows).filter_map(|at| found[at]["iterations"].as_u64()).sum();
        let of_all: u64 = (rows..rows + totals).filter_map(|at| found[at]["iterations"].as_u64()).sum();
        assert_eq!(sum, of_all, "{pattern}");
    }
    let mesh =
        "--gpus 0-1 --memory host --peer-memory host --op read --pattern all-to-all --sizes 5000 --iters 3";
    let said = text(&serve.connect(mesh).stdout);
    for part in
        ["one endpoint per GPU: this end host, peer host", "from, to", "host:0", "host:2", "GB/s at 5000"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(serve.stop(), "");
}

#[test]
fn loopback_mode_has_several_endpoints_at_both_ends() {
    let found = results(&run(&format!(
        "bench --gpus 0-3 --memory host --peer-memory host --op send --sizes 1M {QUICK}"
    )));
    assert_eq!(found.len(), 5);
    assert_eq!((pair(&found[3]), pair(&found[4])), (("host:3", "host:3"), ("all", "all")));
    let shown = text(&run("bench --gpus 0-1 --memory sim --peer-memory sim --sizes 64K --iters 5").stdout);
    assert!(shown.contains("sim:1 > sim:1") && shown.contains(" all "), "{shown}");
}

#[test]
fn ends_with_different_numbers_of_gpus_are_refused_with_both_numbers() {
    let mut serve = Serve::start("--gpus 0-1 --memory sim");
    let args = "--gpus 0-2 --memory sim --peer-memory sim --sizes 4K --iters 3";
    let refused = serve.connect_within(TIMEOUT_DEFAULT, args);
    assert_eq!(refused.status.code(), Some(1));
    let why =
        "this end has 3 endpoints, the peer 2 endpoints: name equally many GPUs with --gpus at both ends";
    let said = first_error(&refused);
    assert!(said.contains(why), "{said}");
    let reported = serve.next_error();
    assert!(reported.contains("refused a run of 127.0.0.1:") && reported.contains(why), "{reported}");
    // A pattern that does not need equal numbers still runs, and the serving end continues.
    let args = format!("--gpus 0-2 --memory sim --peer-memory sim --pattern all-to-all --sizes 4K {QUICK}");
    assert_eq!(results(&serve.connect(&args)).len(), 7);
    // One endpoint is one endpoint.
    assert_eq!(
        results(&serve.connect(&format!("--memory host --peer-memory host --sizes 4K {QUICK}"))).len(),
        1
    );
    let mut plain = Serve::start("--memory sim");
    let args = "--gpus 0-1 --memory sim --peer-memory sim --sizes 4K --iters 3";
    let refused = plain.connect_within(TIMEOUT_DEFAULT, args);
    for said in [first_error(&refused), plain.next_error()] {
        assert!(said.contains("2 endpoints, the peer 1 endpoint:"), "{said}");
    }
}

#[test]
fn gpus_and_maps_that_cannot_be_are_bad_usage() {
    let bad = [
        ("--gpus 0,0", "GPU 0 is named twice"),
        ("--gpus 3-1", "empty"),
        ("--gpus 0-99", "not a GPU number"),
        ("--pattern all-to-all", "name them with --gpus"),
        ("--gpus 0-1 --pattern incast --peers 3", "--peers"),
        ("--gpus 0-1 --memory sim:3", "--memory sim:3: with --gpus each endpoint uses memory of its own GPU"),
        ("--gpus 0-1 --gpu-nics 0=lo", "no NIC for GPU 1"),
        ("--gpus 0 --gpu-nics 0=lo,1=lo", "GPU 1 is not one of --gpus"),
        ("--gpus 0 --gpu-nics lo", "no GPU before"),
        ("--gpus 0 --gpu-nics 0=lo --nics lo", "leave out --nics"),
        ("--gpus 0 --gpu-nics 0=nope0 --memory host", "--gpu-nics 0=nope0: no such NIC"),
    ];
    for (args, part) in bad {
        let output = run(&format!("bench connect 127.0.0.1:9 {args}"));
        assert_eq!(output.status.code(), Some(2), "{args}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(part), "{args}: {}", text(&output.stderr));
    }
}

/// A number would be of one GPU.
#[test]
fn memory_of_several_gpus_has_no_number() {
    for (args, part) in [
        ("serve --listen 127.0.0.1:0 --gpus 0-1 --memory sim:3", "use --memory sim"),
        ("--gpus 0-1 --memory sim:3", "use --memory sim"),
        ("--gpus 0-1 --memory sim --peer-memory sim:3", "use --peer-memory sim"),
    ] {
        let output = run_within(Duration::ZERO, &mut ferrywire(&format!("bench {args}")));
        assert_eq!(output.status.code(), Some(2), "{args}: {}", text(&output.stderr));
        assert!(first_error(&output).ends_with(part), "{args}: {}", text(&output.stderr));
    }
    let serve = Serve::start("--gpus 2-3 --memory sim");
    let args = format!("--memory sim --sizes 4K {QUICK}");
    let refused = serve.connect(&format!("{args} --gpus 0-1 --peer-memory sim:1"));
    assert_eq!(refused.status.code(), Some(1));
    assert!(first_error(&refused).contains("use --peer-memory sim"), "{}", first_error(&refused));
    let lies = |row: &Value| [&row["memory"], &row["peer_memory"]].map(|memory| memory.to_string());
    for args in ["--gpus 0-1 --peer-memory sim", "--gpus 0-1"] {
        let found = results(&serve.connect(&format!("--memory sim --sizes 4K {QUICK} {args}")));
        let memory: Vec<_> = found.iter().map(lies).collect();
        assert_eq!(memory, [["\"sim:0\"", "\"sim:2\""], ["\"sim:1\"", "\"sim:3\""], ["\"sim\"", "\"sim\""]]);
    }
    // A number that says the same is no contradiction.
    let alike = Serve::start("--gpus 3 --memory sim:3");
    let found =
        results(&alike.connect(&format!("--gpus 2 --memory sim:2 --peer-memory sim:3 --sizes 4K {QUICK}")));
    assert_eq!(lies(&found[0]), ["\"sim:2\"", "\"sim:3\""]);
    // One endpoint may have memory of any GPU.
    let one = Serve::start("--memory sim:3");
    let found = results(&one.connect(&format!("{args} --gpus 5 --peer-memory sim:3")));
    assert_eq!(lies(&found[0]), ["\"sim:5\"", "\"sim:3\""]);
    assert_eq!(pair(&found[0]), ("sim:5", "sim:3"));
}

/// The fix in the error works at both ends. Only a GPU that is used causes a refusal.
#[test]
fn a_gpu_without_a_near_nic_needs_leave_to_use_a_far_one() {
    // This NIC does not exist: the error about it shows that the plan was reached.
    let host = Tree::of(
        "node 0 0\nnode 1 1\ncpus 0-1\n\
         gpu pci0000:40/0000:40:01.0/0000:41:00.0 node=0\ngpu pci0000:c0/0000:c0:01.0/0000:c1:00.0 node=1\n\
         nic nofw0 pci0000:40/0000:40:02.0/0000:42:00.0 node=0\nfact address nofw0 192.0.2.9/24\n\
         fact gpu 0 0000:41:00.0 A\nfact gpu 1 0000:c1:00.0 B",
    );
    let driver = driver::stand_in(&[]);
    for end in ["serve --listen 0.0.0.0:0", "connect 192.0.2.1:9 --peer-memory host"] {
        let refused = |args: &str| {
            let mut command = ferrywire(&format!("bench {end} --memory cuda {args} --root"));
            command
                .arg(host.root())
                .env("LD_LIBRARY_PATH", &driver)
                .env("FERRYWIRE_SECRET", "of these tests");
            let output = command.output().expect("it runs");
            assert_eq!(output.status.code(), Some(2), "{end} {args}: {}", text(&output.stderr));
            text(&output.stderr)
        };
        let said = refused("--gpus 0-1");
        assert!(
            said.contains("GPU 1 (NUMA node 1)") && said.contains("--allow-cross-numa uses them"),
            "{said}"
        );
        for enough in ["--gpus 0-1 --allow-cross-numa", "--gpus 0"] {
            let said = refused(enough);
            assert!(said.contains("nofw0: no such NIC with an address"), "{said}");
        }
    }
}

/// As it is with one endpoint.
#[test]
fn a_secret_that_is_too_short_is_bad_usage() {
    for args in
        ["serve --listen 127.0.0.1:0 --gpus 0-1 --memory host", "connect 127.0.0.1:9 --gpus 0 --memory host"]
    {
        let mut command = ferrywire(&format!("bench {args}"));
        let output = command.env("FERRYWIRE_SECRET", "short").output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{args}: {}", text(&output.stderr));
        assert!(first_error(&output).contains("at least 8 bytes"), "{}", first_error(&output));
    }
}

/// A wrong byte of one GPU fails the run of all, and is reported once.
#[test]
fn a_wrong_byte_on_one_of_several_gpus_is_found() {
    let serve = Serve::start("--gpus 0-2 --memory sim --inject wrong-byte");
    let output =
        serve.connect(&format!("--gpus 0-2 --memory sim --peer-memory sim --op read --sizes 64K {QUICK}"));
    assert_eq!(output.status.code(), Some(1));
    let said = json(&output);
    assert_eq!(said["results"], Value::Array(Vec::new()), "no number for data that is wrong");
    let error = said["error"].as_str().unwrap_or_default();
    assert!(error.contains("expected") && error.contains("found"), "{error}");
}

/// Of two pairs the first has been verified when the second's wrong byte is found.
#[test]
fn no_pair_has_a_number_while_another_is_not_verified() {
    let serve = Serve::start("--gpus 0-1 --memory sim --inject late-byte --inject-member 1");
    let gpus = "--gpus 0-1 --memory sim --peer-memory sim";
    for peers in [gpus, "--pattern incast --peers 2 --memory host --peer-memory host"] {
        for op in ["write", "read"] {
            let output = serve.connect(&format!("{peers} --op {op} --sizes 4K {QUICK}"));
            assert_eq!(output.status.code(), Some(1), "{peers} {op}: {}", text(&output.stdout));
            let said = json(&output);
            assert_eq!(said["results"], Value::Array(Vec::new()), "{peers} {op}");
            let error = said["error"].as_str().unwrap_or_default();
            assert!(error.contains("expected") && error.contains("found"), "{error}");
        }
    }
}

#[test]
fn each_pair_reports_how_much_of_it_was_verified() {
    let found = results(&run(&format!("bench --gpus 0-1 --memory sim --peer-memory sim --sizes 4K {QUICK}")));
    let verified = found.iter().map(|row| row["extra"]["verified_iterations"].as_u64());
    assert_eq!(verified.collect::<Vec<_>>(), [Some(6), Some(6), Some(12)]);
}

/// The endpoints of a process lie on ports in a row, and are let go of.
#[test]
fn a_port_that_is_taken_names_the_endpoint() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("it has one").port();
    let output = run(&format!("bench serve --listen 127.0.0.1:{} --gpus 0-1 --memory host", port - 1));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let said = first_error(&output);
    // Another process may have the first port, too.
    assert!(said.contains("starting the endpoint of GPU") && said.contains("in use"), "{said}");
}

/// Each endpoint has a plugin's devices and connections of its own, and memory of its own GPU.
#[test]
fn several_gpus_over_a_plugin() {
    let args =
        "bench --allow-same-host-gpu --gpus 0-3 --memory sim --peer-memory sim --channels 2 --sizes 1,200001";
    let mut command = ferrywire(&with_plugin(&format!("{args} --pattern all-to-all {QUICK}")));
    let output = command.env("FERRYWIRE_TCPX_SIM", ONE_HOST).output().expect("it runs");
    let found = results(&output);
    assert_eq!(found.len(), 2 * (16 + 1));
    assert!(found.iter().all(|row| row["verified"] == true && row["transport"] == "plugin"));
}
