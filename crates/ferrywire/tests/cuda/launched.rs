//! Copies of transfers that a GPU's multiprocessors make: when not to ask them, and what they may touch. Needs the stand-in
//! with kernels, which can be made busy.

use crate::{gpu, is_alone, is_real, moves, of_stand_in, still_moves};
use ferrywire::{Block, BlockList, Endpoint, Peer, Region, TransferError};
use ferrywire_memory::cuda::{CudaError, CudaGpu};
use std::ffi::{c_int, c_ulonglong};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
const BYTES: usize = 8 << 20;

/// Two endpoints over TCP, with so many channels that one transfer finds a crowd, and the peer that one of them is to the other.
fn connected() -> (Endpoint, Endpoint, Peer) {
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(16).build().unwrap();
    let connecting = Endpoint::builder().channels(16).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    (accepting, connecting, near)
}

/// A kernel stands behind whatever computes there, for as long as that takes; a copy engine does not.
#[test]
fn while_multiprocessors_are_busy_the_copy_engines_copy() {
    let Some(gpu) = gpu() else { return };
    if is_real(&gpu) || !is_alone("launched::while_multiprocessors_are_busy_the_copy_engines_copy") {
        return;
    }
    let Some(hold) = of_stand_in(c"stand_in_hold_kernels") else {
        return println!("SKIPPED: needs a stand-in that runs kernels");
    };
    // SAFETY: the function of this name has this type.
    let hold: extern "C" fn(c_int) = unsafe { std::mem::transmute(hold) };
    let (accepting, connecting, near) = connected();
    let source = connecting.alloc_cuda(0, BYTES).unwrap();
    let target = accepting.alloc_cuda(0, BYTES).unwrap();
    let write = || near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
    let (start, mut waited, mut passed) = (Instant::now(), 0, 0);
    while waited == 0 || passed == 0 {
        assert!(
            start.elapsed() < LONG,
            "{waited} transfers waited for the multiprocessors, {passed} did not"
        );
        // Kernels that stay would still copy.
        std::thread::sleep(Duration::from_millis(20));
        hold(1);
        let under_way = write();
        // Some wait for them until that is known, and then now and then one that tries.
        match under_way.wait(Duration::from_millis(100)) {
            Ok(_) => passed += 1,
            Err(TransferError::Stalled { .. }) => {
                waited += 1;
                hold(0);
                assert_eq!(under_way.wait(LONG), Ok(BYTES as u64));
            }
            Err(error) => panic!("{error}"),
        }
        hold(0);
    }
}

/// A check of memory before the launch of a copy kernel comes too early.
#[test]
fn memory_that_is_freed_while_its_copy_is_launched_is_not_touched() {
    let Some(gpu) = gpu() else { return };
    let name = "launched::memory_that_is_freed_while_its_copy_is_launched_is_not_touched";
    if is_real(&gpu) || !is_alone(name) {
        return;
    }
    let Some(free) = of_stand_in(c"stand_in_free_at_launch") else {
        return println!("SKIPPED: needs a stand-in that runs kernels");
    };
    // SAFETY: the function of this name has this type.
    let free_at_launch: extern "C" fn(c_ulonglong) = unsafe { std::mem::transmute(free) };
    let (accepting, connecting, near) = connected();
    let target = accepting.alloc_host(BYTES).unwrap();
    let (start, mut freed) = (Instant::now(), 0);
    while freed < 3 {
        assert!(start.elapsed() < LONG, "{freed} times something was launched");
        let mut address = 0;
        // SAFETY: room for an address.
        let code = gpu.with_current(|| unsafe { cudarc::driver::sys::cuMemAlloc_v2(&mut address, BYTES) });
        assert_eq!(code.unwrap() as u32, 0);
        // SAFETY: it is not: that is the test.
        let source = unsafe { connecting.register_raw(address as *mut u8, BYTES) }.unwrap();
        free_at_launch(address);
        let write = near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
        match write.wait(LONG) {
            Err(TransferError::Cuda(CudaError::Freed { .. })) => freed += 1,
            // On a slow machine the copy engines had to do it, and nothing was launched.
            Ok(_) => {
                free_at_launch(0);
                // SAFETY: freed once.
                let code = gpu.with_current(|| unsafe { cudarc::driver::sys::cuMemFree_v2(address) });
                assert_eq!(code.unwrap() as u32, 0, "nobody has freed it");
            }
            Err(error) => panic!("{error}"),
        }
        still_moves(&connecting, &near, &target, BYTES);
    }
}

