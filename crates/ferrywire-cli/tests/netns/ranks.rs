//! One process for each GPU, eight on either host, as torchrun and srun start them; each GPU with a NIC of its own, on
//! four subnets that do not reach one another. What one process for all does is in `multi_gpu.rs`.

use serde_json::Value;

use crate::counters::{Counters, agree};
use crate::multi_gpu::{CHANNELS, GPUS, MAPS, mesh_notes, nic_of, progress_together};
use crate::plugin::{ALL, plugin};
use crate::process::{Ended, Process, wait_until};
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, long, nothing_is_left, shared_turn, skip, turn};

type Variables = Vec<(&'static str, String)>;

/// The variables of torchrun, whose own store holds the port of `MASTER_PORT`.
fn torchrun(rank: usize) -> Variables {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", (2 * GPUS).to_string()),
        ("LOCAL_RANK", (rank % GPUS).to_string()),
        ("LOCAL_WORLD_SIZE", GPUS.to_string()),
        ("MASTER_ADDR", "10.77.1.1".to_owned()),
        ("MASTER_PORT", "29500".to_owned()),
        ("TORCHELASTIC_RUN_ID", "none".to_owned()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
    ]
}

/// The variables of srun.
fn slurm(rank: usize) -> Variables {
    vec![
        ("SLURM_PROCID", rank.to_string()),
        ("SLURM_STEP_NUM_TASKS", (2 * GPUS).to_string()),
        ("SLURM_LOCALID", (rank % GPUS).to_string()),
        ("SLURM_STEP_NODELIST", "10.77.1.1,10.77.1.2".to_owned()),
    ]
}

fn start(world: &World, maps: [&str; 2], args: &str, launcher: fn(usize) -> Variables) -> Vec<Process> {
    let one = |rank: usize| {
        let (host, map) = if rank < GPUS { (Host::A, maps[0]) } else { (Host::B, maps[1]) };
        let args = format!("bench --memory sim --gpu-nics {map} --timeout 60 --json - {args}");
        Process::start_with(world, host, &args, &launcher(rank))
    };
    (0..2 * GPUS).map(one).collect()
}

/// The results of a run in which only rank 0 printed anything.
fn results(ranks: Vec<Process>) -> Vec<Value> {
    outcome(ranks).0
}

/// The results and the notes of rank 0.
fn outcome(ranks: Vec<Process>) -> (Vec<Value>, Vec<String>) {
    let all: Vec<Ended> = ranks.into_iter().map(|rank| rank.end(2 * RUN_TIMEOUT)).collect();
    for (rank, ended) in all.iter().enumerate() {
        assert_eq!(ended.status, Some(0), "rank {rank}: {}; rank 0: {}", ended.errors, all[0].errors);
        assert!(rank == 0 || (ended.output.is_empty() && ended.errors.is_empty()), "rank {rank}: {ended:?}");
    }
    let json = all[0].json();
    assert_eq!(json["error"], Value::Null);
    let notes = all[0].errors.lines().filter_map(|line| line.strip_prefix("note: ")).map(str::to_owned);
    (json["results"].as_array().expect("results").clone(), notes.collect())
}

fn nics(row: &Value) -> Vec<&str> {
    row["per_nic"].as_array().expect("NICs").iter().filter_map(|nic| nic["nic"].as_str()).collect()
}

/// Every rank on its own NIC, none on another; what the kernel counted is what we say, and a little more. With time to
/// spare also over the plugin.
#[test]
fn every_rank_uses_the_nic_of_its_gpu() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    // Nothing but the timed part moves data.
    let timed = if long() { "--seconds 20" } else { "--iters 12" };
    let args = format!("--sizes 1M --depth 2 --channels {CHANNELS} {timed} --warmup 0 --verify off");
    own_nics(&world, &args);
    if long() {
        own_nics(&world, &format!("{args} {}", plugin()));
    }
    let args = format!("--pattern bidir --sizes 70001 --channels {CHANNELS} --iters 8 --warmup 2");
    let rows = results(start(&world, MAPS, &args, slurm));
    assert_eq!(rows.len(), 3 * (GPUS + 1), "each way, and both");
    assert!(rows.iter().all(|row| row["verified"] == true));
    nothing_is_left(&world);
}

