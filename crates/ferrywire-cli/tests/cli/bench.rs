//! Runs of the real command, both ends, over loopback.

use crate::common::{Serve, ferrywire, results, run, text, unwritten};
use serde_json::Value;

const QUICK: &str = "--iters 20 --warmup 3 --json -";

fn sizes(results: &[Value]) -> Vec<u64> {
    results.iter().filter_map(|result| result["size_bytes"].as_u64()).collect()
}

#[test]
fn loopback_mode_is_verified_and_has_the_documented_form() {
    let output = run(&format!("bench --sizes 4K,1M {QUICK}"));
    let results = results(&output);
    assert_eq!(sizes(&results), [4096, 1 << 20]);
    let json = crate::common::json(&output);
    assert_eq!(json["schema"], 2);
    for key in ["version", "config", "host", "peer"] {
        assert!(!json[key].is_null(), "{key}");
    }
    for result in &results {
        assert_eq!((&result["verified"], &result["iterations"]), (&true.into(), &20.into()));
        for pointer in
            ["/gb_per_s/min", "/gb_per_s/p50", "/gb_per_s/max", "/latency_us/p50", "/latency_us/p99"]
        {
            assert!(result.pointer(pointer).and_then(Value::as_f64).is_some_and(|x| x > 0.0), "{pointer}");
        }
        for pointer in ["/cpu_s_per_gb/source", "/cpu_s_per_gb/target", "/setup_s", "/stages_s/timed"] {
            assert!(result.pointer(pointer).is_some_and(Value::is_number), "{pointer}");
        }
        assert_eq!(result["transport"], "tcp");
        assert!(result["bottleneck"].is_string());
        let moved = |list: &Value, key: &str| {
            list.as_array().map(|l| l.iter().filter_map(|c| c[key].as_u64()).sum::<u64>())
        };
        let least = 20 * result["size_bytes"].as_u64().expect("a size");
        assert!(moved(&result["per_channel"], "bytes") >= Some(least), "{}", result["per_channel"]);
        assert!(moved(&result["per_nic"], "tx_bytes") >= Some(least), "{}", result["per_nic"]);
    }
    let said = text(&output.stderr);
    assert!(said.contains("bottleneck: "), "the table goes to standard error: {said}");
}

#[test]
fn without_json_the_table_goes_to_standard_output() {
    let output = run("bench --sizes 64K --iters 10");
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("64K") && said.contains("bottleneck: "), "{said}");
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}

/// As of `ferrywire bench | head -1`.
#[test]
fn a_closed_standard_output_fails_no_run() {
    unwritten(&mut ferrywire("bench --memory host --peer-memory host --sizes 4K --iters 5"));
}

#[test]
fn loopback_mode_writes_json_when_the_other_end_does_not_start() {
    let output = run("bench --nics nosuch0 --sizes 4K --iters 5 --json -");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let json = crate::common::json(&output);
    assert!(json["error"].as_str().is_some_and(|error| error.contains("nosuch0")), "{json}");
    assert_eq!(json["results"], Value::Array(Vec::new()));
}

#[test]
fn serve_stays_up_for_further_peers() {
    let serve = Serve::start("");
    for op in ["write", "read", "send"] {
        let output = serve.connect(&format!("--op {op} --sizes 0,1,7,4095,65537,3M {QUICK}"));
        let results = results(&output);
        assert_eq!(sizes(&results), [0, 1, 7, 4095, 65537, 3 << 20], "{op}");
        assert!(results.iter().all(|result| result["verified"] == true && result["op"] == op));
        let direction = if op == "read" { "from_peer" } else { "to_peer" };
        assert!(results.iter().all(|result| result["direction"] == direction));
    }
    assert_eq!(serve.stop(), "");
}

#[test]
fn once_ends_after_one_peer() {
    let serve = Serve::start("--once");
    results(&serve.connect(&format!("--sizes 4K {QUICK}")));
    assert_eq!(serve.end(), (Some(0), String::new()));
}

#[test]
fn both_directions_at_once() {
    for op in ["write", "read", "send"] {
        let output = run(&format!("bench --pattern bidir --op {op} --sizes 4095,1M {QUICK}"));
        let results = results(&output);
        let directions: Vec<&str> =
            results.iter().filter_map(|result| result["direction"].as_str()).collect();
        assert_eq!(directions.len(), 6, "{op}");
        assert_eq!(directions.iter().filter(|d| **d == "both").count(), 2);
        assert!(results.iter().filter(|r| r["direction"] == "both").all(|r| r["iterations"] == 40));
    }
}

#[test]
fn two_sided_flows_limited_by_time() {
    let results = results(&run("bench --pattern bidir --op send --sizes 100K --seconds 0.3 --json -"));
    assert!(
        results.iter().all(|result| result["verified"] == true && result["iterations"].as_u64() > Some(1))
    );
}