/// A driver frees memory when the kernels that were launched before have ended.
#[test]
fn memory_that_is_freed_while_its_kernel_waits_for_it_is_copied_whole_or_not_at_all() {
    let Some(gpu) = gpu() else { return };
    let name = "launched::memory_that_is_freed_while_its_kernel_waits_for_it_is_copied_whole_or_not_at_all";
    if is_real(&gpu) || !is_alone(name) {
        return;
    }
    let Some(free) = of_stand_in(c"stand_in_free_after_launch") else {
        return println!("SKIPPED: needs a stand-in that runs kernels");
    };
    // SAFETY: the function of this name has this type.
    let free_after_launch: extern "C" fn(c_ulonglong) -> c_ulonglong = unsafe { std::mem::transmute(free) };
    let (accepting, connecting, near) = connected();
    let bytes = 256 << 10;
    let target = accepting.alloc_host(bytes).unwrap();
    let (start, mut launched, mut salt) = (Instant::now(), 0, 0u8);
    while launched < 20 {
        assert!(start.elapsed() < LONG, "{launched} times something was launched");
        salt = salt.wrapping_add(1);
        let mut address = 0;
        // SAFETY: room for an address.
        let code = gpu.with_current(|| unsafe { cudarc::driver::sys::cuMemAlloc_v2(&mut address, bytes) });
        assert_eq!(code.unwrap() as u32, 0);
        // SAFETY: it is not: that is the test.
        let source = unsafe { connecting.register_raw(address as *mut u8, bytes) }.unwrap();
        source.write_at(0, &vec![salt; bytes]).unwrap();
        free_after_launch(address);
        let write = near.write(&source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
        let mut seen = vec![0; bytes];
        match write.wait(LONG) {
            Ok(_) => {
                target.read_at(0, &mut seen).unwrap();
                assert!(seen.iter().all(|byte| *byte == salt));
            }
            Err(error) => assert!(matches!(error, TransferError::Cuda(CudaError::Freed { .. })), "{error}"),
        }
        // On a slow machine the copy engines made the copy, and the memory was not freed.
        match free_after_launch(0) {
            0 => launched += 1,
            left => {
                // SAFETY: freed once.
                let code = gpu.with_current(|| unsafe { cudarc::driver::sys::cuMemFree_v2(left) });
                assert_eq!(code.unwrap() as u32, 0);
            }
        }
    }
}

/// Memory of a list that is posted to a running kernel may have been freed before the kernel's launch.
#[test]
fn memory_that_is_freed_after_it_was_seen_to_be_there_is_copied_whole_or_not_at_all() {
    let Some(gpu) = gpu() else { return };
    let name = "launched::memory_that_is_freed_after_it_was_seen_to_be_there_is_copied_whole_or_not_at_all";
    if is_real(&gpu) || !is_alone(name) {
        return;
    }
    let Some(free) = of_stand_in(c"stand_in_free_after_questions") else {
        return println!("SKIPPED: needs a stand-in that runs kernels");
    };
    // SAFETY: the function of this name has this type.
    let free_after: extern "C" fn(c_ulonglong, c_int) -> c_ulonglong = unsafe { std::mem::transmute(free) };
    kernels_stay_longer();
    let (accepting, connecting, near) = connected();
    let target = accepting.alloc_host(BYTES).unwrap();
    let (kept, elsewhere) = (connecting.alloc_cuda(0, BYTES), accepting.alloc_host(BYTES));
    let (kept, elsewhere) = (kept.unwrap(), elsewhere.unwrap());
    let (start, mut freed, mut salt) = (Instant::now(), 0, 0u8);
    while freed < 20 {
        assert!(start.elapsed() < LONG, "{freed} times something was freed");
        salt = salt.wrapping_add(1);
        let mut address = 0;
        // SAFETY: room for an address.
        let code = gpu.with_current(|| unsafe { cudarc::driver::sys::cuMemAlloc_v2(&mut address, BYTES) });
        assert_eq!(code.unwrap() as u32, 0);
        // SAFETY: it is not: that is the test.
        let source = unsafe { connecting.register_raw(address as *mut u8, BYTES) }.unwrap();
        source.write_at(0, &vec![salt; BYTES]).unwrap();
        free_after(address, 1 + c_int::from(salt % 40));
        // Both take turns, so that kernels are launched for either and copy both.
        let step = BYTES / 16;
        let writes: Vec<_> = (0..16)
            .flat_map(|at| [(&kept, &elsewhere, at * step), (&source, &target, at * step)])
            .map(|(from, to, at)| {
                near.write(from, at as u64, &to.descriptor(), at as u64, step as u64).unwrap()
            })
            .collect();
        let ends: Vec<_> = writes.iter().map(|write| write.wait(LONG)).collect();
        let mut seen = vec![0; BYTES];
        target.read_at(0, &mut seen).unwrap();
        for (at, end) in ends.iter().enumerate() {
            match end {
                Ok(_) if at % 2 == 0 => {}
                Ok(_) => assert!(seen[at / 2 * step..][..step].iter().all(|byte| *byte == salt)),
                // Copies of the same batch may fail too.
                Err(error) => {
                    assert!(matches!(error, TransferError::Cuda(CudaError::Freed { .. })), "{error}")
                }
            }
        }
        match free_after(0, 0) {
            0 => freed += 1,
            // There were fewer questions.
            left => {
                // SAFETY: freed once.
                let code = gpu.with_current(|| unsafe { cudarc::driver::sys::cuMemFree_v2(left) });
                assert_eq!(code.unwrap() as u32, 0);
            }
        }
    }
}

/// Has kernels of the stand-in stay for longer than a slow machine takes to post something.
fn kernels_stay_longer() {
    let slow_down = of_stand_in(c"stand_in_slow_down").expect("the stand-in runs kernels");
    // SAFETY: the function of this name has this type.
    let slow_down: extern "C" fn(c_int) = unsafe { std::mem::transmute(slow_down) };
    slow_down(100);
}

/// A kernel takes lists of so many runs, and stays; what is too much for it stands behind it, and may not be overtaken.
#[test]
fn a_batch_too_scattered_for_a_kernel_is_not_overtaken() {
    const SCATTERED: usize = 1 << 20;
    let Some(gpu) = gpu() else { return };
    let name = "launched::a_batch_too_scattered_for_a_kernel_is_not_overtaken";
    if !is_alone(name) {
        return;
    }
    if !is_real(&gpu) {
        if of_stand_in(c"stand_in_slow_down").is_none() {
            return println!("SKIPPED: needs a stand-in that runs kernels");
        }
        kernels_stay_longer();
    }
    let Pair { near, source, target, .. } = &pair_of(&gpu);
    // Every other 16 bytes of the first part, and all of the second.
    let blocks = (0..SCATTERED as u64).step_by(32);
    let blocks: Vec<Block> =
        blocks.map(|at| Block { local_offset: at, remote_offset: at, bytes: 16 }).collect();
    let blocks = BlockList::new(source, &target.descriptor(), &blocks).unwrap();
    for salt in 1..4u8 {
        let bytes: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8 ^ salt).collect();
        source.write_at(0, &bytes).unwrap();
        let half = (BYTES - SCATTERED) / 2;
        let whole =
            |at: usize| near.write(source, at as u64, &target.descriptor(), at as u64, half as u64).unwrap();
        let before = whole(SCATTERED);
        let writes = [before, near.write_blocks(&blocks, None, None).unwrap(), whole(SCATTERED + half)];
        for write in writes {
            write.wait(LONG).unwrap();
        }
        let mut seen = vec![0; BYTES];
        target.read_at(0, &mut seen).unwrap();
        assert!(seen[SCATTERED..] == bytes[SCATTERED..]);
        let chosen = |all: &[u8]| -> Vec<u8> {
            all[..SCATTERED].chunks(32).flat_map(|pair| pair[..16].to_vec()).collect()
        };
        assert!(chosen(&seen) == chosen(&bytes));
    }
}

