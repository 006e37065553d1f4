//! Finds the rank and world size of this process from the variables of a launcher (torchrun, Open MPI, Hydra, Slurm) or
//! from flags.
//!
//! Launchers nest: torchrun runs inside a Slurm step, mpirun inside a Slurm batch script. The innermost launcher counts
//! (torchrun, then Open MPI, then Hydra, then Slurm); the others must agree with it, or be able to have started it.
//! Invariant: a pure function of flags and variables. Contradicting or incomplete numbers are an error that names the
//! variables; nothing is guessed.
//! Read next: `hosts.rs`, for lists of nodes.

mod error;
mod hosts;
#[cfg(test)]
mod tests;

use std::fmt;

pub use error::RanksError;
pub use hosts::hosts;

use ferrywire_proto::limits::RANKS_MAX;

/// Variable that only torchrun sets.
const TORCHRUN_MARK: &str = "TORCHELASTIC_RUN_ID";
/// Variable that is `True` if torchrun itself listens on `MASTER_PORT`.
const TORCHRUN_HOLDS_PORT: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Variable with the nodes of the present Slurm step.
const SLURM_STEP_NODES: &str = "SLURM_STEP_NODELIST";
/// Variables with the nodes of the whole Slurm job: the present name and the old one.
const SLURM_JOB_NODES: [&str; 2] = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"];

/// Ports for the rendezvous of ranks that srun starts, if none is given: below the kernel's ephemeral ports.
const SLURM_PORTS: std::ops::Range<u16> = 10_240..30_720;
/// Ports that a step may use in a row, beginning with its rendezvous port.
const STEP_PORTS: u16 = 32;
/// Distance between the ports of consecutive job ids, in ranges of `STEP_PORTS` ports, so that the ports differ.
const JOB_STRIDE: u64 = 31;

/// The rank of this process, and the processes of its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// The rank of this process: 0 to `world_size - 1`.
    pub rank: u32,
    /// The number of processes of the run.
    pub world_size: u32,
    /// The rank of this process among the processes of its host.
    pub local_rank: u32,
    /// The number of processes of the run on this host, if the launcher sets it.
    pub local_world: Option<u32>,
    /// Where the ranks meet, if a flag or a variable says so.
    pub rendezvous: Option<Rendezvous>,
    /// The launcher or flags that gave the numbers.
    pub launcher: Launcher,
}

/// Where the ranks of a run meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// Name or address of the host where the ranks meet.
    pub host: String,
    /// The port of the rendezvous; `None` where no port is given, or the launcher itself uses it.
    pub port: Option<u16>,
}

/// The launcher that started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// No launcher: the ranks come from flags of the command.
    Flags,
    /// PyTorch's torchrun, or a script that sets its variables.
    Torchrun,
    /// mpirun of Open MPI.
    OpenMpi,
    /// mpiexec of MPICH or Intel MPI.
    Hydra,
    /// srun of Slurm.
    Slurm,
}

/// Flags of the command that give ranks; they override the launcher's variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankFlags {
    /// The value of `--rank`, counted from 0.
    pub rank: Option<u32>,
    /// The value of `--world-size`.
    pub world_size: Option<u32>,
    /// The value of `--local-rank`, counted from 0.
    pub local_rank: Option<u32>,
    /// The value of `--rendezvous`: HOST:PORT or HOST.
    pub rendezvous: Option<String>,
}

/// The names of a launcher's variables: rank, world size, local rank, local world size.
struct Variables {
    launcher: Launcher,
    names: [&'static str; 4],
}

/// The launchers, innermost first.
const LAUNCHERS: [Variables; 4] = [
    Variables {
        launcher: Launcher::Torchrun,
        names: ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    },
    Variables {
        launcher: Launcher::OpenMpi,
        names: [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
    },
    Variables {
        launcher: Launcher::Hydra,
        names: ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    },
    // Slurm lists the local world sizes per node. Its variables about tasks of the whole job are also set in a batch
    // script.
    Variables {
        launcher: Launcher::Slurm,
        names: ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""],
    },
];

const FLAGS: [&str; 4] = ["--rank", "--world-size", "--local-rank", ""];

/// A number and the variable or flag that it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told {
    name: &'static str,
    number: u32,
}

