//! A mixed load between two endpoints, and what has to be true of it in the end.
//!
//! Every operation of it either succeeds, and then its bytes are where they belong, or ends in a named
//! error; each notification comes at most once, and exactly once if its operation succeeded.

use crate::world::{World, contents, pattern};
use ferrywire::{Block, BlockList, Peer, Region, Transfer, TransferError};
use std::collections::BTreeMap;

struct Move {
    /// The endpoint that posted it.
    end: usize,
    transfer: Transfer,
    /// The expected contents of the targets, from their start on.
    check: Vec<(Region, usize, u64)>,
    /// Where its bytes come from: registered until the end.
    _source: Vec<Region>,
    /// The number of the notification that goes with it, and the side that gets it.
    notified: Option<(usize, u64)>,
    /// Of a send and its receive the other one.
    pair: Option<Transfer>,
    cancelled: bool,
}

/// Operations under way between two peers.
#[derive(Default)]
pub struct Load {
    moves: Vec<Move>,
    reported: BTreeMap<(usize, u64), u32>,
    next: u64,
    cancelled: bool,
}

impl Load {
    /// Posts `rounds` of everything from both sides; `ends` are the numbers of the endpoints and the
    /// peers as each sees the other.
    pub fn post(
        &mut self,
        world: &mut impl World,
        ends: [(usize, &Peer); 2],
        rounds: usize,
        bytes_max: usize,
    ) {
        for _ in 0..rounds {
            for (from, to) in [(0, 1), (1, 0)] {
                for _ in 0..4 {
                    // The other end may have lost the peer already.
                    let _ = self.one(world, ends, (from, to), bytes_max);
                }
            }
        }
    }

