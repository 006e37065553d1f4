//! Lanes over the plugin on GPUs for which the driver compiles no kernels: a real one is forbidden to.

use crate::case::{Case, case};
use crate::driver::stand_in;
use crate::ends::{Ends, LIMIT, builder, contents, loopback, pattern, plugin};
use crate::gpus::{have_a_stand_in, location, on_gpus};
use ferrywire::{Block, BlockList, Builder, Endpoint, MemoryLocation, Region};
use ferrywire_memory::unpack::UnpackMode;

const BYTES: usize = 3_000_001;
const BLOCKS: usize = 700;
const BLOCK_BYTES: usize = 900;

fn without_kernels(case: Case) -> Case {
    let case = case.with("CUDA_DISABLE_PTX_JIT", "1").with("CUDA_CACHE_DISABLE", "1");
    if std::env::var_os(crate::case::CASE).is_none() && have_a_stand_in() {
        return case.with("LD_LIBRARY_PATH", stand_in(&[]).to_str().unwrap());
    }
    on_gpus(case)
}

fn end(index: u32, mode: UnpackMode) -> Builder {
    builder().plugin(plugin().gpu(location(index)).allow_same_host_gpu(true).unpack(mode))
}

fn on_gpu(end: &Endpoint, index: u32, bytes: &[u8]) -> Region {
    let MemoryLocation::Cuda(index) = location(index) else { panic!("{}", location(index)) };
    let region = end.alloc_cuda(index, bytes.len()).unwrap();
    region.write_at(0, bytes).unwrap();
    region
}

/// Regression: every lane needed the kernels, also where nothing launches one.
#[test]
fn lanes_that_gather_by_copies_need_no_kernels() {
    for mode in [UnpackMode::Copy, UnpackMode::Host] {
        without_kernels(case!("same_host=allow")).passes(|| {
            let ends = Ends::of(loopback(end(1, mode)), end(0, mode));
            let source = on_gpu(&ends.connecting, 0, &pattern(BYTES, 1));
            let target = on_gpu(&ends.accepting, 1, &vec![0; BYTES]);
            let write = ends.near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
            assert_eq!(write.wait(LIMIT), Ok(BYTES as u64));
            assert!(contents(&target) == pattern(BYTES, 1));

            // Scattered at both ends: packed and unpacked by the GPU's copy queue.
            let block = |at: usize| Block {
                local_offset: (at * BLOCK_BYTES) as u64,
                remote_offset: ((BLOCKS - 1 - at) * BLOCK_BYTES) as u64,
                bytes: BLOCK_BYTES as u64 - 200,
            };
            let blocks: Vec<Block> = (0..BLOCKS).map(block).collect();
            let list = BlockList::new(&source, &target.descriptor(), &blocks).unwrap();
            let bytes = blocks.iter().map(|block| block.bytes).sum();
            target.write_at(0, &vec![0; BYTES]).unwrap();
            assert_eq!(ends.near.write_blocks(&list, None, None).unwrap().wait(LIMIT), Ok(bytes));
            let mut expected = vec![0; BYTES];
            for Block { local_offset, remote_offset, bytes } in blocks {
                let (from, to, bytes) = (local_offset as usize, remote_offset as usize, bytes as usize);
                expected[to..to + bytes].copy_from_slice(&pattern(BYTES, 1)[from..from + bytes]);
            }
            assert!(contents(&target) == expected);
            ends.close();
        });
    }
}

#[test]
fn a_lane_that_gathers_by_a_kernel_says_why_there_is_none() {
    without_kernels(case!("same_host=allow")).passes(|| {
        let accepting = loopback(end(1, UnpackMode::Kernel)).build().unwrap();
        let connecting = end(0, UnpackMode::Kernel).build().unwrap();
        let error = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap_err();
        assert!(error.to_string().contains("cuModuleLoadData on CUDA GPU"), "{error}");
    });
}
