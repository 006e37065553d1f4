//! Everything that a run over the plugin can combine, verified. It takes minutes, so it is done with
//! `FERRYWIRE_LONG=1` only; `carried.rs` has a cut of it.

use std::time::Instant;

use crate::common::{Serve, json, text};
use crate::hosted::{ONE_HOST, connect, long, serve};

/// Around every edge: nothing, fragments, chunks, and many of them.
const SIZES: &str = "0,1,4095,4096,4097,65535,524287,524288,524289,1048577,16777219,256M";
/// Sizes without those that take long, or cannot be cut into blocks.
const SIZES_SHORT: &str = "0,1,4095,4096,4097,65535,524287,524288,524289,1048577,16777219";
const SIZES_OF_BLOCKS: &str = "4097,65535,524287,524289,1048577,16777219";

const OPS: [&str; 3] = ["write", "read", "send"];
const UNPACKS: [&str; 3] = ["kernel", "copy", "host"];
/// Memory of the connecting and of the serving end, where receives are scattered.
const WITH_GPUS: [(&str, &str); 3] = [("sim:0", "sim:1"), ("host", "sim:1"), ("sim:0", "host")];

/// One run.
struct Run {
    /// Options of both patterns and sizes.
    what: String,
    unpack: &'static str,
    /// Sizes in it, and results of each.
    sizes: usize,
    results_per_size: usize,
}

/// Memories and modes: in host memory nothing is unpacked.
fn memories() -> Vec<(&'static str, &'static str, &'static str)> {
    let gpus = |unpack| WITH_GPUS.map(|(memory, peer)| (unpack, memory, peer));
    [("kernel", "host", "host")].into_iter().chain(UNPACKS.into_iter().flat_map(gpus)).collect()
}

fn runs() -> Vec<Run> {
    let mut runs = Vec::new();
    for (unpack, memory, peer_memory) in memories() {
        for op in OPS {
            let mut add = |sizes: &str, results_per_size, options: &str| {
                let what = format!(
                    "--op {op} --memory {memory} --peer-memory {peer_memory} --sizes {sizes} {options}"
                );
                runs.push(Run { what, unpack, sizes: sizes.split(',').count(), results_per_size });
            };
            for channels in [1, 2, 4, 8] {
                add(SIZES, 1, &format!("--depth 2 --channels {channels}"));
            }
            add(SIZES_SHORT, 3, "--depth 2 --channels 4 --pattern bidir");
            add(SIZES_SHORT, 3, "--depth 2 --channels 2 --pattern incast --peers 2");
            add(SIZES_OF_BLOCKS, 1, "--depth 2 --channels 4 --blocks 37");
        }
    }
    runs
}

/// Checks a run and counts its results; the error says what is wrong.
fn try_run(serves: &[(&str, Serve)], run: &Run, count: &mut usize) -> Result<(), String> {
    let (_, serve) = serves.iter().find(|(unpack, _)| *unpack == run.unpack).expect("one for each mode");
    let args = format!(
        "{} --unpack {} --allow-same-host-gpu --iters 2 --warmup 0 --timeout 60 --json -",
        run.what, run.unpack
    );
    let output = connect(serve, &args, ONE_HOST);
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, text(&output.stderr)));
    }
    let json = json(&output);
    let results = json["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    let good = |row: &&serde_json::Value| row["verified"] == true && row["transport"] == "plugin";
    let good = results.iter().filter(good).count();
    *count += good;
    match run.sizes * run.results_per_size {
        expected if good == expected && results.len() == expected => Ok(()),
        expected => Err(format!("{good} of {} results are verified, {expected} expected", results.len())),
    }
}

#[test]
fn every_combination_is_verified() {
    if !long() {
        println!("SKIPPED: needs FERRYWIRE_LONG=1, and minutes");
        return;
    }
    let start = |unpack| {
        let args = format!("--memory sim:1 --allow-same-host-gpu --unpack {unpack} --timeout 60");
        (unpack, serve(&args, ONE_HOST))
    };
    let serves = UNPACKS.map(start);
    let (runs, began) = (runs(), Instant::now());
    let (mut results, mut failures) = (0, Vec::new());
    for (i, run) in runs.iter().enumerate() {
        if let Err(why) = try_run(&serves, run, &mut results) {
            println!("FAILED: {} --unpack {}: {why}", run.what, run.unpack);
            failures.push(&run.what);
        }
        if (i + 1) % 10 == 0 {
            println!("{} of {} runs, {:.0} s", i + 1, runs.len(), began.elapsed().as_secs_f64());
        }
    }
    println!(
        "{} runs, {results} results verified, {} runs failed, {:.0} s",
        runs.len(),
        failures.len(),
        began.elapsed().as_secs_f64()
    );
    assert!(failures.is_empty(), "{failures:#?}");
}
