//! The meaning of the flags for one rank of a run of several.
//!
//! Invariant: `options` has exactly the options that must be equal on all ranks; rank 0 compares them.
//! Read next: [`crate::bench::ranks`].

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ferrywire_host::ranks::{Launcher, RankFlags, Ranks, Rendezvous};
use ferrywire_host::topology::Map;
use ferrywire_memory::cuda::CudaGpu;

use super::connect::{ConnectPlan, plain, plan_connect, with_file};
use super::{PORT_DEFAULT, resolve, usage};
use crate::args::{ConnectFlags, Inject, RankArgs};
use crate::auto::{AUTO, Given, OrAuto};
use crate::bench::protocol::Run;
use crate::bench::ranks::WORLD_MAX;
use crate::exit::{Failure, Outcome};
use crate::file;
use crate::memory::Memory;
use crate::units::Gpus;

/// The variables with a launcher's id of the run, innermost launcher first.
const JOBS: [(Launcher, &str); 3] = [
    (Launcher::Torchrun, "TORCHELASTIC_RUN_ID"),
    (Launcher::OpenMpi, "PMIX_NAMESPACE"),
    (Launcher::Slurm, "SLURM_JOB_ID"),
];

/// The plan of one rank.
#[derive(Clone, Debug)]
pub struct RanksPlan {
    /// The parameters of the run and this rank's own options; rank 0's parameters count.
    pub bench: ConnectPlan,
    /// The rank and world size of this process.
    pub ranks: Ranks,
    /// Addresses of rank 0, first choice first.
    pub group: Vec<SocketAddr>,
    /// The address on which rank 0 listens for the group.
    pub listen: SocketAddr,
    /// Whether the whole run uses loopback.
    pub on_loopback: bool,
    /// This rank's memory location.
    pub own: Memory,
    /// Index of this rank's GPU, or of its endpoint for host memory.
    pub gpu: u32,
    /// Options that must be equal on all ranks, as they were given.
    pub options: BTreeMap<String, String>,
    /// The launcher's id of the run.
    pub job: Option<String>,
    /// Data to corrupt, in tests.
    pub inject: Option<Inject>,
}

/// The rank of this process; `None` if it is the only process.
pub fn of(options: &ConnectFlags, args: RankArgs) -> Outcome<Option<(Ranks, RankArgs)>> {
    let args = match &options.config {
        Some(path) => file::fill(args, path)?,
        None => args,
    };
    let flags = RankFlags {
        rank: args.rank.given_ref().copied(),
        world_size: args.world_size.given_ref().copied(),
        local_rank: args.local_rank.given_ref().copied(),
        rendezvous: args.rendezvous.given_ref().cloned(),
    };
    let found = Ranks::from_env(&flags).map_err(|error| Failure::Usage(error.to_string()))?;
    match found.filter(|ranks| ranks.world_size > 1) {
        Some(Ranks { world_size, .. }) if world_size % 2 == 1 => usage(format!(
            "--world-size must be even (got {world_size}): the first half of the ranks sends to the second half"
        )),
        Some(Ranks { world_size, .. }) if world_size > WORLD_MAX => {
            usage(format!("--world-size must be at most {WORLD_MAX} (got {world_size})"))
        }
        found => Ok(found.map(|ranks| (ranks, args))),
    }
}

/// Makes the plan of a rank.
pub fn plan(flags: ConnectFlags, ranks: Ranks, args: &RankArgs, verbose: bool) -> Outcome<RanksPlan> {
    let flags = with_file(flags)?;
    if flags.gpus.is_some() {
        return usage(
            "--gpus: each rank uses the GPU of its local rank; leave out --gpus, or start one process without a launcher",
        );
    }
    if flags.peers.is_some() {
        return usage("--peers: the ranks of the first half are the peers of the incast; leave out --peers");
    }
    let group = Group::of(&ranks, args.rendezvous.given_ref().is_some())?;
    let (own, gpu) = own_memory(&flags, &ranks)?;
    let (connecting, serving) = texts(&flags);
    let map = map(&flags, gpu)?;
    let options = shared_options(&flags)?;
    let connects = ranks.rank < ranks.world_size / 2;
    let theirs = if connects { serving } else { connecting };
    let flags = ConnectFlags {
        memory: Some(OrAuto::Value(own.to_string())),
        peer_memory: theirs.map(OrAuto::Value),
        gpus: Some(Gpus(vec![gpu])),
        gpu_nics: None,
        // Only sending ranks corrupt data.
        ..flags
    };
    let mut bench = plan_connect(flags, Vec::new(), !group.on_loopback, verbose)?;
    bench.engine.map = map;
    bench.run = Run { multi_gpu: false, ..bench.run };
    bench.member = ranks.rank as usize;
    bench.addresses.clone_from(&group.addresses);
    if bench.engine.secret.is_none() && !group.on_loopback {
        return usage(format!(
            "the ranks meet at {}, and beyond loopback a secret is needed: set FERRYWIRE_SECRET or --secret-file to the same \
             secret for every rank (mpirun -x FERRYWIRE_SECRET passes it on)",
            group.shown
        ));
    }
    Ok(RanksPlan {
        bench,
        job: job(ranks.launcher, |name| std::env::var(name).ok()),
        ranks,
        group: group.addresses,
        listen: group.listen,
        on_loopback: group.on_loopback,
        own,
        gpu,
        options,
        inject: args.inject,
    })
}

