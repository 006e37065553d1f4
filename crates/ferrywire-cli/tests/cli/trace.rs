//! `FERRYWIRE_TRACE`: what is in the file, its end, and that no process overwrites another one's.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use crate::common::{GRACE, Serve, ferrywire, first_error, results, run_within, text};

const BYTES: u64 = 64 << 20;
/// Events of a trace, as docs/metrics.md says.
const EVENTS_MAX: u64 = 500_000;

/// The files of a folder, by name.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The events of a trace that has ended.
fn events(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn name(event: &Value) -> &str {
    event["name"].as_str().unwrap()
}

fn bytes(event: &Value) -> u64 {
    event["args"]["bytes"].as_u64().unwrap()
}

fn time(event: &Value) -> f64 {
    event["ts"].as_f64().unwrap()
}

/// The transfers or chunks of a trace: each has one beginning and one end.
fn spans(events: &[Value], category: &str) -> Vec<Value> {
    let mut ends: BTreeMap<&str, f64> = BTreeMap::new();
    let of = |phase: &'static str| {
        events.iter().filter(move |event| event["cat"] == category && event["ph"] == phase)
    };
    for event in of("e") {
        let twice = ends.insert(event["id2"]["local"].as_str().unwrap(), time(event));
        assert_eq!(twice, None, "{event}");
    }
    let begun: Vec<Value> = of("b").cloned().collect();
    for event in &begun {
        let end = ends.remove(event["id2"]["local"].as_str().unwrap());
        assert!(end.is_some_and(|end| end >= time(event)), "{event} ends at {end:?}");
    }
    assert!(ends.is_empty(), "ends without a beginning: {ends:?}");
    begun
}

fn sum(spans: &[Value], is_counted: impl Fn(&str) -> bool) -> u64 {
    spans.iter().filter(|span| is_counted(name(span))).map(bytes).sum()
}

/// The names of the rows in which these stages are, in each of which no two events overlap.
fn rows(events: &[Value]) -> BTreeSet<String> {
    let named = events.iter().filter(|event| name(event) == "thread_name");
    let label = |event: &Value| event["args"]["name"].as_str().unwrap().to_owned();
    let labels: BTreeMap<u64, String> =
        named.map(|event| (event["tid"].as_u64().unwrap(), label(event))).collect();
    let mut until: BTreeMap<u64, f64> = BTreeMap::new();
    let stages = events.iter().filter(|event| event["ph"] == "X");
    let mut stages: Vec<&Value> = stages.collect();
    stages.sort_by(|one, other| time(one).total_cmp(&time(other)));
    for event in stages {
        let (row, end) = (event["tid"].as_u64().unwrap(), time(event) + event["dur"].as_f64().unwrap());
        // Times are printed in nanoseconds, and this sum of floats may be off by one.
        let last = until.insert(row, end).unwrap_or(0.0);
        assert!(last <= time(event) + 0.002, "{}: {event} begins before {last}", labels[&row]);
        assert!(labels[&row].contains(&format!(" {}", name(event))), "{event} in {}", labels[&row]);
    }
    until.keys().map(|row| labels[row].clone()).collect()
}

/// The channels that carried chunks, by number.
fn channels(chunks: &[Value]) -> BTreeSet<u64> {
    chunks.iter().map(|chunk| chunk["args"]["channel"].as_u64().unwrap()).collect()
}

fn end(events: &[Value]) -> (u64, u64) {
    let end = events.last().unwrap();
    assert_eq!(name(end), "end of trace");
    (end["args"]["events"].as_u64().unwrap(), end["args"]["dropped"].as_u64().unwrap())
}

