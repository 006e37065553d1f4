//! Runs of several processes: by flags, by the variables of launchers, and by launchers that are here.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::Value;

use crate::common::{TIMEOUT_DEFAULT, first_error, json, results, run_within, text};
use crate::driver;
use crate::hosted::{ONE_HOST, with_plugin};
use crate::launched::{Launched, all_well, error_line, flags, port, untouched};
use crate::refused::{heard, stranger_at, without_end};

const QUICK: &str = "--iters 6 --warmup 1 --json -";
/// The second size goes on for longer than any test.
const LONG: &str = "--memory host --sizes 8,16M --depth 2 --iters 20000 --warmup 1 --verify off -v --json -";

fn ranks_of(row: &Value) -> Option<(u64, u64)> {
    let ranks = row["extra"]["ranks"].as_array()?;
    Some((ranks[0].as_u64()?, ranks[1].as_u64()?))
}

/// What each rank said failed; all have exit status 1.
fn failures(outputs: &[Output]) -> Vec<String> {
    let failure = |(rank, output): (usize, &Output)| {
        assert_eq!(output.status.code(), Some(1), "rank {rank}: {}", text(&output.stderr));
        error_line(&text(&output.stderr))
    };
    outputs.iter().enumerate().map(failure).collect()
}

#[test]
fn the_first_half_moves_data_to_the_second() {
    for (world, memory) in [(2, "host"), (4, "sim")] {
        let args = format!("--memory {memory} --sizes 8,70001 {QUICK}");
        let outputs = Launched::by_flags(world, &args).end();
        all_well(&outputs);
        let found = results(&outputs[0]);
        let half = world / 2;
        assert_eq!(found.len(), 2 * (half + 1), "a row for each pair, and one for all");
        for of_size in found.chunks(half + 1) {
            for (rank, row) in of_size[..half].iter().enumerate() {
                assert_eq!(ranks_of(row), Some((rank as u64, (rank + half) as u64)));
                let gpus = [format!("{memory}:{rank}"), format!("{memory}:{}", rank + half)];
                assert_eq!([&row["gpu"], &row["peer_gpu"]], [&gpus[0], &gpus[1]]);
                assert_eq!((&row["verified"], &row["iterations"]), (&true.into(), &6.into()));
                assert!(row["cpu_s_per_gb"]["target"].as_f64() > Some(0.0), "{row}");
            }
            let all = &of_size[half];
            assert_eq!((&all["gpu"], &all["iterations"]), (&"all".into(), &(6 * half).into()));
        }
        let config = &json(&outputs[0])["config"];
        assert_eq!(config["ranks"].as_array().map(Vec::len), Some(world));
        assert_eq!(config["ranks"][1]["local_rank"], 1);
    }
}

