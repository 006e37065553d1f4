//! Bytes that move when nothing goes wrong.

use crate::world::{World, assert_same, contents, pattern};
use ferrywire::{Block, BlockList, Transfer};
use rand::Rng;
use rand::seq::SliceRandom;

/// Bytes before and behind a target that nothing may touch.
const GUARD: usize = 64;

/// Nothing, one byte, odd sizes, the edges of small operations and of chunks, and a large one.
fn sizes(world: &impl World) -> Vec<usize> {
    let (chunk, small) = (world.chunk_bytes(), 64 << 10);
    let mut sizes = vec![0, 1, 777, small - 1, small, small + 1];
    sizes.extend([16 * chunk - 1, 16 * chunk, 16 * chunk + 1, world.bytes_max()]);
    sizes
}

pub fn writes_of_every_size(world: &mut impl World) {
    let (peer, _far) = world.pair();
    for (salt, bytes) in sizes(world).into_iter().enumerate() {
        let source = world.patterned(0, bytes + 3, salt as u64);
        let target = world.zeroed(1, bytes + 2 * GUARD);
        let transfer = peer.write(&source, 3, &target.descriptor(), GUARD as u64, bytes as u64).unwrap();
        assert_eq!(world.outcome(&transfer), Ok(bytes as u64));
        let mut expected = vec![0; bytes + 2 * GUARD];
        expected[GUARD..GUARD + bytes].copy_from_slice(&pattern(bytes + 3, salt as u64)[3..]);
        assert_same(&contents(&target), &expected, &format!("a write of {bytes}"));
    }
}

pub fn reads_of_every_size(world: &mut impl World) {
    let (peer, far) = world.pair();
    for (salt, bytes) in sizes(world).into_iter().enumerate() {
        // In turn from either side.
        let (here, there, peer) = [(0, 1, &peer), (1, 0, &far)][salt % 2];
        let source = world.patterned(there, bytes + 3, salt as u64);
        let target = world.zeroed(here, bytes + 2 * GUARD);
        let transfer = peer.read(&target, GUARD as u64, &source.descriptor(), 3, bytes as u64).unwrap();
        assert_eq!(world.outcome(&transfer), Ok(bytes as u64));
        let mut expected = vec![0; bytes + 2 * GUARD];
        expected[GUARD..GUARD + bytes].copy_from_slice(&pattern(bytes + 3, salt as u64)[3..]);
        assert_same(&contents(&target), &expected, &format!("a read of {bytes}"));
    }
}

/// Blocks of mixed sizes, in shuffled places on both sides, with gaps between some of them.
fn shuffled_blocks(world: &mut impl World, count: usize) -> (Vec<Block>, usize) {
    let mut blocks = Vec::new();
    let mut end = 0u64;
    for _ in 0..count {
        let bytes = [0, 1, 64, 100, 700, 4096][world.below(6)];
        let gap = [0, 0, 1, 33][world.below(4)];
        blocks.push(Block { local_offset: end, remote_offset: 0, bytes });
        end += bytes + gap;
    }
    let total = end as usize;
    let mut order: Vec<usize> = (0..count).collect();
    order.shuffle(world.rng());
    let mut at = 0;
    for index in order {
        blocks[index].remote_offset = at;
        at += blocks[index].bytes + 7;
    }
    blocks.shuffle(world.rng());
    (blocks, total.max(at as usize) + 1)
}

/// The contents of zeroed memory after the blocks were moved.
fn moved<'a>(blocks: impl Iterator<Item = &'a Block>, from: &[u8], write: bool) -> Vec<u8> {
    let mut out = vec![0; from.len()];
    for block in blocks {
        let (local, remote) = (block.local_offset as usize, block.remote_offset as usize);
        let (source, target) = if write { (local, remote) } else { (remote, local) };
        let bytes = block.bytes as usize;
        out[target..target + bytes].copy_from_slice(&from[source..source + bytes]);
    }
    out
}

