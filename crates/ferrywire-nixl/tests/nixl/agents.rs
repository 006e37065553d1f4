//! Runs NIXL's own library, from its wheel, with the backend: two agents in two network namespaces with two NICs each.

use crate::{driver, environment, inspection};
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A case that runs longer than this hangs.
const HANGS_AFTER: Duration = Duration::from_secs(240);
/// A link that is not up by then has failed.
const LINK_UP_WITHIN: Duration = Duration::from_secs(60);

/// Two hosts of this machine, joined by two links; removed when dropped.
struct Hosts([String; 2]);

impl Hosts {
    /// Returns `None`, and prints it, if namespaces cannot be made.
    fn new() -> Option<Hosts> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let hosts = Hosts([format!("fw-nixl-a-{id}"), format!("fw-nixl-b-{id}")]);
        let made = hosts.make();
        if made.is_none() {
            println!("SKIPPED: needs root and iproute2");
        }
        made.map(|()| hosts)
    }

    fn make(&self) -> Option<()> {
        let Hosts([first, second]) = self;
        self.0.iter().try_for_each(|name| ip(&format!("netns add {name}")))?;
        self.0.iter().try_for_each(|name| ip(&format!("-n {name} link set lo up")))?;
        for nic in 0..2 {
            ip(&format!("-n {first} link add fw{nic} type veth peer name fw{nic} netns {second}"))?;
            for (name, host) in self.0.iter().zip(1..) {
                ip(&format!("-n {name} addr add 10.21{nic}.7.{host}/24 dev fw{nic}"))?;
                ip(&format!("-n {name} link set fw{nic} up"))?;
            }
        }
        let all = || self.0.iter().flat_map(|name| (0..2).map(move |nic| (name, nic)));
        let since = Instant::now();
        while let Some((name, nic)) = all().find(|(name, nic)| !is_running(name, *nic)) {
            assert!(since.elapsed() < LINK_UP_WITHIN, "fw{nic} of {name} has no link");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(())
    }
}

/// Whether the kernel has noted the link of a NIC, which it does up to a second after both of its ends are up. An agent that
/// starts before leaves the NIC out.
fn is_running(host: &str, nic: u32) -> bool {
    let mut command = Command::new("ip");
    command.args(["-n", host, "-o", "link", "show", &format!("fw{nic}")]);
    command.output().is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(" state UP "))
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.0 {
            ip(&format!("netns del {name}"));
        }
    }
}

fn ip(arguments: &str) -> Option<()> {
    let mut command = Command::new("ip");
    command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().ok().filter(|status| status.success()).map(drop)
}

/// The Python of an environment with NIXL. Its wheel requires PyTorch, but the API runs without.
fn python() -> Option<PathBuf> {
    static PYTHON: OnceLock<Option<PathBuf>> = OnceLock::new();
    // The wheels and the declarations in this crate are for this architecture.
    if !cfg!(target_arch = "x86_64") {
        println!("SKIPPED: needs x86-64");
        return None;
    }
    PYTHON
        .get_or_init(|| {
            environment::python("nixl", &["--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"])
        })
        .clone()
}

/// A folder with the backend under the name `backend`.
fn plugins(backend: &str) -> PathBuf {
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = environment::folder(&format!("plugins-{backend}"));
    let built = std::env::current_exe().unwrap().parent().unwrap().join("libplugin_ferrywire.so");
    let link = folder.join(format!("libplugin_{backend}.so"));
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(built, link).unwrap();
    folder
}

fn case(backend: &str, case: &str) -> Option<String> {
    case_with(backend, case, &[])
}

fn case_with(backend: &str, case: &str, variables: &[(&str, &Path)]) -> Option<String> {
    let (python, hosts) = (python()?, Hosts::new()?);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nixl/python/two_hosts.py");
    let Hosts([near, far]) = &hosts;
    let mut command = Command::new("timeout");
    command.args(["-k", "5", &HANGS_AFTER.as_secs().to_string(), "ip", "netns", "exec", near]);
    command.arg(python).arg(script).args([backend, far, case]);
    command.env("NIXL_PLUGIN_DIR", plugins(backend)).env("PYTHONUNBUFFERED", "1");
    command.env("PYTHONDONTWRITEBYTECODE", "1").envs(variables.iter().copied());
    let began = Instant::now();
    let output = command.output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    assert!(output.status.success(), "{case}: {} after {:?}\n{said}", output.status, began.elapsed());
    assert!(said.contains(&format!("{case}: good\n")), "{said}");
    Some(said)
}

#[test]
fn the_library_needs_no_newer_system_than_is_promised() {
    inspection::needs_nothing_else(&plugins("FERRYWIRE").join("libplugin_FERRYWIRE.so"));
}

#[test]
fn bytes_and_notifications_arrive_over_all_nics() {
    let Some(said) = case("FERRYWIRE", "moves") else { return };
    // The transport is logged at the start and for each connection.
    assert!(
        said.contains("agent initiator moves") && said.contains("fw0 10.210.7.1, fw1 10.211.7.1"),
        "{said}"
    );
    let path =
        said.lines().find(|line| line.contains("connected to agent target by tcp")).unwrap_or_default();
    assert!(path.contains("fw0 (10.210.7.1 to 10.210.7.2)") && path.contains("fw1 (10.211.7.1 to"), "{said}");
}

#[test]
fn memory_of_gpus_moves_too() {
    let defines: &[&str] = if driver::has_kernels() { &[driver::WITH_KERNELS] } else { &[] };
    let stand_in = driver::stand_in(defines);
    let Some(said) = case_with("FERRYWIRE", "gpu", &[("LD_LIBRARY_PATH", &stand_in)]) else { return };
    assert!(said.contains("agent initiator moves host and GPU memory"), "{said}");
}

#[test]
fn a_target_that_is_killed_and_started_again_is_reached_again() {
    case("FERRYWIRE", "restarted");
}

#[test]
fn a_target_whose_network_comes_up_later_is_reached() {
    case("FERRYWIRE", "first_contact");
}

/// Regression: nothing listens at the target's loopback address on this host, and it was dialled until the timeout.
#[test]
fn a_target_that_refuses_at_all_of_its_nics_is_not_dialled_again() {
    let Some(said) = case("FERRYWIRE", "refused") else { return };
    assert!(said.contains("refused: wrong secret"), "{said}");
}

#[test]
fn a_nic_that_goes_down_costs_no_transfer() {
    case("FERRYWIRE", "nic_down");
}

#[test]
fn a_thousand_registrations_are_one_transfer_and_agents_leave_nothing() {
    case("FERRYWIRE", "registrations");
}

#[test]
fn memory_is_deregistered_while_a_peer_is_stopped() {
    case("FERRYWIRE", "stopped");
}

#[test]
fn a_peer_is_removed_and_added_again_in_mid_transfer() {
    case("FERRYWIRE", "again");
}

#[test]
fn the_backend_stands_in_for_ucx_and_says_so() {
    let Some(said) = case("UCX", "moves") else { return };
    assert!(said.contains("warning: agent initiator asked for backend UCX and gets ferrywire"), "{said}");
    let Some(said) = case("UCX", "foreign") else { return };
    assert!(
        said.contains(
            "connection information of agent real cannot be used: another backend made the metadata"
        ),
        "{said}"
    );
}