#[test]
fn every_pattern_between_ranks() {
    for (pattern, rows, totals) in
        [("bidir", 6, 3), ("all-to-all", 4, 1), ("incast", 2, 1), ("latency", 2, 1)]
    {
        let args = format!("--memory sim --pattern {pattern} --sizes 70001 {QUICK}");
        let outputs = Launched::by_flags(4, &args).end();
        all_well(&outputs);
        let found = results(&outputs[0]);
        assert_eq!(found.len(), rows + totals, "{pattern}");
        assert!(found.iter().all(|row| row["verified"] == true && row["pattern"] == pattern));
        let sum = |rows: &[Value]| rows.iter().filter_map(|row| row["iterations"].as_u64()).sum::<u64>();
        assert_eq!(sum(&found[..rows]), sum(&found[rows..]), "{pattern}");
        let last = if pattern == "incast" { (1, 2) } else { (1, 3) };
        assert_eq!(ranks_of(&found[rows - 1]), Some(last), "{pattern}");
    }
    let outputs =
        Launched::by_flags(4, "--memory host --op read --pattern all-to-all --sizes 5000 --iters 3").end();
    all_well(&outputs);
    let said = text(&outputs[0].stdout);
    for part in ["one process per rank", "from, to", "1 (host:1)", "3 (host:3)", "GB/s at 5000"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn the_variables_of_a_launcher_give_the_ranks() {
    let port = port();
    let [torchrun, open_mpi, hydra, slurm] = [
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
        [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
        ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NPROCS"],
    ];
    for (names, world) in [(torchrun, 2), (open_mpi, 4), (hydra, 4), (slurm, 4)] {
        let args = format!("--memory sim --sizes 3000 {QUICK}");
        let outputs = Launched::start(world, &args, |rank, command| {
            let numbers = [rank, world, rank, world].map(|number| number.to_string());
            command.envs(names.into_iter().zip(numbers));
            match names[0] {
                // As a script sets it that starts its processes itself.
                "RANK" => command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()),
                _ => command.env("FERRYWIRE_RENDEZVOUS", format!("127.0.0.1:{port}")),
            };
        })
        .end();
        all_well(&outputs);
        assert_eq!(results(&outputs[0]).len(), world / 2 + 1, "{}", names[0]);
    }
}

/// By a launcher itself, where it is here.
fn launched_by(program: &str, args: &str) -> Option<Output> {
    if Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        println!("SKIPPED: needs {program}");
        return None;
    }
    let port = port();
    // A process with the rank's environment and another program.
    let mut command = Command::new(program);
    let own = untouched("");
    for (name, value) in own.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.args(args.split_whitespace()).arg(env!("CARGO_BIN_EXE_ferrywire"));
    command.args(format!("bench --memory sim --sizes 3000 {QUICK} --rendezvous 127.0.0.1:{port}").split(' '));
    Some(command.stdin(Stdio::null()).output().expect("it runs"))
}

#[test]
fn mpirun_starts_a_run() {
    let args = "--allow-run-as-root --oversubscribe -np 4";
    let Some(output) = launched_by("mpirun", args) else { return };
    assert_eq!(results(&output).len(), 3);
}

#[test]
fn mpiexec_of_hydra_starts_a_run() {
    let Some(output) = launched_by("mpiexec.hydra", "-np 4") else { return };
    assert_eq!(results(&output).len(), 3);
}

#[test]
fn torchrun_starts_a_run() {
    let Some(output) = launched_by("torchrun", "--nproc-per-node 4 --no-python") else { return };
    assert_eq!(results(&output).len(), 3);
}

#[test]
fn ranks_that_cannot_be_are_bad_usage() {
    let at = "--rendezvous 127.0.0.1:9";
    let bad = [
        ("--rank 0 --world-size 3", "--world-size must be even (got 3)"),
        ("--rank 0 --world-size 2", "--rendezvous is missing"),
        ("--rank 2 --world-size 2", "--rank 2 must be below --world-size 2"),
        ("", "give --rank and --world-size too"),
        ("--rank 1", "--rank 1 is set and --world-size is not"),
        ("--rank 0 --world-size 2 --rendezvous node:x", "write it as HOST:PORT"),
        ("--rank 0 --world-size 2 --rendezvous 192.0.2.1:7420", "FERRYWIRE_SECRET"),
        ("--rank 0 --world-size 2 --gpus 0-1", "--gpus"),
        ("--rank 0 --world-size 2 --pattern incast --peers 3", "--peers"),
        ("--rank 0 --world-size 2 --gpu-nics 1=lo", "no NIC for GPU 0"),
        ("--rank 1 --world-size 2 --local-rank 1 --memory sim:99", "numbered 0 to"),
        ("--rank 0 --world-size 5000", "at most"),
    ];
    for (args, part) in bad {
        let place = if args.contains("--rendezvous") || part.contains("is missing") { "" } else { at };
        let output = untouched(&format!("bench {args} {place}")).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{args}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(part), "{args}: {}", text(&output.stderr));
    }
    let mut two_launchers = untouched("bench");
    two_launchers.envs([("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")]);
    two_launchers.envs([
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ]);
    let output = two_launchers.output().expect("it runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(first_error(&output).contains("two launchers disagree"), "{}", first_error(&output));
    // Over several hosts; on one they meet on loopback.
    let open_mpi = [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ];
    let hydra = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
    for (names, launcher) in [(open_mpi, "Open MPI"), (hydra, "MPICH")] {
        let mut without = untouched("bench --memory host");
        let output = without.envs(names.into_iter().zip(["0", "4", "0", "2"])).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2));
        let said = first_error(&output);
        assert!(said.contains("add --rendezvous ADDR:7420 after 'ferrywire bench'"), "{said}");
        assert!(said.contains(launcher), "{said}");
    }
    // One rank is no run of several.
    results(
        &untouched(&format!(
            "bench --rank 0 --world-size 1 --sizes 4K --memory host --peer-memory host {QUICK}"
        ))
        .output()
        .expect("it runs"),
    );
}

