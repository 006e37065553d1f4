//! Messages of all sizes, in every version of the interface, through ferrywire's own host for plugins.

use ferrywire_ncclnet::Request;
use ferrywire_ncclnet::abi::Version;

use crate::pair::{Pair, pattern, plugin, tested, until};

/// Requests that a comm must accept.
const REQUESTS: usize = 32;

/// Sends all messages at once, or as many as the comm takes, into receives that are `room` bytes larger than needed.
pub fn exchange(pair: &Pair, sizes: &[usize], room: usize, receives_first: bool) {
    let mut sources: Vec<Vec<u8>> =
        sizes.iter().enumerate().map(|(seed, &size)| pattern(seed, size)).collect();
    let mut targets: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0xEE; size + room]).collect();
    let mut sends: Vec<Request> = Vec::new();
    let mut receives: Vec<Request> = Vec::new();
    let mut post = |receiving: bool| {
        if receiving {
            receives.extend(targets.iter_mut().map(|target| pair.irecv(target).expect("32 fit")))
        } else {
            sends.extend(sources.iter_mut().map(|source| pair.isend(source).expect("32 fit")))
        }
    };
    post(receives_first);
    if !receives_first {
        // Let messages overtake their receives.
        std::thread::yield_now();
    }
    post(!receives_first);
    for (&size, (send, receive)) in sizes.iter().zip(sends.into_iter().zip(receives)) {
        let (mut sent, mut received) = (None, None);
        until("a message", || {
            sent = sent.or_else(|| tested(&pair.send, send));
            received = received.or_else(|| tested(&pair.recv, receive));
            (sent.is_some() && received.is_some()).then_some(())
        });
        assert_eq!((sent, received), (Some(size as i32), Some(size as i32)));
    }
    for (seed, (&size, target)) in sizes.iter().zip(&targets).enumerate() {
        assert!(target[..size] == pattern(seed, size)[..], "message {seed} of {size} bytes");
        assert!(target[size..].iter().all(|&byte| byte == 0xEE), "message {seed} wrote beyond its end");
    }
}

pub const SIZES: [usize; 14] = [
    0,
    1,
    63,
    64,
    65,
    4096,
    65_535,
    65_536,
    65_537,
    100_000,
    131_072,
    1 << 20,
    (1 << 20) + 13,
    (4 << 20) - 1,
];

fn all_sizes(version: Version) {
    let pair = Pair::new(&plugin(version));
    exchange(&pair, &SIZES, 0, true);
    exchange(&pair, &SIZES, 5000, false);
    let mixed: Vec<usize> = (0..REQUESTS).map(|n| SIZES[(n * 5) % SIZES.len()]).collect();
    exchange(&pair, &mixed, 1, true);
    exchange(&pair, &mixed, 1, false);
    pair.close();
}

macro_rules! versions {
    ($($name:ident $version:ident)+) => {$(
        #[test]
        fn $name() {
            all_sizes(Version::$version);
        }
    )+};
}

versions! {
    all_sizes_v5 V5
    all_sizes_v6 V6
    all_sizes_v7 V7
    all_sizes_v8 V8
    all_sizes_v9 V9
    all_sizes_v10 V10
    all_sizes_v11 V11
    all_sizes_v12 V12
}

#[test]
fn large_messages() {
    let pair = Pair::new(&plugin(Version::V12));
    exchange(&pair, &[64 << 20, 0, (33 << 20) + 1], 0, true);
    pair.close();
}
