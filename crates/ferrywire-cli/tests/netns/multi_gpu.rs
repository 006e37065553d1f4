//! Several GPUs in one process on either host, each GPU with a NIC of its own, on four subnets that do not reach one
//! another.

use serde_json::Value;

use crate::counters::{Counters, agree};
use crate::process::{Ended, Process, SERVE, wait_until};
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, long, nothing_is_left, shared_turn, turn};

/// GPUs of each host, and channels of each.
pub const GPUS: usize = 8;
pub const CHANNELS: usize = 8;
/// As on A3-high: two GPUs to a NIC.
pub const MAPS: [&str; 2] = ["0-1=va1,2-3=va2,4-5=va3,6-7=va4", "0-1=vb1,2-3=vb2,4-5=vb3,6-7=vb4"];

/// The NIC of a GPU on host A.
pub fn nic_of(gpu: usize) -> String {
    Host::A.nic(gpu / 2 + 1)
}

/// The numbers of a row's simulated GPUs.
pub fn numbers(pair: &Value) -> Option<(usize, usize)> {
    let number = |at: usize| pair[at].as_str()?.strip_prefix("sim:")?.parse().ok();
    Some((number(0)?, number(1)?))
}

/// How far a GPU's rate may be from the mean of all.
const SPREAD: f64 = 0.15;

/// All GPUs move data at the same time and as fast: each by all that it sends.
pub fn progress_together(what: &str, rows: &[Value]) {
    let (all, pairs): (Vec<&Value>, Vec<&Value>) = rows.iter().partition(|row| row["gpu"] == "all");
    let mut rates = [0.0; GPUS];
    for row in pairs {
        let (gpu, _) = numbers(&serde_json::json!([row["gpu"], row["peer_gpu"]])).expect("two GPUs");
        rates[gpu] += row["gb_per_s"]["p50"].as_f64().expect("a rate");
    }
    let mean = rates.iter().sum::<f64>() / GPUS as f64;
    let [least, most] = [f64::min, f64::max].map(|pick| rates.into_iter().reduce(pick).expect("rates"));
    let all = all[0]["gb_per_s"]["p50"].as_f64().expect("a rate");
    println!("SUMMARY {what}: all {all:.3} GB/s, each {least:.3} to {most:.3}, mean {mean:.3}");
    let near = |rate: f64| (rate / mean - 1.0).abs() <= SPREAD;
    assert!(near(least) && near(most), "{what}: mean {mean:.3} GB/s: {rates:.3?}");
}

/// Results of a run that is long enough for that.
pub fn timed(world: &World, map: &str, how: &str) -> Vec<Value> {
    connect(world, map, &format!("--sizes 1M --depth 2 --seconds 20 --verify off {how}"))
}

fn serve(world: &World, map: &str) -> Process {
    Process::serve(world, &format!("--gpus 0-7 --memory sim --gpu-nics {map}"))
}

/// Ends a serving process, which leaves nothing.
pub fn stop(world: &World, serve: Process) {
    serve.signal("-INT");
    assert_eq!(serve.end(RUN_TIMEOUT).status, Some(130));
    nothing_is_left(world);
}

fn ended(world: &World, map: &str, args: &str) -> Ended {
    let fixed =
        format!("bench connect {SERVE} --gpus 0-7 --memory sim --peer-memory sim --gpu-nics {map} --json -");
    let ended = Process::start(world, Host::A, &format!("{fixed} {args}")).end(2 * RUN_TIMEOUT);
    assert_eq!(ended.status, Some(0), "{}", ended.errors);
    ended
}

fn rows(ended: &Ended) -> Vec<Value> {
    ended.json()["results"].as_array().expect("results").clone()
}

fn connect(world: &World, map: &str, args: &str) -> Vec<Value> {
    rows(&ended(world, map, args))
}

/// Bytes of TCP that left each link of host A during a run, by the kernel's counters; and its results.
pub fn measured_by(world: &World, map: &str, args: &str) -> (Vec<u64>, Vec<Value>) {
    let before = Counters::of(world);
    let results = connect(world, map, args);
    (Counters::payload_since(world, &before), results)
}

/// The notes of an all-to-all run about GPUs whose NICs do not reach those of other GPUs of the peer.
pub fn mesh_notes() -> Vec<String> {
    let mut notes = Vec::new();
    for gpu in 0..GPUS {
        for there in (0..GPUS).step_by(2).filter(|there| nic_of(*there) != nic_of(gpu)) {
            let (own, on_rail) = (nic_of(gpu), nic_of(there));
            notes.push(format!(
                "GPU {gpu}: {own} does not reach GPU {there} of the peer; uses {on_rail}, on that GPU's rail"
            ));
        }
    }
    notes
}