#[test]
fn a_rank_that_is_killed_ends_the_run_of_all_by_name() {
    for killed in [3, 1, 0] {
        let mut launched = Launched::by_flags(4, LONG);
        let rest = launched.first_size();
        launched.rank(killed).kill().expect("killed");
        let outputs = launched.end();
        let rest = rest.read();
        for (rank, output) in outputs.iter().enumerate().filter(|(rank, _)| *rank != killed) {
            assert_eq!(output.status.code(), Some(1), "rank {rank} when {killed} was killed");
            let said = if rank == 0 { rest.clone() } else { text(&output.stderr) };
            let line = error_line(&said);
            assert!(line.starts_with(&format!("error: rank {killed} (")), "rank {rank}: {line}");
        }
        if killed > 0 {
            let json = json(&outputs[0]);
            assert_eq!(json["results"].as_array().map(Vec::len), Some(3), "what was finished is there");
            let error = json["error"].as_str().unwrap_or_default();
            assert!(error.starts_with(&format!("rank {killed} (")), "{error}");
        }
    }
}

#[test]
fn ctrl_c_on_one_rank_ends_all() {
    for interrupted in [0, 3] {
        let mut launched = Launched::by_flags(4, LONG);
        let rest = launched.first_size();
        let id = launched.rank(interrupted).id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill runs").success());
        let outputs = launched.end();
        let rest = rest.read();
        for (rank, output) in outputs.iter().enumerate() {
            let said = if rank == 0 { rest.clone() } else { text(&output.stderr) };
            if rank == interrupted {
                assert_eq!(output.status.code(), Some(130), "{said}");
                continue;
            }
            assert_eq!(output.status.code(), Some(1), "{said}");
            let line = error_line(&said);
            assert!(line.starts_with(&format!("error: rank {interrupted} (")), "{line}");
            assert!(line.contains("interrupted"), "{line}");
        }
        let json = json(&outputs[0]);
        assert_eq!(json["results"].as_array().map(Vec::len), Some(3));
        assert!(json["error"].as_str().is_some_and(|error| error.contains("interrupted")), "{json}");
    }
}

#[test]
fn a_rank_with_wrong_data_ends_the_run_of_all_by_name() {
    let port = port();
    let outputs =
        Launched::start(4, &format!("--memory sim --op read --sizes 0,64K {QUICK}"), |rank, command| {
            command.args(flags(rank, 4, port));
            if rank == 3 {
                command.arg("--inject=wrong-byte");
            }
        })
        .end();
    // Either end of the pair may be the first to say so.
    let said = failures(&outputs);
    for line in &said {
        assert!(line.starts_with("error: rank 1 (") || line.starts_with("error: rank 3 ("), "{said:?}");
        assert!(line.contains("data mismatch"), "{said:?}");
    }
    // An empty message has no byte that could be wrong.
    assert_eq!(json(&outputs[0])["results"].as_array().map(Vec::len), Some(3));
}

/// The thread of one pair panics while those of other pairs and other ranks wait for it.
#[test]
fn a_rank_whose_thread_panics_ends_the_run_of_all_by_name() {
    for pattern in ["unidir", "incast", "all-to-all"] {
        let port = port();
        let args = format!("--memory host --pattern {pattern} --sizes 64K {QUICK}");
        let outputs = Launched::start(4, &args, |rank, command| {
            command.args(flags(rank, 4, port));
            if rank == 2 {
                command.arg("--inject=panic");
            }
        })
        .end();
        for (rank, output) in outputs.iter().enumerate() {
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{pattern}, rank {rank}: {said}");
            let named = said.lines().any(|line| {
                line.starts_with("error: rank 2 (") && line.contains("a thread of the bench panicked")
            });
            assert!(named, "{pattern}, rank {rank}: {said}");
        }
    }
}

