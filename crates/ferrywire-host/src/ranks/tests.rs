//! Ranks from the variables that launchers set, and combinations that are refused.

use super::*;

const TORCHRUN: &str = "RANK=13 WORLD_SIZE=16 LOCAL_RANK=5 LOCAL_WORLD_SIZE=8 MASTER_ADDR=node0 MASTER_PORT=29500 \
                        TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True";
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                        OMPI_COMM_WORLD_LOCAL_SIZE=2";
const HYDRA: &str = "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_FD=9 PMI_HOSTNAME=gpu2";
const SLURM: &str = "SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1 SLURM_STEP_NODELIST=gpu[07-08] \
                     SLURM_JOB_NODELIST=gpu[01-08]";

/// The variables of a batch script, which is not a task of its job.
const BATCH: &str = "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_ID=7 \
                     SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_NODELIST=gpu[1-2]";

fn find_ranks(flags: RankFlags, variables: &str) -> Result<Option<Ranks>, RanksError> {
    let value = |name: &str| {
        let mut found = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
        found.rfind(|(of, _)| *of == name).map(|(_, value)| value.to_owned())
    };
    Ranks::of(&flags, value)
}

fn ranks(variables: &str) -> Ranks {
    find_ranks(RankFlags::default(), variables).expect("they fit").expect("there is a launcher")
}

fn refused(variables: &str) -> String {
    find_ranks(RankFlags::default(), variables).expect_err(variables).to_string()
}

fn numbers(ranks: &Ranks) -> (u32, u32, u32) {
    (ranks.rank, ranks.world_size, ranks.local_rank)
}

fn at(host: &str, port: Option<u16>) -> Option<Rendezvous> {
    Some(Rendezvous { host: host.to_owned(), port })
}

#[test]
fn without_flags_and_variables_there_are_no_ranks() {
    assert_eq!(find_ranks(RankFlags::default(), ""), Ok(None));
    // In a shell that salloc has started, or with empty variables.
    assert_eq!(find_ranks(RankFlags::default(), "SLURM_NTASKS=16 SLURM_JOB_NODELIST=gpu[1-2]"), Ok(None));
    assert_eq!(find_ranks(RankFlags::default(), "RANK= WORLD_SIZE="), Ok(None));
    assert_eq!(find_ranks(RankFlags::default(), "MASTER_ADDR=node0 MASTER_PORT=29500"), Ok(None));
}

#[test]
fn torchrun_is_read() {
    let ranks = ranks(TORCHRUN);
    assert_eq!((numbers(&ranks), ranks.local_world), ((13, 16, 5), Some(8)));
    assert_eq!(ranks.launcher, Launcher::Torchrun);
    // torchrun itself uses the port.
    assert_eq!(ranks.rendezvous, at("node0", None));
    assert!(!ranks.on_one_host());
}

#[test]
fn a_free_master_port_is_the_rendezvous() {
    let by_hand = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500";
    assert_eq!(ranks(by_hand).rendezvous, at("10.0.0.1", Some(29500)));
}

#[test]
fn open_mpi_is_read() {
    let found = ranks(OPEN_MPI);
    assert_eq!((numbers(&found), found.local_world, found.launcher), ((3, 4, 1), Some(2), Launcher::OpenMpi));
    assert_eq!(found.rendezvous, None);
    assert!(ranks(&OPEN_MPI.replace("LOCAL_SIZE=2", "LOCAL_SIZE=4")).on_one_host());
}

#[test]
fn hydra_is_read() {
    let found = ranks(HYDRA);
    assert_eq!((numbers(&found), found.local_world, found.launcher), ((3, 4, 1), Some(2), Launcher::Hydra));
    // PMI_HOSTNAME differs between ranks.
    assert_eq!(found.rendezvous, None);
    assert!(ranks(&HYDRA.replace("LOCALNRANKS=2", "LOCALNRANKS=4")).on_one_host());
    // mpiexec in a batch script, and mpiexec's daemon on the second host, started by srun.
    let found = ranks(&format!("{BATCH} {HYDRA}"));
    assert_eq!((found.launcher, found.rendezvous), (Launcher::Hydra, at("gpu1", None)));
    let daemon = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0 SLURM_STEP_NODELIST=gpu2";
    assert_eq!(ranks(&format!("{BATCH} {daemon} {HYDRA}")).rendezvous, at("gpu1", None));
}

