//! Address ranges: without access, or as a view of memory that several ranges may share.
//!
//! Invariant: an [`AddressRange`] owns its addresses until it is dropped, so no other mapping ever appears
//! there in the meantime. All calls are safe, since they make no reference and touch no byte.
//! Read next: `sim/allocation.rs` of `ferrywire-memory`, which maps one memory at two ranges.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::checked;

/// Granularity of mappings, in bytes, and the smallest alignment of an [`AddressRange`].
pub const PAGE_BYTES: usize = 4096;
/// Size in bytes of the smaller kind of huge page, on x86-64 and most other processors.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Access rights of an address range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No access: a load or store raises `SIGSEGV`, a system call returns `EFAULT`.
    None,
    /// Access for reading and writing.
    ReadWrite,
}

impl Access {
    fn bits(self) -> libc::c_int {
        match self {
            Access::None => libc::PROT_NONE,
            Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// Creates an anonymous memory file (`memfd`) of `len` zeroed bytes. The kernel frees it with its last
/// mapping and descriptor.
pub fn anonymous_file(len: usize) -> io::Result<OwnedFd> {
    // The file can be sealed: udmabuf takes pages only of a file that cannot shrink.
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a string with its end.
    let fd = checked(unsafe { libc::memfd_create(c"ferrywire".as_ptr(), flags) } as isize)?;
    // SAFETY: the kernel has just made this descriptor, and no other code owns it.
    let file = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    let len = libc::off_t::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: no memory is passed.
    checked(unsafe { libc::ftruncate(file.as_raw_fd(), len) } as isize)?;
    Ok(file)
}

/// Advises the kernel to back these addresses with huge pages; call it before they are first touched. Blocks
/// scattered over a large region then cause far fewer TLB misses. The advice is best effort: kernels without
/// huge pages ignore it.
pub fn prefer_huge_pages(base: *mut u8, len: usize) {
    let start = (base as usize).next_multiple_of(PAGE_BYTES);
    let end = (base as usize + len) / PAGE_BYTES * PAGE_BYTES;
    if start < end {
        // SAFETY: this advice changes no byte, and the kernel checks the addresses.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// A range of virtual addresses, at first without access. Dropping it unmaps the addresses.
#[derive(Debug)]
pub struct AddressRange {
    base: usize,
    len: usize,
}

impl AddressRange {
    /// Reserves `len` bytes of address space (rounded up to whole pages), aligned to `align`, a power of two.
    pub fn reserve(len: usize, align: usize) -> io::Result<AddressRange> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let align = align.max(PAGE_BYTES);
        if !align.is_power_of_two() {
            return Err(invalid());
        }
        let len = len.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or_else(invalid)?;
        let with_room = len.checked_add(align - PAGE_BYTES).ok_or_else(invalid)?;
        let base = map(0, with_room, Access::None, libc::MAP_ANONYMOUS | libc::MAP_PRIVATE, -1)?;
        let whole = AddressRange { base, len: with_room };
        Ok(whole.keep_only(base.next_multiple_of(align), len))
    }

    /// The first address of the range.
    pub fn base(&self) -> usize {
        self.base
    }

    /// Length of the range in bytes, a multiple of [`PAGE_BYTES`].
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range has no bytes; always false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maps zeroed private memory at the range. A forked child does not inherit the mapping, so pages whose
    /// addresses a device knows are never shared with a child by copy-on-write.
    pub fn back(&mut self) -> io::Result<()> {
        let flags = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_FIXED;
        map(self.base, self.len, Access::ReadWrite, flags, -1)?;
        // SAFETY: this advice changes no byte, and the addresses are the range's own.
        checked(unsafe {
            libc::madvise(self.base as *mut libc::c_void, self.len, libc::MADV_DONTFORK) as isize
        })
        .map(drop)
    }

    /// Maps `file`, from its start, at the range.
    pub fn show(&mut self, file: &OwnedFd, access: Access) -> io::Result<()> {
        map(self.base, self.len, access, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd()).map(drop)
    }

    /// Removes the mapping but keeps the addresses reserved: a late access faults.
    pub fn withdraw(&mut self) -> io::Result<()> {
        let flags = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_FIXED;
        map(self.base, self.len, Access::None, flags, -1).map(drop)
    }

    /// Unmaps the addresses before `base` and those after its first `len` bytes.
    fn keep_only(self, base: usize, len: usize) -> AddressRange {
        let (before, end) = (base - self.base, self.base + self.len);
        let behind = end - (base + len);
        drop(AddressRange { base: self.base, len: before });
        drop(AddressRange { base: base + len, len: behind });
        std::mem::forget(self);
        AddressRange { base, len }
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: these addresses belong to this range alone; code that dereferences a pointer into the
            // range has promised that the range outlives the access.
            unsafe { libc::munmap(self.base as *mut libc::c_void, self.len) };
        }
    }
}

/// Maps `len` bytes; returns their address. `base` is 0, or the start of `len` bytes that an [`AddressRange`]
/// owns (with `MAP_FIXED`).
fn map(base: usize, len: usize, access: Access, flags: libc::c_int, fd: RawFd) -> io::Result<usize> {
    let flags = flags | libc::MAP_NORESERVE;
    // SAFETY: a new mapping goes where the kernel finds room, a fixed one only over addresses that the
    // calling range owns, so no mapping of others is replaced.
    let address = unsafe { libc::mmap(base as *mut libc::c_void, len, access.bits(), flags, fd, 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(address as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(address: usize) -> bool {
        let (_near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: a system call checks the address itself.
        let written = unsafe { libc::write(far.as_raw_fd(), address as *const libc::c_void, 1) };
        written == 1
    }

    #[test]
    fn two_ranges_show_one_memory() {
        let file = anonymous_file(2 * PAGE_BYTES).unwrap();
        let mut ranges = [0, 1].map(|_| AddressRange::reserve(2 * PAGE_BYTES, PAGE_BYTES).unwrap());
        ranges.iter_mut().for_each(|range| range.show(&file, Access::ReadWrite).unwrap());
        let [first, second] = ranges.each_ref().map(|range| range.base() as *mut u8);
        // SAFETY: both ranges show two writable pages.
        unsafe {
            first.add(PAGE_BYTES).write(7);
            assert_eq!(second.add(PAGE_BYTES).read(), 7);
            assert_eq!(second.read(), 0);
        }
    }

    #[test]
    fn a_range_is_aligned_and_may_not_be_touched() {
        for align in [PAGE_BYTES, 64 << 10, 2 << 20] {
            let mut range = AddressRange::reserve(1, align).unwrap();
            assert_eq!(range.base() % align, 0);
            assert!(!readable(range.base()));
            range.show(&anonymous_file(1).unwrap(), Access::ReadWrite).unwrap();
            assert!(readable(range.base()));
            range.withdraw().unwrap();
            assert!(!readable(range.base()));
        }
        assert!(AddressRange::reserve(1, 12345).is_err());
        assert!(AddressRange::reserve(usize::MAX, PAGE_BYTES).is_err());
    }
}