/// Every GPU on its own NIC, none on another; what the kernel counted is what we say, and a little more.
#[test]
fn every_gpu_of_a_process_uses_its_own_nic() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let serve = serve(&world, MAPS[1]);
    // Nothing but the timed part moves data.
    let args = format!("--sizes 1M --depth 2 --channels {CHANNELS} --iters 12 --warmup 0 --verify off");
    let (kernel, results) = measured_by(&world, MAPS[0], &args);
    assert_eq!(results.len(), GPUS + 1, "a row for each GPU, and one for all");
    for (gpu, row) in results[..GPUS].iter().enumerate() {
        assert_eq!(numbers(&row["extra"]["pair"]), Some((gpu, gpu)));
        assert_eq!((row["channels"].as_u64(), row["iterations"].as_u64()), (Some(CHANNELS as u64), Some(12)));
        let nics = row["per_nic"].as_array().expect("NICs");
        assert_eq!(nics.len(), 1, "{row}");
        assert_eq!(nics[0]["nic"], nic_of(gpu));
        assert!(nics[0]["tx_bytes"].as_u64().expect("bytes") >= 12 << 20, "{row}");
        let channels = row["per_channel"].as_array().expect("channels");
        assert_eq!(channels.len(), CHANNELS);
        assert!(channels.iter().all(|channel| channel["nic"] == nic_of(gpu)));
    }
    let all = &results[GPUS];
    assert_eq!((&all["gpu"], &all["peer_gpu"]), (&"all".into(), &"all".into()));
    assert_eq!(all["iterations"].as_u64(), Some(12 * GPUS as u64));
    agree("one process, own NICs, tcp", &kernel, &results[..GPUS]);
    let args = format!("--pattern bidir --sizes 70001 --channels {CHANNELS} --iters 8 --warmup 2");
    let results = connect(&world, MAPS[0], &args);
    assert_eq!(results.len(), 3 * (GPUS + 1), "each way, and both");
    assert!(results.iter().all(|row| row["verified"] == true));
    // A mesh joins GPUs of different rails over the target's.
    let args = "--pattern all-to-all --sizes 64K --depth 2 --channels 1 --iters 4 --warmup 0 --verify sample";
    let mesh = ended(&world, MAPS[0], args);
    let notes: Vec<&str> = mesh.errors.lines().filter_map(|line| line.strip_prefix("note: ")).collect();
    assert_eq!(notes, mesh_notes());
    let results = rows(&mesh);
    assert_eq!(results.len(), GPUS * GPUS + 1);
    for row in &results[..GPUS * GPUS] {
        let (_, there) = numbers(&row["extra"]["pair"]).expect("two GPUs");
        assert_eq!(
            (&row["per_nic"][0]["nic"], &row["verified"]),
            (&nic_of(there).into(), &true.into()),
            "{row}"
        );
    }
    if long() {
        progress_together("one process, own NICs, tcp", &timed(&world, MAPS[0], "--channels 8"));
        let rows = timed(&world, MAPS[0], "--pattern all-to-all --channels 1");
        progress_together("one process, mesh, tcp", &rows);
    }
    stop(&world, serve);
}

/// The original's own plan: every GPU over all NICs.
#[test]
fn every_gpu_of_a_process_may_use_all_nics() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let serve = serve(&world, "0-7=vb1,vb2,vb3,vb4");
    // Nothing but the timed part moves data.
    let args = "--sizes 1M --depth 2 --channels 4 --iters 20 --warmup 0";
    let verified = connect(&world, "0-7=va1,va2,va3,va4", &format!("{args} --verify sample"));
    assert!(verified.iter().all(|row| row["verified"] == true));
    let (kernel, results) = measured_by(&world, "0-7=va1,va2,va3,va4", &format!("{args} --verify off"));
    for row in &results[..GPUS] {
        let nics: Vec<&str> =
            row["per_nic"].as_array().expect("NICs").iter().filter_map(|nic| nic["nic"].as_str()).collect();
        assert_eq!(nics, ["va1", "va2", "va3", "va4"], "{row}");
    }
    agree("one process, all NICs, tcp", &kernel, &results[..GPUS]);
    let (least, most) = (kernel.iter().min().expect("links"), kernel.iter().max().expect("links"));
    let payload = (GPUS * 20) as u64 * (1 << 20);
    assert!(kernel.iter().sum::<u64>() >= payload, "{kernel:?}");
    assert!(*least as f64 > *most as f64 * 0.3, "all links take part: {kernel:?}");
    if long() {
        let rows = timed(&world, "0-7=va1,va2,va3,va4", "--channels 4");
        progress_together("one process, all NICs, tcp", &rows);
    }
    stop(&world, serve);
}

