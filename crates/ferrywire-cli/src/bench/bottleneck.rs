//! The bottleneck of a result, as far as the measurements show it.
//!
//! Each process reports where it runs: cores are judged across the processes that share them, NICs and threads by host.
//! Read next: `result.rs`, which stores it.

use std::collections::BTreeMap;

use super::cpu_accounting::BothEnds;
use super::host::Workplace;
use super::protocol::SideReport;

/// Share of all cores' time from which the CPU is the bottleneck.
const CPU_BUSY: f64 = 0.9;
/// Share of a NIC's line rate from which the NIC is the bottleneck.
const NIC_BUSY: f64 = 0.9;
/// Share of the time from which one thread is the bottleneck.
const THREAD_BUSY: f64 = 0.95;
/// Shortest timed part, in seconds, that shows a bottleneck.
const WALL_S_MIN: f64 = 0.05;

/// The processes on one machine, of both ends.
#[derive(Default)]
struct Machine<'a> {
    name: &'a str,
    /// CPU seconds by the set of cores that processes may use, with the number of these cores.
    cpu_s: BTreeMap<(&'a str, usize), f64>,
    /// Share of the time in which the machine's cores ran anything.
    busy: f64,
    threads: Vec<&'a (String, f64)>,
}

/// One short line that names the bottleneck of the timed part, from the reports of both ends on all pairs.
pub fn bottleneck(ends: &BothEnds, members: &[SideReport], serve: &[SideReport]) -> String {
    let wall_s = members.iter().map(|side| side.wall_s).fold(0.0, f64::max);
    if wall_s < WALL_S_MIN {
        return "too short to tell (--iters, --seconds)".to_owned();
    }
    let machines = machines(ends, members, serve);
    let cpu = machines.iter().find_map(|machine| cpu(machine, wall_s));
    let nic = || [members, serve].into_iter().find_map(|reports| nic(reports, wall_s));
    let thread = || machines.iter().find_map(thread);
    cpu.or_else(nic).or_else(thread).unwrap_or_else(|| "network or peer".to_owned())
}

/// The machines, those of the connecting end first.
fn machines<'a>(ends: &BothEnds, members: &'a [SideReport], serve: &'a [SideReport]) -> Vec<Machine<'a>> {
    let mut found: Vec<(&Workplace, Machine)> = Vec::new();
    for (processes, reports) in [(&ends.near, members), (&ends.far, serve)] {
        let mut pairs: BTreeMap<&Workplace, Vec<usize>> = BTreeMap::new();
        for (at, side) in reports.iter().enumerate() {
            pairs.entry(&side.place).or_default().push(at);
        }
        for (place, pairs) in pairs {
            let known = found.iter().position(|(other, _)| place.is_same_machine(other));
            let at = known.unwrap_or_else(|| {
                found.push((place, Machine { name: &place.hostname, ..Machine::default() }));
                found.len() - 1
            });
            let machine = &mut found[at].1;
            for side in pairs.iter().map(|at| &reports[*at]) {
                machine.busy = side.host_busy.unwrap_or_default().max(machine.busy);
                machine.threads.extend(&side.busiest_thread);
            }
            *machine.cpu_s.entry((&place.allowed, place.cores)).or_default() +=
                processes.cpu_s(reports, pairs.into_iter());
        }
    }
    found.into_iter().map(|(_, machine)| machine).collect()
}

fn cpu(machine: &Machine, wall_s: f64) -> Option<String> {
    let name = machine.name;
    let full = |((_, cores), cpu_s): (&(&str, usize), &f64)| {
        let busy = cpu_s / wall_s;
        (busy >= CPU_BUSY * *cores as f64).then(|| format!("CPU: {busy:.1} of {cores} cores busy on {name}"))
    };
    let busy = machine.cpu_s.values().sum::<f64>() / wall_s;
    let all = || {
        (machine.busy >= CPU_BUSY)
            .then(|| format!("CPU: all cores of {name} busy, {busy:.1} of them with this run"))
    };
    machine.cpu_s.iter().find_map(full).or_else(all)
}

fn thread(machine: &Machine) -> Option<String> {
    let (name, share) = machine.threads.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let (percent, host) = (share * 100.0, machine.name);
    (*share >= THREAD_BUSY).then(|| format!("one thread: {name} on {host} ran {percent:.0} % of the time"))
}

/// The busiest NIC. NICs of different hosts may have the same name.
fn nic(reports: &[SideReport], wall_s: f64) -> Option<String> {
    let mut by_nic: BTreeMap<(&str, &str, &str), (u64, u64, f64)> = BTreeMap::new();
    for (place, channel) in reports.iter().flat_map(|side| side.channels.iter().map(|c| (&side.place, c))) {
        if let Some(rate) = channel.line_bytes_per_s {
            let nic = (place.boot_id.as_str(), place.hostname.as_str(), channel.nic.as_str());
            let sum = by_nic.entry(nic).or_insert((0, 0, rate));
            (sum.0, sum.1) = (sum.0 + channel.tx_bytes, sum.1 + channel.rx_bytes);
        }
    }
    let share = |(tx, rx, rate): (u64, u64, f64)| tx.max(rx) as f64 / wall_s / rate;
    let ((.., nic), sum) = by_nic.into_iter().max_by(|a, b| share(a.1).total_cmp(&share(b.1)))?;
    let (percent, gbit_per_s) = (share(sum) * 100.0, sum.2 * 8.0 / 1e9);
    (share(sum) >= NIC_BUSY).then(|| format!("NIC {nic}: {percent:.0} % of its {gbit_per_s:.0} Gbit/s"))
}

