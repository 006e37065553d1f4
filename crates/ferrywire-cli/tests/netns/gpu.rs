//! One endpoint with memory on a GPU takes the NICs on that GPU's PCIe root, as a recorded host has it.

use serde_json::Value;

use crate::driver;
use crate::process::{Process, SERVE, wait_until};
use crate::tree::Tree;
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, nothing_is_left, turn};

/// Two GPUs, each with a NIC on its PCIe root; the other two NICs are on none.
fn recorded(letter: char) -> Tree {
    let nic = |link: usize, bus: &str| {
        let name = format!("v{letter}{link}");
        format!(
            "nic {name} pci0000:{bus}/0000:{bus}:0{link}.0 node=0\nfact address {name} 10.77.{link}.9/24\n"
        )
    };
    let nics = [nic(1, "00"), nic(2, "40"), nic(3, "c0"), nic(4, "00")].concat();
    let gpus = "gpu pci0000:40/0000:40:00.0/0000:41:00.0 node=0\ngpu pci0000:c0/0000:c0:00.0/0000:c1:00.0 node=0\n\
                fact gpu 0 0000:41:00.0 A\nfact gpu 1 0000:c1:00.0 B\n";
    Tree::of(&format!("node 0 0\ncpus 0\n{gpus}{nics}"))
}

fn nics(row: &Value) -> Vec<&str> {
    row["per_nic"].as_array().expect("NICs").iter().filter_map(|nic| nic["nic"].as_str()).collect()
}

#[test]
fn one_endpoint_uses_the_nics_of_its_gpu() {
    let Some(_turn) = turn() else { return };
    if !driver::has_kernels() {
        return crate::skip("a C++ compiler");
    }
    let world = World::new("2gbit");
    let stand_in = driver::stand_in(&[driver::WITH_KERNELS]);
    let cuda = [("LD_LIBRARY_PATH", stand_in.display().to_string())];
    let (near, far) = (recorded('a'), recorded('b'));
    let connect = |args: &str| {
        let fixed = format!("bench connect {SERVE} --root {} --json -", near.root().display());
        let args = format!("{fixed} --sizes 256K --iters 8 --channels 4 {args}");
        Process::start_with(&world, Host::A, &args, &cuda).end(RUN_TIMEOUT)
    };
    let serve = Process::serve(&world, "");
    for (args, expected) in [
        ("--memory cuda:0 --peer-memory host", vec!["va2"]),
        ("--memory cuda:1 --peer-memory host", vec!["va3"]),
        ("--memory cuda:1 --peer-memory host --nics va1,va4", vec!["va1", "va4"]),
        ("--memory host --peer-memory host", vec!["va1", "va2", "va3", "va4"]),
    ] {
        let ended = connect(args);
        assert_eq!(nics(&ended.verified()), expected, "{args}");
        let reported = ended.errors.contains("; --nics names others");
        assert_eq!(reported, expected.len() == 1, "{args}: {}", ended.errors);
    }
    serve.signal("-INT");
    assert_eq!(serve.end(RUN_TIMEOUT).status, Some(130));

    let args = format!("bench serve --listen 0.0.0.0:7420 --memory cuda:1 --root {}", far.root().display());
    let serve = Process::start_with(&world, Host::B, &args, &cuda);
    assert!(wait_until(RUN_TIMEOUT, || world.listeners(Host::B).contains(":7420")), "{}", serve.errors());
    assert!(serve.errors().contains("note: GPU 1 uses vb3, "), "{}", serve.errors());
    let ended = connect("--memory host --peer-memory cuda:1 --nics va1,va2,va3,va4");
    let row = ended.verified();
    let channels = row["per_channel"].as_array().expect("channels");
    assert!(channels.iter().any(|channel| channel["nic"] == "va3"), "{row}");
    let ended = connect("--memory host --peer-memory cuda:1 --nics va3");
    assert_eq!(nics(&ended.verified()), ["va3"]);
    serve.signal("-INT");
    assert_eq!(serve.end(RUN_TIMEOUT).status, Some(130));
    nothing_is_left(&world);
}
