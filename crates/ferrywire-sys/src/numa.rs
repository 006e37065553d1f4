//! NUMA: the node of a PCI device, and the preferred node of an address range.

use super::checked;
use super::mapping::AddressRange;
use std::io;

/// `MPOL_PREFERRED`: allocate on this node if it has room, else on another.
const PREFERRED: libc::c_int = 1;
const WORD_BITS: u32 = u64::BITS;
/// Number of NUMA nodes in a mask, equal to the kernel's limit.
const NODES_MAX: u32 = 1024;

/// The NUMA node of a PCI device, given by its address in sysfs (`0000:1b:00.0`); `None` where the kernel
/// does not know it.
pub fn node_of_pci(address: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok()?;
    // The kernel writes -1 for "no node", which does not parse as `u32`.
    text.trim().parse().ok()
}

/// Makes the kernel allocate pages of `range` on `node` while it has room. Pages that were touched before
/// stay where they are.
pub fn prefer_node(range: &mut AddressRange, node: u32) -> io::Result<()> {
    if node >= NODES_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut mask = [0u64; (NODES_MAX / WORD_BITS) as usize];
    mask[(node / WORD_BITS) as usize] = 1 << (node % WORD_BITS);
    // SAFETY: the call sets the policy of the range's own pages and changes no byte; the mask has that many
    // bits.
    checked(unsafe {
        // The kernel expects one more than the number of bits.
        let bits = u64::from(NODES_MAX) + 1;
        libc::syscall(libc::SYS_mbind, range.base(), range.len(), PREFERRED, mask.as_ptr(), bits, 0) as isize
    })
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_may_be_put_on_the_first_node() {
        let mut range = AddressRange::reserve(8192, 1).unwrap();
        range.back().unwrap();
        match prefer_node(&mut range, 0) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                return println!("SKIPPED: needs a kernel with NUMA");
            }
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                return println!("SKIPPED: needs the right to call mbind");
            }
            Err(error) => panic!("{error}"),
        }
        // SAFETY: two fresh pages of the range, readable and writable.
        unsafe { (range.base() as *mut u8).add(8191).write(1) };
        assert!(prefer_node(&mut range, NODES_MAX).is_err());
    }

    #[test]
    fn a_device_that_is_not_there_has_no_node() {
        assert_eq!(node_of_pci("ffff:ff:1f.7"), None);
    }
}
