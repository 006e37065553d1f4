//! The memory of one end: on the host, a CUDA GPU or a simulated GPU; its choice and its allocation.
//!
//! [`Memory`] is the typed and reported location, [`Home`] the location with its GPU open, [`Local`] registered memory
//! there, with the means to write and compare patterns in it.
//! Invariant: a GPU is open as long as its memory is in use, and a peer's request is granted only after
//! [`Home::check_room`].
//! Read next: [`crate::bench::verify`], which fills and checks.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use ferrywire::region::pattern::RegionPattern;
use ferrywire::{Endpoint, MemoryLocation, Region, limits};
use ferrywire_memory::cuda::{CudaError, CudaGpu};
use ferrywire_memory::sim::SimGpu;
use serde::{Deserialize, Serialize};

use crate::bench::host;
use crate::exit::{self, Failure, Outcome};

/// The memory location of one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Memory {
    Host,
    /// Memory of a CUDA GPU.
    Cuda(u32),
    /// Memory of a simulated GPU.
    Sim(u32),
}

/// Whether a server lets several processes use a GPU at the same time (MPS).
pub fn is_mps_running() -> bool {
    std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some() || Path::new("/tmp/nvidia-mps/control").exists()
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Memory, String> {
        let (kind, number) = text.split_once(':').unwrap_or((text, "0"));
        let index = |most: usize| {
            let index = number.parse().ok().filter(|index| (*index as usize) < most);
            index.ok_or_else(|| format!("GPUs are numbered 0 to {}", most - 1))
        };
        match kind {
            "host" if !text.contains(':') => Ok(Memory::Host),
            "cuda" => index(limits::CUDA_GPUS_MAX).map(Memory::Cuda),
            "sim" => index(limits::SIM_GPUS_MAX).map(Memory::Sim),
            _ => Err("no such kind of memory; there are host, cuda[:N] and sim[:N]".to_owned()),
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Host => f.write_str("host"),
            Memory::Cuda(index) => write!(f, "cuda:{index}"),
            Memory::Sim(index) => write!(f, "sim:{index}"),
        }
    }
}

impl TryFrom<String> for Memory {
    type Error = String;

    fn try_from(text: String) -> Result<Memory, String> {
        text.parse()
    }
}

impl From<Memory> for String {
    fn from(memory: Memory) -> String {
        memory.to_string()
    }
}

impl Memory {
    /// Parses the value of a flag, if it was given.
    pub fn typed(flag: &str, text: Option<&str>) -> Outcome<Option<Memory>> {
        let parse = |text: &str| text.parse().map_err(|why| Failure::Usage(format!("{flag} {text}: {why}")));
        text.map(parse).transpose()
    }

    /// The default memory of this host: its first GPU, or else host memory. If the other end is on this host
    /// and uses a GPU, the default is the GPU after that one.
    pub fn detect(neighbour: Option<Memory>) -> Memory {
        let gpus = match CudaGpu::count() {
            Ok(gpus) => gpus.min(limits::CUDA_GPUS_MAX as u32),
            Err(CudaError::NoDriver | CudaError::NoDevice) => 0,
            Err(error) => {
                exit::note(&format!("warning: uses host memory instead of GPU memory: {error}"));
                0
            }
        };
        match (gpus, neighbour) {
            (0, _) => Memory::Host,
            (_, Some(Memory::Cuda(index))) => Memory::Cuda(index.saturating_add(1) % gpus),
            _ => Memory::Cuda(0),
        }
    }

    /// This kind of memory on another GPU.
    pub fn on(self, gpu: u32) -> Memory {
        match self {
            Memory::Host => Memory::Host,
            Memory::Cuda(_) => Memory::Cuda(gpu),
            Memory::Sim(_) => Memory::Sim(gpu),
        }
    }

    /// The index of the GPU, if the memory is on one.
    pub fn index(self) -> Option<u32> {
        match self {
            Memory::Host => None,
            Memory::Cuda(index) | Memory::Sim(index) => Some(index),
        }
    }

    /// The kind of memory, as it is typed.
    pub fn kind(self) -> &'static str {
        match self {
            Memory::Host => "host",
            Memory::Cuda(_) => "cuda",
            Memory::Sim(_) => "sim",
        }
    }

    /// The name of an endpoint in results; endpoints of host memory are numbered like GPUs.
    pub fn name_on(self, gpu: u32) -> String {
        match self {
            Memory::Host => format!("host:{gpu}"),
            on_gpu => on_gpu.on(gpu).to_string(),
        }
    }

    /// The GPU's memory location, if the memory is on one.
    pub fn gpu(self) -> Option<MemoryLocation> {
        match self {
            Memory::Host => None,
            Memory::Cuda(index) => Some(MemoryLocation::Cuda(index)),
            Memory::Sim(index) => Some(MemoryLocation::SimGpu(index)),
        }
    }

    /// Opens the GPU that the memory is on.
    pub fn open(self) -> Outcome<Home> {
        let failed = |error: ferrywire::Error| Failure::failed(format!("memory {self}: {error}"));
        Ok(match self {
            Memory::Host => Home::Host,
            Memory::Cuda(index) => Home::Cuda(CudaGpu::open(index).map_err(|error| failed(error.into()))?),
            Memory::Sim(index) => Home::Sim(SimGpu::open(index).map_err(|error| failed(error.into()))?),
        })
    }
}

/// A memory location whose GPU is open.
#[derive(Clone, Debug)]
pub enum Home {
    Host,
    /// A CUDA GPU.
    Cuda(Arc<CudaGpu>),
    /// A simulated GPU.
    Sim(Arc<SimGpu>),
}