pub fn blocks_are_written_and_read(world: &mut impl World) {
    let (peer, _far) = world.pair();
    for (round, count) in [0, 1, 40, 700].into_iter().enumerate() {
        let (blocks, bytes) = shuffled_blocks(world, count);
        let bytes_here = pattern(bytes, round as u64);
        let [source, back] = [0, 1].map(|_| world.zeroed(0, bytes));
        source.write_at(0, &bytes_here).unwrap();
        let target = world.zeroed(1, bytes);
        let total: u64 = blocks.iter().map(|block| block.bytes).sum();
        let list = BlockList::new(&source, &target.descriptor(), &blocks).unwrap();
        let transfer = peer.write_blocks(&list, None, None).unwrap();
        assert_eq!(world.outcome(&transfer), Ok(total));
        assert_same(&contents(&target), &moved(blocks.iter(), &bytes_here, true), "blocks written");

        // Every third block by its index, in any order, from a list made once.
        let mut chosen: Vec<u32> = (0..count as u32).step_by(3).collect();
        chosen.shuffle(world.rng());
        target.write_at(0, &pattern(bytes, 99)).unwrap();
        let list = BlockList::new(&back, &target.descriptor(), &blocks).unwrap();
        let transfer = peer.read_blocks(&list, Some(&chosen)).unwrap();
        let picked = || chosen.iter().map(|index| &blocks[*index as usize]);
        assert_eq!(world.outcome(&transfer), Ok(picked().map(|block| block.bytes).sum()));
        assert_same(&contents(&back), &moved(picked(), &pattern(bytes, 99), false), "blocks read");
        assert!(peer.read_blocks(&list, Some(&[count as u32])).is_err());
    }
}

/// One operation and one notification over several pairs of regions, written, read, and in part.
pub fn joined_lists_are_written_and_read(world: &mut impl World) {
    let (peer, far) = world.pair();
    for (round, counts) in
        [vec![40, 0, 3, 300], vec![0, 0], vec![0, 1, 0], vec![1; 30]].into_iter().enumerate()
    {
        let mut lists = Vec::new();
        let mut expected = Vec::new();
        let mut blocks_of_all = Vec::new();
        for (index, count) in counts.iter().enumerate() {
            let (blocks, bytes) = shuffled_blocks(world, *count);
            let salt = (round * 100 + index) as u64;
            let (source, target) = (world.patterned(0, bytes, salt), world.zeroed(1, bytes));
            lists.push(BlockList::new(&source, &target.descriptor(), &blocks).unwrap());
            expected.push((source, target, moved(blocks.iter(), &pattern(bytes, salt), true)));
            blocks_of_all.extend(blocks.into_iter().map(|block| (index, block)));
        }
        let list = BlockList::join(&lists.iter().collect::<Vec<_>>()).unwrap();
        let total: u64 = blocks_of_all.iter().map(|(_, block)| block.bytes).sum();
        assert_eq!((list.len(), list.bytes()), (blocks_of_all.len(), total));
        let transfer = peer.write_blocks(&list, None, Some(b"all of it")).unwrap();
        let behind = peer.notify(b"behind").unwrap();
        assert_eq!(world.notification(&far), Ok(b"all of it".to_vec()));
        for (_, target, expected) in &expected {
            assert_same(&contents(target), expected, "at the moment of notification");
        }
        assert_eq!(world.outcome(&transfer), Ok(total));
        assert_eq!(transfer.bytes_moved(), total);
        assert_eq!(world.notification(&far), Ok(b"behind".to_vec()));
        world.all_done(&[behind]);

        // Every third block back, by its number among all.
        let mut chosen: Vec<u32> = (0..list.len() as u32).step_by(3).collect();
        chosen.shuffle(world.rng());
        let mut back = Vec::new();
        for (source, _, written) in &expected {
            source.write_at(0, &vec![0; written.len()]).unwrap();
            back.push(vec![0; written.len()]);
        }
        let mut bytes = 0;
        for (index, block) in chosen.iter().map(|index| &blocks_of_all[*index as usize]) {
            let (local, remote) = (block.local_offset as usize, block.remote_offset as usize);
            let run = expected[*index].2[remote..][..block.bytes as usize].to_vec();
            back[*index][local..][..run.len()].copy_from_slice(&run);
            bytes += block.bytes;
        }
        let transfer = peer.read_blocks(&list, Some(&chosen)).unwrap();
        assert_eq!(world.outcome(&transfer), Ok(bytes));
        for ((source, ..), back) in expected.iter().zip(&back) {
            assert_same(&contents(source), back, "blocks read back");
        }
        assert!(peer.read_blocks(&list, Some(&[list.len() as u32])).is_err());
    }
    assert_eq!(far.poll_notification(), Ok(None));
}