#[test]
fn pmi_of_srun_is_not_hydra() {
    let pmi2 = "PMI_FD=7 PMI_JOBID=7.0 PMI_RANK=9 PMI_SIZE=16";
    let found = ranks(&format!("{SLURM} {pmi2}"));
    assert_eq!((numbers(&found), found.launcher), ((9, 16, 1), Launcher::Slurm));
    assert_eq!(found.rendezvous, at("gpu07", None));
}

#[test]
fn slurm_is_read_with_the_nodes_of_the_step() {
    let found = ranks(SLURM);
    assert_eq!((numbers(&found), found.local_world, found.launcher), ((9, 16, 1), None, Launcher::Slurm));
    assert_eq!(found.rendezvous, at("gpu07", None));
    let without_step = SLURM.replace("SLURM_STEP_NODELIST=gpu[07-08]", "");
    assert_eq!(ranks(&without_step).rendezvous, at("gpu01", None));
    assert!(!ranks(SLURM).on_one_host());
    let on_one_node = ranks(&SLURM.replace("gpu[07-08]", "gpu07"));
    assert!(on_one_node.on_one_host() && on_one_node.local_world == Some(16));
    let with_master = format!("{SLURM} MASTER_ADDR=gpu08 MASTER_PORT=1234");
    assert_eq!(ranks(&with_master).rendezvous, at("gpu08", Some(1234)));
}

#[test]
fn steps_of_slurm_that_run_at_once_meet_apart() {
    let port = |job: u32, step: u32| {
        let variables = format!("{SLURM} SLURM_JOB_ID={job} SLURM_STEP_ID={step}");
        ranks(&variables).rendezvous.and_then(|point| point.port).expect("a port")
    };
    let mut ports: Vec<u16> = (700..716).flat_map(|job| (0..30).map(move |step| port(job, step))).collect();
    assert!(
        ports.iter().all(|port| SLURM_PORTS.contains(port) && SLURM_PORTS.contains(&(port + STEP_PORTS - 1)))
    );
    ports.sort_unstable();
    // Serving ranks of a host listen on the ports that follow.
    assert!(ports.windows(2).all(|two| two[1] - two[0] >= STEP_PORTS), "{ports:?}");
    // A shell that salloc starts has a step with a large number.
    assert!(SLURM_PORTS.contains(&port(u32::MAX, 4_294_967_290)));
    // A flag or MASTER_ADDR is not changed.
    let with_master = format!("{SLURM} SLURM_JOB_ID=7 SLURM_STEP_ID=1 MASTER_ADDR=gpu08");
    assert_eq!(ranks(&with_master).rendezvous, at("gpu08", None));
    let flags = RankFlags { rendezvous: Some("gpu07".to_owned()), ..RankFlags::default() };
    let typed = find_ranks(flags, &format!("{SLURM} SLURM_JOB_ID=7 SLURM_STEP_ID=1")).expect("they fit");
    assert_eq!(typed.and_then(|found| found.rendezvous), at("gpu07", None));
}

#[test]
fn a_batch_script_is_no_rank() {
    assert_eq!(find_ranks(RankFlags::default(), BATCH), Ok(None));
    // A shell that salloc starts as a step is the step's only task.
    let interactive = format!("{BATCH} SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=4294967290");
    assert_eq!(numbers(&ranks(&interactive)), (0, 1, 0));
    // srun in that shell starts tasks that are ranks, fewer than the job may have.
    let step = format!("{BATCH} SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=2");
    assert_eq!(numbers(&ranks(&step)), (1, 2, 1));
}

