//! Access to regions: which memory a peer may touch, and until when.

use crate::world::{Raw, World, assert_same, contents, pattern};
use ferrywire::{Block, BlockList, RemoteRegion, TransferError};

pub fn deregistered_regions_are_refused(world: &mut impl World) {
    let (peer, _far) = world.pair();
    for bytes in [0, 10, world.bytes_max()] {
        let here = world.patterned(0, bytes, 1);
        let there = world.zeroed(1, bytes);
        let remote = RemoteRegion::from_bytes(&there.descriptor().to_bytes()).unwrap();
        there.deregister().unwrap();
        let write = peer.write(&here, 0, &remote, 0, bytes as u64).unwrap();
        let outcome = world.outcome(&write);
        assert!(matches!(outcome, Err(TransferError::AccessRefused { .. })), "write of {bytes}: {outcome:?}");
        if bytes > 0 {
            let read = peer.read(&here, 0, &remote, 0, bytes as u64).unwrap();
            let outcome = world.outcome(&read);
            assert!(
                matches!(outcome, Err(TransferError::AccessRefused { .. })),
                "read of {bytes}: {outcome:?}"
            );
        }
        assert_same(&contents(&here), &pattern(bytes, 1), "the local side of a refused access");
    }
    // The connection is as good as before.
    let (here, there) = (world.patterned(0, 5000, 2), world.zeroed(1, 5000));
    let write = peer.write(&here, 0, &there.descriptor(), 0, 5000).unwrap();
    world.all_done(&[write]);
    assert_same(&contents(&there), &pattern(5000, 2), "a write after refused ones");
}

/// A refused write delivers no notification, and does not delay transfers behind it.
pub fn refused_writes_do_not_notify(world: &mut impl World) {
    let (peer, far) = world.pair();
    for bytes in [10, world.bytes_max()] {
        let here = world.patterned(0, bytes, 1);
        let there = world.zeroed(1, bytes);
        let remote = there.descriptor();
        there.deregister().unwrap();
        let write = peer.write_notify(&here, 0, &remote, 0, bytes as u64, b"never").unwrap();
        let after = peer.notify(b"after").unwrap();
        let outcome = world.outcome(&write);
        assert!(matches!(outcome, Err(TransferError::AccessRefused { .. })), "{outcome:?}");
        assert_eq!(world.notification(&far), Ok(b"after".to_vec()));
        world.all_done(&[after]);
    }
}

/// A joined list with one missing target fails as a whole, delivers no notification, and releases the other memory.
pub fn a_refused_part_fails_the_whole(world: &mut impl World) {
    let (peer, far) = world.pair();
    for gone in 0..3 {
        let bytes = [10, world.bytes_max() / 2, 100_000];
        let sources = bytes.map(|bytes| world.patterned(0, bytes, 1));
        let mut targets: Vec<_> = bytes.map(|bytes| world.zeroed(1, bytes)).into();
        let lists = [0, 1, 2].map(|index| {
            let block = Block { local_offset: 0, remote_offset: 0, bytes: bytes[index] as u64 };
            BlockList::new(&sources[index], &targets[index].descriptor(), &[block]).unwrap()
        });
        let list = BlockList::join(&lists.each_ref()).unwrap();
        targets.remove(gone).deregister().unwrap();
        let write = peer.write_blocks(&list, None, Some(b"never")).unwrap();
        let read = peer.read_blocks(&list, None).unwrap();
        let after = peer.notify(b"after").unwrap();
        for transfer in [write, read] {
            let outcome = world.outcome(&transfer);
            assert!(matches!(outcome, Err(TransferError::AccessRefused { .. })), "{outcome:?}");
        }
        assert_eq!(world.notification(&far), Ok(b"after".to_vec()));
        world.all_done(&[after]);
        drop((list, lists));
        sources.into_iter().for_each(|source| source.deregister().unwrap());
    }
    assert_eq!(far.poll_notification(), Ok(None));
}