/// A list may be posted late: a debugger makes launches wait for their kernels, or the process is stopped.
#[test]
fn a_list_that_is_not_posted_in_time_costs_time_and_no_transfer() {
    let Some(gpu) = gpu() else { return };
    if is_real(&gpu) || !is_alone("launched::a_list_that_is_not_posted_in_time_costs_time_and_no_transfer") {
        return;
    }
    let Some(block) = of_stand_in(c"stand_in_block_launches") else {
        return println!("SKIPPED: needs a stand-in that runs kernels");
    };
    // SAFETY: the function of this name has this type.
    let block_launches: extern "C" fn(c_int) = unsafe { std::mem::transmute(block) };
    let (accepting, connecting, near) = connected();
    let source = connecting.alloc_cuda(0, BYTES).unwrap();
    let target = accepting.alloc_cuda(0, BYTES).unwrap();
    block_launches(1);
    for salt in 1..4u8 {
        moves(&near, &source, &target, salt);
    }
}

/// A peer goes while lists are under way, and what its copiers shared with their kernels is the next ones': where those began with
/// a number that had been called the end, their first kernel took it for that.
#[test]
fn the_copiers_of_a_peer_that_went_in_mid_transfer_leave_the_next_ones_nothing() {
    let Some(gpu) = gpu() else { return };
    let name = "launched::the_copiers_of_a_peer_that_went_in_mid_transfer_leave_the_next_ones_nothing";
    if !is_alone(name) {
        return;
    }
    if !is_real(&gpu) {
        if of_stand_in(c"stand_in_slow_down").is_none() {
            return println!("SKIPPED: needs a stand-in that runs kernels");
        }
        kernels_stay_longer();
    }
    const STEP: usize = 256 << 10;
    // Some that stay, with what is the GPU's; a peer, its ends, and memory at both.
    let stays = pair_of(&gpu);
    moves(&stays.near, &stays.source, &stays.target, 1);
    let (start, mut cut, mut round) = (Instant::now(), 0, 0u8);
    while cut < 20 {
        assert!(start.elapsed() < LONG, "{cut} times it went in mid-transfer");
        round = round.wrapping_add(1);
        let Pair { near, source, target, .. } = &pair_of(&gpu);
        moves(near, source, target, round);
        let writes: Vec<_> = (0..BYTES / STEP)
            .map(|at| (at * STEP) as u64)
            .map(|at| near.write(source, at, &target.descriptor(), at, STEP as u64).unwrap())
            .collect();
        writes[usize::from(round) % (writes.len() / 2)].wait(LONG).unwrap();
        cut += u32::from(near.close(Duration::ZERO).is_err());
    }
}