/// The addresses of rank 0.
struct Group {
    addresses: Vec<SocketAddr>,
    listen: SocketAddr,
    on_loopback: bool,
    shown: String,
}

impl Group {
    /// Chooses the rendezvous: that of the flag; else loopback if all ranks are on one host; else the launcher's.
    fn of(ranks: &Ranks, typed: bool) -> Outcome<Group> {
        let reported = ranks.rendezvous.as_ref();
        let port = reported.and_then(|reported| reported.port).unwrap_or(PORT_DEFAULT);
        let on_one_host = ranks.on_one_host() && !typed;
        let host = match reported {
            _ if on_one_host => Ipv4Addr::LOCALHOST.to_string(),
            Some(Rendezvous { host, .. }) => host.clone(),
            // These launchers set no variable with rank 0's host.
            None if let Some(launcher) = silent(ranks.launcher) => {
                return usage(format!(
                    "{launcher} sets no variable with the address of rank 0: add --rendezvous ADDR:{PORT_DEFAULT} after 'ferrywire \
                     bench', where ADDR is an address of the host of rank 0, the first of the hostfile ('hostname -I' there)"
                ));
            }
            None => {
                return usage(
                    "--rendezvous is missing: give every rank --rendezvous ADDR:PORT with an address of the host of rank 0, or \
                     127.0.0.1 where all ranks are on one host",
                );
            }
        };
        let shown = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let literal: Option<IpAddr> = host.parse().ok();
        let on_loopback = host == "localhost" || literal.is_some_and(|ip| ip.is_loopback());
        let addresses = match literal {
            Some(ip) => vec![SocketAddr::new(ip, port)],
            None => resolve("--rendezvous", &shown)?,
        };
        let listen = match addresses[0].ip() {
            ip if on_loopback => ip,
            // A name may resolve to loopback on its own host, and data may use other NICs than the address's.
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Ok(Group { addresses, listen: SocketAddr::new(listen, port), on_loopback, shown })
    }
}

/// The name of a launcher that does not give ranks the addresses of others.
fn silent(launcher: Launcher) -> Option<&'static str> {
    match launcher {
        Launcher::OpenMpi => Some("Open MPI"),
        Launcher::Hydra => Some("mpiexec of MPICH or Intel MPI"),
        _ => None,
    }
}

/// The memory locations of the connecting and the serving half, as they were typed. One flag is for both halves unless
/// the other is given too.
fn texts(flags: &ConnectFlags) -> (Option<String>, Option<String>) {
    let [memory, peer_memory] = [&flags.memory, &flags.peer_memory].map(|text| text.given_ref().cloned());
    (memory.clone(), peer_memory.or(memory))
}

/// The memory location of this rank, with the index of its GPU: the local rank, unless an index was typed.
fn own_memory(flags: &ConnectFlags, ranks: &Ranks) -> Outcome<(Memory, u32)> {
    let (connecting, serving) = texts(flags);
    let (flag, text) = if ranks.rank < ranks.world_size / 2 {
        ("--memory", connecting)
    } else {
        (if flags.peer_memory.given_ref().is_some() { "--peer-memory" } else { "--memory" }, serving)
    };
    let memory = match (Memory::typed(flag, text.as_deref())?, &flags.plugin) {
        (Some(memory), _) => memory,
        (None, Some(_)) => Memory::Host,
        (None, None) => Memory::detect(None),
    };
    let numbered = text.is_some_and(|text| text.contains(':'));
    match memory.gpu() {
        Some(location) if numbered => Ok((memory, number(location))),
        _ => {
            let gpu = match memory {
                Memory::Cuda(_) => cuda_of(ranks.local_rank),
                _ => ranks.local_rank,
            };
            let own = memory.on(gpu);
            // A number beyond the limit is refused as a typed one is.
            Memory::typed(flag, Some(&own.to_string())).map(|_| (own, gpu))
        }
    }
}