/// Whether this process is a task of a Slurm step: its rank and the number of tasks are both set only there.
fn in_slurm_step(variable: &impl Fn(&str) -> Option<String>) -> bool {
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"].iter().all(|name| variable(name).is_some())
}

/// The numbers that one launcher has set.
#[derive(Clone, Copy, Debug)]
struct Set {
    launcher: Launcher,
    names: [&'static str; 4],
    reported: [Option<Told>; 4],
}

impl Ranks {
    /// Ranks from the environment of this process; `None` if neither a launcher nor a flag gives any.
    ///
    /// # Errors
    /// The errors of [`Ranks::of`].
    pub fn from_env(flags: &RankFlags) -> Result<Option<Ranks>, RanksError> {
        Ranks::of(flags, |name| std::env::var(name).ok())
    }

    /// Ranks from flags and variables; `None` if neither gives any.
    ///
    /// # Errors
    /// Incomplete or contradicting numbers, a rank outside of the world, a list of nodes or a rendezvous that cannot be
    /// parsed.
    pub fn of(
        flags: &RankFlags,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Ranks>, RanksError> {
        let variable = |name: &str| {
            let value = variable(name).map(|value| value.trim().to_owned());
            value.filter(|value| !value.is_empty())
        };
        let typed = Set::of_flags(flags);
        // If all numbers are given by flags, leftover variables of a shell do not matter.
        if typed.reported[..3].iter().all(Option::is_some) {
            return typed.ranks(rendezvous(flags, Launcher::Flags, &variable)?).map(Some);
        }
        let mut launchers = Vec::new();
        for of in &LAUNCHERS {
            launchers.extend(Set::of_variables(of, &variable)?);
        }
        let Some(innermost) = launchers.first().copied() else {
            let point = rendezvous(flags, Launcher::Flags, &variable)?;
            return match (typed.reported.iter().any(Option::is_some), &flags.rendezvous) {
                (true, _) => typed.ranks(point).map(Some),
                (false, Some(text)) => Err(RanksError::NoRank { text: text.clone() }),
                (false, None) => Ok(None),
            };
        };
        let is_torchrun = innermost.launcher == Launcher::Torchrun && variable(TORCHRUN_MARK).is_some();
        if !is_torchrun && typed.reported.iter().all(Option::is_none) {
            launchers[1..].iter().try_for_each(|outer| innermost.check_inside(outer))?;
        }
        let reported = typed.over(&innermost);
        let ranks = reported.ranks(rendezvous(flags, reported.launcher, &variable)?)?;
        Ok(Some(ranks.with_local_world(&variable)?))
    }

    /// Slurm gives the number of tasks per node; on a single node all tasks are local.
    fn with_local_world(self, variable: &impl Fn(&str) -> Option<String>) -> Result<Ranks, RanksError> {
        let on_one_node = self.launcher == Launcher::Slurm
            && slurm_nodes(self.launcher, variable)?.is_some_and(|nodes| nodes.len() == 1);
        Ok(Ranks { local_world: self.local_world.or(on_one_node.then_some(self.world_size)), ..self })
    }

    /// Whether all processes are known to be on this host.
    pub fn on_one_host(&self) -> bool {
        self.local_world == Some(self.world_size)
    }
}

impl Set {
    fn of_flags(flags: &RankFlags) -> Set {
        let numbers = [flags.rank, flags.world_size, flags.local_rank, None];
        let reported = |at: usize| numbers[at].map(|number| Told { name: FLAGS[at], number });
        Set { launcher: Launcher::Flags, names: FLAGS, reported: std::array::from_fn(reported) }
    }

