//! The sources of a topology: a tree of files, and facts that no file contains.
//!
//! The tree is `/`, or a folder with the same files below it. Facts that the kernel and the CUDA driver report only
//! through calls are in [`Facts`]: read by calls on this host, or from the file `facts` of a recorded tree.
//! Invariant: with a recorded tree nothing of this host is read.
//! Read next: `nics.rs` and `gpus.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::{Address, Cpus, PciAddress};
use ferrywire::{Error, Result};
use ferrywire_devmem::sys::ethtool;
use ferrywire_memory::cuda::{CudaError, CudaGpu};
use ferrywire_proto::limits::{CUDA_GPUS_MAX, NICS_LISTED_MAX};
use ferrywire_sys::{affinity, files, nics};

/// The source of a topology: this host, or a recorded tree.
#[derive(Clone, Debug)]
pub struct Source {
    root: PathBuf,
    pub(super) facts: Facts,
}

/// Facts that no file of `/sys` contains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Addresses of NICs, by the NIC's name.
    pub addresses: Vec<(String, Address)>,
    /// Whether header split is on, for the NICs that report it.
    pub header_split: Vec<(String, bool)>,
    /// The CUDA driver's GPUs; `None` without a driver.
    pub gpus: Option<Vec<DriverGpu>>,
    /// CPUs that this process may use; `None` for all.
    pub allowed_cpus: Option<Cpus>,
    /// Messages about calls that failed.
    pub notes: Vec<String>,
}

/// A GPU as the CUDA driver reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverGpu {
    /// The driver's index of the GPU.
    pub index: u32,
    /// The GPU's PCI address.
    pub address: PciAddress,
    /// The name of the GPU's model.
    pub name: String,
}

impl Source {
    /// The source that is this host. Loads the CUDA driver if there is one, and makes no context on any GPU.
    pub fn detect() -> Source {
        match driver_gpus() {
            Ok(gpus) => Source::with_gpus(Some(gpus)),
            Err(CudaError::NoDriver) => Source::with_gpus(None),
            Err(error @ CudaError::NoDevice) => {
                let mut source = Source::with_gpus(Some(Vec::new()));
                source.facts.notes.push(error.to_string());
                source
            }
            Err(error) => {
                let mut source = Source::with_gpus(None);
                source.facts.notes.push(format!("cannot query the CUDA driver: {error}"));
                source
            }
        }
    }

    /// The source that is this host with the GPUs that the CUDA driver shows, `None` without a driver. Does not load
    /// the driver.
    pub fn with_gpus(gpus: Option<Vec<DriverGpu>>) -> Source {
        let root = PathBuf::from("/");
        let facts = Facts { gpus, ..Facts::detect(&names(&root.join("sys/class/net"))) };
        Source { root, facts }
    }

    /// A source that was recorded on another host: its files below `/sys`, `/proc/driver/nvidia` and `/dev`, and the
    /// file `facts` with one line for each fact that no file contains:
    ///
    /// ```text
    /// address eth1 10.0.1.2/24
    /// header-split eth1 on
    /// gpu 0 0000:04:00.0 NVIDIA H100 80GB HBM3
    /// driver                          (there is one, whatever GPUs it shows)
    /// cpus 0-51
    /// ```
    pub fn recorded(root: &Path) -> Result<Source> {
        let file = root.join("facts");
        let text =
            fs::read_to_string(&file).map_err(|error| Error::io(file.display().to_string(), &error))?;
        let facts = Facts::parse(&text).map_err(|line| Error::Invalid {
            what: file.display().to_string(),
            why: format!("cannot parse the line {line:?}"),
        })?;
        Ok(Source { root: root.to_owned(), facts })
    }

    /// Sorted names of the entries of a folder; empty if the folder does not exist.
    pub(super) fn names(&self, folder: &str) -> Vec<String> {
        names(&self.root.join(folder))
    }

