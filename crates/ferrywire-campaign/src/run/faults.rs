//! The faults of a scenario, and the phases of the links that they meet.
//!
//! Invariant: a fault that may cost a peer is noted as an outage before it begins.
//! Read next: `end.rs`.

use super::*;

impl Run<'_> {
    pub(super) fn later(&mut self, fault: &Option<(u64, Fault)>) {
        if let Some((us, fault)) = fault {
            self.delayed.push(fault.clone());
            let when = self.driver.now() + Duration::from_micros(*us);
            self.driver.at(when, Timed::Begins(self.delayed.len() - 1));
        }
    }

    /// The phase of a link for the table of coverage; `None` if the link was never started.
    pub(super) fn phase(&self, index: usize) -> Option<&'static str> {
        let link = &self.links[index];
        if !link.started || link.failed.is_some() {
            return None;
        }
        if self.is_over(index) {
            return Some("over");
        }
        if link.closing != [false; 2] {
            return Some("draining");
        }
        if link.peers.iter().any(Option::is_none) {
            return Some("connecting");
        }
        if link.resumed {
            return Some("channels down");
        }
        let busy = self.ops.iter().any(|op| op.post.link == index && op.outcome.is_none());
        Some(if busy { "in flight" } else { "idle" })
    }

    pub(super) fn note_phases(&mut self, fault: &'static str, ends: &[usize]) {
        for index in 0..self.links.len() {
            let (a, b) = self.links[index].plan;
            if (ends.is_empty() || ends.contains(&a) || ends.contains(&b))
                && let Some(phase) = self.phase(index)
            {
                self.out.cover.count(fault, phase);
            }
        }
    }

    /// Adds to the time in which the links of an endpoint may have had no path.
    pub(super) fn outage(&mut self, end: usize, time: Duration) {
        for link in self.links.iter_mut().filter(|link| link.plan.0 == end || link.plan.1 == end) {
            link.outage += time;
            if link.outage >= OUTAGE_MAX {
                link.fragile = Some("it had no path for a while");
            }
        }
    }

    pub(super) fn fragile(&mut self, end: Option<usize>, why: &'static str) {
        let of = |link: &Link| end.is_none_or(|end| link.plan.0 == end || link.plan.1 == end);
        self.links.iter_mut().filter(|link| of(link)).for_each(|link| link.fragile = Some(why));
    }

    /// Chooses an existing connection, of those that carry data or of all.
    pub(super) fn pick(&self, pick: u64) -> Option<ferrywire::net::sim::ConnId> {
        let all = self.driver.net.connections();
        (!all.is_empty()).then(|| all[(pick % all.len() as u64) as usize].id)
    }

    pub(super) fn fault(&mut self, fault: &Fault) {
        note!(self, "fault {fault:?}");
        let (net, now) = (self.driver.net.clone(), self.driver.now());
        let us = Duration::from_micros;
        let ends = match fault {
            Fault::Cut { end, .. }
            | Fault::Partition { end, .. }
            | Fault::ResetNic { end, .. }
            | Fault::DeleteNic { end, .. }
            | Fault::Freeze { end, .. }
            | Fault::Sleep { end, .. }
            | Fault::RefuseDials { end, .. }
            | Fault::Latency { end, .. }
            | Fault::Rate { end, .. }
            | Fault::GpuStall { end, .. }
            | Fault::GpuFail { end, .. } => vec![*end],
            _ => Vec::new(),
        };
        self.note_phases(fault.name(), &ends);
        match fault {
            Fault::Cut { end, nic, out, into, us: time } => self.cut(*end, *nic, (*out, *into), us(*time)),
            Fault::Partition { end, us: time } => {
                for nic in 0..self.hosts[*end].nics.len() {
                    self.cut(*end, nic, (true, true), us(*time));
                }
            }
            Fault::Reset { pick, by_dialler, later_us } => {
                let first = if *by_dialler { Side::Dialler } else { Side::Acceptor };
                let seen = later_us.map_or(ResetSeen::AtOnce, |later| ResetSeen::OtherEndAfter(us(later)));
                if let Some(conn) = self.pick(*pick) {
                    net.reset(conn, first, seen);
                }
            }
            Fault::ResetAll { with_control } => {
                for conn in net.connections().into_iter().filter(|conn| conn.bulk || *with_control) {
                    net.reset(conn.id, Side::Dialler, ResetSeen::AtOnce);
                }
            }
            Fault::ResetNic { end, nic } => {
                net.reset_nic(self.hosts[*end].nics[*nic], ResetSeen::AtOnce);
            }
            Fault::DeleteNic { end, nic } => self.delete(*end, *nic),
            Fault::Stall { pick, us: time } => {
                if let Some(conn) = self.pick(*pick) {
                    net.stall(conn, us(*time));
                    (0..self.hosts.len()).for_each(|end| self.outage(end, us(*time)));
                }
            }
            Fault::Freeze { end, us: time } => self.freeze(*end, us(*time)),
            Fault::Sleep { end, us: time } => {
                if let Some(slot) = self.hosts[*end].slot {
                    self.driver.stop_polling(slot);
                    self.driver.at(now + us(*time), Timed::Wake(slot));
                    self.outage(*end, us(*time));
                }
            }
            Fault::RefuseDials { end, nic, count, silent } => {
                let how = if *silent { DialFault::TimeOut } else { DialFault::Refuse };
                net.fail_dials(self.hosts[*end].nics[*nic], how, *count);
                self.fragile(Some(*end), "dials fail");
            }
            Fault::Latency { end, nic, us: time } => {
                net.set_nic_latency(self.hosts[*end].nics[*nic], us(*time))
            }
            Fault::Rate { end, nic, bytes_per_second } => {
                net.set_bandwidth(self.hosts[*end].nics[*nic], Some(*bytes_per_second));
            }
            Fault::Rough => {
                net.set_faults(Faults::random(self.scenario.seed));
                self.fragile(None, "faults by chance");
            }
            Fault::Corrupt { times } => {
                // Corruption begins behind the handshakes of data connections, which have their own proofs.
                if self.corrupts {
                    net.corrupt_bulk(400, *times);
                }
            }
            Fault::GpuStall { end, us: time } => self.gpu(*end, us(*time), None),
            Fault::GpuFail { end, after, us: time } => self.gpu(*end, us(*time), Some(*after)),
        }
    }

    pub(super) fn cut(&mut self, end: usize, nic: usize, (out, into): (bool, bool), time: Duration) {
        let (net, now) = (self.driver.net.clone(), self.driver.now());
        if self.hosts[end].has_lost(nic) {
            return;
        }
        let address = self.hosts[end].nics[nic];
        match (out, into) {
            (true, true) => net.cut_for(address, time),
            (true, false) => net.cut_outgoing(address),
            _ => net.cut_incoming(address),
        }
        if !(out && into) {
            self.driver.at(now + time, Timed::Heal(address));
        }
        self.hosts[end].cut_until[nic] = self.hosts[end].cut_until[nic].max(now + time);
        self.missing_paths(time);
    }

    /// Counts an outage of this time if the cuts of now may leave no path.
    fn missing_paths(&mut self, time: Duration) {
        let now = self.driver.now();
        // If a second NIC is cut anywhere at the same time, no pair of NICs may be left.
        let cuts = self.hosts.iter().flat_map(|host| &host.cut_until).filter(|until| **until > now).count();
        let alone = self.hosts.iter().any(|host| host.nics.len() == 1);
        if alone || cuts > 1 {
            (0..self.hosts.len()).for_each(|end| self.outage(end, time));
        }
    }

    /// Deletes a NIC for good, unless it is the last one of its host.
    fn delete(&mut self, end: usize, nic: usize) {
        if self.hosts[end].has_lost(nic) || self.hosts[end].addresses().len() == 1 {
            return;
        }
        let address = self.hosts[end].nics[nic];
        self.driver.forget_heal(address);
        self.driver.net.delete(address);
        self.hosts[end].cut_until[nic] = Duration::MAX;
        self.missing_paths(OUTAGE_MAX);
        // A handshake may have got this address alone.
        let connecting = |link: &&mut Link| link.started && link.peers.iter().any(Option::is_none);
        for link in self.links.iter_mut().filter(connecting) {
            link.fragile = Some("a NIC was deleted while it connected");
        }
    }

    pub(super) fn freeze(&mut self, end: usize, time: Duration) {
        let Some(slot) = self.hosts[end].slot else { return };
        let name = self.hosts[end].sim.host_name().to_owned();
        self.driver.net.freeze(&name);
        self.driver.stop_polling(slot);
        let until = self.driver.now() + time;
        self.driver.at(until, Timed::Thaw(name));
        self.driver.at(until, Timed::Wake(slot));
        self.outage(end, time);
    }

    /// Stalls a GPU for a time, or makes its copies fail after so many.
    pub(super) fn gpu(&mut self, end: usize, time: Duration, fails_after: Option<u64>) {
        let Some(slot) = self.hosts[end].slot.filter(|_| !self.driver.gpus.is_empty()) else { return };
        let gpu = slot % self.driver.gpus.len();
        let until = self.driver.now() + time;
        match fails_after {
            None => {
                self.driver.gpus[gpu].set_stall(true);
                self.driver.at(until, Timed::GpuGoesOn(gpu));
            }
            Some(after) => {
                let faults = gpu_faults(&self.driver.gpus[gpu]);
                self.driver.gpus[gpu].set_faults(SimFaults { fail_after: Some(after), ..faults });
                self.driver.at(until, Timed::GpuWorksAgain(gpu));
                // All endpoints count as affected, because they share GPUs.
                self.hosts.iter_mut().for_each(|host| host.gpu_faulty = true);
            }
        }
    }

    // --- The end ------------------------------------------------------------------------------
}
