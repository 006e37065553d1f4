//! How long a write of 64 MiB takes on connections that have idled, when the kernel has forgotten what the path carries.
//!
//! ```text
//! after-idle serve ADDR:PORT
//! after-idle connect ADDR:PORT SECONDS
//! ```
//!
//! Both ends need `FERRYWIRE_SECRET`. `connect` prints one JSON line: milliseconds of the first write, of the median
//! of some in a row, of the write after the pause, and of the write after that one. Read next: `delay.py`, which runs it.

use std::error::Error;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use ferrywire::{Endpoint, Peer, Region, RemoteRegion};

const WRITE_BYTES: u64 = 64 << 20;
const WARM_WRITES: usize = 5;
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let secret = std::env::var("FERRYWIRE_SECRET")?;
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address] => serve(address.parse()?, &secret),
        ["connect", address, seconds] => {
            connect(address.parse()?, &secret, Duration::from_secs_f64(seconds.parse()?))
        }
        _ => Err("usage: after-idle serve ADDR:PORT | connect ADDR:PORT SECONDS".into()),
    }
}

/// Registers memory for one peer, and stays until that peer has gone.
fn serve(address: SocketAddr, secret: &str) -> Result<(), Box<dyn Error>> {
    let endpoint = Endpoint::builder().listen(address).secret(secret).build()?;
    let target = endpoint.alloc_host(WRITE_BYTES as usize)?;
    let peer = endpoint.accept(LIMIT)?;
    peer.notify(&target.descriptor().to_bytes())?.wait(LIMIT)?;
    peer.wait_notification(Duration::from_secs(3600))?;
    Ok(())
}

fn connect(address: SocketAddr, secret: &str, pause: Duration) -> Result<(), Box<dyn Error>> {
    let endpoint = Endpoint::builder().secret(secret).build()?;
    let peer = endpoint.connect(address, LIMIT)?;
    let target = RemoteRegion::from_bytes(&peer.wait_notification(LIMIT)?)?;
    let source = endpoint.register(vec![7; WRITE_BYTES as usize])?;
    let write = || write_ms(&peer, &source, &target);
    let first = write()?;
    let mut warm = (0..WARM_WRITES).map(|_| write()).collect::<ferrywire::Result<Vec<_>>>()?;
    warm.sort_unstable_by(f64::total_cmp);
    thread::sleep(pause);
    let (after, next) = (write()?, write()?);
    peer.notify(b"done")?.wait(LIMIT)?;
    let warm = warm[WARM_WRITES / 2];
    println!(
        "{{\"first_ms\": {first:.1}, \"warm_ms\": {warm:.1}, \"after_idle_ms\": {after:.1}, \"next_ms\": {next:.1}}}"
    );
    Ok(())
}

fn write_ms(peer: &Peer, source: &Region, target: &RemoteRegion) -> ferrywire::Result<f64> {
    let start = Instant::now();
    peer.write(source, 0, target, 0, WRITE_BYTES)?.wait(LIMIT)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}