/// Regression: copies of short messages to a GPU, which belong to no channel, were shown as copies from that GPU by channel 0.
#[test]
fn copies_of_short_messages_are_in_no_row_of_another_stage() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = ferrywire(
        "bench --op send --memory sim:0 --peer-memory sim:1 --sizes 4K --iters 200 --channels 1 --json -",
    );
    results(&command.env("FERRYWIRE_TRACE", folder.path().join("trace.json")).output().unwrap());
    let all: Vec<_> = files(folder.path()).iter().map(|file| events(file)).collect();
    let of_sends = |events: &[Value]| sum(&spans(events, "transfer"), |name| name == "send") > 0;
    let (source, target): (Vec<_>, Vec<_>) = all.iter().partition(|events| of_sends(events));
    assert_eq!((source.len(), target.len()), (1, 1));
    let has = |events: &[Value], stage| rows(events).iter().any(|row| row.contains(stage));
    assert!(has(source[0], " d2h,") && !has(target[0], " d2h"), "{:?}", rows(target[0]));
}

#[test]
fn a_trace_has_all_bytes_of_a_gpu_and_the_stages_of_each_channel_at_both_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = ferrywire(
        "bench --memory sim:0 --peer-memory sim:1 --sizes 64M --iters 1 --warmup 0 --channels 2 --json -",
    );
    command.env("FERRYWIRE_TRACE", folder.path().join("trace.json"));
    let rows_of_bench = results(&command.output().unwrap());
    assert_eq!(rows_of_bench[0]["iterations"], 1);
    let [first, second] = &files(folder.path())[..] else { panic!("{:?}", files(folder.path())) };
    assert_eq!(first.file_name().unwrap(), "trace.json");
    let second_name = text(second.file_name().unwrap().as_encoded_bytes());
    let pid = second_name.strip_prefix("trace.json.").and_then(|pid| pid.parse::<u64>().ok()).expect("a pid");
    let [one, other] = [events(first), events(second)];
    let is_of = |events: &[Value], pid: u64| events.iter().all(|event| event["pid"] == pid);
    assert!(is_of(&other, pid) && !is_of(&one, pid));
    // The serving end is a child of the connecting end, and which of them begins first is open.
    let writes = |events: &[Value]| sum(&spans(events, "transfer"), |name| name == "write") > 0;
    let (source, target) = if writes(&one) { (one, other) } else { (other, one) };

    for events in [&source, &target] {
        assert_eq!(name(&events[0]), "process_name");
        assert!(events[0]["args"]["name"].as_str().unwrap().starts_with("ferrywire (command), "));
        assert_eq!(end(events).1, 0, "nothing is dropped");
    }
    let (transfers, sent) = (spans(&source, "transfer"), spans(&source, "chunk"));
    let is_sent = |name: &str| ["write", "send", "serve"].contains(&name);
    let written = sum(&transfers, |name| name == "write");
    assert!(written >= BYTES && written.is_multiple_of(BYTES), "{written}");
    let tx = sum(&sent, |name| name.starts_with("chunk tx"));
    assert_eq!(tx, sum(&transfers, is_sent));
    let placed = spans(&target, "chunk");
    assert_eq!(sum(&placed, |name| name.starts_with("chunk rx")), tx);
    assert!(transfers.iter().all(|transfer| transfer["args"]["failed"] == false));
    assert!(
        transfers.iter().all(|transfer| transfer["args"]["peer"].as_str().unwrap().contains("127.0.0.1"))
    );
    // Each chunk is a part of a transfer in the same file.
    let ids: BTreeSet<u64> =
        transfers.iter().map(|each| each["args"]["transfer"].as_u64().unwrap()).collect();
    for chunk in sent.iter().filter(|chunk| name(chunk).starts_with("chunk tx")) {
        assert!(ids.contains(&chunk["args"]["transfer"].as_u64().unwrap()), "{chunk}");
    }

    let carries = channels(&sent);
    assert_eq!(carries, BTreeSet::from([0, 1]));
    for (events, copy, socket) in [(&source, "d2h", "socket tx"), (&target, "h2d", "socket rx")] {
        let rows = rows(events);
        for channel in &carries {
            for stage in [copy, socket] {
                let row = format!("channel {channel} {stage}, lo, worker ");
                assert!(rows.iter().any(|name| name.starts_with(&row)), "no {row:?} in {rows:?}");
            }
        }
        let of_socket = events.iter().filter(|event| event["ph"] == "X" && name(event) == "socket");
        assert!(of_socket.map(bytes).sum::<u64>() >= BYTES);
        let mut of_copies = events.iter().filter(|event| event["ph"] == "X" && name(event) != "socket");
        assert!(of_copies.all(|event| event["args"]["bytes"].is_null()), "the bytes of a copy are unknown");
    }
}

