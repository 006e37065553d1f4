//! Block lists: made once, used by many transfers.
//!
//! Read next: `transfer.rs`, whose `ferrywire_write_blocks` and `ferrywire_read_blocks` move them.

use std::ffi::c_int;
use std::sync::Arc;

use ferrywire::{BlockList, Lengths};

use crate::handles::{self, object};
use crate::memory::{Region, Remote};
use crate::status::{FERRYWIRE_OK, array, call};

/// A checked list of blocks between local and remote regions. The list keeps its local regions registered.
pub struct Blocks(pub(crate) BlockList);

object!(Blocks, "ferrywire_blocks", 6);

/// Makes a list of `count` blocks between `local` and `remote`. Block i begins at byte `local_offsets[i]` of `local`
/// and at byte `remote_offsets[i]` of `remote`. Its length in bytes is `lengths[i]`, or `length` if `lengths` is NULL.
/// If a block is not inside both regions, the call fails with FERRYWIRE_ERROR_USAGE and names the first such block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_blocks_new(
    local: *const Region,
    remote: *const Remote,
    local_offsets: *const i64,
    remote_offsets: *const i64,
    lengths: *const i64,
    length: u64,
    count: usize,
    blocks: *mut *mut Blocks,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises valid arguments, as the header states.
        let (out, here, there) = unsafe {
            (
                handles::place(blocks)?,
                array("local_offsets", local_offsets, count)?,
                array("remote_offsets", remote_offsets, count)?,
            )
        };
        let lengths = if lengths.is_null() {
            Lengths::Same(length)
        } else {
            // SAFETY: the caller promises an array of `count` lengths.
            Lengths::Each(unsafe { array("lengths", lengths, count) }?)
        };
        let (local, remote) = (handles::get(local)?, handles::get(remote)?);
        let list = BlockList::from_offsets(&local.region, &remote.0, here, there, lengths)?;
        out.put(handles::new(Blocks(list))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Makes one list of the blocks of `count` lists, in their order; the lists may be of different regions of one peer.
/// One operation can then move all blocks, and one notification can follow them. The given lists are not changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_blocks_join(
    lists: *const *const Blocks,
    count: usize,
    blocks: *mut *mut Blocks,
) -> c_int {
    call(|| {
        // SAFETY: the caller promises valid arguments, as the header states.
        let (out, lists) = unsafe { (handles::place(blocks)?, array("lists", lists, count)?) };
        let lists: Vec<Arc<Blocks>> =
            lists.iter().map(|list| handles::get(*list)).collect::<Result<_, _>>()?;
        let joined = BlockList::join(&lists.iter().map(|list| &list.0).collect::<Vec<_>>())?;
        out.put(handles::new(Blocks(joined))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Returns the number of blocks in the list; 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_blocks_count(blocks: *const Blocks) -> usize {
    let mut count = 0;
    call(|| {
        count = handles::get(blocks)?.0.len();
        Ok(FERRYWIRE_OK)
    });
    count
}

/// Frees the handle; operations that use the list continue. NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_blocks_free(blocks: *mut Blocks) -> c_int {
    handles::free(blocks)
}
