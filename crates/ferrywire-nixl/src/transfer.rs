//! A NIXL transfer: prepared once, posted any number of times.
//!
//! Descriptors become one engine block list per pair of registrations, joined into one: a post is one operation however
//! many descriptors there are.
//! Read next: `remote.rs`, which starts a transfer once there is a connection.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrywire::{Block, BlockList, Peer, Region, RegisterError, TransferError, Wakeup};

use crate::memory::Memory;
use crate::notification;
use crate::remote::{Connection, Remote};
use crate::status::Status;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

/// A descriptor of a list, as NIXL passes it.
#[repr(C)]
pub struct Descriptor {
    pub address: u64,
    pub bytes: u64,
    pub device: u64,
    pub metadata: *const Metadata,
}

/// The C++ object of the shim that refers to registered memory.
#[repr(C)]
pub struct Metadata {
    virtual_functions: *const c_void,
    is_private: bool,
    memory: *const Memory,
}

impl Descriptor {
    /// # Safety
    /// The metadata is null or a live object of the shim.
    unsafe fn memory(&self) -> Option<&Memory> {
        // SAFETY: the caller promises null or a live object, which holds a reference to its memory.
        unsafe { self.metadata.as_ref().and_then(|metadata| metadata.memory.as_ref()) }
    }
}

pub struct Transfer {
    operation: Operation,
    route: Route,
    /// Name of this agent, for notifications.
    sender: Arc<[u8]>,
    /// The process that prepared the transfer.
    process: u32,
    phase: Mutex<Phase>,
}

/// The prepared transfers with remote agents.
#[derive(Default)]
pub struct Transfers(Mutex<Vec<Weak<Transfer>>>);

impl Transfers {
    pub fn add(&self, transfer: &Arc<Transfer>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The list is cleaned up only when it would grow: each transfer then costs a constant time, and dropped
        // entries take little space.
        if all.len() == all.capacity() {
            all.retain(|transfer| transfer.strong_count() > 0);
            let room = all.len().max(64);
            all.reserve(room);
        }
        all.push(Arc::downgrade(transfer));
    }

    /// Cancels the transfers in flight that use this memory.
    pub fn cancel_those_of(&self, memory: &Memory) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        all.iter().filter_map(Weak::upgrade).for_each(|transfer| transfer.cancel_if_of(memory));
    }
}

enum Route {
    Remote {
        remote: Arc<Remote>,
        list: BlockList,
        bytes: u64,
        /// Addresses of the local [`Memory`] objects in the list, for comparison only.
        memory: Vec<usize>,
    },
    /// Copies within this agent, without a connection.
    Own(Vec<Copy>),
}

struct Copy {
    from: (Region, u64),
    to: (Region, u64),
    bytes: u64,
}

#[derive(Default)]
struct Phase {
    /// Number of times that the transfer was posted.
    post: u64,
    step: Step,
    /// Time of NIXL's last status call for this transfer.
    asked_at: Option<Instant>,
}

/// Longest wait of a status call in a polling loop. The wait ends when the transfer ends.
const SPIN_PAUSE: Duration = Duration::from_micros(300);
/// Longest wait of a status call in a loop over this transfer alone, where no call for another transfer is delayed.
const SPIN_PAUSE_ALONE: Duration = Duration::from_millis(1);
/// Longest time between two status calls of one transfer that form a polling loop: the caller has nothing else to
/// do.
const SPIN_APART: Duration = Duration::from_micros(20);
/// Fewest bytes of a transfer for which a status call waits; shorter transfers are moved by the status call itself,
/// which then must not wait.
const SPIN_BYTES_MIN: u64 = 512 << 10;

impl Phase {
    fn is_spun_on(&mut self, transfer: &Transfer) -> bool {
        let Route::Remote { bytes, .. } = transfer.route else { return false };
        let now = Instant::now();
        let before = self.asked_at.replace(now);
        bytes >= SPIN_BYTES_MIN && before.is_some_and(|before| now - before < SPIN_APART)
    }
}