/// When deregistration returns nothing more is placed, however much is under way.
pub fn deregistered_during_a_write(world: &mut impl World) {
    let (peer, _far) = world.pair();
    let bytes = world.bytes_max();
    let source = world.patterned(0, bytes, 1);
    let mut memory = Raw::new(world.gpus().of(1), bytes);
    // SAFETY: `memory` outlives the region, which is deregistered below, and is only read after.
    let target = unsafe { world.end(1).register_raw(memory.base(), bytes) }.unwrap();
    let write = peer.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
    let enough = (world.below(4) * bytes / 4) as u64;
    world.until("some bytes", || (write.bytes_moved() >= enough || write.poll().is_some()).then_some(()));
    target.deregister().unwrap();
    memory.bytes().fill(0xEE);
    match world.outcome(&write) {
        Ok(moved) => assert_eq!(moved, bytes as u64),
        Err(error) => assert!(matches!(error, TransferError::AccessRefused { .. }), "{error}"),
    }
    world.linger();
    assert_same(memory.bytes(), &vec![0xEE; bytes], "memory that is the caller's again");
}

/// The error used to say that the peer had ended the read.
pub fn deregistered_during_a_read_into_it(world: &mut impl World) {
    let (peer, _far) = world.pair();
    let bytes = world.bytes_max();
    let source = world.patterned(1, bytes, 1);
    let target = world.zeroed(0, bytes);
    let read = peer.read(&target, 0, &source.descriptor(), 0, bytes as u64).unwrap();
    target.deregister().unwrap();
    match world.outcome(&read) {
        Ok(moved) => assert_eq!(moved, bytes as u64),
        Err(error) => assert!(matches!(error, TransferError::Invalid { .. }), "{error}"),
    }
}

/// A handle of an operation that has ended does not keep its memory.
pub fn deregistered_while_ended_transfers_are_held(world: &mut impl World) {
    let (peer, far) = world.pair();
    let mut memory = vec![7u8; 100_000];
    // SAFETY: `memory` outlives the region, which is deregistered below.
    let source = unsafe { world.end(0).register_raw(memory.as_mut_ptr(), memory.len()) }.unwrap();
    let target = world.zeroed(1, 100_000);
    let write = peer.write(&source, 0, &target.descriptor(), 0, 100_000).unwrap();
    let send = peer.send(1, &source, 0, 100_000).unwrap();
    let received = far.recv(1, &target, 0, 100_000).unwrap();
    world.all_done(&[write.clone(), send.clone(), received]);
    assert_eq!(source.deregister(), Ok(()));
    memory.fill(0);
    assert_eq!(world.outcome(&write), Ok(100_000));
}

pub fn wrong_regions_and_offsets_are_refused_at_once(world: &mut impl World) {
    let (peer, far) = world.pair();
    let third = world.add(1, |builder| builder);
    let (up, _down) = world.connect(third, 0);
    let (mine, theirs, others) = (world.zeroed(0, 100), world.zeroed(1, 100), world.zeroed(third, 100));
    let remote = theirs.descriptor();
    let invalid = |error| assert!(matches!(error, TransferError::Invalid { .. }), "{error}");
    invalid(peer.write(&mine, 0, &others.descriptor(), 0, 10).unwrap_err());
    invalid(peer.read(&mine, 0, &others.descriptor(), 0, 10).unwrap_err());
    invalid(peer.write(&others, 0, &remote, 0, 10).unwrap_err());
    invalid(peer.send(1, &others, 0, 10).unwrap_err());
    invalid(far.recv(1, &mine, 0, 10).unwrap_err());
    invalid(up.write(&others, 0, &remote, 0, 10).unwrap_err());
    let outside = |error| assert!(matches!(error, TransferError::OutOfRegion { .. }), "{error}");
    for (offset, bytes) in [(0, 101), (100, 1), (u64::MAX, 1), (1, u64::MAX), (101, 0)] {
        outside(peer.write(&mine, offset, &remote, 0, bytes).unwrap_err());
        outside(peer.read(&mine, 0, &remote, offset, bytes).unwrap_err());
        outside(peer.send(1, &mine, offset, bytes).unwrap_err());
        outside(peer.recv(1, &mine, offset, bytes).unwrap_err());
        let block = Block { local_offset: 0, remote_offset: offset, bytes };
        outside(BlockList::new(&mine, &remote, &[block]).unwrap_err());
    }
    let gone = world.zeroed(0, 10);
    gone.clone().deregister().unwrap();
    invalid(peer.write(&gone, 0, &remote, 0, 10).unwrap_err());
}
