use ferrywire::*;
use std::time::{Duration, Instant};
fn main() {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .init();
    let limit = Duration::from_secs(5);
    let chans: usize = std::env::args().nth(1).map_or(2, |s| s.parse().unwrap());
    let recv = Endpoint::builder()
        .listen("127.0.0.1:0".parse().unwrap())
        .build()
        .unwrap();
    let addr = recv.listen_addresses()[0];
    let target = recv.register_zeroed(256 << 20).unwrap();
    let sender = Endpoint::builder().channels(chans).build().unwrap();
    let t = Instant::now();
    let peer = sender.connect(addr, limit).unwrap();
    println!("connected in {:?}: {:?}", t.elapsed(), peer.stats());
    let from = recv.accept(limit).unwrap();
    let data: Vec<u8> = (0..(256usize << 20)).map(|i| (i * 31 % 251) as u8).collect();
    let source = sender.register(data.clone()).unwrap();
    let remote = target.descriptor();
    for round in 0..3 {
        for size in [0u64, 1, 4097, 65536, 1 << 20, 64 << 20, 256 << 20] {
            let t = Instant::now();
            let w = peer.write_notify(&source, 0, &remote, 0, size, b"x").unwrap();
            let moved = w.wait(limit).unwrap();
            let e = t.elapsed();
            println!(
                "{round} write {size}: {moved} {:?} {:.2} GB/s",
                e,
                size as f64 / e.as_secs_f64() / 1e9
            );
            assert_eq!(from.wait_notification(limit).unwrap(), b"x");
            let mut got = vec![0; size as usize];
            target.read_at(0, &mut got).unwrap();
            assert!(got[..] == data[..size as usize]);
            target.write_at(0, &vec![0xaa; size as usize]).unwrap();
        }
    }
    // depth 4
    let t = Instant::now();
    let mut q = std::collections::VecDeque::new();
    let n = 64;
    for _ in 0..n {
        q.push_back(peer.write(&source, 0, &remote, 0, 64 << 20).unwrap());
        if q.len() == 4 {
            q.pop_front().unwrap().wait(limit).unwrap();
        }
    }
    for w in q {
        w.wait(limit).unwrap();
    }
    println!(
        "depth 4 64 MiB: {:.2} GB/s",
        (n as f64) * (64 << 20) as f64 / t.elapsed().as_secs_f64() / 1e9
    );
    // send/recv
    for size in [0u64, 5, 4096, 65536, 1 << 20, 33 << 20] {
        let r = from.recv(7, &target, 0, size).unwrap();
        let s = peer.send(7, &source, 0, size).unwrap();
        assert_eq!(s.wait(limit).unwrap(), size);
        assert_eq!(r.wait(limit).unwrap(), size);
    }
    // read
    for size in [1u64, 4096, 65536, 1 << 20, 128 << 20] {
        let back = sender.register_zeroed(size as usize).unwrap();
        let t = Instant::now();
        peer.read(&back, 0, &remote, 0, size)
            .unwrap()
            .wait(limit)
            .unwrap();
        println!("read {size}: {:?}", t.elapsed());
    }
    let t = Instant::now();
    peer.close(limit).unwrap();
    println!(
        "closed in {:?}; other side: {:?}",
        t.elapsed(),
        from.wait_notification(limit)
    );
}
