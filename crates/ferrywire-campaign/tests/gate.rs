//! The seeds of the gate.

use ferrywire_campaign::{Plan, campaign};

#[test]
fn two_hundred_seeds_hold() {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let report = campaign(Plan { from: 0, seeds: 200, threads, time: None, quick: false });
    let failures: Vec<String> = report.failures.iter().map(|failure| failure.text()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert!(report.is_well(), "{}", report.text());
    assert_eq!(report.seeds, 200);
    println!("{}", report.text());
}
