//! Interpretation of a plugin's results.

use super::lane::{Direction, judge};
use super::tcpx;
use ferrywire_ncclnet::abi::ResultCode;

#[test]
fn only_the_first_result_2_of_a_receive_without_done_may_be_no_failure() {
    use Direction::{Recv, Send};
    for direction in [Send, Recv] {
        assert_eq!(judge(direction, ResultCode::SUCCESS, true), Ok(true));
        assert_eq!(judge(direction, ResultCode::SUCCESS, false), Ok(false));
        for code in (1..9).map(ResultCode) {
            for done in [false, true] {
                let transient = direction == Recv && code == ResultCode::SYSTEM_ERROR && !done;
                assert_eq!(judge(direction, code, done), Err(transient), "{direction:?} {code} {done}");
            }
        }
    }
}

#[test]
fn a_pci_path_ends_in_an_address() {
    let lacks = |path| tcpx::lacks_address(Some(path)).is_some();
    assert!(!lacks("/sys/devices/pci0000:00/0000:00:1d.0/0000:8a:00.0"));
    for path in [
        "/sys/devices/virtual/net/lo",
        "/sys/devices/pci0000:00/0000:00:03.0/virtio0",
        "10000:e1:00.0",
        "",
        "/",
    ] {
        assert!(lacks(path), "{path}");
    }
    assert!(tcpx::lacks_address(None).is_some());
}