/// The port on which a process listens.
fn listens_at(process: u32) -> u16 {
    let sockets = || {
        let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        let names = files.filter_map(|file| Some(fs::read_link(file.path()).ok()?.to_str()?.to_owned()));
        names.filter_map(|name| Some(name.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
    };
    let port = || {
        let table = fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
        let sockets: Vec<String> = sockets().collect();
        table.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let listens = fields.get(3) == Some(&"0A") && sockets.iter().any(|socket| socket == fields[9]);
            let port = fields.get(1).filter(|_| listens)?.rsplit(':').next()?;
            u16::from_str_radix(port, 16).ok()
        })
    };
    let since = Instant::now();
    loop {
        if let Some(port) = port() {
            return port;
        }
        assert!(since.elapsed() < TIMEOUT_DEFAULT, "it does not listen");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Ranks took messages of up to 64 MiB of any process that has the secret.
#[test]
fn a_message_without_end_is_refused_by_ranks() {
    let port = port();
    let gate = std::env::temp_dir().join(format!("ferrywire-ranks-{}-{port}", std::process::id()));
    let args = format!("--memory host --sizes 4K {QUICK}");
    let mut launched = Launched::start(4, &args, |rank, command| {
        command.args(flags(rank, 4, port));
        if rank == 1 {
            // Until the gate is open, the ranks wait for this one.
            let waits = r#"until [ -e "$0" ]; do sleep 0.05; done; exec "$@""#;
            let mut later = Command::new("sh");
            later.args(["-c", waits]).arg(&gate).arg(command.get_program()).args(command.get_args());
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => later.env(name, value),
                    None => later.env_remove(name),
                };
            }
            *command = later;
        }
    });
    let serving = listens_at(launched.rank(3).id());
    let at = |port| stranger_at(([127, 0, 0, 1], port).into());
    let strangers = [at(port), at(serving)];
    strangers.iter().for_each(|(_, peer)| without_end(peer, 64 << 10));
    fs::write(&gate, "").expect("the gate opens");
    for (_, peer) in &strangers {
        let answer = heard(peer);
        assert!(answer.contains("refused") && answer.contains("a message of more than 64 KiB"), "{answer}");
    }
    all_well(&launched.end());
    fs::remove_file(gate).expect("it was there");
}

/// One pair verifies for longer than --timeout after the other has: who waits for that is not given up.
#[test]
fn pairs_that_verify_for_longer_than_others_fail_nothing() {
    let port = port();
    let args = "--memory host --sizes 4K --depth 1 --iters 16 --warmup 1 --timeout 12 --json -";
    let outputs = Launched::start(4, args, |rank, command| {
        command.args(flags(rank, 4, port));
        if rank == 3 {
            command.arg("--inject=slow");
        }
    })
    .end();
    all_well(&outputs);
    let found = results(&outputs[0]);
    let verified = found.iter().map(|row| row["extra"]["verified_iterations"].as_u64());
    assert_eq!(verified.collect::<Vec<_>>(), [Some(16), Some(16), Some(32)]);
}

#[test]
fn a_rank_that_does_not_come_is_named_by_all() {
    let port = port();
    let mut launched =
        Launched::start(4, "--memory host --sizes 4K --iters 3 --timeout 10", |rank, command| {
            command.args(flags(rank, 4, port));
            if rank == 2 {
                // Something else is started in its place.
                command.arg("--help");
            }
        });
    assert!(launched.rank(2).wait().expect("it ends").success());
    let mut outputs = launched.end_within(Duration::from_secs(10));
    outputs.remove(2);
    for line in failures(&outputs) {
        assert!(line.starts_with("error: rank 2: not connected within 10 s"), "{line}");
        assert!(line.contains("3 of 4 ranks are connected"), "{line}");
    }
}