pub fn notifications_come_after_their_bytes(world: &mut impl World) {
    let (peer, far) = world.pair();
    let sizes = [0, 10, 64 << 10, world.bytes_max() / 2];
    for round in 0..6u64 {
        let bytes = sizes[world.below(sizes.len())];
        let source = world.patterned(0, bytes, round);
        let target = world.zeroed(1, bytes);
        let message = format!("round {round}");
        let transfer =
            peer.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, message.as_bytes()).unwrap();
        assert_eq!(world.notification(&far), Ok(message.into_bytes()));
        assert_same(&contents(&target), &pattern(bytes, round), "at the moment of notification");
        assert_eq!(world.outcome(&transfer), Ok(bytes as u64));
    }
    assert_eq!(far.poll_notification(), Ok(None), "none comes twice");
}

pub fn both_sides_at_once(world: &mut impl World) {
    let (peer, far) = world.pair();
    let bytes = world.bytes_max() / 4;
    let mut transfers = Vec::new();
    let mut checks = Vec::new();
    for round in 0..6u64 {
        for (here, there, peer) in [(0, 1, &peer), (1, 0, &far)] {
            let len = world.rng().random_range(0..bytes);
            let salt = 2 * round + here as u64;
            let (source, target) = if round % 2 == 0 {
                (world.patterned(here, len, salt), world.end(there).alloc_host(len.max(1)).unwrap())
            } else {
                (world.patterned(there, len, salt), world.end(here).alloc_host(len.max(1)).unwrap())
            };
            let transfer = match round % 2 {
                0 => peer.write(&source, 0, &target.descriptor(), 0, len as u64),
                _ => peer.read(&target, 0, &source.descriptor(), 0, len as u64),
            };
            transfers.push(transfer.unwrap());
            checks.push((source, target, len, salt));
        }
    }
    world.all_done(&transfers);
    for (_source, target, len, salt) in &checks {
        assert_same(&contents(target)[..*len], &pattern(*len, *salt), "both ways");
    }
}

pub fn many_peers(world: &mut impl World) {
    let clients = world.peers_max();
    let hub = world.add(1, |builder| builder);
    let bytes = 70_000;
    let mut all = Vec::new();
    for client in 1..=clients {
        let index = world.add(1, |builder| builder.channels(2));
        let (up, down) = world.connect(index, hub);
        assert_eq!(up.identity(), world.end(hub).identity());
        assert_eq!(down.identity(), world.end(index).identity());
        all.push((client, index, up, down));
    }
    assert_eq!(world.end(hub).peer_count(), clients);
    let mut transfers: Vec<Transfer> = Vec::new();
    let mut checks = Vec::new();
    for (client, index, up, down) in &all {
        let (mine, its) = (
            world.patterned(*index, bytes, *client as u64),
            world.patterned(hub, bytes, 100 + *client as u64),
        );
        let (at_hub, at_client) = (world.zeroed(hub, bytes), world.zeroed(*index, bytes));
        transfers.push(up.write(&mine, 0, &at_hub.descriptor(), 0, bytes as u64).unwrap());
        transfers.push(down.write(&its, 0, &at_client.descriptor(), 0, bytes as u64).unwrap());
        checks.push((*client as u64, at_hub));
        checks.push((100 + *client as u64, at_client));
    }
    world.all_done(&transfers);
    for (salt, target) in &checks {
        assert_same(&contents(target), &pattern(bytes, *salt), "each peer's own bytes");
    }
}
