//! `ferrywire topo`, on this host and on recorded ones.

use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::common::{ferrywire, first_error, json as json_of, run, text};
use crate::tree::{self, Tree};

fn topo(tree: &Tree, args: &str) -> Output {
    ferrywire(&format!("topo {args}")).arg("--root").arg(tree.root()).output().expect("the command starts")
}

#[test]
fn this_host_is_shown_whatever_it_has() {
    let output = run("topo");
    let said = text(&output.stdout);
    for part in ["NUMA nodes", "PCIe roots", "GPUs", "NICs", "lo "] {
        assert!(said.contains(part), "{said}");
    }
    let output = run("topo --json");
    let host = json_of(&output);
    assert_eq!(output.status.success(), host["error"].is_null(), "{host}");
    assert_eq!(host["plan"].is_null(), !host["error"].is_null());
    assert_eq!(host["schema"], 2);
    let nics = host["nics"].as_array().expect("NICs");
    assert!(nics.iter().any(|nic| nic["nic"] == "lo" && nic["loopback"] == true), "{host}");
    for nic in nics {
        let devmem = &nic["devmem"];
        assert_eq!(devmem.is_null(), nic["device"] == false, "{nic}");
        // Either it can, or there are words about why not.
        let words = devmem["unsupported_reason"].as_array().is_none_or(|words| !words.is_empty());
        assert!(devmem.is_null() || devmem["possible"] == true || words, "{nic}");
    }
}

#[test]
fn a_report_that_cannot_be_written_is_a_failure_and_a_closed_pipe_none() {
    let tree = Tree::named("small-vm");
    for options in ["", "--json"] {
        crate::common::unwritten(ferrywire(&format!("topo {options}")).arg("--root").arg(tree.root()));
    }
}

#[test]
fn clean_up_refuses_a_recorded_host() {
    let output = topo(&Tree::named("small-vm"), "--clean-up");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        first_error(&output).contains("--clean-up changes NICs of this host only"),
        "{}",
        text(&output.stderr)
    );
}

/// `topo --clean-up` with an empty /run of its own, which a shell prepares; `None` where that cannot be.
fn clean_up_after(prepare: &str, options: &str) -> Option<Output> {
    let script = format!(
        r#"mount -t tmpfs none /run && mkdir /run/ferrywire && cd /run/ferrywire && touch /run/ready || exit 77
        {prepare}
        exec "$0" topo --clean-up {options}"#
    );
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", &script, env!("CARGO_BIN_EXE_ferrywire")]);
    let output = command.env_remove("XDG_RUNTIME_DIR").output().ok()?;
    (output.status.code() != Some(77) && !text(&output.stderr).contains("unshare: ")).then_some(output)
}

/// Regression: the exit status was 0, and records that could not be read counted as none.
#[test]
fn a_clean_up_that_fails_is_a_failure() {
    let Some(clean) = clean_up_after("", "") else {
        return println!("SKIPPED: needs unshare and a file system of its own");
    };
    let said = text(&clean.stderr);
    assert_eq!((clean.status.code(), said.lines().count()), (Some(0), 1), "{said}");
    assert!(said.contains("no run has left anything"), "{said}");
    // A file in place of the folder of a NIC's records, and of that of all records.
    let of_nic = "mkdir -m 700 devmem && touch devmem/$(stat -L -c %i /proc/self/ns/net)-lo";
    for (prepare, words) in [
        (of_nic, "NIC lo: cannot undo the changes of earlier runs"),
        ("touch devmem", "cannot read the records of earlier runs in /run/ferrywire/devmem"),
    ] {
        let failed = clean_up_after(prepare, "").expect("as before");
        let said = text(&failed.stderr);
        assert_eq!(failed.status.code(), Some(1), "{said}");
        assert!(said.contains(words) && !said.contains("no run has left anything"), "{said}");
        assert!(text(&failed.stdout).contains("NICs"), "the tables are printed");
        assert!(said.lines().any(|line| line.starts_with("error: ")), "{said}");
        let failed = json_of(&clean_up_after(prepare, "--json").expect("as before"));
        assert!(failed["error"].is_string() && !failed["nics"].is_null(), "{failed}");
    }
}

/// Regression: the records in the folder that cannot be entered counted as none, and the exit status was 0.
#[test]
fn a_clean_up_without_the_right_to_read_root_s_records_is_a_failure() {
    // Without these capabilities even root cannot enter a folder of mode 0.
    let limited = r#"mkdir /run/own && export XDG_RUNTIME_DIR=/run/own && chmod 0 /run/ferrywire && cd / || exit 77
        drop=-dac_override,-dac_read_search
        setpriv --bounding-set $drop true || exit 77
        exec setpriv --bounding-set $drop "$0" topo --clean-up"#;
    let Some(failed) = clean_up_after(limited, "") else {
        return println!("SKIPPED: needs unshare, setpriv and a file system of its own");
    };
    let said = text(&failed.stderr);
    assert_eq!(failed.status.code(), Some(1), "{said}");
    assert!(said.contains("in /run/ferrywire/devmem: ") && said.contains(": run as root"), "{said}");
    assert!(!said.contains("no run has left anything"), "{said}");
}