impl Home {
    /// The memory location, as it is typed.
    pub fn memory(&self) -> Memory {
        match self {
            Home::Host => Memory::Host,
            Home::Cuda(gpu) => Memory::Cuda(gpu.index()),
            Home::Sim(gpu) => Memory::Sim(gpu.index()),
        }
    }

    /// The name of the GPU.
    pub fn gpu_name(&self) -> Option<String> {
        match self {
            Home::Host => None,
            Home::Cuda(gpu) => Some(gpu.name().to_owned()),
            Home::Sim(_) => Some("simulated GPU".to_owned()),
        }
    }

    /// Refuses `bytes` bytes if they would use nearly all free memory of the location.
    pub fn check_room(&self, bytes: u64) -> Outcome {
        let Home::Cuda(gpu) = self else { return host::check_memory(bytes) };
        let free_bytes = gpu.free_bytes()?;
        if bytes <= free_bytes / 10 * 9 {
            return Ok(());
        }
        Err(Failure::failed(format!(
            "the sizes and the depth need {} MiB on cuda:{} ({}) of {}, which has {} MiB free: choose smaller --sizes or \
             --depth",
            bytes >> 20,
            gpu.index(),
            gpu.name(),
            host::hostname(),
            free_bytes >> 20
        )))
    }

    /// Identifies the memory that locations share: a CUDA GPU's own, or else the host's.
    pub fn store(&self) -> Option<u32> {
        match self {
            Home::Host | Home::Sim(_) => None,
            Home::Cuda(gpu) => Some(gpu.index()),
        }
    }

    /// Refuses the bytes that several endpoints need together, by the rule of [`Home::check_room`].
    pub fn check_room_of_all<'a>(needs: impl IntoIterator<Item = (&'a Home, u64)>) -> Outcome {
        let mut of_stores: BTreeMap<Option<u32>, (&Home, u64)> = BTreeMap::new();
        for (home, bytes) in needs {
            let (_, sum) = of_stores.entry(home.store()).or_insert((home, 0));
            *sum = sum.saturating_add(bytes);
        }
        of_stores.into_values().try_for_each(|(home, bytes)| home.check_room(bytes))
    }

    /// Allocates and registers memory at the location.
    pub fn register(&self, endpoint: &Endpoint, bytes: u64) -> Outcome<Local> {
        let region = match self {
            Home::Host => endpoint.alloc_host(bytes as usize),
            Home::Cuda(gpu) => endpoint.alloc_cuda(gpu.index(), bytes as usize),
            Home::Sim(gpu) => endpoint.alloc_sim(gpu.index(), bytes as usize),
        }?;
        Ok(Local { patterns: RegionPattern::of(&region)?, region })
    }
}

/// Registered memory of this end.
pub struct Local {
    /// Writes and compares patterns in memory that the CPU cannot access.
    pub patterns: Option<RegionPattern>,
    /// The registered memory.
    pub region: Region,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_as_it_is_shown() {
        let good = [
            ("host", "host"),
            ("sim", "sim:0"),
            ("sim:3", "sim:3"),
            ("cuda", "cuda:0"),
            ("cuda:7", "cuda:7"),
        ];
        for (text, shown) in good {
            assert_eq!(text.parse::<Memory>().map(|memory| memory.to_string()), Ok(shown.to_owned()));
            let reported = serde_json::to_string(&text.parse::<Memory>().expect("it is good")).expect("JSON");
            assert_eq!(reported, format!("{shown:?}"));
            assert_eq!(serde_json::from_str::<Memory>(&reported).ok(), text.parse().ok());
        }
        for text in
            ["", "host:0", "sim:", "sim:x", "sim:-1", "sim:99999", "cuda:", "cuda:a", "cuda:64", "floppy"]
        {
            assert!(text.parse::<Memory>().is_err(), "{text}");
        }
    }

    /// Regression: each of two requests fitted, and both together used all memory.
    #[test]
    fn endpoints_of_one_process_share_the_memory_of_the_host() {
        let sim = Memory::Sim(8).open().expect("a GPU");
        // Half of the memory may be used; this finds out how much that is.
        let fits = |bytes: u64| Home::Host.check_room(bytes).is_ok();
        let most = (20..50).map(|power| 1 << power).take_while(|bytes| fits(*bytes)).last().expect("a MiB");
        let three = [(&Home::Host, most), (&sim, most), (&Home::Host, most)];
        let said = Home::check_room_of_all(three).expect_err("more than there is").message();
        assert!(said.contains(&format!("need {} MiB", (3 * most) >> 20)), "{said}");
        assert_eq!(Home::check_room_of_all([(&Home::Host, most / 2)]), Ok(()));
    }

    #[test]
    fn patterns_in_memory_of_a_gpu_are_the_hosts() {
        use crate::bench::pattern::Pattern;
        use ferrywire_memory::pattern::Stretch;
        let endpoint = Endpoint::builder().build().expect("an endpoint");
        let local = Memory::Sim(9).open().and_then(|home| home.register(&endpoint, 10_000)).expect("memory");
        let pattern = Pattern::new(7, 3);
        let stretch = Stretch { pattern: pattern.words(), from: 13, offset: 1, bytes: 9_000 };
        local.patterns.as_ref().expect("a GPU's").fill(&[stretch]).expect("filled");
        let mut bytes = vec![0; 9_000];
        local.region.read_at(1, &mut bytes).expect("read");
        assert_eq!(pattern.first_difference(13, &bytes), None);
    }
}