#[test]
fn launchers_may_nest() {
    // srun with one task per host and torchrun in each task: torchrun's ranks need not follow Slurm's.
    let srun = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_JOB_NODELIST=gpu[1-2]";
    assert_eq!(ranks(&format!("{srun} {TORCHRUN}")).launcher, Launcher::Torchrun);
    // A nested launcher, with a script that sets the numbers itself.
    let by_hand = "RANK=13 WORLD_SIZE=16 LOCAL_RANK=5";
    assert_eq!(numbers(&ranks(&format!("{srun} {by_hand}"))), (13, 16, 5));
    // mpirun in a batch script.
    let found = ranks(&format!("{BATCH} {OPEN_MPI}"));
    assert_eq!((found.launcher, found.rendezvous), (Launcher::OpenMpi, at("gpu1", None)));
    // mpirun's daemon on the second host, which srun starts as a step of all hosts but the first, where rank 0 is.
    let found = ranks(&format!("{srun} SLURM_STEP_NODELIST=gpu2 {OPEN_MPI}"));
    assert_eq!((found.launcher, found.rendezvous), (Launcher::OpenMpi, at("gpu1", None)));
}

#[test]
fn launchers_that_agree_are_one() {
    let both = format!("{SLURM} RANK=9 WORLD_SIZE=16 LOCAL_RANK=1");
    assert_eq!(numbers(&ranks(&both)), (9, 16, 1));
}

#[test]
fn launchers_that_disagree_are_named() {
    let said = [
        (format!("{SLURM} RANK=8 WORLD_SIZE=16 LOCAL_RANK=1"), "RANK=8, but SLURM_PROCID=9"),
        (format!("{SLURM} RANK=9 WORLD_SIZE=32 LOCAL_RANK=1"), "WORLD_SIZE=32, but SLURM_STEP_NUM_TASKS=16"),
        (format!("{SLURM} RANK=9 WORLD_SIZE=16 LOCAL_RANK=2"), "LOCAL_RANK=2, but SLURM_LOCALID=1"),
        (format!("{SLURM} {OPEN_MPI}"), "OMPI_COMM_WORLD_RANK=3, but SLURM_PROCID=9"),
        (format!("{OPEN_MPI} RANK=0 WORLD_SIZE=2 LOCAL_RANK=0"), "RANK=0, but OMPI_COMM_WORLD_RANK=3"),
    ];
    for (variables, start) in said {
        let error = refused(&variables);
        let rest = ": two launchers disagree; unset the variables of one, or give --rank, --world-size and --local-rank";
        assert_eq!(error, format!("{start}{rest}"));
    }
}

