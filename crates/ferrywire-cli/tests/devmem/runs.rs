//! Whole runs: each operation, both ways, verified.

use crate::hosts::{self, Running, connect, find, seen};

#[test]
fn each_operation_both_ways_is_verified() {
    if !hosts::are_here() {
        return;
    }
    let before = [find(0, false), find(1, false)];
    let serving = Running::serve("");
    for op in ["write", "read", "send"] {
        let sizes = if op == "write" { "0,1,64K,1M,64M" } else { "0,1,4097,1M" };
        let run = connect(&format!(
            "--op {op} --pattern bidir --sizes {sizes} --iters 2 --warmup 0 --depth 1 --channels 4 --json -"
        ));
        let said = String::from_utf8_lossy(&run.stdout).into_owned();
        let reported = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(run.status.success(), "{reported}");
        let json: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        let results = json["results"].as_array().expect("results");
        assert!(results.len() >= sizes.split(',').count(), "{json}");
        for result in results {
            assert_eq!(
                (&result["transport"], &result["verified"]),
                (&"devmem".into(), &true.into()),
                "{result}"
            );
        }
        assert_eq!(seen(0), before[0], "{op}");
    }
    serving.signal(libc::SIGTERM);
    assert_eq!(serving.ended(), Some(143));
    assert_eq!(seen(1), before[1]);
}