#[cfg(test)]
mod tests {
    use super::super::protocol::ChannelBytes;
    use super::super::result::RankPair;
    use super::*;

    /// The bottleneck of a run with one connecting process per pair and one serving process.
    fn bottleneck(members: &[SideReport], serve: &[SideReport]) -> String {
        super::bottleneck(&BothEnds::of(&[], false, members.len()), members, serve)
    }

    /// A report from a host with 2 cores.
    fn side(boot_id: &str, cpu_s: f64, thread: f64) -> SideReport {
        let hostname = format!("h{boot_id}");
        let place = Workplace { hostname, boot_id: boot_id.into(), allowed: "0-1".into(), cores: 2 };
        let busiest_thread = Some(("w".into(), thread));
        SideReport { wall_s: 1.0, cpu_s, busiest_thread, place, ..SideReport::default() }
    }

    fn wired(side: SideReport, nic: &str, tx_bytes: u64) -> SideReport {
        let nic = nic.to_owned();
        let channel = ChannelBytes { nic, tx_bytes, line_bytes_per_s: Some(25.0), ..Default::default() };
        SideReport { channels: vec![channel], ..side }
    }

    fn on_cores(side: SideReport, allowed: &str, cores: usize) -> SideReport {
        SideReport { place: Workplace { allowed: allowed.into(), cores, ..side.place.clone() }, ..side }
    }

    #[test]
    fn ends_on_one_machine_share_its_cores() {
        let (near, far) = (side("1", 0.9, 0.5), side("1", 1.0, 0.5));
        assert_eq!(bottleneck(std::slice::from_ref(&near), &[far]), "CPU: 1.9 of 2 cores busy on h1");
        assert_eq!(bottleneck(&[near], &[side("2", 1.0, 0.5)]), "network or peer");
    }

    #[test]
    fn ends_with_cores_of_their_own_do_not_share_them() {
        let end = |cpu_s, allowed| on_cores(side("1", cpu_s, 0.5), allowed, 4);
        assert_eq!(bottleneck(&[end(1.8, "0-3")], &[end(1.8, "4-7")]), "network or peer");
        assert_eq!(bottleneck(&[end(1.8, "0-3")], &[end(3.7, "4-7")]), "CPU: 3.7 of 4 cores busy on h1");
        // Here both processes share the machine.
        let busy = SideReport { host_busy: Some(0.95), ..end(1.8, "0-3") };
        let all = "CPU: all cores of h1 busy, 3.6 of them with this run";
        assert_eq!(bottleneck(&[busy], &[end(1.8, "4-7")]), all);
    }

    #[test]
    fn cores_busy_with_something_else_are_named() {
        let near = SideReport { host_busy: Some(0.97), ..side("1", 0.9, 0.5) };
        let limit = bottleneck(&[near], &[side("2", 0.0, 0.0)]);
        assert_eq!(limit, "CPU: all cores of h1 busy, 0.9 of them with this run");
    }

    #[test]
    fn all_processes_of_a_host_count_and_a_process_once() {
        let near = |cpu_s| [side("1", cpu_s, 0.5), side("1", cpu_s, 0.5)];
        let far = |cpu_s| [side("2", cpu_s, 0.1), side("2", cpu_s, 0.1)];
        assert_eq!(bottleneck(&near(0.5), &far(1.0)), "network or peer");
        assert_eq!(bottleneck(&near(1.0), &far(1.0)), "CPU: 2.0 of 2 cores busy on h1");
        assert_eq!(bottleneck(&near(0.5), &far(2.0)), "CPU: 2.0 of 2 cores busy on h2");
    }

    #[test]
    fn each_host_of_a_run_of_ranks_is_judged_by_itself() {
        let pair = |from, to| RankPair { ranks: (from, to), hosts: Default::default() };
        let ends = BothEnds::of(&[pair(0, 2), pair(1, 3)], false, 2);
        let far = [side("3", 0.1, 0.1), side("4", 0.1, 0.1)];
        let limit = |near: [SideReport; 2]| super::bottleneck(&ends, &near, &far);
        let sends = |host, bytes| wired(side(host, 1.0, 0.5), "eth1", bytes);
        assert_eq!(limit([sends("1", 12), sends("2", 12)]), "network or peer");
        assert!(limit([sends("1", 12), sends("2", 24)]).starts_with("NIC eth1: 96 %"));
        assert!(limit([sends("1", 12), sends("1", 12)]).starts_with("CPU: 2.0 of 2 cores busy on h1"));
        let busy = SideReport { host_busy: Some(0.97), ..side("2", 1.2, 0.5) };
        let all = "CPU: all cores of h2 busy, 1.2 of them with this run";
        assert_eq!(limit([side("1", 0.2, 0.5), busy]), all);
        let thread = "one thread: w on h2 ran 99 % of the time";
        assert_eq!(limit([side("1", 0.2, 0.5), side("2", 1.0, 0.99)]), thread);
    }

    #[test]
    fn one_busy_thread_or_nic_is_named() {
        let thread = bottleneck(&[side("1", 1.0, 0.99)], &[side("2", 0.0, 0.0)]);
        assert_eq!(thread, "one thread: w on h1 ran 99 % of the time");
        let near = [wired(side("1", 0.1, 0.1), "eth1", 24)];
        assert!(bottleneck(&near, &[side("2", 0.0, 0.0)]).starts_with("NIC eth1: 96 %"));
    }
}
