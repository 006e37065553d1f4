//! What kept a result from being better, as far as the measurements tell.

use std::collections::BTreeMap;

use super::host::Host;
use super::protocol::SideReport;

/// Share of all cores from which the CPU is the limit.
const CPU_BUSY: f64 = 0.9;
/// Share of a NIC's line rate from which it is the limit.
const NIC_BUSY: f64 = 0.9;
/// Share of the time from which one thread is the limit.
const THREAD_BUSY: f64 = 0.95;
/// Shorter than this, nothing can be told.
const WALL_S_MIN: f64 = 0.05;

/// The processes of one host.
struct Load<'a> {
    host: &'a Host,
    cpu_s: f64,
    host_busy: f64,
    threads: Vec<&'a (String, f64)>,
}

/// One short line on what was the limit of the timed part; with the CPU seconds of all processes on either host.
pub fn limited_by(
    (here, there): (&Host, &Host),
    (near_cpu_s, far_cpu_s): (f64, f64),
    members: &[SideReport],
    serve: &[SideReport],
) -> String {
    let wall_s = members.iter().map(|side| side.wall_s).fold(0.0, f64::max);
    if wall_s < WALL_S_MIN {
        return "too short to tell (--iters, --seconds)".to_owned();
    }
    let (near, far) = (load(here, near_cpu_s, members), load(there, far_cpu_s, serve));
    let loads = if here.is_same_machine(there) { vec![merged(near, far)] } else { vec![near, far] };
    let cpu = loads.iter().find_map(|load| cpu(load, wall_s));
    let nic = || [members, serve].into_iter().find_map(|reports| nic(reports, wall_s));
    let thread = || loads.iter().find_map(thread);
    cpu.or_else(nic).or_else(thread).unwrap_or_else(|| "network or peer".to_owned())
}

fn load<'a>(host: &'a Host, cpu_s: f64, reports: &'a [SideReport]) -> Load<'a> {
    let host_busy = reports.iter().filter_map(|side| side.host_busy).fold(0.0, f64::max);
    Load {
        host,
        cpu_s,
        host_busy,
        threads: reports.iter().filter_map(|side| side.busiest_thread.as_ref()).collect(),
    }
}

fn merged<'a>(near: Load<'a>, far: Load<'a>) -> Load<'a> {
    let threads = near.threads.into_iter().chain(far.threads).collect();
    Load {
        host: near.host,
        cpu_s: near.cpu_s + far.cpu_s,
        host_busy: near.host_busy.max(far.host_busy),
        threads,
    }
}

fn cpu(load: &Load, wall_s: f64) -> Option<String> {
    let (busy, cores) = (load.cpu_s / wall_s, load.host.cores);
    let name = &load.host.hostname;
    if busy >= CPU_BUSY * cores as f64 {
        return Some(format!("CPU: {busy:.1} of {cores} cores busy on {name}"));
    }
    (load.host_busy >= CPU_BUSY)
        .then(|| format!("CPU: all cores of {name} busy, {busy:.1} of them with this run"))
}

fn thread(load: &Load) -> Option<String> {
    let (name, share) = load.threads.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let (percent, host) = (share * 100.0, &load.host.hostname);
    (*share >= THREAD_BUSY).then(|| format!("one thread: {name} on {host} ran {percent:.0} % of the time"))
}

fn nic(reports: &[SideReport], wall_s: f64) -> Option<String> {
    let mut by_nic: BTreeMap<&str, (u64, u64, f64)> = BTreeMap::new();
    for channel in reports.iter().flat_map(|side| &side.channels) {
        if let Some(rate) = channel.line_bytes_per_s {
            let sum = by_nic.entry(&channel.nic).or_insert((0, 0, rate));
            (sum.0, sum.1) = (sum.0 + channel.tx_bytes, sum.1 + channel.rx_bytes);
        }
    }
    let share = |(tx, rx, rate): (u64, u64, f64)| tx.max(rx) as f64 / wall_s / rate;
    let (nic, sum) = by_nic.into_iter().max_by(|a, b| share(a.1).total_cmp(&share(b.1)))?;
    let (percent, gbit_per_s) = (share(sum) * 100.0, sum.2 * 8.0 / 1e9);
    (share(sum) >= NIC_BUSY).then(|| format!("NIC {nic}: {percent:.0} % of its {gbit_per_s:.0} Gbit/s"))
}

#[cfg(test)]
mod tests {
    use super::super::protocol::ChannelBytes;
    use super::*;

    fn limited_by(here: &Host, there: &Host, members: &[SideReport], serve: &[SideReport]) -> String {
        let near_cpu_s = members.iter().map(|side| side.cpu_s).sum();
        super::limited_by((here, there), (near_cpu_s, serve[0].cpu_s), members, serve)
    }

    fn host(boot_id: &str) -> Host {
        Host { hostname: format!("h{boot_id}"), cores: 2, boot_id: boot_id.into(), ..Host::default() }
    }

    fn side(cpu_s: f64, thread: f64) -> SideReport {
        SideReport { wall_s: 1.0, cpu_s, busiest_thread: Some(("w".into(), thread)), ..SideReport::default() }
    }

    #[test]
    fn ends_on_one_machine_share_its_cores() {
        let (near, far) = (side(0.9, 0.5), side(1.0, 0.5));
        let one = limited_by(&host("1"), &host("1"), std::slice::from_ref(&near), std::slice::from_ref(&far));
        assert_eq!(one, "CPU: 1.9 of 2 cores busy on h1");
        assert_eq!(limited_by(&host("1"), &host("2"), &[near], &[far]), "network or peer");
    }

    #[test]
    fn cores_busy_with_something_else_are_told() {
        let near = SideReport { host_busy: Some(0.97), ..side(0.9, 0.5) };
        let limit = limited_by(&host("1"), &host("2"), &[near], &[side(0.0, 0.0)]);
        assert_eq!(limit, "CPU: all cores of h1 busy, 0.9 of them with this run");
    }

    #[test]
    fn all_processes_of_a_host_count() {
        let members = [side(1.0, 0.5), side(1.0, 0.5)];
        let limit = |near_cpu_s, far_cpu_s| {
            let hosts = (&host("1"), &host("2"));
            super::limited_by(hosts, (near_cpu_s, far_cpu_s), &members, &[side(0.1, 0.1)])
        };
        assert_eq!(limit(1.0, 1.0), "network or peer");
        assert_eq!(limit(2.0, 1.0), "CPU: 2.0 of 2 cores busy on h1");
        assert_eq!(limit(1.0, 2.0), "CPU: 2.0 of 2 cores busy on h2");
    }

    #[test]
    fn one_busy_thread_or_nic_is_named() {
        let thread = limited_by(&host("1"), &host("2"), &[side(1.0, 0.99)], &[side(0.0, 0.0)]);
        assert_eq!(thread, "one thread: w on h1 ran 99 % of the time");
        let channel = ChannelBytes {
            nic: "eth1".into(),
            tx_bytes: 24,
            line_bytes_per_s: Some(25.0),
            ..Default::default()
        };
        let wired = SideReport { channels: vec![channel], ..side(0.1, 0.1) };
        assert!(
            limited_by(&host("1"), &host("2"), &[wired], &[side(0.0, 0.0)]).starts_with("NIC eth1: 96 %")
        );
    }
}