    /// The numbers of one launcher; `None` if the launcher has set none for this process.
    fn of_variables(
        of: &Variables,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Set>, RanksError> {
        // A shell inside a Slurm allocation is not a task of a step. Nor is a batch script, though it has a task
        // number.
        if of.launcher == Launcher::Slurm && !in_slurm_step(variable) {
            return Ok(None);
        }
        // srun with `--mpi=pmi2` sets Hydra's variables for rank and world size, but its own variable for the local
        // rank.
        let of_srun = || variable(of.names[2]).is_none() && in_slurm_step(variable);
        if of.launcher == Launcher::Hydra && of_srun() {
            return Ok(None);
        }
        let mut reported = [None; 4];
        for (at, name) in of.names.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            reported[at] = variable(name).map(|value| number(name, &value)).transpose()?;
        }
        let some = reported[..3].iter().any(Option::is_some);
        Ok(some.then_some(Set { launcher: of.launcher, names: of.names, reported }))
    }

    /// Takes each number from the flags where it is given there, else from the launcher.
    fn over(&self, launcher: &Set) -> Set {
        let reported = std::array::from_fn(|at| self.reported[at].or(launcher.reported[at]));
        Set { reported, ..*launcher }
    }

    /// Returns an error if an outer launcher contradicts this one and cannot have started it.
    fn check_inside(&self, outer: &Set) -> Result<(), RanksError> {
        let number = |set: &Set, at: usize| set.reported[at].map(|reported| reported.number);
        let differs = |at: &usize| {
            number(self, *at).zip(number(outer, *at)).is_some_and(|(inner, outer)| inner != outer)
        };
        let Some(at) = (0..3).find(differs) else { return Ok(()) };
        // An outer launcher may have one process per host that starts the others there, or one process in all.
        let first_on_host = number(outer, 2).unwrap_or(0) == 0;
        let fewer = number(outer, 1) < number(self, 1);
        if first_on_host && (fewer || number(outer, 0) == Some(0)) {
            return Ok(());
        }
        let shown = |set: &Set| set.reported[at].map_or_else(String::new, |reported| reported.to_string());
        Err(RanksError::Disagree { one: shown(self), other: shown(outer) })
    }

    fn ranks(&self, rendezvous: Option<Rendezvous>) -> Result<Ranks, RanksError> {
        let (rank, world_size) = (self.needed(0)?, self.needed(1)?);
        let local_rank = match self.launcher {
            // Without a launcher there is usually one process per host.
            Launcher::Flags => self.reported[2].unwrap_or(Told { name: FLAGS[2], number: 0 }),
            _ => self.needed(2)?,
        };
        below(rank, world_size)?;
        if world_size.number > RANKS_MAX {
            return Err(RanksError::TooMany { world_size: world_size.to_string() });
        }
        let local_world = self.reported[3];
        below(local_rank, local_world.unwrap_or(world_size))?;
        let (rank, world_size, local_rank) = (rank.number, world_size.number, local_rank.number);
        let local_world = local_world.map(|reported| reported.number);
        Ok(Ranks { rank, world_size, local_rank, local_world, rendezvous, launcher: self.launcher })
    }