#[derive(Default)]
enum Step {
    /// The transfer is not posted yet.
    #[default]
    Prepared,
    /// The transfer waits for the connection.
    Waiting {
        notification: Option<Vec<u8>>,
    },
    Moving {
        transfer: ferrywire::Transfer,
        notification: Option<Vec<u8>>,
    },
    /// The bytes have arrived, and a status call sends the notification, or it waits for a connection.
    Notifying,
    Ended(Status),
}

/// Parts of the agent that a transfer uses.
pub struct Context<'a> {
    pub connect_timeout: Duration,
    pub wakeup: &'a Wakeup,
}

impl Transfer {
    /// Prepares a transfer with a remote agent.
    ///
    /// # Errors
    /// `Status` for lists that do not match each other or their registrations.
    ///
    /// # Safety
    /// The metadata of each descriptor is null or a live object of the shim.
    pub unsafe fn with_remote(
        operation: Operation,
        local: &[Descriptor],
        remote: &[Descriptor],
        peer: Arc<Remote>,
        sender: Arc<[u8]>,
    ) -> Result<Transfer, Status> {
        // SAFETY: the caller promises that the metadata is null or live.
        let (list, memory) = unsafe { blocks(local, remote) }?;
        let bytes = list.bytes();
        let route = Route::Remote { remote: peer, list, bytes, memory };
        Ok(Transfer { operation, route, sender, process: std::process::id(), phase: Mutex::default() })
    }

