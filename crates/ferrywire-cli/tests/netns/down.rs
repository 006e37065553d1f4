//! Runs that cannot start: a NIC that is down, a port in use; and the notes of an all-to-all run of few ranks about
//! its rails. Two GPUs a side, each with a NIC of its own.

use std::time::Duration;

use crate::process::{Ended, Process, SERVE, wait_until};
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, nothing_is_left, turn};

const MAPS: [&str; 2] = ["0=va1,1=va2", "0=vb1,1=vb2"];
const QUICK: &str = "--sizes 64K --iters 4 --warmup 0 --channels 2";
/// Where ranks meet: not where a serve listens.
const PORT: u16 = 7440;
/// Of the runs that fail; they have [`RUN_TIMEOUT`] in all.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The processes of two ranks on either host.
fn ranks(world: &World, args: &str) -> Vec<Process> {
    let one = |rank: usize| {
        let host = if rank < 2 { Host::A } else { Host::B };
        let who =
            format!("--rank {rank} --world-size 4 --local-rank {} --rendezvous 10.77.1.1:{PORT}", rank % 2);
        let args = format!(
            "bench {who} --memory sim --gpu-nics {} --timeout {} --json - {args}",
            MAPS[rank / 2],
            TIMEOUT.as_secs()
        );
        Process::start(world, host, &args)
    };
    (0..4).map(one).collect()
}

fn ends(ranks: Vec<Process>) -> Vec<Ended> {
    ranks.into_iter().map(|rank| rank.end(RUN_TIMEOUT)).collect()
}

fn failure(process: Process) -> String {
    process.end(RUN_TIMEOUT).failure()
}

#[test]
fn a_nic_that_is_down_at_the_start_is_named() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let serve_args = format!("--gpus 0-1 --memory sim --gpu-nics {}", MAPS[1]);
    let connect = |args: &str| {
        let args = format!("bench connect {SERVE} --memory sim --peer-memory sim --json - {QUICK} {args}");
        Process::start(&world, Host::A, &args)
    };
    // A link that is down at one end has no carrier at the other.
    let serve = Process::serve(&world, &serve_args);
    world.set_link(Host::A, 2, "down");
    assert!(wait_until(RUN_TIMEOUT, || !world.has_carrier(Host::B, 2)), "the kernel takes a while to tell");
    let said = failure(connect(&format!("--gpus 0-1 --gpu-nics {}", MAPS[0])));
    assert!(said.contains("--gpu-nics 1=va2: va2 is down"), "{said}");
    let said = failure(connect("--nics va1,va2"));
    assert!(said.contains("--nics va2: va2 is down"), "{said}");
    for (args, part) in
        [(serve_args.as_str(), "--gpu-nics 1=vb2: vb2 is down"), ("--nics vb2", "--nics vb2: vb2 is down")]
    {
        let args = format!("bench serve --listen 0.0.0.0:7500 {args}");
        let said = failure(Process::start(&world, Host::B, &args));
        assert!(said.contains(part), "{said}");
    }
    for ended in ends(ranks(&world, QUICK)) {
        let said = ended.failure();
        let near = said.contains("rank 1 (") && said.contains("--gpu-nics 1=va2: va2 is down");
        let far = said.contains("rank 3 (") && said.contains("--gpu-nics 1=vb2: vb2 is down");
        assert!(near || far, "{said}");
    }
    world.set_link(Host::A, 2, "up");
    let back = || world.has_carrier(Host::A, 2) && world.has_carrier(Host::B, 2);
    assert!(wait_until(RUN_TIMEOUT, back));
    connect(&format!("--gpus 0-1 --gpu-nics {}", MAPS[0])).end(RUN_TIMEOUT).verified();
    serve.signal("-INT");
    assert_eq!(serve.end(RUN_TIMEOUT).status, Some(130));
    nothing_is_left(&world);
}

/// The port of a serving rank is that of the group and its local rank.
#[test]
fn a_port_behind_the_meetings_that_is_taken_is_named_with_its_rank() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let taken = PORT + 1;
    let args = format!("bench serve --listen 10.77.2.2:{taken} --memory host");
    let taker = Process::start(&world, Host::B, &args);
    let listens = || world.listeners(Host::B).contains(&format!(":{taken}"));
    assert!(wait_until(RUN_TIMEOUT, listens), "{}", taker.errors());
    let ended = ends(ranks(&world, QUICK));
    for rank in &ended {
        let said = rank.failure();
        assert!(said.starts_with("error: rank 3 (") && said.contains("in use"), "{said}");
    }
    let advice = format!("the port, which is that of --rendezvous, {PORT}, + local rank 1");
    assert!(ended[3].errors.contains(&advice), "{}", ended[3].errors);
    taker.signal("-INT");
    assert_eq!(taker.end(RUN_TIMEOUT).status, Some(130));
    nothing_is_left(&world);
}

/// Whatever a rank has to say of its rails, rank 0 prints.
#[test]
fn a_mesh_of_ranks_says_which_rails_it_takes() {
    let Some(_turn) = turn() else { return };
    let world = World::new("2gbit");
    let ended = ends(ranks(&world, &format!("--pattern all-to-all {QUICK}")));
    ended[0].verified();
    for rank in &ended[1..] {
        assert_eq!((rank.status, rank.errors.as_str()), (Some(0), ""), "{rank:?}");
    }
    let mut notes: Vec<&str> =
        ended[0].errors.lines().filter_map(|line| line.strip_prefix("note: ")).collect();
    notes.sort_unstable();
    let expected = [
        "rank 0: GPU 0: va1 does not reach GPU 1 of the peer; uses va2, on that GPU's rail",
        "rank 1: GPU 1: va2 does not reach GPU 0 of the peer; uses va1, on that GPU's rail",
    ];
    assert_eq!(notes, expected);
    nothing_is_left(&world);
}