#[test]
fn options_that_differ_are_named_with_the_rank() {
    let port = port();
    let outputs = Launched::start(4, "--memory host --iters 3", |rank, command| {
        command.args(flags(rank, 4, port)).arg(if rank == 1 { "--sizes=8K" } else { "--sizes=4K" });
    })
    .end();
    for line in failures(&outputs) {
        assert!(line.starts_with("error: rank 1 ("), "{line}");
        assert!(
            line.contains("--sizes is 8192, but rank 0 has 4096") || line.contains("--sizes is"),
            "{line}"
        );
    }
    // Options that concern one host may differ.
    let port = self::port();
    let outputs = Launched::start(2, "--memory host --iters 3 --sizes 4K", |rank, command| {
        command.args(flags(rank, 2, port)).arg(format!("--threads={}", rank + 1));
    })
    .end();
    all_well(&outputs);
}

#[test]
fn a_rank_with_another_secret_is_refused_with_the_cause() {
    let port = port();
    let outputs = Launched::start(2, "--memory host --sizes 4K --iters 3 --timeout 10", |rank, command| {
        command.args(flags(rank, 2, port));
        command.env("FERRYWIRE_SECRET", format!("the secret of rank {rank}"));
    })
    .end_within(Duration::from_secs(10));
    let said = failures(&outputs);
    assert!(said[0].contains("rank 1: not connected within 10 s"), "{}", said[0]);
    assert!(said[0].ends_with("1 of 2 ranks are connected; 1 connection had another secret"), "{}", said[0]);
    assert!(said[1].starts_with("error: rank 1 (") && said[1].contains("secret"), "{}", said[1]);
    let port = self::port();
    let outputs = Launched::start(2, "--memory host --sizes 4K --iters 3", |rank, command| {
        command.args(flags(rank, 2, port)).env("FERRYWIRE_SECRET", "the same secret");
    })
    .end();
    all_well(&outputs);
}

/// Regression: a rank ended when rank 0 could take no further peer for a moment.
#[test]
fn a_rank_that_rank_0_cannot_take_at_the_moment_tries_again() {
    let full = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = full.local_addr().expect("it has one").port();
    let (refused, attempts) = mpsc::channel();
    thread::spawn(move || {
        for mut socket in full.incoming().map_while(Result::ok) {
            // A refusal in clear: its mark, the code for a limit, and the length of an empty text.
            let _ = socket.read(&mut [0; 4096]).and_then(|_| socket.write_all(&[0xff, 0xff, 5, 0, 0]));
            let _ = refused.send(socket);
        }
    });
    let mut rank = untouched("bench --memory host --sizes 4K --iters 3 --timeout 2");
    let output = run_within(Duration::from_secs(2), rank.args(flags(1, 2, port)));
    let said = text(&output.stderr);
    assert!(said.contains("rank 0 still refuses after 2 s") && !said.contains("likely:"), "{said}");
    assert!(attempts.try_iter().count() > 1, "{said}");
}

#[test]
fn a_meeting_point_that_is_taken_is_said() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("it has one").port();
    let outputs = Launched::start(2, "--memory host --sizes 4K --iters 3 --timeout 5", |rank, command| {
        command.args(flags(rank, 2, port));
    })
    .end_within(Duration::from_secs(5));
    let said = failures(&outputs);
    assert!(said[0].contains("cannot wait for the other ranks at 127.0.0.1:"), "{}", said[0]);
    assert!(text(&outputs[0].stderr).contains("another port with --rendezvous"), "{}", said[0]);
    assert!(said[1].starts_with("error: rank 1 ("), "{}", said[1]);
}

