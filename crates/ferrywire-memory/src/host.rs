//! Host memory that the engine allocates: page-aligned, zeroed, freed with its region.

use crate::error::{Error, Result};
use ferrywire_sys::mapping::{self, HUGE_PAGE_BYTES, PAGE_BYTES};
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};

/// Zeroed host memory, aligned to a page or a huge page.
pub struct HostBuffer {
    base: *mut u8,
    len: usize,
    layout: Layout,
}

// SAFETY: the buffer is plain memory, freed once; the pointer is only handed out raw.
unsafe impl Send for HostBuffer {}

impl HostBuffer {
    /// Allocates `len` zeroed bytes. Returns [`Error::Io`] when the system has no memory.
    pub fn zeroed(len: usize) -> Result<HostBuffer> {
        let align = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let layout = Layout::from_size_align(len.max(1), align).map_err(|_| {
            Error::invalid("buffer size", format!("{len} bytes are more than can be addressed"))
        })?;
        let huge = len >= HUGE_PAGE_BYTES;
        // SAFETY: the layout has a size of at least one byte.
        let base = unsafe { if huge { alloc(layout) } else { alloc_zeroed(layout) } };
        if base.is_null() {
            let why = format!("the system has no {len} bytes");
            return Err(Error::Io {
                what: "cannot allocate host memory".into(),
                message: why,
                code: Some(libc::ENOMEM),
            });
        }
        if huge {
            mapping::prefer_huge_pages(base, len);
            // SAFETY: `len` bytes were just allocated here, and no other code has the address.
            unsafe { base.write_bytes(0, len) };
        }
        Ok(HostBuffer { base, len, layout })
    }

    /// Address of the buffer's first byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Size of the buffer in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated by `zeroed` with this layout, and is freed once.
        unsafe { dealloc(self.base, self.layout) };
    }
}
