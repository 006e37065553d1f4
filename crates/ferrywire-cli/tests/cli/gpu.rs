//! Memory of GPUs over TCP, by the real command: of simulated ones, and of CUDA with a stand-in for the driver that
//! runs the kernels on the CPU.

use crate::common::{Serve, TIMEOUT_DEFAULT, ferrywire, first_error, json, results, run, text};
use crate::driver::{self, stand_in};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Output;

const QUICK: &str = "--iters 10 --warmup 2 --json -";
const SIZES: &str = "--sizes 0,1,4097,524289,2000003";
/// Of both ends.
const KINDS: [(&str, &str); 3] = [("sim:0", "sim:1"), ("host", "sim:1"), ("sim:0", "host")];

/// The CUDA driver that the command is to find.
struct Driver(PathBuf);

impl Driver {
    /// One with two GPUs, which runs kernels; `None`, and a word about it, where that cannot be made.
    fn with_kernels() -> Option<Driver> {
        if !driver::has_kernels() {
            println!("SKIPPED: needs a C++ compiler");
            return None;
        }
        Some(Driver(stand_in(&[driver::WITH_KERNELS])))
    }

    fn run(&self, args: &str) -> Output {
        ferrywire(args).env("LD_LIBRARY_PATH", &self.0).output().expect("it runs")
    }

    fn serve(&self, args: &str) -> Serve {
        let folder = self.0.to_str().expect("text");
        Serve::start_with(&format!("--listen 127.0.0.1:0 {args}"), &[("LD_LIBRARY_PATH", folder)])
    }
}

fn verified(results: &[Value], memory: &str, peer_memory: &str) {
    for result in results {
        assert_eq!((&result["verified"], &result["transport"]), (&true.into(), &"tcp".into()));
        assert_eq!((&result["memory"], &result["peer_memory"]), (&memory.into(), &peer_memory.into()));
        assert_eq!(result["unpack"], Value::Null);
    }
}

#[test]
fn every_operation_between_simulated_gpus_and_the_host() {
    let serve = Serve::start("--memory sim:1");
    for op in ["write", "read", "send"] {
        for (memory, peer_memory) in KINDS {
            let args = format!(
                "--memory {memory} --peer-memory {peer_memory} --op {op} {SIZES} --depth 3 --channels 2 {QUICK}"
            );
            let results = results(&serve.connect(&args));
            assert_eq!(results.len(), 5);
            verified(&results, memory, peer_memory);
            for (kind, gpu) in [(memory, "gpu"), (peer_memory, "peer_gpu")] {
                let expected = if kind == "host" { Value::Null } else { "simulated GPU".into() };
                assert_eq!(results[0][gpu], expected);
            }
        }
    }
    assert_eq!(serve.stop(), "");
}

#[test]
fn every_pattern_with_simulated_gpus() {
    for (memory, peer_memory) in KINDS {
        let memories = format!("--memory {memory} --peer-memory {peer_memory}");
        for pattern in ["bidir", "latency", "incast"] {
            let output = run(&format!("bench {memories} --pattern {pattern} --sizes 8,70001 {QUICK}"));
            verified(&results(&output), memory, peer_memory);
        }
        for op in ["read", "send"] {
            let output = run(&format!("bench {memories} --pattern latency --op {op} --sizes 70001 {QUICK}"));
            verified(&results(&output), memory, peer_memory);
        }
    }
}

#[test]
fn scattered_blocks_of_simulated_gpus() {
    for (memory, peer_memory) in KINDS {
        for op in ["write", "read", "send"] {
            let output = run(&format!(
                "bench --memory {memory} --peer-memory {peer_memory} --op {op} --blocks 300 --sizes 300,1000001 {QUICK}"
            ));
            verified(&results(&output), memory, peer_memory);
        }
    }
}

#[test]
fn checksums_and_samples_with_simulated_gpus() {
    for extra in ["--crc", "--verify sample"] {
        let output = run(&format!("bench --memory sim --peer-memory sim:1 {extra} --sizes 3M {QUICK}"));
        verified(&results(&output), "sim:0", "sim:1");
    }
}

#[test]
fn the_stages_of_gpu_memory_are_reported() {
    let output = run(&format!("bench -v --memory sim --peer-memory sim:1 --sizes 1M {QUICK}"));
    let result = &results(&output)[0];
    let stages = &result["stages_s"];
    for stage in ["d2h", "socket", "h2d"] {
        assert!(stages[stage].as_f64() > Some(0.0), "{stage}: {stages}");
    }
    assert!(stages["waiting"].is_number() && stages["timed"].is_number(), "{stages}");
    let staging = &result["extra"]["staging"];
    for counted in ["pinned_bytes", "peer_pinned_bytes", "driver_calls_per_gb", "peer_driver_calls_per_gb"] {
        assert!(staging[counted].as_f64() > Some(0.0), "{counted}: {staging}");
    }
    let said = text(&output.stderr);
    for words in ["d2h", "socket", "h2d", "waiting", "pinned", "driver calls per GB"] {
        assert!(said.contains(words), "{said}");
    }
    // From a GPU to the host nothing is copied in, and the host's end pins nothing.
    let result = &results(&run(&format!("bench --memory sim --peer-memory host --sizes 1M {QUICK}")))[0];
    assert_eq!(result["stages_s"]["h2d"], 0.0);
    assert_eq!(result["extra"]["staging"]["peer_pinned_bytes"], 0);
    let host = &results(&run(&format!("bench --memory host --peer-memory host --sizes 1M {QUICK}")))[0];
    assert!(host["stages_s"]["d2h"].is_null() && host["extra"]["staging"].is_null());
}

