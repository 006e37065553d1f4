//! Devices made of several NICs: between two network namespaces with the driver in C (`c/nics.c`), where the kernel
//! counts the bytes of each NIC, and under ferrywire's own host in every version that has them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use ferrywire_ncclnet::Library;
use ferrywire_ncclnet::abi::Version;

use crate::driver::{can_make_namespaces, has_time, passes};
use crate::over_host::{SIZES, exchange};
use crate::pair::{Pair, file};

fn passes_with_nics(versions: &[u32], case: &str) {
    if can_make_namespaces() {
        versions.iter().for_each(|&version| passes("nics", version, case));
    }
}

#[test]
fn valid_merges_are_made_and_invalid_ones_refused() {
    passes_with_nics(&[10, 11, 12], "merging");
}

#[test]
fn one_comm_uses_two_nics() {
    passes_with_nics(&[10, 12], "two_nics");
    passes_with_nics(&[11], "two_nics_v6");
}

#[test]
fn one_comm_uses_four_nics() {
    passes_with_nics(&[12], "four_nics");
    passes_with_nics(&[11], "four_nics_v6");
}

#[test]
fn ends_may_have_different_numbers_of_nics() {
    passes_with_nics(&[12], "two_and_three");
    passes_with_nics(&[10], "one_and_two");
}

#[test]
fn a_faster_nic_carries_more() {
    passes_with_nics(&[12], "unequal_nics");
}

#[test]
fn a_nic_that_is_down_at_the_start_is_left_out() {
    passes_with_nics(&[12], "down_at_start");
}

#[test]
fn an_address_that_refuses_is_left_out() {
    passes_with_nics(&[12], "refused_at_start");
}

#[test]
fn an_address_that_does_not_answer_is_left_out() {
    passes_with_nics(&[12], "mute_at_start");
}

#[test]
fn an_address_that_is_not_found_is_left_out() {
    passes_with_nics(&[12], "absent_at_start");
}

#[test]
fn unreachable_nics_are_tried_again_when_no_other_works() {
    passes_with_nics(&[12], "mute_in_turn");
}

#[test]
fn interfaces_are_not_asked_for_by_each_comm() {
    passes_with_nics(&[12], "asking");
}

#[test]
fn a_nic_that_dies_later_is_an_error_that_names_it() {
    if has_time() {
        passes_with_nics(&[12], "dies_later");
    }
}

/// Set in the process that makes NICs in a namespace of its own.
const INSIDE: &str = "FERRYWIRE_TEST_NAMESPACE";

/// The plugin's devices belong to its process, so this test runs in a process of its own.
#[test]
fn our_own_host_uses_merged_devices() {
    if !can_make_namespaces() {
        return;
    }
    let name = "several_nics::in_a_namespace_of_its_own";
    let mut inside = Command::new(std::env::current_exe().unwrap());
    inside.args(["--exact", name, "--ignored", "--nocapture"]).env("NCCL_SOCKET_IFNAME", "=n0,n2");
    inside.env(INSIDE, "1").env("FERRYWIRE_NCCL_MERGE", "any");
    // SAFETY: a system call, and nothing else between fork and exec.
    unsafe {
        inside.pre_exec(|| match libc::unshare(libc::CLONE_NEWNET) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    let output = inside.output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "run by our_own_host_uses_merged_devices"]
fn in_a_namespace_of_its_own() {
    assert!(std::env::var_os(INSIDE).is_some(), "it makes NICs: not in the host's own namespace");
    let links = "link set lo up
        link add n0 type veth peer name n1
        link add n2 type veth peer name n3
        addr add 10.77.0.1/24 dev n0
        addr add fd00:77::1/64 dev n2 nodad
        link set n0 up
        link set n1 up
        link set n2 up
        link set n3 up";
    for line in links.lines() {
        assert!(Command::new("ip").args(line.split_whitespace()).status().unwrap().success(), "{line}");
    }
    crate::pair::until("links", || {
        let nics = ferrywire_sys::nics::addresses().unwrap();
        (nics.iter().filter(|nic| nic.up && nic.name.starts_with('n')).count() == 2).then_some(())
    });
    for version in [Version::V9, Version::V10, Version::V11, Version::V12] {
        // SAFETY: the file is this project's own.
        let plugin = unsafe { Library::open(file()).unwrap().load(Some(version)).unwrap() };
        let merged = plugin.make_v_device(&[1, 0]).unwrap();
        assert_eq!((merged, plugin.make_v_device(&[1, 0]).unwrap()), (2, 2), "{version:?}");
        let [first, second, both] = [0, 1, merged].map(|device| plugin.properties(device).unwrap());
        assert_eq!(both.name, format!("{}+{}", second.name, first.name));
        assert_eq!(both.devices, [1, 0], "{version:?}");
        assert_eq!(both.speed_mbps, first.speed_mbps + second.speed_mbps);
        assert_eq!((both.guid, both.pci_path, both.max_recvs), (2, None, 1));
        assert!(plugin.make_v_device(&[0, merged]).is_err());
        assert_eq!(plugin.make_v_device(&[0]).unwrap(), 0);
        let pair = Pair::over(&plugin, merged);
        exchange(&pair, &SIZES, 0, true);
        exchange(&pair, &SIZES, 5000, false);
        pair.close();
    }
}
