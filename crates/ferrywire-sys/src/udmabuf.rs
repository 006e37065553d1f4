//! Host memory as a dma-buf (`udmabuf`): pages of a memory file that devices can read and write.
//!
//! NICs receive into and send from such memory where there is no GPU, and for simulated GPUs.
//! Read next: `sys/netdev.rs` of `ferrywire-devmem`, which binds a dma-buf to a NIC.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use super::checked;
use super::mapping::PAGE_BYTES;

const DEVICE: &str = "/dev/udmabuf";
/// Module parameter with the largest dma-buf, in MiB.
const LIMIT: &str = "/sys/module/udmabuf/parameters/size_limit_mb";
const FLAGS_CLOEXEC: u32 = 1;
/// `UDMABUF_CREATE`: `_IOW('u', 0x42, struct udmabuf_create)`.
const CREATE: u32 = (1 << 30) | ((size_of::<Create>() as u32) << 16) | ((b'u' as u32) << 8) | 0x42;

/// The request of `UDMABUF_CREATE`: `struct udmabuf_create` of `linux/udmabuf.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    bytes: u64,
}

const _: () = assert!(size_of::<Create>() == 24);
const _: () = assert!(CREATE == 0x4018_7542);

/// Whether this kernel has the udmabuf device and the current user can see it.
pub fn is_there() -> bool {
    Path::new(DEVICE).exists()
}

/// Most bytes of one dma-buf, where the kernel reports it: 64 MiB unless an administrator changed it.
pub fn limit_bytes() -> Option<u64> {
    let mib: u64 = fs::read_to_string(LIMIT).ok()?.trim().parse().ok()?;
    mib.checked_mul(1 << 20)
}

/// Creates a dma-buf of `bytes` bytes at `offset` of a memory file. The file must allow sealing, as
/// [`anonymous_file`](super::mapping::anonymous_file) does, and can never shrink afterwards.
///
/// # Errors
/// The message says what to do: the device is missing, the user lacks the right, the range is not whole
/// pages, it is too large, or the file cannot be sealed.
pub fn from_memfd(memfd: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<OwnedFd> {
    let page = PAGE_BYTES as u64;
    if bytes == 0 || !offset.is_multiple_of(page) || !bytes.is_multiple_of(page) {
        let why = format!("{bytes} bytes at {offset} of a memory file are not whole pages of {page} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let device = open()?;
    // SAFETY: no memory is passed.
    checked(unsafe { libc::fcntl(memfd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) } as isize)
        .map_err(|error| {
            explained(
                "cannot seal a memory file against shrinking",
                "create the file with MFD_ALLOW_SEALING",
                &error,
            )
        })?;
    let create = Create { memfd: memfd.as_raw_fd() as u32, flags: FLAGS_CLOEXEC, offset, bytes };
    // SAFETY: this request reads one `Create`.
    let fd = checked(unsafe { libc::ioctl(device.as_raw_fd(), CREATE as _, &raw const create) } as isize)
        .map_err(|error| explained("cannot make a dma-buf of host memory", &likely_cause(bytes), &error))?;
    // SAFETY: the kernel has just made this descriptor, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn open() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(DEVICE).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            explained(&format!("there is no {DEVICE}"), "load the kernel's module: modprobe udmabuf", &error)
        }
        _ => explained(
            &format!("cannot open {DEVICE}"),
            "run as root, or as a member of the group kvm",
            &error,
        ),
    })
}

fn likely_cause(bytes: u64) -> String {
    match limit_bytes() {
        Some(limit) if bytes > limit => {
            format!("{bytes} bytes are more than {LIMIT} allows ({limit}): write a larger number there")
        }
        _ => format!("{bytes} bytes were asked for"),
    }
}

fn explained(what: &str, hint: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error} ({hint})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::anonymous_file;
    use std::os::fd::AsFd;

    #[test]
    fn a_file_of_memory_becomes_a_dmabuf_or_the_reason_is_reported() {
        let file = anonymous_file(4 * PAGE_BYTES).expect("memory");
        let made = from_memfd(file.as_fd(), PAGE_BYTES as u64, 2 * PAGE_BYTES as u64);
        match made {
            Ok(fd) => assert!(fd.as_raw_fd() > 2),
            Err(error) if is_there() => println!("SKIPPED: needs {DEVICE} for this user: {error}"),
            Err(error) => {
                println!("SKIPPED: needs {DEVICE}");
                assert_eq!(error.kind(), io::ErrorKind::NotFound);
                assert!(error.to_string().contains("modprobe udmabuf"), "{error}");
            }
        }
    }

    #[test]
    fn half_pages_are_refused() {
        let file = anonymous_file(4 * PAGE_BYTES).expect("memory");
        for (offset, bytes) in [(1, 4096), (4096, 4095), (0, 0)] {
            let error = from_memfd(file.as_fd(), offset, bytes).expect_err("not whole pages");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{offset} {bytes}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_sealed_is_refused() {
        let path = std::env::current_exe().expect("this program");
        let file = File::open(path).expect("it is a file");
        let error = from_memfd(file.as_fd(), 0, 4096).expect_err("a file on a disk");
        assert!(!is_there() || error.to_string().contains("sealing"), "{error}");
    }
}