    /// Prepares a transfer within this agent.
    ///
    /// # Errors
    /// `Status` for lists that do not match each other or their registrations.
    ///
    /// # Safety
    /// The metadata of each descriptor is null or a live object of the shim.
    pub unsafe fn within(
        operation: Operation,
        local: &[Descriptor],
        other: &[Descriptor],
        sender: Arc<[u8]>,
    ) -> Result<Transfer, Status> {
        let at = |descriptor: &Descriptor| {
            // SAFETY: the caller promises that the metadata is null or live.
            match unsafe { descriptor.memory() } {
                Some(Memory::Local { region, base }) => {
                    Some((region.clone(), descriptor.address.checked_sub(*base)?))
                }
                _ => None,
            }
        };
        let copy = |(one, two): (&Descriptor, &Descriptor)| {
            let (here, there) = (at(one)?, at(two)?);
            let (from, to) = match operation {
                Operation::Read => (there, here),
                Operation::Write => (here, there),
            };
            (one.bytes == two.bytes).then_some(Copy { from, to, bytes: one.bytes })
        };
        let copies: Option<Vec<Copy>> = local.iter().zip(other).map(copy).collect();
        let copies = copies.filter(|_| local.len() == other.len() && !local.is_empty());
        let route = Route::Own(copies.ok_or(Status::INVALID_PARAMETER)?);
        Ok(Transfer { operation, route, sender, process: std::process::id(), phase: Mutex::default() })
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the transfer, now or once there is a connection. A transfer within the agent is complete when this
    /// returns; the caller delivers its notification.
    pub fn post(self: &Arc<Transfer>, notification: Option<Vec<u8>>, context: &Context<'_>) -> Status {
        let (remote, post) = match &self.route {
            Route::Own(copies) => {
                let done = copies.iter().try_for_each(Copy::make);
                let status = done.map_or_else(Status::of, |()| Status::SUCCESS);
                self.phase().step = Step::Ended(status);
                return status;
            }
            Route::Remote { remote, .. } => {
                let mut phase = self.phase();
                if let Step::Waiting { .. } | Step::Moving { .. } | Step::Notifying = phase.step {
                    return Status::REPOST_ACTIVE;
                }
                phase.post += 1;
                phase.step = Step::Waiting { notification };
                (remote, phase.post)
            }
        };
        match remote.connection_for(self, post, context.connect_timeout, context.wakeup) {
            Connection::Up(peer) => self.start(&peer, post),
            Connection::Waiting => {}
            Connection::Removed => self.fail_waiting(post),
        }
        match &self.phase().step {
            Step::Ended(status) => *status,
            _ => Status::IN_PROGRESS,
        }
    }

    /// Starts the post that waited for a connection, because there is one.
    pub fn start(&self, peer: &Peer, post: u64) {
        let mut phase = self.phase();
        let Route::Remote { list, remote, .. } = &self.route else { return };
        if phase.post != post || !matches!(phase.step, Step::Waiting { .. }) {
            return;
        }
        let Step::Waiting { notification } = std::mem::take(&mut phase.step) else { return };
        let with_bytes = |message: &Vec<u8>| {
            self.operation == Operation::Write && notification::is_short(&self.sender, message)
        };
        let (first, later) = match notification {
            Some(message) if with_bytes(&message) => {
                (notification::encode(&self.sender, &message, 0).pop(), None)
            }
            other => (None, other),
        };
        let posted = match self.operation {
            Operation::Write => peer.write_blocks(list, None, first.as_deref()),
            Operation::Read => peer.read_blocks(list, None),
        };
        phase.step = match posted {
            Ok(transfer) => Step::Moving { transfer, notification: later },
            Err(error) => Step::Ended(remote.failed("a transfer could not be posted", error)),
        };
    }

    /// Whether the bytes of this post have arrived, and its notification is not sent yet.
    pub fn is_notifying(&self, post: u64) -> bool {
        let phase = self.phase();
        phase.post == post && matches!(phase.step, Step::Notifying)
    }

    /// Ends a post whose bytes have arrived, and whose notification waited for a connection.
    pub fn notified(&self, post: u64, status: Status) {
        let mut phase = self.phase();
        if phase.post == post && matches!(phase.step, Step::Notifying) {
            phase.step = Step::Ended(status);
        }
    }

    /// Fails the post that waited for a connection, because there is none.
    pub fn fail_waiting(&self, post: u64) {
        let mut phase = self.phase();
        if phase.post == post && matches!(phase.step, Step::Waiting { .. }) {
            phase.step = Step::Ended(Status::REMOTE_DISCONNECT);
        }
    }

    /// The status of the transfer. Sends the notification once the bytes have arrived. `alone` says that the
    /// process's last status call was for this transfer.
    pub fn check(self: &Arc<Transfer>, context: &Context<'_>, alone: bool) -> Status {
        let mut phase = self.phase();
        let Step::Moving { transfer, .. } = &phase.step else {
            return match phase.step {
                Step::Prepared => Status::NOT_POSTED,
                Step::Ended(status) => status,
                _ => Status::IN_PROGRESS,
            };
        };
        let mut outcome = transfer.poll();
        if outcome.is_none() && phase.is_spun_on(self) {
            // The status call waits, because a polling loop would take a core from the threads that move the bytes.
            let Step::Moving { transfer, .. } = &phase.step else { return Status::BACKEND };
            let transfer = transfer.clone();
            drop(phase);
            let _ = transfer.wait_for(if alone { SPIN_PAUSE_ALONE } else { SPIN_PAUSE }, Duration::MAX);
            phase = self.phase();
            phase.asked_at = Some(Instant::now());
            let Step::Moving { transfer, .. } = &phase.step else { return Status::IN_PROGRESS };
            outcome = transfer.poll();
        }
        let Some(outcome) = outcome else { return Status::IN_PROGRESS };
        let Route::Remote { remote, .. } = &self.route else { return Status::BACKEND };
        let Step::Moving { notification, .. } = std::mem::take(&mut phase.step) else {
            return Status::BACKEND;
        };
        let status = match (outcome, notification) {
            (Err(error), _) => remote.failed("a transfer failed", error),
            (Ok(_), None) => Status::SUCCESS,
            (Ok(_), Some(message)) => {
                phase.step = Step::Notifying;
                let of = Some((self, phase.post));
                // The lock is released first, because the remote's lock has to be taken before it.
                drop(phase);
                let status =
                    remote.notify(&self.sender, &message, of, context.connect_timeout, context.wakeup);
                if status == Status::IN_PROGRESS {
                    return status;
                }
                phase = self.phase();
                status
            }
        };
        phase.step = Step::Ended(status);
        status
    }

    /// Cancels the transfer if it uses this memory.
    fn cancel_if_of(&self, one: &Memory) {
        let Route::Remote { memory, .. } = &self.route else { return };
        if !memory.contains(&std::ptr::from_ref(one).addr()) {
            return;
        }
        let mut phase = self.phase();
        match &phase.step {
            Step::Moving { transfer, .. } => transfer.cancel(),
            // Else it could start before the memory is deregistered, and use it then.
            Step::Waiting { .. } => phase.step = Step::Ended(Status::CANCELLED),
            _ => {}
        }
    }

    /// Whether the transfer is within this agent.
    pub fn is_within(&self) -> bool {
        matches!(self.route, Route::Own(_))
    }

    /// Ends the caller's use of the transfer. A transfer in flight is cancelled and not waited for; in a forked child it
    /// belongs to the parent and goes on.
    pub fn release(self: Arc<Transfer>) {
        if self.process != std::process::id() {
            // Another thread of the parent may have held a lock of it or of what it uses.
            return std::mem::forget(self);
        }
        let mut phase = self.phase();
        if let Step::Moving { transfer, .. } = &phase.step {
            transfer.cancel();
        }
        phase.step = Step::Ended(Status::CANCELLED);
    }
}

impl Copy {
    fn make(&self) -> Result<(), RegisterError> {
        const PIECE_BYTES: usize = 1 << 20;
        let ((from, from_offset), (to, to_offset)) = (&self.from, &self.to);
        let mut buffer = vec![0; PIECE_BYTES.min(self.bytes as usize)];
        let mut done = 0;
        while done < self.bytes {
            let piece = &mut buffer[..PIECE_BYTES.min((self.bytes - done) as usize)];
            from.read_at(from_offset + done, piece)?;
            to.write_at(to_offset + done, piece)?;
            done += piece.len() as u64;
        }
        Ok(())
    }
}

/// The joined block list of two descriptor lists, and the local memories in it.
///
/// # Safety
/// The metadata of each descriptor is null or a live object of the shim.
unsafe fn blocks(local: &[Descriptor], remote: &[Descriptor]) -> Result<(BlockList, Vec<usize>), Status> {
    if local.len() != remote.len() || local.is_empty() {
        return Err(Status::INVALID_PARAMETER);
    }
    type Pair = (*const Memory, *const Memory);
    let mut pairs: Vec<(Pair, Vec<Block>)> = Vec::new();
    let mut known: HashMap<Pair, usize> = HashMap::new();
    let mut at = usize::MAX;
    for (here, there) in local.iter().zip(remote) {
        // SAFETY: the caller promises that the metadata is null or live.
        let (Some(one), Some(two)) = (unsafe { here.memory() }, unsafe { there.memory() }) else {
            return Err(Status::INVALID_PARAMETER);
        };
        let pair: Pair = (one, two);
        if pairs.get(at).is_none_or(|(last, _)| *last != pair) {
            at = *known.entry(pair).or_insert_with(|| {
                // One registration on each side is the common case, so the first list has room for all blocks.
                pairs.push((pair, Vec::with_capacity(if pairs.is_empty() { local.len() } else { 0 })));
                pairs.len() - 1
            });
        }
        let offsets = (here.address.checked_sub(one.base()), there.address.checked_sub(two.base()));
        match offsets {
            (Some(local_offset), Some(remote_offset)) if here.bytes == there.bytes => {
                pairs[at].1.push(Block { local_offset, remote_offset, bytes: here.bytes });
            }
            _ => return Err(Status::INVALID_PARAMETER),
        }
    }
    let list_of = |((one, two), blocks): &(Pair, Vec<Block>)| {
        // SAFETY: the caller promises that the references of the descriptors live.
        match unsafe { (&**one, &**two) } {
            (Memory::Local { region, .. }, Memory::Remote { region: remote, .. }) => {
                BlockList::new(region, remote, blocks).map_err(refused)
            }
            _ => Err(Status::INVALID_PARAMETER),
        }
    };
    let mut memory: Vec<usize> = pairs.iter().map(|((one, _), _)| one.addr()).collect();
    memory.sort_unstable();
    memory.dedup();
    let mut lists = pairs.iter().map(list_of).collect::<Result<Vec<_>, _>>()?;
    let list = match lists.pop() {
        Some(only) if lists.is_empty() => only,
        Some(last) => {
            lists.push(last);
            BlockList::join(&lists.iter().collect::<Vec<_>>()).map_err(refused)?
        }
        None => return Err(Status::INVALID_PARAMETER),
    };
    Ok((list, memory))
}

fn refused(error: TransferError) -> Status {
    tracing::warn!(%error, "cannot prepare a transfer");
    Status::of(error)
}
