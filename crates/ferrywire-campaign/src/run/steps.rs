//! The steps of a scenario: connections, operations, cancels, deregistrations and closes.
//!
//! Invariant: a step stores its operation where `look` finds it.
//! Read next: `faults.rs`.

use super::*;
use ferrywire::RegisterError;

impl Run<'_> {
    pub(super) fn step(&mut self, step: &Step) -> Check {
        self.pass_time(Duration::from_micros(step.pause_us))?;
        note!(self, "step {:?}", step.action);
        match &step.action {
            Action::Connect { link } => self.connect(*link, None),
            Action::ConnectWithin { link, timeout_us } => {
                self.connect(*link, Some(Duration::from_micros(*timeout_us)))
            }
            Action::Post(post) => self.post(post),
            Action::Cancel(op) => {
                self.cancel(*op);
                Ok(())
            }
            Action::Wait { op, timeout_us } => self.wait(*op, Duration::from_micros(*timeout_us)),
            Action::Deregister { op, of_source } => self.deregister(*op, *of_source),
            Action::DropRegion { op, of_source } => self.drop_region(*op, *of_source),
            Action::Free { op, of_source } => {
                self.free(*op, *of_source);
                Ok(())
            }
            Action::Poll(passes) => (0..*passes).try_for_each(|_| self.pass()),
            Action::Fault(fault) => {
                self.fault(fault);
                Ok(())
            }
            Action::ClosePeer { link, side, timeout_us, meanwhile } => {
                self.close_peer(*link, *side, Duration::from_micros(*timeout_us), meanwhile)
            }
            Action::DropPeer { link, side } => self.drop_peer(*link, *side),
            Action::CloseEnd { end, timeout_us, meanwhile } => {
                self.close_end(*end, Duration::from_micros(*timeout_us), meanwhile)
            }
            Action::Kill { end } => {
                self.kill(*end);
                Ok(())
            }
            Action::Restart { end } => self.restart(*end),
            Action::ReadNotifications { link, side, on } => {
                self.links[*link].reading[*side] = *on;
                Ok(())
            }
        }
    }

    pub(super) fn connect(&mut self, index: usize, timeout: Option<Duration>) -> Check {
        let (from, to) = self.links[index].plan;
        let pair = |link: &Link| link.plan == (from, to) || link.plan == (to, from);
        let before: Vec<usize> = (0..index).filter(|each| pair(&self.links[*each])).collect();
        if !self.until(CONNECT_MAX, |run| before.iter().all(|each| run.is_over(*each)))? {
            return Ok(());
        }
        let (Some(near), Some(far)) = (self.hosts[from].slot, self.hosts[to].slot) else { return Ok(()) };
        let Some(endpoint) = self.driver.endpoint(near) else { return Ok(()) };
        let (nics, count) = (self.hosts[to].addresses(), self.ops.len());
        let address = SocketAddr::new(nics[(index + count) % nics.len()], PORT);
        let link = &mut self.links[index];
        (link.slots, link.started, link.began) = ([near, far], true, self.driver.now());
        link.well_at = [link.began; 2];
        match timeout {
            Some(timeout) => {
                let since = self.driver.now();
                let result = self.wait_in(near, || endpoint.connect(address, timeout))?;
                let took = self.driver.now() - since;
                if took > timeout + Duration::from_secs(1) {
                    return broken(
                        "a connect ends at its timeout",
                        format!("it took {took:?}, and the timeout is {timeout:?}"),
                    );
                }
                self.connected(index, result, true)
            }
            None => match endpoint.start_connect(address) {
                Ok(connecting) => {
                    self.links[index].connecting = Some(connecting);
                    Ok(())
                }
                Err(error) => self.connect_failed(index, &error, false),
            },
        }
    }

    /// Whether a link has ended, or was never established.
    pub fn is_over(&self, index: usize) -> bool {
        let link = &self.links[index];
        let gone = |side: usize| match &link.peers[side] {
            _ if self.driver.endpoint(link.slots[side]).is_none() => true,
            Some(peer) => peer.error().is_some(),
            None => link.closing[side] || link.failed.is_some() || (side == 1 && link.peers[0].is_none()),
        };
        !link.started || link.failed.is_some() || (link.connecting.is_none() && gone(0) && gone(1))
    }

    /// The peer at one side of a link, once both ends have one.
    pub(super) fn ready(&mut self, link: usize, side: usize) -> Result<Option<Peer>, Broken> {
        let settled = |run: &mut Self| {
            let link = &run.links[link];
            !link.started
                || link.failed.is_some()
                || link.closing != [false; 2]
                || link.peers.iter().all(Option::is_some)
                || link.slots.iter().any(|slot| run.driver.endpoint(*slot).is_none())
        };
        self.until(CONNECT_MAX, settled)?;
        let state = &self.links[link];
        let both = state.peers.iter().all(Option::is_some);
        Ok(state.peers[side].clone().filter(|_| both && self.driver.endpoint(state.slots[side]).is_some()))
    }

    /// Whether a step drops a handle of the operation's memory.
    fn is_dropped(&self, id: OpId) -> bool {
        let drops = |step: &Step| matches!(step.action, Action::DropRegion { op, .. } if op == id);
        self.scenario.steps.iter().any(drops)
    }

    /// Makes the area of an operation at one end; `None` if its process was killed.
    pub(super) fn area(
        &mut self,
        slot: usize,
        on_gpu: bool,
        post: &Post,
        part: usize,
        salt: Option<u64>,
    ) -> Result<Option<usize>, Broken> {
        let Some(endpoint) = self.driver.endpoint(slot) else { return Ok(None) };
        let gap = if post.blocks > 1 { 5 + part * 3 + usize::from(salt.is_some()) * 2 } else { 0 };
        let blocks = split(part_bytes(post, part), post.blocks, gap);
        let gpu = on_gpu.then(|| self.driver.gpus[slot % self.driver.gpus.len()].clone());
        let raw = match post.raw {
            false => Raw::No,
            // A thread of the endpoint would release memory with an owner, at a time that does not repeat.
            true if self.is_dropped(post.id) => Raw::Kept,
            true => Raw::WithOwner,
        };
        let mut area = registered(post, Area::new(slot, &endpoint, gpu.as_ref(), raw, blocks, salt))?;
        area.loose = self.corrupts;
        self.areas.push(area);
        Ok(Some(self.areas.len() - 1))
    }

    pub(super) fn post(&mut self, post: &Post) -> Check {
        let Some(peer) = self.ready(post.link, post.side)? else { return Ok(()) };
        let slots = self.links[post.link].slots;
        let (near, far) = (slots[post.side], slots[1 - post.side]);
        let (source, target) = if post.verb == Verb::Read { (far, near) } else { (near, far) };
        let (mut sources, mut targets) = (Vec::new(), Vec::new());
        for part in 0..post.regions {
            let salt = salt_of(post.id, part);
            if matches!(post.verb, Verb::Write | Verb::Read | Verb::Send { .. }) {
                let Some(area) = self.area(source, post.source_on_gpu, post, part, Some(salt))? else {
                    return Ok(());
                };
                sources.push(area);
            }
            if matches!(post.verb, Verb::Write | Verb::Read | Verb::Recv { .. }) {
                let at = if matches!(post.verb, Verb::Recv { .. }) { near } else { target };
                let Some(area) = self.area(at, post.target_on_gpu, post, part, None)? else { return Ok(()) };
                match post.verb {
                    Verb::Recv { .. } => self.areas[area].phase = Phase::OpenForMessage,
                    _ => self.areas[area].expect(&pattern(part_bytes(post, part), salt)),
                }
                targets.push(area);
            }
        }
        let waiting = post.stream_us.filter(|_| !self.driver.gpus.is_empty()).map(|us| {
            let gpu = near % self.driver.gpus.len();
            self.driver.waiting_stream(gpu, Duration::from_micros(us))
        });
        let (peer, stream) = match waiting {
            Some(Ok((event, stream))) => (peer.on_stream(event), Some(stream)),
            Some(Err(error)) => return broken("a stream takes work", error.to_string()),
            None => (peer, None),
        };
        let posted = self.posted(&peer, post, &sources, &targets);
        let mut op = Op {
            post: post.clone(),
            transfer: None,
            outcome: None,
            sources,
            targets,
            cancelled: false,
            notified: 0,
            met: None,
            moved: 0,
            stream,
        };
        match posted {
            Ok(transfer) => {
                op.transfer = Some(transfer);
                self.ops.push(op);
                Ok(())
            }
            Err(error) => {
                self.ops.push(op);
                let index = self.ops.len() - 1;
                self.ended(index, Err(error))
            }
        }
    }

    pub(super) fn posted(
        &self,
        peer: &Peer,
        post: &Post,
        sources: &[usize],
        targets: &[usize],
    ) -> Result<Transfer, TransferError> {
        let message = post.notify.map(|bytes| notification(post.id, bytes));
        let region = |area: usize| self.areas[area].region.clone().expect("it was registered just now");
        let single = (post.blocks, post.regions) == (1, 1);
        let at = |area: usize| self.areas[area].blocks[0].0 as u64;
        let bytes = post.bytes as u64;
        let pieces = |area: usize| -> Vec<(u64, u64)> {
            self.areas[area].blocks.iter().map(|(at, len)| (*at as u64, *len as u64)).collect()
        };
        match post.verb {
            Verb::Notify => peer.notify(&message.unwrap_or_default()),
            Verb::Send { tag } if single => peer.send(tag, &region(sources[0]), at(sources[0]), bytes),
            Verb::Send { tag } => peer.send_blocks(tag, &region(sources[0]), &pieces(sources[0])),
            Verb::Recv { tag } if single => peer.recv(tag, &region(targets[0]), at(targets[0]), bytes),
            Verb::Recv { tag } => peer.recv_blocks(tag, &region(targets[0]), &pieces(targets[0])),
            Verb::Write if single => {
                let (from, to) = (region(sources[0]), region(targets[0]).descriptor());
                let (a, b) = (at(sources[0]), at(targets[0]));
                match &message {
                    Some(message) => peer.write_notify(&from, a, &to, b, bytes, message),
                    None => peer.write(&from, a, &to, b, bytes),
                }
            }
            Verb::Read if single => {
                let (from, to) = (region(sources[0]).descriptor(), region(targets[0]));
                peer.read(&to, at(targets[0]), &from, at(sources[0]), bytes)
            }
            Verb::Write => peer.write_blocks(&self.list(sources, targets)?, None, message.as_deref()),
            Verb::Read => peer.read_blocks(&self.list(targets, sources)?, None),
        }
    }

    pub(super) fn list(&self, local: &[usize], remote: &[usize]) -> Result<BlockList, TransferError> {
        let list = |(local, remote): (&usize, &usize)| {
            let (local, remote) = (&self.areas[*local], &self.areas[*remote]);
            let pairs = local.blocks.iter().zip(&remote.blocks);
            let block = |(a, b): (&(usize, usize), &(usize, usize))| Block {
                local_offset: a.0 as u64,
                remote_offset: b.0 as u64,
                bytes: a.1 as u64,
            };
            let blocks: Vec<Block> = pairs.map(block).collect();
            let (Some(local), Some(remote)) = (&local.region, &remote.region) else {
                unreachable!("new areas")
            };
            BlockList::new(local, &remote.descriptor(), &blocks)
        };
        let lists: Result<Vec<BlockList>, _> = local.iter().zip(remote).map(list).collect();
        let lists = lists?;
        BlockList::join(&lists.iter().collect::<Vec<_>>())
    }

    pub(super) fn find(&self, op: OpId) -> Option<usize> {
        self.ops.iter().position(|each| each.post.id == op)
    }

    pub(super) fn cancel(&mut self, op: OpId) {
        let Some(index) = self.find(op) else { return };
        let op = &mut self.ops[index];
        let (link, side) = (op.post.link, op.post.side);
        if !self.is_alive(link, side) {
            return;
        }
        let op = &mut self.ops[index];
        if let Some(transfer) = op.transfer.clone().filter(|_| op.outcome.is_none()) {
            op.cancelled = true;
            let (slot, driver) = (self.links[link].slots[side], self.driver.clone());
            driver.wait_in(slot, || transfer.cancel());
        }
    }

    pub(super) fn wait(&mut self, op: OpId, timeout: Duration) -> Check {
        let Some(index) = self.find(op) else { return Ok(()) };
        let (link, side) = (self.ops[index].post.link, self.ops[index].post.side);
        let Some(transfer) = self.ops[index].transfer.clone().filter(|_| self.is_alive(link, side)) else {
            return Ok(());
        };
        let (since, before) = (self.driver.now(), self.ops[index].outcome.clone());
        let outcome = self.wait_in(self.links[link].slots[side], || transfer.wait_for(timeout, timeout))?;
        let took = self.driver.now() - since;
        if took > timeout + Duration::from_millis(500) {
            return broken(
                "a wait ends at its timeout",
                format!("it took {took:?}, and the timeout is {timeout:?}: {outcome:?}"),
            );
        }
        // A fault that began meanwhile may have stopped the endpoint. Its outcomes are known when it goes on.
        self.until(SETTLE_MAX, |run| run.is_alive(link, side))?;
        self.look_at_all()?;
        let timed_out =
            matches!(outcome, Err(TransferError::TimedOut { .. } | TransferError::Stalled { .. }));
        let known = if timed_out { before } else { self.ops[index].outcome.clone() };
        if known.is_some() == timed_out || known.as_ref().is_some_and(|known| *known != outcome) {
            return broken(
                "a wait returns the outcome",
                format!("the wait returned {outcome:?}, and a poll {known:?}"),
            );
        }
        Ok(())
    }

    /// Indices of the areas of an operation at its source or its target, if the endpoint there runs.
    pub(super) fn areas_of(&self, op: OpId, of_source: bool) -> Vec<usize> {
        let Some(op) = self.find(op).map(|index| &self.ops[index]) else { return Vec::new() };
        let areas = if of_source { &op.sources } else { &op.targets };
        let runs = |slot: usize| self.driver.endpoint(slot).is_some() && !self.driver.is_stopped(slot);
        areas.iter().copied().filter(|area| runs(self.areas[*area].slot)).collect()
    }

    pub(super) fn deregister(&mut self, op: OpId, of_source: bool) -> Check {
        for index in self.areas_of(op, of_source) {
            let owned_by_user = self.find(op).is_some_and(|op| self.ops[op].post.raw);
            let area = &mut self.areas[index];
            let Some(region) = area.region.clone().filter(|_| area.phase != Phase::Gone) else { continue };
            area.taken = true;
            let slot = area.slot;
            let result = self.wait_in(slot, || region.deregister())?;
            note!(self, "deregistered area {index}: {result:?}");
            if result.is_ok() && (owned_by_user || !of_source) {
                if let Err(why) = self.areas[index].check() {
                    return broken("no byte is written late, or outside", why);
                }
                let area = &mut self.areas[index];
                area.was_incomplete = area.phase == Phase::Open && area.check_done().is_err();
                area.poison();
            }
        }
        Ok(())
    }

    pub(super) fn drop_region(&mut self, op: OpId, of_source: bool) -> Check {
        let owned_by_user = self.find(op).is_some_and(|op| self.ops[op].post.raw);
        for index in self.areas_of(op, of_source) {
            let area = &mut self.areas[index];
            let Some(region) = area.region.take() else { continue };
            let slot = area.slot;
            area.taken = true;
            if owned_by_user {
                self.wait_in(slot, || drop(region))?;
                self.areas[index].poison();
            } else {
                area.phase = Phase::Gone;
                self.wait_in(slot, || drop(region))?;
            }
        }
        Ok(())
    }

    pub(super) fn free(&mut self, op: OpId, of_source: bool) {
        let now = self.driver.now();
        for index in self.areas_of(op, of_source) {
            if self.areas[index].free() {
                let slot = self.areas[index].slot;
                if let Some(host) = self.hosts.iter_mut().find(|host| host.slot == Some(slot)) {
                    host.gpu_fails_from(now);
                }
            }
        }
    }

    // --- Ends ---------------------------------------------------------------------------------

    pub(super) fn close_peer(
        &mut self,
        link: usize,
        side: usize,
        timeout: Duration,
        meanwhile: &Option<(u64, Fault)>,
    ) -> Check {
        let Some(peer) = self.ready(link, side)?.filter(|_| self.is_alive(link, side)) else {
            self.later(meanwhile);
            return Ok(());
        };
        self.links[link].closing[side] = true;
        // What ended before the close is none of its transfers.
        self.look_at_all()?;
        let (since, slot) = (self.driver.now(), self.links[link].slots[side]);
        let open = self.open_of(slot);
        self.begins_within(meanwhile);
        let result = self.wait_in(slot, || peer.close(timeout))?;
        note!(self, "closed: {result:?}");
        let took = self.driver.now() - since;
        if took > timeout + Duration::from_secs(2) {
            return broken(
                "a close ends at its timeout",
                format!("it took {took:?}, and the timeout is {timeout:?}: {result:?}"),
            );
        }
        if peer.error().is_none() {
            return broken("a closed peer is closed", format!("{result:?}"));
        }
        self.closed_well(&open, Some(link), result.is_ok())
    }

    /// Indices of the operations of an endpoint that have not ended.
    pub(super) fn open_of(&self, slot: usize) -> Vec<usize> {
        let is_open = |op: &Op| op.outcome.is_none() && self.links[op.post.link].slots[op.post.side] == slot;
        (0..self.ops.len()).filter(|index| is_open(&self.ops[*index])).collect()
    }

    /// Checks that a close that succeeded has ended all operations that were open and could end, with
    /// success.
    pub(super) fn closed_well(&mut self, open: &[usize], link: Option<usize>, well: bool) -> Check {
        // The outcomes at a stopped end are not known.
        let known = |op: &Op| op.outcome.is_some() || self.is_alive(op.post.link, op.post.side);
        let of_link = |op: &&Op| link.is_none_or(|link| link == op.post.link) && known(op);
        for op in open.iter().map(|index| &self.ops[*index]).filter(of_link) {
            let cut_off = matches!(
                op.outcome,
                None | Some(Err(TransferError::Closed
                    | TransferError::PeerClosed { .. }
                    | TransferError::PeerLost { .. }))
            );
            let unsent = op.transfer.is_none() || matches!(op.post.verb, Verb::Recv { .. });
            // What its user has cancelled has to end, and need not finish.
            let withdrawn = op.cancelled && op.outcome.is_some();
            if well && cut_off && !unsent && !withdrawn {
                let what = format!("{:?} ended in {:?}", op.post, op.outcome);
                return broken("a close finishes what was posted, or says that it did not", what);
            }
        }
        Ok(())
    }

    pub(super) fn drop_peer(&mut self, link: usize, side: usize) -> Check {
        if self.ready(link, side)?.is_none() || !self.is_alive(link, side) {
            return Ok(());
        }
        self.links[link].closing[side] = true;
        self.links[link].peers[side] = None;
        Ok(())
    }

    pub(super) fn close_end(
        &mut self,
        end: usize,
        timeout: Duration,
        meanwhile: &Option<(u64, Fault)>,
    ) -> Check {
        let slot = self.hosts[end].slot.filter(|slot| !self.driver.is_stopped(*slot));
        let Some((slot, endpoint)) = slot.and_then(|slot| Some((slot, self.driver.endpoint(slot)?))) else {
            self.later(meanwhile);
            return Ok(());
        };
        self.hosts[end].closed = true;
        for link in self.links.iter_mut().filter(|link| link.started) {
            let side = link.slots.iter().position(|each| *each == slot);
            if let Some(side) = side {
                link.closing[side] = true;
            }
        }
        // What ended before the close is none of its transfers.
        self.look_at_all()?;
        let (since, open) = (self.driver.now(), self.open_of(slot));
        self.begins_within(meanwhile);
        let result = self.wait_in(slot, || endpoint.close(timeout))?;
        note!(self, "closed the endpoint: {result:?}");
        let took = self.driver.now() - since;
        if took > timeout + Duration::from_secs(3) {
            return broken(
                "a close ends at its timeout",
                format!("it took {took:?}, and the timeout is {timeout:?}: {result:?}"),
            );
        }
        self.closed_well(&open, None, result.is_ok())
    }

    pub(super) fn kill(&mut self, end: usize) {
        let Some(slot) = self.hosts[end].slot.take() else { return };
        self.note_phases("process killed", &[end]);
        self.driver.net.kill(self.hosts[end].sim.host_name());
        if let Some(endpoint) = self.driver.take(slot) {
            self.killed.push((slot, endpoint));
        }
        // The memory ends with its process, although the area still has the bytes that had arrived.
        self.areas.iter_mut().filter(|area| area.slot == slot).for_each(|area| area.phase = Phase::Gone);
        for link in self.links.iter_mut().filter(|link| link.started && link.slots.contains(&slot)) {
            link.outages.push(Outage::new(Cost::Peer, self.driver.now(), OUTAGE_MAX));
            if link.slots[0] == slot {
                link.connecting = None;
            }
        }
    }

    pub(super) fn restart(&mut self, end: usize) -> Check {
        if self.hosts[end].slot.is_some() {
            return Ok(());
        }
        self.driver.net.revive(self.hosts[end].sim.host_name());
        self.start(end)
    }

    // --- Faults -------------------------------------------------------------------------------
}

/// The area of an operation. Memory is registered also with an endpoint that is closed, and no fault of a scenario prevents it.
fn registered(post: &Post, area: Result<Area, RegisterError>) -> Result<Area, Broken> {
    area.or_else(|error| broken("memory is registered", format!("{post:?}: {error:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_registered_breaks_the_run() {
        let post = Post::plain(3, 0, 0, Verb::Write, 100);
        let why = RegisterError::Internal("no memory".into());
        let broken = registered(&post, Err(why)).err().expect("the error is reported");
        assert_eq!(broken.invariant, "memory is registered");
        assert!(broken.detail.contains("no memory"), "{}", broken.detail);
    }
}
