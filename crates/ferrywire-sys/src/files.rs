//! Permissions of files.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Whether this process may read and write a file. The file is not opened, which could start a device. Access
/// to a device can still be refused by a control group.
pub fn may_open(path: &Path) -> bool {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: a terminated name, which outlives the call.
    unsafe { libc::access(name.as_ptr(), libc::R_OK | libc::W_OK) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_may_be_opened_and_a_missing_one_not() {
        assert!(may_open(Path::new("/dev/null")));
        assert!(!may_open(Path::new("/dev/no-such-device")));
        assert!(!may_open(Path::new("/dev/null\0")));
    }
}
