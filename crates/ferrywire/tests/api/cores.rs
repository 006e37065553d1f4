//! On which cores the progress threads of both ends run, on one host.

use crate::affinity::{cores_of, has_cores};
use crate::case::case;
use crate::{LIMIT, builder};
use ferrywire::{Endpoint, Peer, Region, Transfer};
use std::collections::VecDeque;
use std::time::Instant;

/// With more cores the threads are pinned only in bulk.
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
    fn write_until(&self, bytes: u64, until: impl Fn(&[Vec<usize>]) -> bool) {
        let began = Instant::now();
        let mut writes: VecDeque<Transfer> = VecDeque::new();
        while !until(&progress_threads()) {
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

/// The cores that are the only ones of some threads, each as often as it is.
fn pinned(threads: &[Vec<usize>]) -> Vec<usize> {
    let mut cores: Vec<usize> =
        threads.iter().filter(|cores| cores.len() == 1).map(|cores| cores[0]).collect();
    cores.sort();
    cores
}

#[test]
fn on_few_cores_each_progress_thread_is_pinned() {
    case!("").passes(|| {
        if !has_cores(2) {
            println!("SKIPPED: needs 2 cores");
            return;
        }
        let ends = Ends::with_threads(2);
        ends.write_until(64, |threads| {
            let cores = pinned(threads);
            cores.len() == 4 && cores[0] == cores[1] && cores[1] < cores[2] && cores[2] == cores[3]
        });
        ends.close();
    });
}

#[test]
fn on_many_cores_progress_threads_are_pinned_in_bulk_alone() {
    case!("").passes(|| {
        const COUNT: usize = FEW_CORES + 1;
        if !has_cores(COUNT) {
            println!("SKIPPED: needs {COUNT} cores");
            return;
        }
        let ends = Ends::with_threads(COUNT);
        let began = Instant::now();
        while progress_threads().len() < 2 * COUNT {
            assert!(began.elapsed() < LIMIT, "{:?}", progress_threads());
            std::thread::yield_now();
        }
        assert!(progress_threads().iter().all(|cores| cores.len() == COUNT));
        // The threads of the first channel, which carries short messages alone.
        let first = || cores_of("ferrywire-0");
        ends.write_until(32 << 20, |_| matches!(&first()[..], [near, far] if near == far && near.len() == 1));
        ends.write_until(
            4 << 10,
            |_| matches!(&first()[..], [near, far] if near.len() == COUNT && near == far),
        );
        ends.close();
    });
}
