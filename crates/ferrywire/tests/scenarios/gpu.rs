//! Memory of a GPU on transports that do not reach it: refused by name, with nothing moved.

use crate::world::{World, assert_same, contents, pattern};
use ferrywire::{Block, BlockList, Error, Place, Region, RemoteRegion, Result, Transfer};

const BYTES: usize = 100_000;

/// A region on simulated GPU 0 with bytes that follow from a salt.
fn on_gpu(world: &impl World, index: usize, salt: u64) -> Region {
    let region = world.end(index).register_sim(0, BYTES).unwrap();
    region.write_at(0, &pattern(BYTES, salt)).unwrap();
    region
}

#[track_caller]
fn out_of_reach(expected_side: &str, result: Result<Transfer>) {
    let error = result.unwrap_err();
    let Error::OutOfReach { side, place, .. } = &error else { panic!("{error}") };
    assert_eq!((*side, *place), (expected_side, Place::SimGpu(0)));
    let text = error.to_string();
    assert!(text.contains("memory of simulated GPU 0, which needs --transport plugin"), "{text}");
}

/// The caller's own side, and what a peer's descriptor says.
pub fn gpu_memory_is_refused_before_anything_moves(world: &mut impl World) {
    let (near, far) = world.pair();
    // From the end that connected, and from the end that accepted.
    for (mine, theirs, peer) in [(0, 1, &near), (1, 0, &far)] {
        let (gpu, host) = (on_gpu(world, mine, 1), world.patterned(mine, BYTES, 2));
        let (remote_gpu, remote_host) = (on_gpu(world, theirs, 3), world.patterned(theirs, BYTES, 4));
        let (to_gpu, to_host) = (remote_gpu.descriptor(), remote_host.descriptor());
        let block = Block { local_offset: 5, remote_offset: 6, bytes: 700 };
        for bytes in [0, 10, BYTES as u64] {
            out_of_reach("local", peer.write(&gpu, 0, &to_host, 0, bytes));
            out_of_reach("local", peer.write_notify(&gpu, 0, &to_host, 0, bytes, b"never"));
            out_of_reach("local", peer.read(&gpu, 0, &to_host, 0, bytes));
            out_of_reach("local", peer.send(1, &gpu, 0, bytes));
            out_of_reach("local", peer.recv(1, &gpu, 0, bytes));
            out_of_reach("remote", peer.write(&host, 0, &to_gpu, 0, bytes));
            out_of_reach("remote", peer.read(&host, 0, &to_gpu, 0, bytes));
        }
        out_of_reach("local", peer.send_blocks(1, &gpu, &[(0, 10), (20, 10)]));
        out_of_reach("local", peer.recv_blocks(1, &gpu, &[(0, 10), (20, 10)]));
        for (region, remote, side) in [(&gpu, &to_host, "local"), (&host, &to_gpu, "remote")] {
            let list = BlockList::new(region, remote, &[block]).unwrap();
            out_of_reach(side, peer.write_blocks(&list, None, None));
            out_of_reach(side, peer.read_blocks(&list, Some(&[0])));
        }
        world.linger();
        for (region, salt) in [(&gpu, 1), (&host, 2), (&remote_gpu, 3), (&remote_host, 4)] {
            assert_same(&contents(region), &pattern(BYTES, salt), "memory of refused operations");
        }
        // What was refused left nothing behind: the next message meets the next receive.
        let (sent, source) = (world.patterned(theirs, 10, 5), if mine == 0 { &far } else { &near });
        let transfers = [peer.recv(1, &host, 0, 10).unwrap(), source.send(1, &sent, 0, 10).unwrap()];
        world.all_done(&transfers);
        assert_same(&contents(&host)[..10], &pattern(10, 5), "a message after refused ones");
    }
    assert_eq!((near.poll_notification(), far.poll_notification()), (Ok(None), Ok(None)));
}

/// A peer that says, or believes, that GPU memory is host memory is told otherwise.
pub fn gpu_memory_is_refused_by_its_owner_too(world: &mut impl World) {
    let (near, far) = world.pair();
    for (mine, theirs, peer) in [(0, 1, &near), (1, 0, &far)] {
        let (host, gpu) = (world.patterned(mine, BYTES, 1), on_gpu(world, theirs, 2));
        let mut descriptor = gpu.descriptor().to_bytes();
        let place = descriptor.len() - 3;
        descriptor[place..].fill(0);
        let wrong = RemoteRegion::from_bytes(&descriptor).unwrap();
        assert_eq!(wrong.place(), Place::Host);
        let blocks = [(0, 10), (50, 20), (99, 300)];
        let blocks =
            blocks.map(|(offset, bytes)| Block { local_offset: offset, remote_offset: offset, bytes });
        let list = BlockList::new(&host, &wrong, &blocks).unwrap();
        let all = BYTES as u64;
        let transfers = [
            peer.write(&host, 0, &wrong, 0, 0),
            peer.write(&host, 0, &wrong, 0, 10),
            peer.write_notify(&host, 0, &wrong, 0, all, b"never"),
            peer.write_blocks(&list, None, None),
            peer.read(&host, 0, &wrong, 0, 10),
            peer.read(&host, 0, &wrong, 0, all),
            peer.read_blocks(&list, None),
        ];
        for transfer in transfers {
            let transfer = transfer.unwrap();
            match world.outcome(&transfer) {
                Err(Error::AccessRefused { why, .. }) => assert!(why.contains("memory of a GPU"), "{why}"),
                outcome => panic!("{transfer:?} ended in {outcome:?}"),
            }
        }
        world.linger();
        assert_same(&contents(&host), &pattern(BYTES, 1), "the local side of refused accesses");
        assert_same(&contents(&gpu), &pattern(BYTES, 2), "GPU memory that the transport does not reach");
        // The connection is as good as before.
        let target = world.zeroed(theirs, BYTES);
        let write = peer.write(&host, 0, &target.descriptor(), 0, all).unwrap();
        world.all_done(&[write]);
        assert_same(&contents(&target), &pattern(BYTES, 1), "a write after refused ones");
    }
    assert_eq!((near.poll_notification(), far.poll_notification()), (Ok(None), Ok(None)));
}