    fn needed(&self, at: usize) -> Result<Told, RanksError> {
        let set = self.reported.iter().flatten().next().map_or_else(String::new, Told::to_string);
        self.reported[at].ok_or(RanksError::HalfSet { set, missing: self.names[at], flag: FLAGS[at] })
    }
}

fn number(name: &'static str, value: &str) -> Result<Told, RanksError> {
    let number = value.parse().map_err(|_| RanksError::NotANumber { variable: format!("{name}={value}") })?;
    Ok(Told { name, number })
}

fn below(rank: Told, world_size: Told) -> Result<(), RanksError> {
    if rank.number < world_size.number {
        Ok(())
    } else {
        Err(RanksError::Outside { rank: rank.to_string(), world_size: world_size.to_string() })
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joint = if self.name.starts_with("--") { ' ' } else { '=' };
        write!(f, "{}{joint}{}", self.name, self.number)
    }
}

/// Finds the rendezvous: the flag, else `MASTER_ADDR`, else the first node of Slurm's list.
///
/// # Errors
/// A flag or a list that cannot be parsed.
fn rendezvous(
    flags: &RankFlags,
    launcher: Launcher,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<Option<Rendezvous>, RanksError> {
    if let Some(text) = &flags.rendezvous {
        return parse_rendezvous(text).map(Some);
    }
    if launcher == Launcher::Flags {
        return Ok(None);
    }
    if let Some(host) = variable("MASTER_ADDR") {
        let port = variable("MASTER_PORT").map(|port| parse_port("MASTER_PORT", &port)).transpose()?;
        let taken = variable(TORCHRUN_HOLDS_PORT).is_some_and(|value| value.eq_ignore_ascii_case("true"));
        return Ok(Some(Rendezvous { host, port: port.filter(|_| !taken) }));
    }
    let host = slurm_nodes(launcher, variable)?.and_then(|nodes| nodes.into_iter().next());
    let port = if launcher == Launcher::Slurm { slurm_port(variable) } else { None };
    Ok(host.map(|host| Rendezvous { host, port }))
}

/// A rendezvous port for a step of a Slurm job, derived from both ids because several steps may run on the same nodes
/// at once.
fn slurm_port(variable: &impl Fn(&str) -> Option<String>) -> Option<u16> {
    let number = |name| variable(name)?.parse::<u64>().ok();
    let (job, step) = (number("SLURM_JOB_ID")?, number("SLURM_STEP_ID")?);
    let places = u64::from((SLURM_PORTS.end - SLURM_PORTS.start) / STEP_PORTS);
    let place = job.wrapping_mul(JOB_STRIDE).wrapping_add(step) % places;
    Some(SLURM_PORTS.start + place as u16 * STEP_PORTS)
}

/// The list of nodes of the Slurm step, or else of the job.
fn slurm_nodes(
    launcher: Launcher,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<Option<Vec<String>>, RanksError> {
    // mpirun and mpiexec start their daemons on the other nodes as a step, which does not include the first node's
    // ranks.
    let by_daemons = matches!(launcher, Launcher::OpenMpi | Launcher::Hydra);
    let step = (!by_daemons).then_some(SLURM_STEP_NODES);
    let mut names = step.into_iter().chain(SLURM_JOB_NODES);
    let Some((name, list)) = names.find_map(|name| Some((name, variable(name)?))) else {
        return Ok(None);
    };
    let bad = |why| RanksError::BadNodes { variable: format!("{name}={list}"), why };
    hosts(&list).map(Some).map_err(bad)
}

fn parse_port(name: &str, value: &str) -> Result<u16, RanksError> {
    let port = value.parse().ok().filter(|port| *port > 0);
    port.ok_or_else(|| RanksError::NotANumber { variable: format!("{name}={value}") })
}

fn parse_rendezvous(text: &str) -> Result<Rendezvous, RanksError> {
    let bad = || RanksError::BadRendezvous { text: text.to_owned() };
    // An IPv6 address contains colons, and has brackets if a port follows.
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if bare.parse::<std::net::Ipv6Addr>().is_ok() {
        return Ok(Rendezvous { host: bare.to_owned(), port: None });
    }
    let (host, port) = match text.rsplit_once(':') {
        None => (text, None),
        Some((host, port)) => (host, Some(port.parse().ok().filter(|port| *port > 0).ok_or_else(bad)?)),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_host = !host.is_empty() && !host.contains(char::is_whitespace);
    if is_host { Ok(Rendezvous { host: host.to_owned(), port }) } else { Err(bad()) }
}
