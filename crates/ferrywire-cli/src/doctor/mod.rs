//! `ferrywire doctor`: finds obstacles to speed, or to working at all.
//!
//! Each of [`kernel`], [`limits`], [`nic`], [`gpu`], [`environment`] and [`peer`] reads plain facts and has a pure
//! function that makes [`finding`]s of them, which [`report`] shows.
//! Invariant: no setting is changed, and every wait is bounded.
//! Read next: [`finding`], then any of the checks.

pub mod driver;
mod environment;
mod files;
mod finding;
mod gpu;
mod kernel;
mod limits;
mod nic;
mod peer;
mod report;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire_devmem::sys::ethtool::Ethtool;
use ferrywire_host::topology::{PlanOptions, Source, Topology};

use crate::exit::{self, Failure, Outcome};
use crate::nics;
use crate::plan::{self, DoctorPlan};
use crate::{plugin, sys, tool};
use driver::Driver;
use finding::Finding;
use nic::Settings;
use peer::PeerFacts;

/// The plugin that needs a manager process on its host.
const TCPX: &str = "GPUDirectTCPX";
/// Variable with the folder of the manager's sockets.
const MANAGER_FOLDER: &str = "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX";
/// Beginning of the names of some of the manager's sockets.
const MANAGER_SOCKETS: &str = "get_gpu_fd_";

/// How often a wait checks for Ctrl-C.
const SLICE: Duration = Duration::from_millis(50);

/// Makes all checks and prints the findings.
pub fn run(plan: &DoctorPlan) -> Outcome {
    // A wrong NIC name is a usage error; a NIC that is down is a finding.
    if let Err(Failure::Usage(why)) = nics::check(&plan.engine.nics) {
        return Err(Failure::Usage(why));
    }
    let driver = Driver::ask(plan.timeout);
    let mut topology = Topology::read(&Source::with_gpus(driver.gpus()));
    topology.probe_devmem();
    let mut findings = here(plan, &topology, driver);
    if sys::interrupted() {
        return Err(Failure::Interrupted);
    }
    if let Some(asked) = &plan.plugin {
        findings.extend(plugin_works(asked)?);
    }
    let peer = visit(plan, &topology, &mut findings)?;
    let text = if plan.json {
        format!("{}\n", report::json(&findings, peer.as_ref()))
    } else {
        report::text(&findings, plan.verbose)
    };
    exit::print(&text)?;
    match report::error(&findings) {
        Some(why) => Err(Failure::failed(why)),
        None => Ok(()),
    }
}

/// The findings about this host.
fn here(plan: &DoctorPlan, topology: &Topology, driver: Driver) -> Vec<Finding> {
    let settings = settings();
    let options = PlanOptions { nics: plan.engine.nics.clone(), ..PlanOptions::default() };
    let nvidia_smi = |args: &[&str]| tool::output("nvidia-smi", args, plan.timeout);
    let names: Vec<String> = topology.nics.iter().map(|nic| nic.name.clone()).collect();
    [
        kernel::judge(&kernel::Kernel::read(), nic::fastest_mbps(topology)),
        limits::judge(&limits::Limits::read(), nic::total_mbps(topology, &settings)),
        nic::judge(topology, &settings, &plan.engine.nics),
        gpu::judge(&gpu::Gpus::read(driver, topology, &nvidia_smi), topology, &options),
        environment::judge(&environment::Environment::read(), &names),
    ]
    .concat()
}

/// Reads the settings of a NIC, once per NIC.
fn settings() -> impl Fn(&str) -> Settings {
    let ethtool = RefCell::new(Ethtool::open().ok());
    let known = RefCell::new(BTreeMap::<String, Settings>::new());
    move |nic| {
        let read = || Settings::read(nic, ethtool.borrow_mut().as_mut());
        known.borrow_mut().entry(nic.to_owned()).or_insert_with(read).clone()
    }
}

/// Checks that a plugin loads and has devices, in a process of its own, and that its manager is there.
fn plugin_works(asked: &crate::plan::PluginPlan) -> Outcome<Vec<Finding>> {
    let subject = format!("plugin {}", asked.path.display());
    let found = |evidence: String| Finding::ok("plugin", &subject, evidence);
    Ok(match plugin::devices(asked) {
        Ok((0, name)) => {
            vec![
                found(format!("{name} has no devices"))
                    .fail("give the plugin NICs that it can use; -v shows its log"),
            ]
        }
        Ok((count, name)) => {
            let manager = name.starts_with(TCPX).then(|| manager(&subject));
            [found(format!("{name} has {count} devices"))].into_iter().chain(manager).collect()
        }
        Err(Failure::Interrupted) => return Err(Failure::Interrupted),
        Err(failure) => vec![
            found(failure.first_line())
                .fail(format!("ferrywire plugin {} -v shows the plugin's log", asked.path.display())),
        ],
    })
}

/// Looks for the sockets of the plugin's manager, which the plugin needs from the first connection on.
fn manager(subject: &str) -> Finding {
    let folder = manager_folder();
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let is_socket = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(MANAGER_SOCKETS);
    let count = entries.filter(is_socket).count();
    let folder = folder.display();
    let evidence =
        format!("{count} sockets of the receive data path manager ({MANAGER_SOCKETS}...) in {folder}");
    let found = Finding::ok("plugin-manager", subject, evidence);
    if count > 0 {
        return found;
    }
    found.warn(format!(
        "start the manager (RxDM, tcpgpudmarxd) on this host, or name the folder of its sockets in {MANAGER_FOLDER}"
    ))
}

/// The folder in which the plugin looks for the sockets of its manager.
fn manager_folder() -> PathBuf {
    let named = std::env::var_os(MANAGER_FOLDER).filter(|folder| !folder.is_empty());
    named.map(PathBuf::from).unwrap_or_else(|| {
        let usual = Path::new("/run/tcpx");
        if usual.exists() { usual.to_owned() } else { PathBuf::from("/tmp") }
    })
}

/// The addresses of a peer, or why there are none within this time.
fn look_up(name: &str, limit: Duration) -> Outcome<Result<Vec<SocketAddr>, String>> {
    let (done, result) = mpsc::channel();
    let of_thread = name.to_owned();
    thread::spawn(move || done.send(plan::look_up(&of_thread)));
    let until = Instant::now() + limit;
    loop {
        match result.recv_timeout(SLICE.min(until.saturating_duration_since(Instant::now()))) {
            Ok(found) => return Ok(found),
            Err(_) if sys::interrupted() => return Err(Failure::Interrupted),
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
            Err(_) => return Ok(Err(format!("the name was not found within {} s", limit.as_secs_f64()))),
        }
    }
}

fn visit(plan: &DoctorPlan, topology: &Topology, findings: &mut Vec<Finding>) -> Outcome<Option<PeerFacts>> {
    let Some(name) = plan.peer.as_ref().filter(|_| nics::check(&plan.engine.nics).is_ok()) else {
        return Ok(None);
    };
    let addresses = match look_up(name, plan.timeout)? {
        Ok(addresses) => addresses,
        Err(why) => {
            let found = Finding::ok("peer-name", format!("peer {name}"), why);
            findings.push(found.fail("correct the name, or write the peer's IP address"));
            return Ok(None);
        }
    };
    let facts = PeerFacts::visit(&plan.engine, topology, &addresses, plan.timeout)?;
    if sys::interrupted() {
        return Err(Failure::Interrupted);
    }
    findings.extend(peer::judge(&facts, topology, &plan.engine.nics));
    Ok(Some(facts))
}