#[test]
fn without_the_variable_no_file_is_written_and_a_file_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for variable in [None, Some("")] {
        let mut command = ferrywire("bench --memory host --sizes 4K --iters 1 --json -");
        command.current_dir(folder.path()).envs(variable.map(|value| ("FERRYWIRE_TRACE", value)));
        results(&command.output().unwrap());
        assert!(files(folder.path()).is_empty(), "{:?}", files(folder.path()));
    }
    let missing = folder.path().join("missing/trace.json");
    for path in [missing.to_str().unwrap(), "/dev/null", folder.path().to_str().unwrap()] {
        let mut command = ferrywire("bench --memory host --sizes 4K --iters 1");
        let output = run_within(GRACE, command.env("FERRYWIRE_TRACE", path));
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        let said = first_error(&output);
        assert!(
            said.contains("FERRYWIRE_TRACE") && said.contains(&format!("cannot write {path}: ")),
            "{said}"
        );
    }
    assert!(files(folder.path()).is_empty());
}

#[test]
fn processes_with_one_file_write_one_each_and_that_of_a_killed_one_lacks_only_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    fs::write(&file, "left by an earlier process, and longer than what comes first").unwrap();
    let variable = [("FERRYWIRE_TRACE", file.to_str().unwrap())];
    let mut serve = Serve::start_with("--listen 127.0.0.1:0 --memory host", &variable);
    let mut names = vec!["trace.json".to_owned()];
    for (name, kept) in [("trace.json", "trace.json.PID"), ("%p.json", "PID.json")] {
        let mut command =
            ferrywire(&format!("bench connect {} --memory host --sizes 1M --iters 3", serve.address));
        command.env("FERRYWIRE_TRACE", folder.path().join(name));
        let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
        names.push(kept.replace("PID", &child.id().to_string()));
        assert!(child.wait().unwrap().success());
        let events = events(&folder.path().join(names.last().unwrap()));
        assert_eq!(end(&events).1, 0);
    }
    names.sort();
    let found = files(folder.path());
    let found: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(found, names);
    // Events are written within moments.
    let until = Instant::now() + GRACE;
    while !fs::read_to_string(&file).unwrap().contains("chunk rx") {
        assert!(Instant::now() < until, "{}", fs::read_to_string(&file).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    serve.child.kill().unwrap();
    serve.child.wait().unwrap();
    let cut = fs::read_to_string(&file).unwrap();
    let whole = serde_json::from_str(&format!("{cut}]"));
    let events: Vec<Value> = whole.unwrap_or_else(|error| panic!("{error}: {cut}"));
    assert!(sum(&spans(&events, "chunk"), |name| name.starts_with("chunk rx")) >= 6 << 20);
}

#[test]
fn a_trace_is_bounded_and_says_how_many_events_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = ferrywire("bench --memory host --sizes 8 --iters 60000 --depth 64 --json -");
    results(&command.env("FERRYWIRE_TRACE", folder.path().join("%p.json")).output().unwrap());
    let mut lacking = 0;
    for path in files(folder.path()) {
        let written = fs::read_to_string(&path).unwrap();
        let last = written.trim_end().trim_end_matches(']').trim_end().lines().last().unwrap();
        let last: Value = serde_json::from_str(last).unwrap();
        let (events, dropped) = end(&[last]);
        assert!(events <= EVENTS_MAX && written.len() < 200_000_000, "{events} in {} bytes", written.len());
        let spans = |phase: &str| {
            memchr::memmem::find_iter(written.as_bytes(), &format!("\"ph\":\"{phase}\"")).count() as u64
        };
        assert_eq!(spans("b"), spans("e"));
        assert_eq!(spans("b") + spans("X"), events);
        lacking = lacking.max(dropped);
    }
    assert!(lacking > 0, "the run has more events than a trace");
}