#[test]
fn half_of_a_launchers_variables_are_not_enough() {
    let said = [
        ("RANK=0", "RANK=0 is set and WORLD_SIZE is not: set both, or neither, or give --world-size"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2 is set and RANK is not: set both, or neither, or give --rank"),
        (
            "RANK=0 WORLD_SIZE=2",
            "RANK=0 is set and LOCAL_RANK is not: set both, or neither, or give --local-rank",
        ),
        (
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2",
            "SLURM_PROCID=0 is set and SLURM_LOCALID is not: set both, or neither, or give --local-rank",
        ),
        (
            "PMI_RANK=0 PMI_SIZE=2",
            "PMI_RANK=0 is set and MPI_LOCALRANKID is not: set both, or neither, or give --local-rank",
        ),
        (
            "OMPI_COMM_WORLD_SIZE=2",
            "OMPI_COMM_WORLD_SIZE=2 is set and OMPI_COMM_WORLD_RANK is not: set both, or neither, or give --rank",
        ),
    ];
    for (variables, error) in said {
        assert_eq!(refused(variables), error);
    }
}

#[test]
fn numbers_that_cannot_be_are_named() {
    let said = [
        ("RANK=4 WORLD_SIZE=4 LOCAL_RANK=0", "RANK=4 must be below WORLD_SIZE=4: ranks are numbered from 0"),
        ("RANK=0 WORLD_SIZE=0 LOCAL_RANK=0", "RANK=0 must be below WORLD_SIZE=0: ranks are numbered from 0"),
        (
            "RANK=5 WORLD_SIZE=9 LOCAL_RANK=5 LOCAL_WORLD_SIZE=4",
            "LOCAL_RANK=5 must be below LOCAL_WORLD_SIZE=4: ranks are numbered from 0",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2",
            "LOCAL_RANK=2 must be below WORLD_SIZE=2: ranks are numbered from 0",
        ),
        ("RANK=-1 WORLD_SIZE=2 LOCAL_RANK=0", "RANK=-1 is not a valid number"),
        ("RANK=0 WORLD_SIZE=two LOCAL_RANK=0", "WORLD_SIZE=two is not a valid number"),
        (
            "RANK=0 WORLD_SIZE=100000 LOCAL_RANK=0",
            "WORLD_SIZE=100000 is too large: a run has at most 65536 ranks",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=0",
            "MASTER_PORT=0 is not a valid number",
        ),
        (
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_JOB_NODELIST=gpu[1-",
            "SLURM_JOB_NODELIST=gpu[1-: '[' without ']'",
        ),
    ];
    for (variables, error) in said {
        assert_eq!(refused(variables), error);
    }
}

#[test]
fn flags_go_before_launchers() {
    let flags = |rank, world_size, local_rank| RankFlags { rank, world_size, local_rank, rendezvous: None };
    let found = find_ranks(flags(Some(2), None, None), SLURM).expect("they fit").expect("a launcher");
    assert_eq!((numbers(&found), found.launcher), ((2, 16, 1), Launcher::Slurm));
    // With all numbers given by flags, nonsense in the environment does not matter.
    let nonsense = format!("{SLURM} RANK=x OMPI_COMM_WORLD_RANK=1");
    let found = find_ranks(flags(Some(1), Some(2), Some(1)), &nonsense).expect("they fit").expect("flags");
    assert_eq!((numbers(&found), found.launcher, found.rendezvous), ((1, 2, 1), Launcher::Flags, None));
    // A flag completes a half set, and decides between two launchers.
    let found =
        find_ranks(flags(None, None, Some(1)), "RANK=1 WORLD_SIZE=2").expect("they fit").expect("a launcher");
    assert_eq!(numbers(&found), (1, 2, 1));
    let two = format!("{SLURM} RANK=8 WORLD_SIZE=16 LOCAL_RANK=1");
    assert_eq!(
        find_ranks(flags(Some(8), None, None), &two).map(|found| found.map(|found| found.rank)),
        Ok(Some(8))
    );
}

#[test]
fn flags_do_without_launchers() {
    let flags = |rank, world_size| RankFlags { rank, world_size, ..RankFlags::default() };
    let found = find_ranks(flags(Some(1), Some(2)), "").expect("they fit").expect("flags");
    assert_eq!((numbers(&found), found.launcher), ((1, 2, 0), Launcher::Flags));
    let refused = |flags| find_ranks(flags, "").expect_err("no sense").to_string();
    assert_eq!(
        refused(flags(Some(1), None)),
        "--rank 1 is set and --world-size is not: set both, or neither"
    );
    assert_eq!(
        refused(flags(Some(2), Some(2))),
        "--rank 2 must be below --world-size 2: ranks are numbered from 0"
    );
}

#[test]
fn a_meeting_point_may_be_typed() {
    let typed = |text: &str| {
        let flags = RankFlags { rendezvous: Some(text.to_owned()), ..RankFlags::default() };
        find_ranks(flags, TORCHRUN).map(|found| found.and_then(|found| found.rendezvous))
    };
    assert_eq!(typed("node7:7000"), Ok(at("node7", Some(7000))));
    assert_eq!(typed("node7"), Ok(at("node7", None)));
    assert_eq!(typed("[fd00::1]:7000"), Ok(at("fd00::1", Some(7000))));
    assert_eq!(typed("fd00::1"), Ok(at("fd00::1", None)));
    let alone = RankFlags { rendezvous: Some("node7:7000".to_owned()), ..RankFlags::default() };
    let error = find_ranks(alone, "").expect_err("no rank").to_string();
    assert!(error.starts_with("--rendezvous node7:7000 needs the rank of this process"), "{error}");
    for bad in ["", ":7000", "node7:", "node7:x", "node7:0", "node7:70000", "two words"] {
        let error = typed(bad).expect_err(bad).to_string();
        assert_eq!(error, format!("--rendezvous {bad}: write it as HOST:PORT"));
    }
}