/// The words in which a kernel's blocks announce lists to each other have the lower bits of lists' numbers: where
/// peers that only moved little left numbers out, a block took what was said there long ago for the list that it
/// waited for.
#[test]
fn an_old_mark_of_a_list_is_not_taken_for_a_later_one() {
    let Some(gpu) = gpu() else { return };
    let name = "launched::an_old_mark_of_a_list_is_not_taken_for_a_later_one";
    if !is_alone(name) {
        return;
    }
    if !is_real(&gpu) && of_stand_in(c"stand_in_slow_down").is_none() {
        return println!("SKIPPED: needs a stand-in that runs kernels");
    }
    // One that stays, with what is the GPU's.
    let stays = pair_with(&gpu, 100);
    moves(&stays.near, &stays.source, &stays.target, 1);
    let moves_much = |salt| {
        let pair = pair_of(&gpu);
        moves(&pair.near, &pair.source, &pair.target, salt);
    };
    moves_much(2);
    // Fewer than the lower bits can distinguish, by as many as may be said at once.
    for _ in 0..256 - 4 {
        let pair = pair_with(&gpu, 100);
        moves(&pair.near, &pair.source, &pair.target, 3);
    }
    moves_much(4);
}

/// Two endpoints over one channel, each with memory of the GPU.
struct Pair {
    near: Peer,
    source: Region,
    target: Region,
    _ends: [Endpoint; 2],
}

fn pair_of(gpu: &CudaGpu) -> Pair {
    pair_with(gpu, BYTES)
}

fn pair_with(gpu: &CudaGpu, bytes: usize) -> Pair {
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(1).build().unwrap();
    let connecting = Endpoint::builder().channels(1).build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let source = connecting.alloc_cuda(gpu.index(), bytes).unwrap();
    let target = accepting.alloc_cuda(gpu.index(), bytes).unwrap();
    Pair { near, source, target, _ends: [accepting, connecting] }
}