fn own_nics(world: &World, args: &str) {
    let before = Counters::of(world);
    let rows = results(start(world, MAPS, args, torchrun));
    let kernel = Counters::payload_since(world, &before);
    assert_eq!(rows.len(), GPUS + 1, "a row for each pair, and one for all");
    for (rank, row) in rows[..GPUS].iter().enumerate() {
        assert_eq!(row["extra"]["ranks"], serde_json::json!([rank, rank + GPUS]));
        assert_eq!([&row["gpu"], &row["peer_gpu"]], [&format!("sim:{rank}"); 2]);
        assert_eq!(nics(row), [nic_of(rank)]);
        let channels = row["per_channel"].as_array().expect("channels");
        assert_eq!(channels.len(), CHANNELS);
        assert!(channels.iter().all(|channel| channel["nic"] == nic_of(rank)));
        let payload = row["per_nic"][0]["tx_bytes"].as_u64().expect("bytes");
        assert!(payload >= row["iterations"].as_u64().expect("a count") << 20, "{row}");
    }
    let transport = rows[0]["transport"].as_str().expect("a name");
    agree(&format!("8 processes, own NICs, {transport}"), &kernel, &rows[..GPUS]);
    if long() {
        progress_together(&format!("8 processes, own NICs, {transport}"), &rows);
    }
}

/// The original's own plan, and a mesh, which joins GPUs of different rails over the target's.
#[test]
fn ranks_may_use_all_nics_and_other_rails() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let args = "--sizes 1M --depth 2 --channels 4 --iters 20 --warmup 0";
    let rows = results(start(&world, ALL, &format!("{args} --verify sample"), slurm));
    assert!(rows.iter().all(|row| row["verified"] == true));
    // Nothing but the timed part moves data.
    let before = Counters::of(&world);
    let rows = results(start(&world, ALL, &format!("{args} --verify off"), slurm));
    let kernel = Counters::payload_since(&world, &before);
    for row in &rows[..GPUS] {
        assert_eq!(nics(row), ["va1", "va2", "va3", "va4"], "{row}");
    }
    agree("8 processes, all NICs, tcp", &kernel, &rows[..GPUS]);
    let (least, most) = (kernel.iter().min().expect("links"), kernel.iter().max().expect("links"));
    let payload = (GPUS * 20) as u64 * (1 << 20);
    assert!(kernel.iter().sum::<u64>() >= payload, "{kernel:?}");
    assert!(*least as f64 > *most as f64 * 0.3, "all links take part: {kernel:?}");
    if long() {
        mesh(&world, "");
        progress_together("8 processes, all NICs, tcp", &timed(&world, ALL, ""));
        progress_together(
            "8 processes, mesh, tcp",
            &timed(&world, MAPS, "--pattern all-to-all --channels 1"),
        );
    }
    nothing_is_left(&world);
}

/// A mesh joins GPUs of different rails over the target's, and says so.
fn mesh(world: &World, how: &str) {
    let args = "--pattern all-to-all --sizes 64K --depth 2 --channels 1 --iters 4 --warmup 0 --verify sample";
    let (rows, mut notes) = outcome(start(world, MAPS, &format!("{args} {how}"), torchrun));
    assert_eq!(rows.len(), GPUS * GPUS + 1);
    for row in &rows[..GPUS * GPUS] {
        let there = row["extra"]["ranks"][1].as_u64().expect("a rank") as usize - GPUS;
        assert_eq!((nics(row), &row["verified"]), (vec![nic_of(there).as_str()], &true.into()), "{row}");
    }
    // Each rank by itself: in whatever order.
    notes.sort_unstable();
    let expected: Vec<String> = mesh_notes()
        .iter()
        .map(|note| {
            let gpu = note.trim_start_matches("GPU ").split(':').next().expect("a number");
            format!("rank {gpu}: {note}")
        })
        .collect();
    assert_eq!(notes, expected);
}