/// The ranks of another launch get one error each, and the first launch goes on.
#[test]
fn a_second_launch_at_one_meeting_point_leaves_the_first_alone() {
    // On a slow machine the first may be over before the second has begun.
    for seconds in [2, 30] {
        let port = port();
        let args = format!("--memory sim --sizes 8,64K --channels 1 --seconds {seconds} -v --json -");
        let job = |name: &'static str| {
            move |rank: usize, command: &mut Command| {
                let local = [("LOCAL_RANK", rank.to_string()), ("LOCAL_WORLD_SIZE", "2".to_owned())];
                command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").envs(local);
                command.env("TORCHELASTIC_RUN_ID", name);
                command.env("FERRYWIRE_RENDEZVOUS", format!("127.0.0.1:{port}"));
            }
        };
        let mut first = Launched::start(2, &args, job("one"));
        first.first_size();
        let others = [("other", "another launch has started"), ("one", "two runs use one --rendezvous")];
        let said = others.map(|(name, _)| Launched::start(2, &args, job(name)).end());
        let is_over = first.rank(0).try_wait().expect("it can be waited for").is_some();
        let first = first.end_within(Duration::from_secs(2 * seconds) + TIMEOUT_DEFAULT);
        if is_over {
            continue;
        }
        for ((_, why), outputs) in others.iter().zip(&said) {
            let lines = failures(outputs);
            assert!(lines[0].contains("cannot wait for the other ranks at 127.0.0.1:"), "{}", lines[0]);
            // Rank 0 reports the failure of the first rank.
            assert!(lines[1].starts_with("error: rank 0: ") && lines[1].contains(why), "{}", lines[1]);
            assert!(lines[1].contains("this is rank 0 of a run of 2 on "), "{}", lines[1]);
        }
        let rows = results(&first[0]);
        assert!(rows.len() == 4 && rows.iter().all(|row| row["verified"] == true), "{rows:?}");
        assert_eq!((text(&first[1].stderr), first[1].status.code()), (String::new(), Some(0)));
        return;
    }
    panic!("no launch came during another");
}

#[test]
fn a_gpu_that_is_not_there_is_named_with_its_rank() {
    let (port, stand_in) = (port(), driver::stand_in(&[]));
    let outputs = Launched::start(4, "--memory cuda --sizes 4K --iters 3", |rank, command| {
        // The last is the third of its host, which has two GPUs.
        let local_rank = [0, 1, 0, 2][rank];
        command
            .args([format!("--rank={rank}"), format!("--local-rank={local_rank}")])
            .args(["--world-size=4", &format!("--rendezvous=127.0.0.1:{port}")]);
        command.env("LD_LIBRARY_PATH", &stand_in);
    })
    .end();
    for line in failures(&outputs) {
        assert!(line.starts_with("error: rank 3 ("), "{line}");
        assert!(line.contains("memory cuda:2: there is no CUDA GPU 2: this process sees 2"), "{line}");
    }
}

/// By default each rank has the GPU of its local rank.
#[test]
fn ranks_have_cuda_gpus_by_their_local_rank() {
    if !driver::has_kernels() {
        println!("SKIPPED: needs a C++ compiler");
        return;
    }
    let (port, stand_in) = (port(), driver::stand_in(&[driver::WITH_KERNELS]));
    let outputs = Launched::start(2, &format!("--sizes 1,70001 {QUICK}"), |rank, command| {
        command.args(flags(rank, 2, port)).env("LD_LIBRARY_PATH", &stand_in);
    })
    .end();
    for (rank, output) in outputs.iter().enumerate() {
        let said = text(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {said}");
        // The stand-in driver reports resources that were not released.
        let left = said.lines().filter(|line| line.starts_with("stand-in: left"));
        assert!(
            left.clone().count() == 1 && left.clone().all(|line| line.contains("left 0 contexts, 0 streams")),
            "{said}"
        );
    }
    for row in results(&outputs[0]).iter().filter(|row| row["gpu"] != "all") {
        assert_eq!([&row["gpu"], &row["peer_gpu"]], ["cuda:0", "cuda:1"]);
        assert_eq!(row["verified"], true);
    }
}

/// Each rank's plugin runs in a process of its own, as that of any end.
#[test]
fn ranks_over_a_plugin() {
    let port = port();
    let args = with_plugin(&format!(
        "--allow-same-host-gpu --memory sim --channels 2 --pattern all-to-all --sizes 1,200001 {QUICK}"
    ));
    let outputs = Launched::start(4, &args, |rank, command| {
        command.args(flags(rank, 4, port)).env("FERRYWIRE_TCPX_SIM", ONE_HOST);
    })
    .end();
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", text(&output.stderr));
    }
    let found = results(&outputs[0]);
    assert_eq!(found.len(), 2 * (4 + 1));
    assert!(found.iter().all(|row| row["verified"] == true && row["transport"] == "plugin"));
}
