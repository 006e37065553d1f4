//! The plugin's rate for host memory with a window of 16. Run it in release, with `--ignored`.

use std::collections::VecDeque;
use std::time::Instant;

use crate::case::case;
use crate::driver::{OK, Plugin};

const MESSAGE_BYTES: usize = 512 << 10;
const MESSAGES: usize = 40_000;
const WINDOW: usize = 16;

#[test]
#[ignore = "a measurement, not a rule"]
fn host_memory_over_loopback() {
    let output = case!("host_warning=off").passes(|| {
        let pair = Plugin::start().pair();
        let (send, recv) = (pair.send, pair.recv);
        let sender = std::thread::spawn(move || {
            let source = send.host(vec![1; MESSAGE_BYTES]);
            let mut window = VecDeque::new();
            for _ in 0..MESSAGES {
                if window.len() == WINDOW {
                    send.finish(window.pop_front().unwrap());
                }
                window.push_back(send.isend(&source, MESSAGE_BYTES).unwrap() as usize as _);
            }
            window.into_iter().for_each(|request| assert!(send.finish(request).is_done()));
        });
        let targets: Vec<_> = (0..WINDOW).map(|_| recv.host(vec![0; MESSAGE_BYTES])).collect();
        let (mut window, start) = (VecDeque::new(), Instant::now());
        let give_back = |window: &mut VecDeque<_>| {
            let oldest = window.pop_front().unwrap();
            assert!(recv.finish(oldest).is_done());
            assert_eq!(recv.consumed(oldest), OK);
        };
        for k in 0..MESSAGES {
            if window.len() == WINDOW {
                give_back(&mut window);
            }
            window.push_back(recv.irecv(&targets[k % WINDOW], MESSAGE_BYTES).unwrap());
        }
        while !window.is_empty() {
            give_back(&mut window);
        }
        let seconds = start.elapsed().as_secs_f64();
        println!("speed: {:.2} GB/s", (MESSAGES * MESSAGE_BYTES) as f64 / seconds / 1e9);
        sender.join().unwrap();
    });
    output.lines().filter(|line| line.contains("speed:")).for_each(|line| println!("{line}"));
}
