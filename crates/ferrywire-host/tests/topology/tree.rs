//! Recorded hosts: compact text made into the files that `/sys` would have.
//!
//! ```text
//! node 0 0-51,104-155                    a NUMA node with its CPUs
//! cpus 0-207                             CPUs that are there; siblings=104: CPU n shares a core with n + 104
//! gpu WAY node=0 device=2330             one of NVIDIA's devices; WAY leads from the PCI root to it
//! nic eth1 WAY node=0 speed=200000 mtu=8244 driver=gve queues=16 state=down
//! nic bond0 - lower=eth1,eth2            `-`: no device
//! file PATH TEXT                         any other file
//! fact LINE                              a line of `facts`
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A recorded tree on disk, removed with the test.
pub struct Tree(TempDir);

impl Tree {
    /// Builds the tree that some text describes.
    pub fn of(text: &str) -> Tree {
        // Hundreds of tiny files: in memory if possible.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let tree = Tree(folder.expect("a folder"));
        tree.write("facts", "");
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            tree.take(line);
        }
        tree
    }

    /// One of the recorded hosts.
    pub fn named(name: &str) -> Tree {
        Tree::of(&text(name))
    }

    pub fn root(&self) -> &Path {
        self.0.path()
    }

    fn take(&self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let options: BTreeMap<&str, &str> = words.iter().filter_map(|word| word.split_once('=')).collect();
        match words[..] {
            ["node", number, cpus] => {
                self.write(&format!("sys/devices/system/node/node{number}/cpulist"), cpus)
            }
            ["cpus", list, ..] => self.cpus(list, options.get("siblings").copied()),
            ["gpu", way, ..] => self.gpu(way, &options),
            ["nic", name, "-", ..] => self.nic(name, Path::new("virtual"), &options),
            ["nic", name, way, ..] => {
                self.pci_devices(way, options.get("node").copied().unwrap_or("-1"));
                self.nic(name, Path::new(way), &options);
            }
            ["file", path, ..] => self.write(path, line.splitn(3, ' ').nth(2).unwrap_or_default()),
            ["fact", ..] => self.fact(line.strip_prefix("fact ").unwrap_or_default()),
            _ => panic!("a tree cannot have {line:?}"),
        }
    }

    fn fact(&self, line: &str) {
        let facts = fs::read_to_string(self.root().join("facts")).expect("facts");
        self.write("facts", &format!("{facts}{line}\n"));
    }

    fn cpus(&self, list: &str, siblings: Option<&str>) {
        self.write("sys/devices/system/cpu/online", list);
        let Some(apart) = siblings.map(|number| number.parse::<u32>().expect("a number")) else { return };
        // The second threads of cores would repeat the same and double the time that a tree takes.
        for cpu in 0..apart {
            let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            self.write(&file, &format!("{cpu},{}", cpu + apart));
        }
    }

    /// Every device on a path, as the bus lists them.
    fn pci_devices(&self, way: &str, node: &str) {
        let mut folder = PathBuf::new();
        for name in way.split('/') {
            folder.push(name);
            if name.starts_with("pci") || !name.contains('.') {
                continue;
            }
            let listed = format!("sys/bus/pci/devices/{name}");
            if !self.root().join(&listed).exists() {
                self.link(&listed, &Path::new("../../../devices").join(&folder));
                self.write(&format!("{}/numa_node", self.device(&folder)), node);
            }
        }
    }

    fn device(&self, folder: &Path) -> String {
        let folder = format!("sys/devices/{}", folder.display());
        fs::create_dir_all(self.root().join(&folder)).expect("a folder");
        folder
    }

    fn gpu(&self, way: &str, options: &BTreeMap<&str, &str>) {
        self.pci_devices(way, options.get("node").copied().unwrap_or("-1"));
        let folder = self.device(Path::new(way));
        let files = [("vendor", "0x10de"), ("class", "0x030200")];
        for (file, text) in files {
            self.write(&format!("{folder}/{file}"), text);
        }
        self.write(&format!("{folder}/device"), &format!("0x{}", options.get("device").unwrap_or(&"2330")));
    }

    fn nic(&self, name: &str, way: &Path, options: &BTreeMap<&str, &str>) {
        let get = |key: &str, default: &'static str| options.get(key).copied().unwrap_or(default);
        let folder = self.device(&way.join("net").join(name));
        self.link(
            &format!("sys/class/net/{name}"),
            &Path::new("../../devices").join(way).join("net").join(name),
        );
        self.write(&format!("{folder}/flags"), get("flags", if name == "lo" { "0x9" } else { "0x1003" }));
        self.write(&format!("{folder}/operstate"), get("state", if name == "lo" { "unknown" } else { "up" }));
        self.write(&format!("{folder}/mtu"), get("mtu", "1500"));
        self.write(&format!("{folder}/speed"), get("speed", "-1"));
        for queue in 0..get("queues", "1").parse().expect("a number") {
            self.write(&format!("{folder}/queues/rx-{queue}"), "");
            self.write(&format!("{folder}/queues/tx-{queue}"), "");
        }
        for lower in get("lower", "").split(',').filter(|lower| !lower.is_empty()) {
            self.link(&format!("{folder}/lower_{lower}"), &Path::new("/sys/class/net").join(lower));
        }
        if way != Path::new("virtual") {
            self.link(&format!("{folder}/device"), Path::new("../.."));
            if let Some(driver) = options.get("driver") {
                let drivers = self.device(&Path::new("drivers").join(driver));
                self.link(&format!("sys/devices/{}/driver", way.display()), &self.root().join(drivers));
            }
        }
    }

    fn write(&self, file: &str, text: &str) {
        let file = self.root().join(file);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::write(&file, text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }

    fn link(&self, from: &str, to: &Path) {
        let from = self.root().join(from);
        fs::create_dir_all(from.parent().expect("a folder")).expect("a folder");
        // Several NICs may share a device and its driver.
        if from.symlink_metadata().is_err() {
            symlink(to, from).expect("a link");
        }
    }
}

/// The text of a recorded host.
pub fn text(name: &str) -> String {
    let file = format!("{}/../ferrywire-host/tests/topology/trees/{name}", env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"))
}
