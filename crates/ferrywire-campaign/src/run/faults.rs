//! The faults of a scenario, and the phases of the links that they meet.
//!
//! A fault is noted by the run, and begins by an effect of its own on the driver, which needs no run: so it also begins
//! within a call that waits.
//! Invariant: a fault that may cost a peer is noted as an outage before it begins.
//! Read next: `end.rs`.

use super::*;

impl Run<'_> {
    /// Lets a fault begin some time after now, within the close that follows.
    pub(super) fn begins_within(&mut self, fault: &Option<(u64, Fault)>) {
        if let Some((_, fault)) = fault {
            self.out.cover.count(fault.name(), "draining");
        }
        self.later(fault);
    }

    /// Lets a fault begin some time after now.
    pub(super) fn later(&mut self, fault: &Option<(u64, Fault)>) {
        if let Some((us, fault)) = fault {
            let when = self.driver.now() + Duration::from_micros(*us);
            note!(self, "fault {fault:?} from {when:?} on");
            let effect = self.note(fault, when);
            self.driver.begin_at(when, effect);
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

    /// Begins a fault.
    pub(super) fn fault(&mut self, fault: &Fault) {
        note!(self, "fault {fault:?}");
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
        let effect = self.note(fault, self.driver.now());
        effect(&self.driver);
    }

    /// Notes a fault that begins at this time. Returns its effect.
    fn note(&mut self, fault: &Fault, when: Duration) -> Effect {
        let us = Duration::from_micros;
        match *fault {
            Fault::Cut { end, nic, out, into, us: time } => self.cut(end, nic, (out, into), when, us(time)),
            Fault::Partition { end, us: time } => {
                let nics = 0..self.hosts[end].nics.len();
                let cuts: Vec<_> = nics.map(|nic| self.cut(end, nic, (true, true), when, us(time))).collect();
                Box::new(|driver| cuts.into_iter().for_each(|cut| cut(driver)))
            }
            Fault::Reset { pick, by_dialler, later_us } => {
                self.outage(Cost::Connect, None, when, us(later_us.unwrap_or(0)));
                let first = if by_dialler { Side::Dialler } else { Side::Acceptor };
                let seen = later_us.map_or(ResetSeen::AtOnce, |later| ResetSeen::OtherEndAfter(us(later)));
                Box::new(move |driver| {
                    if let Some(conn) = pick_connection(driver, pick) {
                        driver.net.reset(conn, first, seen);
                    }
                })
            }
            Fault::ResetAll { with_control } => {
                self.outage(Cost::Connect, None, when, Duration::ZERO);
                Box::new(move |driver| {
                    let all = driver.net.connections().into_iter();
                    for conn in all.filter(|conn| conn.bulk || with_control) {
                        driver.net.reset(conn.id, Side::Dialler, ResetSeen::AtOnce);
                    }
                })
            }
            Fault::ResetNic { end, nic } => {
                let address = self.hosts[end].nics[nic];
                self.outage(Cost::Connect, Some(end), when, Duration::ZERO);
                Box::new(move |driver| _ = driver.net.reset_nic(address, ResetSeen::AtOnce))
            }
            Fault::DeleteNic { end, nic } => self.delete(end, nic, when),
            Fault::Stall { pick, us: time } => {
                if when > self.driver.now() || !self.driver.net.connections().is_empty() {
                    self.outage(Cost::Peer, None, when, us(time));
                }
                Box::new(move |driver| {
                    if let Some(conn) = pick_connection(driver, pick) {
                        driver.net.stall(conn, us(time));
                    }
                })
            }
            Fault::Freeze { end, us: time } => self.freeze(end, when, us(time)),
            Fault::Sleep { end, us: time } => {
                let Some(slot) = self.hosts[end].slot else { return nothing() };
                self.outage(Cost::Peer, Some(end), when, us(time));
                Box::new(move |driver| {
                    if driver.endpoint(slot).is_some() {
                        driver.stop_polling(slot);
                        driver.at(when + us(time), Timed::Wake(slot));
                    }
                })
            }
            Fault::RefuseDials { end, nic, count, silent } => {
                let how = if silent { DialFault::TimeOut } else { DialFault::Refuse };
                let address = self.hosts[end].nics[nic];
                // Each dial that it fails is an outage.
                self.fails_dials = true;
                Box::new(move |driver| driver.net.fail_dials(address, how, count))
            }
            Fault::Latency { end, nic, us: time } => {
                let address = self.hosts[end].nics[nic];
                Box::new(move |driver| driver.net.set_nic_latency(address, us(time)))
            }
            Fault::Rate { end, nic, bytes_per_second } => {
                let address = self.hosts[end].nics[nic];
                Box::new(move |driver| driver.net.set_bandwidth(address, Some(bytes_per_second)))
            }
            Fault::Rough => {
                let faults = Faults::random(self.scenario.seed);
                self.fails_dials = true;
                self.outage(Cost::Peer, None, when, Duration::MAX);
                Box::new(move |driver| driver.net.set_faults(faults))
            }
            Fault::Corrupt { times } => {
                // Corruption begins behind the handshakes of data connections, which have their own proofs.
                let corrupts = self.corrupts;
                Box::new(move |driver| {
                    if corrupts {
                        driver.net.corrupt_bulk(400, times);
                    }
                })
            }
            Fault::GpuStall { end, us: time } => self.gpu(end, when, us(time), None),
            Fault::GpuFail { end, after, us: time } => self.gpu(end, when, us(time), Some(after)),
        }
    }

    fn cut(
        &mut self,
        end: usize,
        nic: usize,
        (out, into): (bool, bool),
        when: Duration,
        time: Duration,
    ) -> Effect {
        if self.hosts[end].has_lost(nic) {
            return nothing();
        }
        let address = self.hosts[end].nics[nic];
        self.hosts[end].cut_until[nic] = self.hosts[end].cut_until[nic].max(when + time);
        // A handshake may have got this address alone.
        self.outage(Cost::Connect, Some(end), when, time);
        self.missing_paths(when, time);
        Box::new(move |driver| {
            // A cut ends, and would bring a NIC back that was deleted before it began.
            if driver.is_deleted(address) {
                return;
            }
            match (out, into) {
                (true, true) => driver.net.cut_for(address, time),
                (true, false) => driver.net.cut_outgoing(address),
                _ => driver.net.cut_incoming(address),
            }
            if !(out && into) {
                driver.at(when + time, Timed::Heal(address));
            }
        })
    }

    /// Counts an outage of this time if the cuts of then may leave no path.
    fn missing_paths(&mut self, when: Duration, time: Duration) {
        // If a second NIC is cut anywhere at the same time, no pair of NICs may be left.
        let cuts = self.hosts.iter().flat_map(|host| &host.cut_until).filter(|until| **until > when).count();
        let alone = self.hosts.iter().any(|host| host.nics.len() == 1);
        if alone || cuts > 1 {
            self.outage(Cost::Peer, None, when, time);
        }
    }

    /// Deletes a NIC for good, unless it is the last one of its host.
    fn delete(&mut self, end: usize, nic: usize, when: Duration) -> Effect {
        if self.hosts[end].has_lost(nic) || self.hosts[end].addresses().len() == 1 {
            return nothing();
        }
        let address = self.hosts[end].nics[nic];
        self.hosts[end].cut_until[nic] = Duration::MAX;
        self.missing_paths(when, OUTAGE_MAX);
        // A handshake may have got this address alone, one that begins before the NIC is gone too.
        let is_later = when > self.driver.now();
        let connecting =
            |link: &&mut Link| (link.started || is_later) && link.peers.iter().any(Option::is_none);
        for link in self.links.iter_mut().filter(connecting) {
            link.outages.push(Outage::new(Cost::Peer, when, OUTAGE_MAX));
        }
        Box::new(move |driver| driver.delete(address))
    }

    fn freeze(&mut self, end: usize, when: Duration, time: Duration) -> Effect {
        let Some(slot) = self.hosts[end].slot else { return nothing() };
        let name = self.hosts[end].sim.host_name().to_owned();
        self.outage(Cost::Peer, Some(end), when, time);
        Box::new(move |driver| {
            // Its process may have been killed before, and another one started.
            if driver.endpoint(slot).is_none() {
                return;
            }
            driver.net.freeze(&name);
            driver.stop_polling(slot);
            driver.at(when + time, Timed::Thaw(name));
            driver.at(when + time, Timed::Wake(slot));
        })
    }

    /// Stalls a GPU for a time, or makes its copies fail after so many.
    fn gpu(&mut self, end: usize, when: Duration, time: Duration, fails_after: Option<u64>) -> Effect {
        let Some(slot) = self.hosts[end].slot.filter(|_| !self.driver.gpus.is_empty()) else {
            return nothing();
        };
        let gpu = slot % self.driver.gpus.len();
        if fails_after.is_some() {
            // All endpoints count as affected, because they share GPUs.
            self.hosts.iter_mut().for_each(|host| host.gpu_fails_from(when));
        }
        Box::new(move |driver| match fails_after {
            None => {
                driver.gpus[gpu].set_stall(true);
                driver.at(when + time, Timed::GpuGoesOn(gpu));
            }
            Some(after) => {
                let faults = gpu_faults(&driver.gpus[gpu]);
                driver.gpus[gpu].set_faults(SimFaults { fail_after: Some(after), ..faults });
                driver.at(when + time, Timed::GpuWorksAgain(gpu));
            }
        })
    }

    // --- The end ------------------------------------------------------------------------------
}

fn nothing() -> Effect {
    Box::new(|_| {})
}

/// Chooses an existing connection, of those that carry data or of all.
fn pick_connection(driver: &Driver, pick: u64) -> Option<ferrywire::net::sim::ConnId> {
    let all = driver.net.connections();
    (!all.is_empty()).then(|| all[(pick % all.len() as u64) as usize].id)
}