/// The error of a run whose serving end spoils its memory.
fn mismatch(inject: &str, serve: &str, connect: &str) -> String {
    let serve = Serve::start(&format!("--once --inject {inject} {serve}"));
    let output = serve.connect(&format!("--iters 8 --warmup 1 --json - {connect}"));
    assert_eq!(output.status.code(), Some(1), "{inject}: {}", text(&output.stderr));
    assert_eq!(json(&output)["results"], Value::Array(Vec::new()), "no number for what did not verify");
    assert_eq!(serve.end().0, Some(1));
    let found = first_error(&output);
    for part in ["data mismatch", "offset", "expected 0x", "found 0x"] {
        assert!(found.contains(part), "{found}");
    }
    found
}

#[test]
fn wrong_data_in_gpu_memory_is_found_by_either_end() {
    // A read is verified by the end that connects, else by the one that serves; a host checks what a GPU wrote.
    for (memory, peer_memory, op) in [
        ("sim", "sim:1", "write"),
        ("sim", "sim:1", "read"),
        ("host", "sim:1", "write"),
        ("host", "sim:1", "read"),
        ("sim", "host", "read"),
        ("sim", "host", "send"),
    ] {
        let offer = if peer_memory == "host" { "" } else { "--memory sim:1" };
        let memories = format!("--memory {memory} --peer-memory {peer_memory} --op {op}");
        let said = mismatch("wrong-byte", offer, &format!("{memories} --sizes 100001"));
        assert!(said.contains("offset 100000:"), "{said}");
        let said = mismatch("old-pattern", offer, &format!("{memories} --sizes 600001"));
        assert!(said.contains("the data of 1 iterations ago"), "{said}");
        mismatch("wrong-byte", offer, &format!("{memories} --sizes 64K --blocks 7"));
    }
    let said = mismatch("skip-write", "--memory sim", "--memory sim --peer-memory sim --sizes 100001");
    assert!(said.contains("never written"), "{said}");
    mismatch("wrong-byte", "--memory sim", "--memory sim --peer-memory sim --sizes 8 --pattern latency");
}

#[test]
fn a_peer_gets_no_memory_that_is_not_offered() {
    let serve = Serve::start("--memory sim:1");
    for asked in ["sim:0", "cuda:0"] {
        let refused = serve.connect(&format!("--memory host --peer-memory {asked} --sizes 4K --iters 5"));
        assert_eq!(refused.status.code(), Some(1));
        let said = first_error(&refused);
        assert!(said.contains(&format!("start serve with --memory {asked}")), "{said}");
    }
    // The named memory is the default too.
    let output = serve.connect("--memory host --sizes 4K --iters 5 --json -");
    verified(&results(&output), "host", "sim:1");
}

#[test]
fn cuda_memory_is_the_default_where_there_are_gpus() {
    let Some(driver) = Driver::with_kernels() else { return };
    let output = driver.run("bench --sizes 70001 --iters 5 --json -");
    let result = &results(&output)[0];
    verified(std::slice::from_ref(result), "cuda:0", "cuda:1");
    assert_eq!((&result["gpu"], &result["peer_gpu"]), (&"stand-in 0".into(), &"stand-in 1".into()));
    let said = text(&output.stderr);
    assert!(said.contains("this end cuda:0 (stand-in 0), peer cuda:1 (stand-in 1)"), "{said}");
    let serve = driver.serve("");
    let connect = |args: &str| {
        let args = format!("bench connect {} --sizes 70001 --iters 5 --json - {args}", serve.address);
        results(&driver.run(&args))
    };
    verified(&connect(""), "cuda:0", "cuda:1");
    verified(&connect("--memory cuda:1"), "cuda:1", "cuda:0");
    verified(&connect("--memory host"), "host", "cuda:0");
    verified(&connect("--peer-memory host"), "cuda:0", "host");
    verified(&connect("--pattern incast --peers 2"), "cuda:0", "cuda:1");
    // Another host without GPUs.
    let without = serve.connect("--sizes 70001 --iters 5 --json -");
    verified(&results(&without), "host", "cuda:0");
    serve.stop();
    let serve = Serve::start("");
    let args = format!("bench connect {} --sizes 70001 --iters 5 --json -", serve.address);
    verified(&results(&driver.run(&args)), "cuda:0", "host");
}

