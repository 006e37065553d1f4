//! Fragment lists of a kernel, recorded in the VM and gathered in other tests.
//!
//! A list is JSON: `{"kernel": "7.2", "mtu": 1500, "pool_bytes": N, "message_bytes": N, "fragments": [[offset, bytes], ..]}`,
//! in the order of the message. [`message_is_gathered`] takes any queue of a GPU, so that real ones can be given the
//! same lists.

use ferrywire_memory::sim::{MappedBuffer, SimGpu};
use ferrywire_memory::unpack::{Fragment, GatherDevice, GatherRun, SimQueue};
use std::time::{Duration, Instant};

/// Recorded at MTU 1500 and 9000.
pub const LISTS: [&str; 2] =
    [include_str!("recorded/fragments-1500.json"), include_str!("recorded/fragments-9000.json")];

/// The places of one message's bytes in the pool.
#[derive(Debug)]
pub struct Recorded {
    pub pool_bytes: u64,
    pub message_bytes: u64,
    /// Offsets in the pool, and lengths.
    pub fragments: Vec<(u64, u32)>,
}

impl Recorded {
    pub fn parse(text: &str) -> Recorded {
        let after = |name: &str| {
            let name = format!("\"{name}\":");
            let at = text.find(&name).unwrap_or_else(|| panic!("{name} is missing"));
            text[at + name.len()..].trim_start()
        };
        let number = |text: &str| {
            let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
            text[..end].parse::<u64>().expect("a number")
        };
        let list = after("fragments").strip_prefix('[').expect("a list");
        let pairs = list.split('[').skip(1).map(|pair| {
            let (offset, bytes) = pair.split_once(',').expect("two numbers");
            (number(offset.trim()), number(bytes.trim()) as u32)
        });
        let fragments: Vec<_> = pairs.collect();
        let recorded = Recorded {
            pool_bytes: number(after("pool_bytes")),
            message_bytes: number(after("message_bytes")),
            fragments,
        };
        let total: u64 = recorded.fragments.iter().map(|(_, bytes)| u64::from(*bytes)).sum();
        assert_eq!(total, recorded.message_bytes);
        assert!(recorded.fragments.len() > 100);
        recorded
    }

    /// The list for a gather: from the pool to places in the message.
    pub fn list(&self) -> Vec<Fragment> {
        let mut target = 0;
        let place = |&(offset, bytes): &(u64, u32)| {
            let fragment = Fragment { source: offset as u32, bytes, target };
            target += u64::from(bytes);
            fragment
        };
        self.fragments.iter().map(place).collect()
    }

    /// The message in a pool with these contents, assembled by a plain loop.
    pub fn message(&self, pool: &[u8]) -> Vec<u8> {
        let mut message = Vec::new();
        for (offset, bytes) in &self.fragments {
            let offset = *offset as usize;
            message.extend_from_slice(&pool[offset..offset + *bytes as usize]);
        }
        message
    }

    /// A pool whose bytes depend on their position.
    pub fn pool(&self) -> Vec<u8> {
        (0..self.pool_bytes as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }
}

/// Gathers the message in one launch. `list` is host memory mapped for the GPU, with room for the list.
pub fn message_is_gathered(
    queue: &mut dyn GatherDevice,
    recorded: &Recorded,
    list: *mut u8,
    (pool, target): (u64, u64),
) {
    let fragments = recorded.list();
    // SAFETY: room for the list, as the caller promises, and nothing reads it yet.
    unsafe { list.cast::<Fragment>().copy_from_nonoverlapping(fragments.as_ptr(), fragments.len()) };
    let run = GatherRun { fragments: list as u64, count: fragments.len() as u64, source: pool, target };
    let before = queue.reached().expect("no failure");
    queue.gather(&[run]).expect("a launch");
    queue.mark().expect("a mark");
    let until = Instant::now() + Duration::from_secs(60);
    while queue.reached().expect("no failure") == before {
        assert!(Instant::now() < until, "the GPU does not end");
        std::thread::yield_now();
    }
}

#[test]
fn a_simulated_gpu_gathers_what_a_kernel_scattered() {
    let gpu = SimGpu::open(3).expect("a GPU");
    for text in LISTS {
        let recorded = Recorded::parse(text);
        let (content, bytes) = (recorded.pool(), recorded.message_bytes as usize);
        let pool = gpu.alloc(content.len(), 4096).expect("memory");
        let target = gpu.alloc(bytes + 1, 4096).expect("memory");
        gpu.write_from_slice(pool.address(), &content).expect("written");
        let list_bytes = recorded.fragments.len() * size_of::<Fragment>();
        let list = MappedBuffer::new(list_bytes, 4096).expect("memory");
        let mut queue = SimQueue::new(&gpu);
        // To an odd address, as a message's destination may have.
        let to = (pool.address(), target.address() + 1);
        message_is_gathered(&mut queue, &recorded, list.as_ptr(), to);
        let gathered = gpu.read_to_vec(target.address() + 1, bytes).expect("read");
        assert!(gathered == recorded.message(&content));
    }
}