#[test]
fn a_small_vm_as_people_read_it() {
    let output = topo(&Tree::named("small-vm"), "");
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    let expected = "\
NUMA nodes
  node  CPUs
  0     0-1

PCIe roots with GPUs or NICs
  root     node  GPUs  NICs
  0000:00  -     -     eth0,eth1

GPUs
  none

NICs
  NIC   state  Gbit/s  MTU    addresses       PCI           root     node  driver      queues  header split
  eth0  up     -       1400   192.168.7.2/24  0000:00:03.0  0000:00  -     virtio_net  1/1     -
  eth1  up     -       1400   192.168.8.2/24  0000:00:05.0  0000:00  -     virtio_net  1/1     -
  ifb0  down   -       1500   -               -             -        -     -           1/1     -
  lo    up     -       65536  127.0.0.1/8     -             -        -     -           1/1     -

Plan
  no GPU: host memory uses eth0, eth1
  not used: ifb0: is down
  not used: lo: is loopback
";
    assert_eq!(text(&output.stdout), expected);
}

#[test]
fn a3_high_as_people_read_it() {
    let said = text(&topo(&Tree::named("a3-high"), "").stdout);
    let expected = "
PCIe roots with GPUs or NICs
  root     node  GPUs  NICs
  0000:00  0     -     eth0
  0000:01  0     0-1   eth1
  0000:07  0     2-3   eth2
  0000:81  1     4-5   eth3
  0000:87  1     6-7   eth4
";
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("  3    NVIDIA H100 80GB HBM3  0000:0b:00.0  0000:07  0\n"), "{said}");
    let nic =
        "  eth4     up     200     8244   10.0.4.2/24    0000:8c:00.0  0000:87  1     gve     16/16   on\n";
    assert!(said.contains(nic), "{said}");
    let expected = "
Plan
  GPU  NICs (channels)  CPUs            reason
  0    eth1 (8)         0-12,104-116    behind PCIe bridge 0000:02:00.0
  1    eth1 (8)         13-25,117-129   behind PCIe bridge 0000:02:00.0
  2    eth2 (8)         26-38,130-142   behind PCIe bridge 0000:08:00.0
  3    eth2 (8)         39-51,143-155   behind PCIe bridge 0000:08:00.0
  4    eth3 (8)         52-64,156-168   behind PCIe bridge 0000:82:00.0
  5    eth3 (8)         65-77,169-181   behind PCIe bridge 0000:82:00.0
  6    eth4 (8)         78-90,182-194   behind PCIe bridge 0000:88:00.0
  7    eth4 (8)         91-103,195-207  behind PCIe bridge 0000:88:00.0
  not used: docker0: is down
  not used: eth0: is for control: it shares its PCIe root with no GPU, and other NICs do
  not used: lo: is loopback
";
    assert!(said.ends_with(expected), "{said}");
}

#[test]
fn programs_read_the_same() {
    let host = json_of(&topo(&Tree::named("a3-high"), "--json"));
    assert_eq!(host["error"], Value::Null);
    assert_eq!(host["nodes"][1], json!({ "node": 1, "cpus": "52-103,156-207" }));
    assert_eq!(
        host["gpus"][2],
        json!({
            "gpu": 2, "name": "NVIDIA H100 80GB HBM3", "pci": "0000:0a:00.0", "pci_root": "0000:07", "node": 0
        })
    );
    assert_eq!(
        host["nics"][3],
        json!({
            "nic": "eth2", "up": true, "addresses": ["10.0.2.2/24"], "pci": "0000:0c:00.0", "pci_root": "0000:07",
            "node": 0, "speed_mbps": 200_000, "mtu_bytes": 8244, "driver": "gve", "device": true,
            "loopback": false, "lower": [], "rx_queues": 16, "tx_queues": 16, "header_split": true,
            "devmem": null
        })
    );
    assert_eq!(
        host["plan"]["gpus"][2],
        json!({
            "gpu": 2, "nics": ["eth2"], "channels": { "eth2": 8 }, "locality": "switch",
            "why": "behind PCIe bridge 0000:08:00.0", "cpus": "26-38,130-142",
            "others": ["eth1", "eth0", "eth3", "eth4"]
        })
    );
    assert_eq!(host["plan"]["unused"][2], json!({ "nic": "lo", "why": "is loopback" }));
}

