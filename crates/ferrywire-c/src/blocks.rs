//! Lists of blocks, made once and used many times.

use std::ffi::c_int;
use std::sync::Arc;

use ferrywire::{BlockList, Lengths};

use crate::handles::{self, object};
use crate::memory::{Region, Remote};
use crate::status::{FERRYWIRE_OK, array, call};

/// A checked list of blocks between local and remote regions. It keeps its local regions registered.
pub struct Blocks(pub(crate) BlockList);

object!(Blocks, "ferrywire_blocks", 6);

/// Makes a list of `count` blocks: number i is at `local_offsets[i]` of `local` and at `remote_offsets[i]` of `remote`,
/// and `lengths[i]` long, or, where `lengths` is NULL, `length` long; all in bytes. The first block that is not inside
/// both regions is an error that names it.
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
        // SAFETY: by the caller's promise.
        let (out, here, there) = unsafe {
            (
                handles::place(blocks)?,
                array("local_offsets", local_offsets, count)?,
                array("remote_offsets", remote_offsets, count)?,
            )
        };
        let lengths = match lengths.is_null() {
            true => Lengths::Same(length),
            // SAFETY: by the caller's promise.
            false => Lengths::Each(unsafe { array("lengths", lengths, count) }?),
        };
        let (local, remote) = (handles::get(local)?, handles::get(remote)?);
        let list = BlockList::from_offsets(&local.region, &remote.0, here, there, lengths)?;
        out.put(handles::new(Blocks(list))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Makes one list of all blocks of `count` others, in their order, whatever regions they are of: one operation moves
/// them, and one notification can follow them. The others stay as they are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrywire_blocks_join(
    lists: *const *const Blocks,
    count: usize,
    blocks: *mut *mut Blocks,
) -> c_int {
    call(|| {
        // SAFETY: by the caller's promise.
        let (out, lists) = unsafe { (handles::place(blocks)?, array("lists", lists, count)?) };
        let lists: Vec<Arc<Blocks>> =
            lists.iter().map(|list| handles::get(*list)).collect::<Result<_, _>>()?;
        let joined = BlockList::join(&lists.iter().map(|list| &list.0).collect::<Vec<_>>())?;
        out.put(handles::new(Blocks(joined))?);
        Ok(FERRYWIRE_OK)
    })
}

/// Blocks in the list; 0 for a wrong handle.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_blocks_count(blocks: *const Blocks) -> usize {
    let mut count = 0;
    call(|| {
        count = handles::get(blocks)?.0.len();
        Ok(FERRYWIRE_OK)
    });
    count
}

/// Frees the handle; operations with it go on. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_blocks_free(blocks: *mut Blocks) -> c_int {
    handles::free(blocks)
}