fn number(location: ferrywire::MemoryLocation) -> u32 {
    match location {
        ferrywire::MemoryLocation::Cuda(gpu) | ferrywire::MemoryLocation::SimGpu(gpu) => gpu,
        _ => 0,
    }
}

/// A launcher may show each rank only its own GPU, which then has index 0.
fn cuda_of(local_rank: u32) -> u32 {
    match CudaGpu::count() {
        Ok(1) => 0,
        _ => local_rank,
    }
}

/// NICs by GPU, which must include this rank's GPU.
fn map(flags: &ConnectFlags, gpu: u32) -> Outcome<Map> {
    let Some(text) = flags.gpu_nics.given_ref() else { return Ok(Map::default()) };
    let map: Map = text.parse().map_err(|why| Failure::Usage(format!("--gpu-nics {text}: {why}")))?;
    if flags.nics.given_ref().is_some() {
        return usage("--gpu-nics and --nics both name NICs: leave out --nics");
    }
    if map.nics.contains_key(&gpu) {
        Ok(map)
    } else {
        usage(format!("--gpu-nics {text}: no NIC for GPU {gpu} of this rank; add {gpu}=NIC"))
    }
}

/// All options but those that may differ between hosts or ranks.
fn shared_options(flags: &ConnectFlags) -> Outcome<BTreeMap<String, String>> {
    let own = ConnectFlags {
        nics: None,
        gpu_nics: None,
        allow_cross_numa: None,
        root: None,
        threads: None,
        plugin: None,
        json: None,
        csv: None,
        secret_file: None,
        config: None,
        ..flags.clone()
    };
    let table = toml::Table::try_from(own).map_err(|error| Failure::failed(error.to_string()))?;
    let options = table.into_iter().map(|(name, value)| (name, plain(&value)));
    // A missing option and `auto` mean the same.
    let mut options: BTreeMap<String, String> = options.filter(|(_, value)| value != AUTO).collect();
    if flags.plugin.is_some() {
        options.insert("plugin".to_owned(), "given".to_owned());
    }
    Ok(options)
}

fn job(launcher: Launcher, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let (_, name) = JOBS.iter().find(|(of, _)| *of == launcher)?;
    let job = variable(name)?;
    match variable("SLURM_STEP_ID").filter(|_| launcher == Launcher::Slurm) {
        // Each step of a Slurm job is a run of its own.
        Some(step) => Some(format!("{job}.{step}")),
        None => Some(job),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Transport;
    use crate::bench::host;

    /// Whether devmem is tried by a rank with this rendezvous, and whether it is required.
    fn devmem(location: &str, flags: ConnectFlags) -> Option<bool> {
        let secret = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(secret.path(), host::random_hex(8).expect("random")).expect("written");
        let ranks = Ranks {
            rank: 0,
            world_size: 2,
            local_rank: 0,
            local_world: None,
            rendezvous: Some(Rendezvous { host: location.to_owned(), port: None }),
            launcher: Launcher::Flags,
        };
        let flags = ConnectFlags {
            memory: flags.memory.or_else(|| Some(OrAuto::Value("host".to_owned()))),
            secret_file: Some(secret.path().to_owned()),
            ..flags
        };
        let plan = plan(flags, ranks, &RankArgs::default(), false).expect("a plan");
        plan.bench.engine.devmem.map(|devmem| devmem.required)
    }

    #[test]
    fn steps_of_a_job_are_different_runs() {
        let of = |step: &'static str| {
            job(Launcher::Slurm, move |name| match name {
                "SLURM_JOB_ID" => Some("7".to_owned()),
                "SLURM_STEP_ID" => Some(step.to_owned()),
                _ => None,
            })
        };
        assert_eq!([of("0"), of("1")], [Some("7.0".to_owned()), Some("7.1".to_owned())]);
    }

    #[test]
    fn ranks_try_devmem_as_two_ends_do() {
        let typed = |transport| ConnectFlags { transport: Some(transport), ..Default::default() };
        let on_gpus = || ConnectFlags { memory: Some(OrAuto::Value("sim".to_owned())), ..Default::default() };
        assert_eq!(devmem("192.0.2.1", on_gpus()), Some(false));
        assert_eq!(devmem("192.0.2.1", ConnectFlags::default()), None);
        assert_eq!(devmem("192.0.2.1", typed(Transport::Devmem)), Some(true));
        assert_eq!(devmem("192.0.2.1", typed(Transport::Tcp)), None);
        assert_eq!(devmem("127.0.0.1", on_gpus()), None);
    }
}