#[test]
fn every_operation_and_pattern_with_cuda_memory() {
    let Some(driver) = Driver::with_kernels() else { return };
    for (memory, peer_memory) in
        [("cuda:0", "cuda:1"), ("host", "cuda:1"), ("cuda", "host"), ("cuda:1", "sim")]
    {
        for shape in [
            "--op write",
            "--op read",
            "--op send",
            "--pattern bidir",
            "--pattern latency",
            "--blocks 100",
            "--op read --blocks 100",
        ] {
            let output = driver.run(&format!(
                "bench --memory {memory} --peer-memory {peer_memory} {shape} --sizes 100,300001 --depth 1 {QUICK}"
            ));
            let results = results(&output);
            assert!(
                !results.is_empty() && results.iter().all(|result| result["verified"] == true),
                "{shape}"
            );
            // The driver reports remaining resources at the end; the other end's output is not shown.
            let said = text(&output.stderr);
            let clean = "stand-in: left 0 contexts, 0 streams, 0 events, 0 ranges";
            assert!(!memory.starts_with("cuda") || said.contains(clean), "{said}");
        }
    }
}

#[test]
fn wrong_data_in_cuda_memory_is_found() {
    let Some(driver) = Driver::with_kernels() else { return };
    for (memory, peer_memory, op) in
        [("cuda", "cuda:1", "write"), ("cuda", "host", "read"), ("host", "cuda", "send")]
    {
        for shape in ["--sizes 100001", "--sizes 64K --blocks 7"] {
            let serve = driver.serve("--inject wrong-byte");
            let output = driver.run(&format!(
                "bench connect {} --memory {memory} --peer-memory {peer_memory} --op {op} {shape} --iters 8 --json -",
                serve.address
            ));
            assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
            let said = json(&output)["error"].as_str().unwrap_or_default().to_owned();
            assert!(said.contains("data mismatch") && said.contains("found 0x"), "{said}");
            assert!(shape.contains("blocks") || said.contains("offset 100000:"), "{said}");
        }
    }
}

/// The one line of a command that failed, with status 1, among what the stand-in says.
fn failed(output: &Output) -> String {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| !line.starts_with("stand-in: ")).collect();
    assert!(errors.len() == 1 && errors[0].starts_with("error: "), "{said}");
    errors[0].to_owned()
}

#[test]
fn the_missing_part_of_cuda_is_named() {
    let with = |defines: &[&str], args: &str| {
        let folder = stand_in(defines);
        failed(&ferrywire(args).env("LD_LIBRARY_PATH", folder).output().expect("it runs"))
    };
    let old = with(&["VERSION=11080"], "bench --memory cuda --peer-memory host");
    assert!(old.contains("memory cuda:0") && old.contains("CUDA 11.8"), "{old}");
    let none = with(&["DEVICES=0"], "bench --memory cuda --peer-memory host");
    assert!(none.contains("no GPU"), "{none}");
    for args in ["bench --memory cuda:7 --peer-memory host", "bench serve --memory cuda:7"] {
        let absent = with(&[], args);
        assert!(absent.contains("there is no CUDA GPU 7: this process sees 2"), "{absent}");
    }
    // The stand-in has 1 GiB; the host is not asked for more than it can give.
    let full = with(&[], "bench --memory cuda --peer-memory host --sizes 1G --depth 1");
    assert!(full.contains("MiB on cuda:0 (stand-in 0)") && full.contains("1024 MiB free"), "{full}");
    let mut serve = Driver(stand_in(&[])).serve("");
    for (asked, why) in
        [("cuda:5", "there is no CUDA GPU 5"), ("cuda:1 --sizes 1G --depth 1", "1024 MiB free")]
    {
        let args = format!("--memory host --peer-memory {asked} --iters 5");
        let refused = failed(&serve.connect_within(TIMEOUT_DEFAULT, &args));
        assert!(refused.contains(why), "{refused}");
        let reported = serve.next_error();
        assert!(reported.contains("refused a run of 127.0.0.1:") && reported.contains(why), "{reported}");
    }
    // With the host's memory the same end goes on.
    results(&serve.connect("--memory host --peer-memory host --sizes 4K --iters 5 --json -"));
}

#[test]
fn an_old_driver_is_no_reason_to_fail_unasked() {
    let folder = stand_in(&["VERSION=11080"]);
    let mut command = ferrywire("bench --sizes 4K --iters 5 --json -");
    let output = command.env("LD_LIBRARY_PATH", folder).output().expect("it runs");
    verified(&results(&output), "host", "host");
    assert!(
        text(&output.stderr).contains("warning: uses host memory instead of GPU memory: "),
        "{}",
        text(&output.stderr)
    );
}
