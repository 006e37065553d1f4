//! Which cores the progress threads of both ends keep to, on one host.

use crate::affinity::{cores_of, has_cores};
use crate::case::case;
use crate::{LIMIT, builder};
use ferrywire::{Endpoint, Peer, Region, Transfer};
use std::collections::VecDeque;
use std::time::Instant;

/// With more cores the threads keep to cores only in bulk.
const FEW_CORES: usize = 8;

struct Ends {
    ends: [Endpoint; 2],
    peer: Peer,
    source: Region,
    target: Region,
}

impl Ends {
    fn with_threads(count: usize) -> Ends {
        let build = || builder().listen("127.0.0.1:0".parse().unwrap()).threads(count).build().unwrap();
        let ends = [build(), build()];
        let peer = ends[0].connect(ends[1].listen_addresses()[0], LIMIT).unwrap();
        let [source, target] = [&ends[0], &ends[1]].map(|end| end.alloc_host(32 << 20).unwrap());
        Ends { ends, peer, source, target }
    }

    /// Writes messages of `bytes` bytes, 8 at a time, until the progress threads may use such cores.
    fn write_until(&self, bytes: u64, is_so: impl Fn(&[Vec<usize>]) -> bool) {
        let began = Instant::now();
        let mut writes: VecDeque<Transfer> = VecDeque::new();
        while !is_so(&progress_threads()) {
            assert!(began.elapsed() < LIMIT, "{:?}", progress_threads());
            for _ in 0..100 {
                let write = self.peer.write(&self.source, 0, &self.target.descriptor(), 0, bytes).unwrap();
                writes.push_back(write);
                // A caller that waits would do the work of a thread.
                while writes.len() == 8 && writes[0].poll().is_none() {
                    std::thread::yield_now();
                }
                if writes.len() == 8 {
                    assert_eq!(writes.pop_front().unwrap().wait(LIMIT), Ok(bytes));
                }
            }
        }
        writes.iter().for_each(|write| assert_eq!(write.wait(LIMIT), Ok(bytes)));
    }

    fn close(self) {
        self.ends.iter().for_each(|end| end.close(LIMIT).unwrap());
    }
}

/// The cores of each progress thread of this process.
fn progress_threads() -> Vec<Vec<usize>> {
    (0..10).flat_map(|digit| cores_of(&format!("ferrywire-{digit}"))).collect()
}

/// Whether each core has the threads of both ends with one number, and no other.
fn are_in_pairs(threads: &[Vec<usize>]) -> bool {
    let mut cores = threads.concat();
    cores.sort();
    let (pairs, rest) = cores.as_chunks::<2>();
    rest.is_empty()
        && threads.iter().all(|cores| cores.len() == 1)
        && pairs.iter().all(|[first, second]| first == second)
        && pairs.windows(2).all(|two| two[0] != two[1])
}

#[test]
fn on_few_cores_each_progress_thread_keeps_to_its_own() {
    case!("").passes(|| {
        if !has_cores(2) {
            println!("SKIPPED: needs 2 cores");
            return;
        }
        let ends = Ends::with_threads(2);
        ends.write_until(64, |threads| threads.len() == 4 && are_in_pairs(threads));
        ends.close();
    });
}

#[test]
fn on_many_cores_progress_threads_keep_to_their_own_in_bulk_alone() {
    case!("").passes(|| {
        const COUNT: usize = FEW_CORES + 1;
        if !has_cores(COUNT) {
            println!("SKIPPED: needs {COUNT} cores");
            return;
        }
        let ends = Ends::with_threads(COUNT);
        let of_all = |threads: &[Vec<usize>]| threads.iter().all(|cores| cores.len() == COUNT);
        assert!(of_all(&progress_threads()));
        ends.write_until(32 << 20, |threads| threads.len() == 2 * COUNT && are_in_pairs(threads));
        // Those that sleep keep theirs.
        let of_two =
            |threads: &[Vec<usize>]| threads.iter().filter(|cores| cores.len() == COUNT).count() >= 2;
        ends.write_until(4 << 10, of_two);
        ends.close();
    });
}