/// Long enough to compare the rates of GPUs.
fn timed(world: &World, maps: [&str; 2], how: &str) -> Vec<Value> {
    let args = format!("--sizes 1M --depth 2 --seconds 20 --verify off {how}");
    results(start(world, maps, &args, torchrun))
}

/// With time to spare, what processes do over TCP they do over the plugin, each in a process of its own.
#[test]
fn ranks_over_the_plugin_use_own_nics_all_nics_and_other_rails() {
    let Some(_turn) = turn() else { return };
    if !long() {
        return skip("FERRYWIRE_LONG=1");
    }
    let world = World::new("2gbit");
    let plugin = plugin();
    let rows = results(start(&world, MAPS, &format!("--sizes 1M --channels 8 --iters 8 {plugin}"), torchrun));
    for row in &rows[..GPUS] {
        let channels = row["per_channel"].as_array().map(Vec::len);
        assert_eq!((&row["transport"], &row["verified"]), (&"plugin".into(), &true.into()), "{row}");
        assert_eq!(channels, Some(CHANNELS), "64 in all");
    }
    let args = format!("--sizes 1M --depth 2 --channels 4 --iters 20 --warmup 0 {plugin}");
    assert!(results(start(&world, ALL, &args, slurm)).iter().all(|row| row["verified"] == true));
    let before = Counters::of(&world);
    let rows = results(start(&world, ALL, &format!("{args} --verify off"), slurm));
    let kernel = Counters::payload_since(&world, &before);
    for row in &rows[..GPUS] {
        assert_eq!(nics(row), ["va1", "va2", "va3", "va4"], "{row}");
    }
    agree("8 processes, all NICs, plugin", &kernel, &rows[..GPUS]);
    mesh(&world, &plugin);
    progress_together(
        "8 processes, all NICs, plugin",
        &timed(&world, ALL, &format!("--channels 4 {plugin}")),
    );
    let how = format!("--pattern all-to-all --channels 1 {plugin}");
    progress_together("8 processes, mesh, plugin", &timed(&world, MAPS, &how));
    nothing_is_left(&world);
}

/// One of sixteen is killed in mid-run; all others say which, and nothing is left.
#[test]
fn a_killed_rank_is_named_on_both_hosts() {
    let Some(_turn) = shared_turn() else { return };
    let world = World::new("2gbit");
    let mut ranks =
        start(&world, MAPS, "--sizes 256K --channels 2 --seconds 60 --warmup 0 --verify off", torchrun);
    let moves = wait_until(RUN_TIMEOUT, || world.sent_bytes_of(Host::A) > 16 << 20);
    assert!(moves, "{}", ranks[0].errors());
    assert_eq!(ranks.remove(11).kill().status, None);
    for rank in ranks {
        let said = rank.end(RUN_TIMEOUT).failure();
        assert!(said.starts_with("error: rank 11 ("), "{said}");
    }
    nothing_is_left(&world);
}

/// Where the launcher says that all ranks are on one host, they meet on loopback, at the usual port, and need no
/// secret.
#[test]
fn ranks_of_one_host_meet_on_loopback() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let ranks = (0..2).map(|rank: usize| {
        let mut variables = torchrun(rank);
        let of_one_host =
            [("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "no.such.host.example")];
        variables.extend(of_one_host.map(|(name, value)| (name, value.to_owned())));
        variables.push(("FERRYWIRE_SECRET", String::new()));
        let args = "bench --memory host --json - --sizes 4K --iters 5 --timeout 60";
        Process::start_with(&world, Host::A, args, &variables)
    });
    let rows = results(ranks.collect());
    assert_eq!((rows.len(), nics(&rows[0])), (2, vec!["lo"]));
    nothing_is_left(&world);
}