#[test]
fn several_peers_write_to_one() {
    let output = run(&format!("bench --pattern incast --peers 3 --sizes 64K,1M {QUICK}"));
    let results = results(&output);
    assert_eq!(results.len(), 8);
    let all: Vec<&Value> = results.iter().filter(|result| result["gpu"] == "all").collect();
    assert!(all.len() == 2 && all.iter().all(|result| result["iterations"] == 60));
}

#[test]
fn latency_of_every_operation() {
    for op in ["write", "read", "send"] {
        let output = run(&format!("bench --pattern latency --op {op} --sizes 0,8,4095,256K {QUICK}"));
        let results = results(&output);
        assert_eq!(results.len(), 4, "{op}");
        for result in &results {
            assert!(result["latency_us"]["p50"].as_f64() > Some(0.0) && result["depth"] == 1);
            let completion = &result["extra"]["write_completion_us"]["p50"];
            assert_eq!(completion.is_number(), op == "write", "{completion}");
        }
    }
}

#[test]
fn scattered_blocks() {
    for op in ["write", "read", "send"] {
        let output = run(&format!("bench --op {op} --blocks 300 --sizes 300,100001,3M {QUICK}"));
        for result in results(&output) {
            assert!(result["verified"] == true && result["blocks"] == 300, "{op}");
            assert!(result["extra"]["ns_per_block"].as_f64() > Some(0.0));
        }
    }
    results(&run(&format!("bench --pattern latency --blocks 10 --sizes 10,64K {QUICK}")));
    results(&run(&format!("bench --pattern bidir --blocks 10 --sizes 1001 {QUICK}")));
}

#[test]
fn engine_options_reach_the_engine() {
    let output =
        run(&format!("bench --channels 2 --chunk 128K --window 8 --threads 1 --crc --sizes 1M {QUICK}"));
    let result = &results(&output)[0];
    assert_eq!(result["chunk_bytes"], 128 << 10);
    assert_eq!((&result["window"], &result["threads"]), (&8.into(), &1.into()));
    assert_eq!(result["channels"], 2);
}

#[test]
fn csv_has_a_line_per_result() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.csv");
    let output = run(&format!("bench --sizes 4K,8K --iters 10 --csv {}", path.display()));
    assert!(output.status.success() && output.stdout.is_empty());
    let csv = std::fs::read_to_string(path).expect("written");
    assert_eq!(csv.lines().count(), 3);
    assert!(csv.starts_with("op,memory,"));
}

#[test]
fn verbose_prints_effective_values() {
    let output = run("bench -v --sizes 4K --iters 5 --json -");
    let said = text(&output.stderr);
    assert!(said.contains("sizes = [4096]") && said.contains("seconds = null"), "{said}");
    assert_eq!(crate::common::json(&output)["config"]["iters"], 5);
}

#[test]
fn permissions_of_a_run_are_shown_and_stored() {
    let output =
        run("bench -v --gpus 0-1 --gpu-nics 0-1=lo --allow-cross-numa --memory host --peer-memory host \
                      --sizes 4K --iters 5 --json -");
    results(&output);
    let config = &crate::common::json(&output)["config"];
    let [gpus, map] = [serde_json::json!([0, 1]), serde_json::json!({"0": ["lo"], "1": ["lo"]})];
    assert_eq!((&config["gpus"], &config["gpu_nics"]), (&gpus, &map));
    assert_eq!([&config["allow_cross_numa"], &config["allow_nic_setup"]], [true, false]);
    let said = text(&output.stderr);
    for line in
        ["gpus = [0,1]", "allow_cross_numa = true", "allow_nic_setup = false", "allow_same_host_gpu = false"]
    {
        assert!(said.contains(line), "{line}: {said}");
    }
    let mut serve =
        Serve::start("-v --gpus 0-1 --gpu-nics 0-1=lo --allow-cross-numa --memory host --timeout 7");
    let lines = serve.collect_errors();
    results(&serve.connect(&format!("--memory host --peer-memory host --sizes 4K {QUICK}")));
    let said = lines.lock().expect("whole lines").join("\n");
    for line in [
        "gpus = [0,1]",
        "gpu_nics = {\"0\":[\"lo\"],\"1\":[\"lo\"]}",
        "allow_cross_numa = true",
        "timeout_s = 7",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn verification_can_be_sampled_or_left_out() {
    let sampled = &results(&run(&format!("bench --verify sample --sizes 4M {QUICK}")))[0];
    assert_eq!(sampled["verified"], true);
    let output = run("bench --verify off --sizes 4K --iters 10");
    let said = text(&output.stdout);
    assert!(said.contains("not verified: --verify off"), "{said}{}", text(&output.stderr));
}