/// Where every GPU has all NICs, one that goes down takes nothing along; where it was a GPU's only one, the run ends by name.
#[test]
fn a_nic_that_goes_down_in_mid_run() {
    let Some(_turn) = turn() else { return };
    let world = World::new("1gbit");
    let fixed =
        format!("bench connect {SERVE} --gpus 0-7 --memory sim --peer-memory sim --json - --warmup 0");
    let timed = "--sizes 256K --depth 4 --channels 4 --seconds 6 --timeout 20";
    let start = |map: &str| Process::start(&world, Host::A, &format!("{fixed} {timed} --gpu-nics {map}"));
    let while_it_runs = |run: &Process| {
        let before = world.sent_bytes(Host::A, 2);
        let moves = wait_until(RUN_TIMEOUT, || world.sent_bytes(Host::A, 2) > before + (8 << 20));
        assert!(moves, "{}", run.errors());
        world.set_link(Host::A, 2, "down");
    };
    let all = serve(&world, "0-7=vb1,vb2,vb3,vb4");
    let run = start("0-7=va1,va2,va3,va4");
    while_it_runs(&run);
    let ended = run.end(RUN_TIMEOUT);
    assert_eq!(ended.status, Some(0), "{}", ended.errors);
    let json = ended.json();
    let rows = json["results"].as_array().expect("results");
    assert_eq!(rows.len(), GPUS + 1);
    for row in rows {
        assert_eq!(row["verified"], true);
        let lost = row["extra"]["lost_channels"].to_string();
        assert!(lost.contains("va2"), "{row}");
    }
    world.set_link(Host::A, 2, "up");
    stop(&world, all);

    let own = serve(&world, MAPS[1]);
    let run = start(MAPS[0]);
    while_it_runs(&run);
    let ended = run.end(RUN_TIMEOUT);
    assert_eq!(ended.status, Some(1), "{}", ended.errors);
    let said = ended.failure();
    assert!(said.contains("GPU 2 to GPU 2") || said.contains("GPU 3 to GPU 3"), "{said}");
    assert!(said.contains("10.77.2.2") || said.contains("va2"), "{said}");
    world.set_link(Host::A, 2, "up");
    stop(&world, own);
}

/// A serving process that is killed ends the run of all GPUs with one error; a connecting one leaves the serving end in
/// place.
#[test]
fn either_process_may_be_killed_under_eight_gpus() {
    let Some(_turn) = shared_turn() else { return };
    let world = World::new("2gbit");
    let args = format!(
        "bench connect {SERVE} --gpus 0-7 --memory sim --peer-memory sim --gpu-nics {} --json - --sizes 256K --channels 2 \
         --seconds 60 --warmup 0",
        MAPS[0]
    );
    let moves = || wait_until(RUN_TIMEOUT, || world.sent_bytes_of(Host::A) > 16 << 20);
    let served = serve(&world, MAPS[1]);
    let run = Process::start(&world, Host::A, &args);
    assert!(moves(), "{}", run.errors());
    assert_eq!(run.kill().status, None);
    let said = served.await_error(RUN_TIMEOUT);
    assert!(said.contains("10.77."), "{said}");
    // The serving end accepts the next run.
    let again = connect(&world, MAPS[0], "--sizes 64K --iters 4 --warmup 0 --channels 2");
    assert!(again.len() == GPUS + 1 && again.iter().all(|row| row["verified"] == true));
    let run = Process::start(&world, Host::A, &args);
    let before = world.sent_bytes_of(Host::A);
    assert!(
        wait_until(RUN_TIMEOUT, || world.sent_bytes_of(Host::A) > before + (16 << 20)),
        "{}",
        run.errors()
    );
    served.kill();
    let said = run.end(RUN_TIMEOUT).failure();
    assert!(said.contains("GPU ") && said.contains("10.77."), "{said}");
    nothing_is_left(&world);
}