    /// The text of a file, trimmed; `None` if the file cannot be read.
    pub(super) fn text(&self, file: &str) -> Option<String> {
        let text = fs::read(self.root.join(file)).ok()?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// The text of a file, parsed; `None` if it cannot be read or parsed.
    pub(super) fn parsed<T: FromStr>(&self, file: &str) -> Option<T> {
        self.text(file)?.parse().ok()
    }

    /// The number in a file, which the kernel writes as `0x10de`.
    pub(super) fn hex(&self, file: &str) -> Option<u32> {
        u32::from_str_radix(self.text(file)?.trim_start_matches("0x"), 16).ok()
    }

    /// Whether this process may read and write a file of `/dev`; `None` if the tree has no `/dev`.
    pub(super) fn may_open(&self, file: &str) -> Option<bool> {
        self.root.join("dev").exists().then(|| files::may_open(&self.root.join(file)))
    }

    /// The target of a symbolic link, as a folder below the tree's root.
    pub(super) fn folder(&self, path: &str) -> Option<PathBuf> {
        let root = fs::canonicalize(&self.root).ok()?;
        let found = fs::canonicalize(self.root.join(path)).ok()?;
        found.strip_prefix(root).ok().map(Path::to_owned)
    }
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names.truncate(NICS_LISTED_MAX);
    names
}

impl Facts {
    /// Reads the facts of this host, without its GPUs.
    fn detect(names: &[String]) -> Facts {
        let allowed = affinity::allowed_cores().ok();
        let mut facts = Facts {
            header_split: header_split(names),
            allowed_cpus: allowed.map(|cpus| cpus.iter().map(|cpu| *cpu as u32).collect()),
            ..Facts::default()
        };
        match nics::addresses() {
            Ok(found) => facts.addresses = found.iter().map(address_of).collect(),
            Err(error) => facts.notes.push(format!("cannot read the addresses of NICs: {error}")),
        }
        facts
    }

    /// Parses the file `facts`; the error is the first line that cannot be parsed.
    fn parse(text: &str) -> std::result::Result<Facts, String> {
        let mut facts = Facts::default();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            facts.take(line).ok_or_else(|| line.to_owned())?;
        }
        Ok(facts)
    }

    fn take(&mut self, line: &str) -> Option<()> {
        let (what, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
        match what {
            "address" => self.addresses.push((name.to_owned(), value.parse().ok()?)),
            "header-split" => self.header_split.push((name.to_owned(), on_or_off(value)?)),
            "cpus" => self.allowed_cpus = Some(rest.parse().ok()?),
            "driver" => drop(self.gpus.get_or_insert_default()),
            "gpu" => {
                let (address, model) = value.split_once(' ')?;
                let gpu = DriverGpu {
                    index: name.parse().ok()?,
                    address: address.parse().ok()?,
                    name: model.to_owned(),
                };
                self.gpus.get_or_insert_default().push(gpu);
            }
            _ => return None,
        }
        Some(())
    }
}

fn on_or_off(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

fn address_of(nic: &ferrywire_net::Nic) -> (String, Address) {
    (nic.name.clone(), Address { ip: nic.address, prefix_len: nic.prefix_len })
}

fn header_split(names: &[String]) -> Vec<(String, bool)> {
    let Ok(mut ethtool) = ethtool::Ethtool::open() else { return Vec::new() };
    let reported = |name: &String| Some((name.clone(), ethtool.header_split(name).ok()??));
    names.iter().filter_map(reported).collect()
}

/// The GPUs that the CUDA driver shows to this process. Loads the driver, and makes no context on any GPU.
///
/// # Errors
/// [`CudaError::NoDriver`], [`CudaError::NoDevice`], [`CudaError::OldDriver`], and the driver's error.
pub fn driver_gpus() -> std::result::Result<Vec<DriverGpu>, CudaError> {
    let count = CudaGpu::count()?.min(CUDA_GPUS_MAX as u32);
    let mut gpus = Vec::new();
    for index in 0..count {
        let (name, address) = CudaGpu::name_and_pci(index)?;
        gpus.extend(address.parse().ok().map(|address| DriverGpu { index, address, name }));
    }
    Ok(gpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_lines() {
        let text = "address eth1 10.0.1.2/24\n\nheader-split eth1 on\ngpu 0 0000:0A:00.0 NVIDIA H100 80GB HBM3\ncpus 0-3\n";
        let facts = Facts::parse(text).expect("they are good");
        assert_eq!(facts.addresses, [("eth1".to_owned(), "10.0.1.2/24".parse().expect("an address"))]);
        assert_eq!(facts.header_split, [("eth1".to_owned(), true)]);
        assert_eq!(facts.allowed_cpus.map(|cpus| cpus.len()), Some(4));
        let gpus = facts.gpus.expect("a driver");
        assert_eq!((gpus[0].address.bus, gpus[0].name.as_str()), (10, "NVIDIA H100 80GB HBM3"));
    }

    #[test]
    fn the_line_that_makes_no_sense_is_named() {
        for line in
            ["address eth1 10.0.1.2/33", "header-split eth1 perhaps", "gpu x 0000:0a:00.0 A", "weather fine"]
        {
            assert_eq!(Facts::parse(&format!("cpus 0\n{line}\n")), Err(line.to_owned()));
        }
    }
}