#[test]
fn a_map_overrides_the_plan_and_what_is_slower_is_noted() {
    let output = topo(&Tree::named("a3-high"), "--gpu-nics 0-7=eth1,eth2,eth3,eth4 --channels 6 --json");
    let host = json_of(&output);
    assert_eq!(host["plan"]["gpus"][0]["channels"], json!({ "eth1": 2, "eth2": 2, "eth3": 1, "eth4": 1 }));
    assert_eq!(host["plan"]["gpus"][1]["channels"], json!({ "eth1": 1, "eth2": 2, "eth3": 2, "eth4": 1 }));
    assert_eq!(host["plan"]["notes"][0], "GPUs 0-3: uses eth3, eth4 of another NUMA node, which is slower");
    let said = text(&topo(&Tree::named("a3-high"), "--gpu-nics 0=eth3 --nics eth1,eth3").stdout);
    assert!(said.contains("  0    eth3 (8) "), "{said}");
    assert!(said.contains("Notes\n  GPU 0: uses eth3 of another NUMA node, which is slower\n"), "{said}");
}

#[test]
fn an_impossible_plan_is_one_error_beside_the_tables() {
    let across = Tree::named("two-h200");
    let output = topo(&across, "");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stderr),
        "error: GPU 1 (NUMA node 1): no NIC on the same PCIe root or NUMA node can be used, only eth0 of other nodes; \
         --allow-cross-numa uses them, which is slower, or name NICs with --gpu-nics\n"
    );
    assert!(text(&output.stdout).contains("NVIDIA H200") && !text(&output.stdout).contains("Plan"));
    let output = topo(&across, "--json");
    let host = json_of(&output);
    assert!(
        host["plan"].is_null() && host["error"].as_str().is_some_and(|error| error.starts_with("GPU 1 "))
    );
    assert_eq!(output.status.code(), Some(1));
    let output = topo(&across, "--allow-cross-numa");
    assert!(output.status.success() && text(&output.stdout).contains("which is slower"), "{output:?}");
}

#[test]
fn the_cuda_driver_is_asked_where_there_is_one() {
    let folder = crate::driver::stand_in(&[]);
    let output = ferrywire("topo --json").env("LD_LIBRARY_PATH", folder).output().expect("it runs");
    let host = json_of(&output);
    let shown: Vec<_> =
        host["gpus"].as_array().expect("GPUs").iter().map(|gpu| gpu["name"].as_str()).collect();
    assert_eq!(shown, [Some("stand-in 0"), Some("stand-in 1")], "{host}");
}

/// Regression: loopback was left out also where it was named, and the plan had no NIC.
#[test]
fn loopback_is_used_where_it_is_named() {
    let said = text(&topo(&Tree::named("small-vm"), "--nics lo").stdout);
    assert!(said.contains("host memory uses lo\n") && !said.contains("not used: lo"), "{said}");
}

#[test]
fn wishes_that_make_no_sense_are_bad_usage() {
    let host =
        Tree::of(&tree::text("a3-high").replace("0000:0c:00.0 node=0", "0000:0c:00.0 node=0 state=down"));
    let said = [
        ("--gpu-nics 9=eth1", 2, "--gpu-nics 9=...: no such GPU; there are GPUs 0-7"),
        (
            "--gpu-nics 0=eth7",
            2,
            "--gpu-nics 0=eth7: there is no NIC eth7; there are docker0, eth0, eth1, eth2, eth3, eth4, lo",
        ),
        (
            "--gpu-nics 0=eth2",
            1,
            "--gpu-nics 0=eth2: eth2 is down; NICs that can be used: eth0, eth1, eth3, eth4",
        ),
        (
            "--nics eth7",
            2,
            "--nics eth7: there is no NIC eth7; there are docker0, eth0, eth1, eth2, eth3, eth4, lo",
        ),
        (
            "--gpu-nics eth1",
            2,
            "--gpu-nics eth1: no GPU before \"eth1\"; write it as GPU=NIC,..., for example 0=eth1,1=eth2, or 0-1=eth1,eth2 \
             for several of each",
        ),
        ("--channels 0", 2, "--channels must be at least 1 (got 0)"),
        ("--channels 1000", 2, "--channels must be at most 256 (got 1000)"),
    ];
    for (args, status, error) in said {
        let output = topo(&host, args);
        assert_eq!((output.status.code(), first_error(&output)), (Some(status), format!("error: {error}")));
    }
    let nowhere = run("topo --root /nonexistent");
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(first_error(&nowhere).contains("/nonexistent/facts"), "{}", text(&nowhere.stderr));
}
