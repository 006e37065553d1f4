//! Several GPUs in one process on either host, as in `multi_gpu.rs`, with payload over the simulated plugin.

use serde_json::Value;

use crate::counters::{agree, sent_by_nic};
use crate::multi_gpu::{CHANNELS, GPUS, MAPS, measured_by, nic_of, numbers, progress_together, stop, timed};
use crate::process::{Process, SERVE, wait_until};
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, long, shared_turn, turn};

/// Every GPU over all NICs, on either host: the original's own plan.
pub const ALL: [&str; 2] = ["0-7=va1,va2,va3,va4", "0-7=vb1,vb2,vb3,vb4"];

pub fn plugin() -> String {
    let library = std::env::current_exe().expect("a path").with_file_name("libferrywire_tcpx_sim.so");
    format!("--allow-same-host-gpu --plugin {}", library.display())
}

fn serve(world: &World, map: &str) -> Process {
    Process::serve(world, &format!("--gpus 0-7 --memory sim --gpu-nics {map} {}", plugin()))
}

fn measured(world: &World, map: &str, args: &str) -> (Vec<u64>, Vec<Value>) {
    measured_by(world, map, &format!("{} {args}", plugin()))
}

/// 64 channels, each on the NIC of its GPU; the kernel counted what we say, and a little more. A mesh too.
#[test]
fn eight_gpus_use_their_own_nics_over_a_plugin() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let serve = serve(&world, MAPS[1]);
    // Nothing but the timed part moves data.
    let args = format!("--sizes 1M --depth 2 --channels {CHANNELS} --iters 12 --warmup 0 --verify off");
    let (kernel, results) = measured(&world, MAPS[0], &args);
    let pairs = &results[..GPUS];
    for (gpu, row) in pairs.iter().enumerate() {
        assert_eq!((&row["transport"], numbers(&row["extra"]["pair"])), (&"plugin".into(), Some((gpu, gpu))));
        let channels = row["per_channel"].as_array().expect("channels");
        assert_eq!((channels.len(), row["iterations"].as_u64()), (CHANNELS, Some(12)));
        assert!(channels.iter().all(|channel| channel["nic"] == nic_of(gpu)), "{row}");
    }
    agree("one process, own NICs, plugin", &kernel, pairs);
    let args = "--pattern all-to-all --sizes 64K --depth 2 --channels 1 --iters 4 --warmup 0 --verify sample";
    let (_, results) = measured(&world, MAPS[0], args);
    assert_eq!(results.len(), GPUS * GPUS + 1);
    for row in &results[..GPUS * GPUS] {
        let (_, there) = numbers(&row["extra"]["pair"]).expect("two GPUs");
        let (nic, verified) = (&row["per_nic"][0]["nic"], &row["verified"]);
        assert_eq!((nic, verified), (&nic_of(there).into(), &true.into()), "{row}");
    }
    if long() {
        let plugin = plugin();
        let rows = timed(&world, MAPS[0], &format!("--channels 8 {plugin}"));
        progress_together("one process, own NICs, plugin", &rows);
        let rows = timed(&world, MAPS[0], &format!("--pattern all-to-all --channels 1 {plugin}"));
        progress_together("one process, mesh, plugin", &rows);
    }
    stop(&world, serve);
}

#[test]
fn eight_gpus_may_use_all_nics_over_a_plugin() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let serve = serve(&world, ALL[1]);
    let args = "--sizes 2M --depth 2 --channels 4 --iters 8 --warmup 0";
    let (kernel, results) = measured(&world, ALL[0], &format!("{args} --verify off"));
    agree("one process, all NICs, plugin", &kernel, &results[..GPUS]);
    let (_, results) = measured(&world, ALL[0], args);
    for row in &results[..GPUS] {
        assert_eq!(row["verified"], true);
        let nics = sent_by_nic(std::slice::from_ref(row)).into_keys().collect::<Vec<_>>();
        assert_eq!(nics, ["va1", "va2", "va3", "va4"], "{row}");
    }
    if long() {
        let rows = timed(&world, ALL[0], &format!("--channels 4 {}", plugin()));
        progress_together("one process, all NICs, plugin", &rows);
    }
    stop(&world, serve);
}

/// A plugin's connections are bound to their NIC: the run ends, on both sides by name.
#[test]
fn a_nic_that_goes_down_ends_a_run_over_a_plugin_by_name() {
    let Some(_turn) = shared_turn() else { return };
    let world = World::new("500mbit");
    let serve = serve(&world, MAPS[1]);
    let args = "--sizes 1M --depth 4 --channels 2 --seconds 600 --warmup 0 --timeout 20 --json -";
    let fixed =
        format!("bench connect {SERVE} --gpus 0-7 --memory sim --peer-memory sim --gpu-nics {}", MAPS[0]);
    let run = Process::start(&world, Host::A, &format!("{fixed} {} {args}", plugin()));
    let before = world.sent_bytes(Host::A, 2);
    let moves = wait_until(RUN_TIMEOUT, || world.sent_bytes(Host::A, 2) > before + (8 << 20));
    assert!(moves, "{}", run.errors());
    world.set_link(Host::A, 2, "down");
    let said = run.end(RUN_TIMEOUT).failure();
    assert!(said.contains("GPU 2 to GPU 2") || said.contains("GPU 3 to GPU 3"), "{said}");
    assert!(said.contains("10.77.2.2") || said.contains("va2"), "{said}");
    let there = serve.await_error(RUN_TIMEOUT);
    assert!(there.contains("10.77."), "{there}");
    world.set_link(Host::A, 2, "up");
    stop(&world, serve);
}