    /// Posts one operation of any kind.
    pub fn one(
        &mut self,
        world: &mut impl World,
        ends: [(usize, &Peer); 2],
        (from, to): (usize, usize),
        bytes_max: usize,
    ) -> Result<(), TransferError> {
        let ((here, peer), (there, other)) = (ends[from], ends[to]);
        let small = world.below(2) == 0;
        let bytes = world.below(if small { bytes_max.min(4000) } else { bytes_max } + 1);
        self.next += 1;
        let salt = self.next;
        match world.below(6) {
            0 => {
                let (source, target) = (world.patterned(here, bytes, salt), world.zeroed(there, bytes));
                let message = salt.to_le_bytes();
                let transfer =
                    peer.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, &message)?;
                self.add(here, transfer, [source], [(target, bytes, salt)], Some((to, salt)));
            }
            1 => {
                let (source, target) = (world.patterned(here, bytes, salt), world.zeroed(there, bytes));
                let transfer = peer.write(&source, 0, &target.descriptor(), 0, bytes as u64)?;
                self.add(here, transfer, [source], [(target, bytes, salt)], None);
            }
            2 => {
                let (source, target) = (world.patterned(there, bytes, salt), world.zeroed(here, bytes));
                let transfer = peer.read(&target, 0, &source.descriptor(), 0, bytes as u64)?;
                self.add(here, transfer, [source], [(target, bytes, salt)], None);
            }
            3 => {
                let (source, target) = (world.patterned(here, bytes, salt), world.zeroed(there, bytes));
                // Each send has a tag of its own, so that a failed one takes no other receive.
                let received = other.recv(salt, &target, 0, bytes as u64)?;
                self.add(there, received, [], [(target, bytes, salt)], None);
                let at = self.moves.len();
                match peer.send(salt, &source, 0, bytes as u64) {
                    Ok(sent) => {
                        self.add(here, sent.clone(), [source], [], None);
                        self.moves[at].pair = Some(self.moves[at - 1].transfer.clone());
                        self.moves[at - 1].pair = Some(sent);
                    }
                    Err(error) => {
                        self.moves[at - 1].transfer.cancel();
                        return Err(error);
                    }
                }
            }
            4 => {
                let transfer = peer.notify(&salt.to_le_bytes())?;
                self.add(here, transfer, [], [], Some((to, salt)));
            }
            _ => {
                // Written or read, between several pairs of regions.
                let write = world.below(2) == 0;
                let (end, other) = if write { (here, there) } else { (there, here) };
                let sizes =
                    [bytes / 2, 0, bytes / 3, bytes.min(100)].map(|bytes| (bytes, salt + bytes as u64));
                let sources = sizes.map(|(bytes, salt)| world.patterned(end, bytes, salt));
                let targets = sizes.map(|(bytes, _)| world.zeroed(other, bytes));
                let (local, remote) = if write { (&sources, &targets) } else { (&targets, &sources) };
                let lists = [0, 1, 2, 3].map(|index| {
                    let block = Block { local_offset: 0, remote_offset: 0, bytes: sizes[index].0 as u64 };
                    BlockList::new(&local[index], &remote[index].descriptor(), &[block]).unwrap()
                });
                let list = BlockList::join(&lists.each_ref())?;
                let message = salt.to_le_bytes();
                let transfer = match write {
                    true => peer.write_blocks(&list, None, Some(&message))?,
                    false => peer.read_blocks(&list, None)?,
                };
                let check =
                    targets.into_iter().zip(sizes).map(|(target, (bytes, salt))| (target, bytes, salt));
                self.add(here, transfer, sources, check, write.then_some((to, salt)));
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        end: usize,
        transfer: Transfer,
        source: impl IntoIterator<Item = Region>,
        check: impl IntoIterator<Item = (Region, usize, u64)>,
        notified: Option<(usize, u64)>,
    ) {
        self.moves.push(Move {
            end,
            transfer,
            check: check.into_iter().collect(),
            _source: source.into_iter().collect(),
            notified,
            pair: None,
            cancelled: false,
        });
    }

    /// Everything ends well.
    pub fn finish_well(mut self, world: &mut impl World, ends: [(usize, &Peer); 2]) {
        let failed = self.finish(world, ends);
        assert!(failed.is_empty(), "failed: {failed:?}");
    }

    /// Everything ends; returns the errors.
    pub fn finish(&mut self, world: &mut impl World, ends: [(usize, &Peer); 2]) -> Vec<TransferError> {
        let moves = std::mem::take(&mut self.moves);
        // A receive whose message was taken back waits for another one, and a send for another receive.
        for pair in moves.iter().filter(|each| each.cancelled).filter_map(|each| each.pair.as_ref()) {
            pair.cancel();
        }
        let mut failed = Vec::new();
        for each in &moves {
            match world.outcome(&each.transfer) {
                Err(error) => failed.push(error),
                Ok(moved) => {
                    if !each.check.is_empty() {
                        let bytes: usize = each.check.iter().map(|(_, bytes, _)| bytes).sum();
                        assert_eq!(moved, bytes as u64, "{:?}", each.transfer);
                    }
                    for (target, bytes, salt) in &each.check {
                        crate::world::assert_same(
                            &contents(target),
                            &pattern(*bytes, *salt),
                            &format!("{:?}", each.transfer),
                        );
                    }
                }
            }
        }
        // Notifications of finished operations have arrived, and late ones do not arrive twice.
        world.linger();
        for (index, (_, peer)) in ends.iter().enumerate() {
            while let Ok(Some(message)) = peer.poll_notification() {
                self.tell(index, message);
            }
        }
        for each in &moves {
            let Some(key) = each.notified else { continue };
            let times = self.reported.get(&key).copied().unwrap_or(0);
            let well = matches!(each.transfer.poll(), Some(Ok(_)));
            assert!(times == 1 || (times == 0 && !well), "{key:?} came {times} times, success: {well}");
        }
        failed
    }

    /// Another notification that one side gets.
    pub fn expecting(mut self, far: &Peer, message: &[u8]) -> Load {
        let found = std::iter::from_fn(|| far.poll_notification().ok().flatten());
        let mut times = 0;
        for each in found {
            match each == message {
                true => times += 1,
                false => self.tell(1, each),
            }
        }
        assert_eq!(times, 1, "{message:?}");
        self
    }

    fn tell(&mut self, side: usize, message: Vec<u8>) {
        let number = u64::from_le_bytes(message.try_into().expect("ours have 8 bytes"));
        *self.reported.entry((side, number)).or_default() += 1;
    }

    /// Forgets what the other side posted: its process is gone.
    pub fn keep_of(&mut self, end: usize) {
        self.moves.retain(|each| each.end == end);
        self.moves.iter_mut().for_each(|each| each.notified = None);
    }

    /// Cancels one of the operations.
    pub fn cancel_one(&mut self, world: &mut impl World) {
        if !self.moves.is_empty() {
            let index = world.below(self.moves.len());
            self.moves[index].transfer.cancel();
            self.moves[index].cancelled = true;
            self.cancelled = true;
        }
    }

    /// Whether any was cancelled.
    pub fn cancelled(&self) -> bool {
        self.cancelled
    }

    /// Bytes that have moved so far.
    pub fn moved(&self) -> u64 {
        self.moves.iter().map(|each| each.transfer.bytes_moved()).sum()
    }
}
