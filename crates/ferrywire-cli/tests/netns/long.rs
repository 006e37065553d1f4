//! A long path between two hosts that have one kernel: it is tuned by its round trip, whatever else suggests that
//! the ends are near.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::process::Process;
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, skip, turn};

/// One way; twice this is a long round trip.
const DELAY_US: u32 = 5000;
/// Name of the line's end on either host, and the address on the far one.
const LINE: &str = "vline";
const LINE_ADDRESS: &str = "10.77.9.2";
/// The least that the kernel counts for a socket buffer of a long path, and the most for one of a short path.
const LONG_BYTES_MIN: u64 = 16 << 20;
const SHORT_BYTES_MAX: u64 = 4 << 20;
/// The least number of channels of a long path.
const LONG_CHANNELS_MIN: u64 = 8;

/// A long path from host A to an address of host B, over a NIC of A.
struct Long {
    nic: String,
    address: String,
    /// The program that delays, where the kernel cannot.
    line: Option<Child>,
}

impl Long {
    /// The fourth link made long by the kernel, or a line of its own through a program.
    fn new(world: &World) -> Result<Long, String> {
        match world.delay(4, DELAY_US) {
            Ok(()) => Ok(Long { nic: Host::A.nic(4), address: "10.77.4.2".to_owned(), line: None }),
            Err(no_netem) => Long::through_program(world).map_err(|why| format!("{no_netem}; {why}")),
        }
    }

    fn through_program(world: &World) -> Result<Long, String> {
        let program = Path::new(env!("CARGO_BIN_EXE_ferrywire")).with_file_name("delay-line");
        if !program.exists() {
            return Err("or delay-line, made by `cargo build -p delay-line`".to_owned());
        }
        let mut line = Command::new("ip")
            .args(["netns", "exec", &world.namespace(Host::A)])
            .arg(program)
            .args([LINE, "vfar", "--delay-us", &DELAY_US.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        let mut said = String::new();
        let heard = BufReader::new(line.stdout.as_mut().expect("piped")).read_line(&mut said);
        let long = Long { nic: LINE.to_owned(), address: LINE_ADDRESS.to_owned(), line: Some(line) };
        if heard.is_err() || said != "ready\n" {
            return Err("or /dev/net/tun".to_owned());
        }
        world.take_over("vfar", LINE);
        world.address(Host::A, LINE, "10.77.9.1/24");
        world.address(Host::B, LINE, &format!("{LINE_ADDRESS}/24"));
        Ok(long)
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        if let Some(line) = &mut self.line {
            let _ = line.kill();
            let _ = line.wait();
        }
    }
}

/// A run over one NIC.
fn run(world: &World, nic: &str, address: &str) -> Value {
    let args = format!("bench connect {address}:7420 --nics {nic} --json - --sizes 4M --depth 4 --seconds 2");
    Process::start(world, Host::A, &args).end(RUN_TIMEOUT).verified()
}

/// Of one channel little is under way: the kernel bounds its buffers.
#[test]
fn both_ends_of_a_long_path_have_large_buffers_and_many_channels() {
    let Some(_turn) = turn() else { return };
    let world = World::new("1gbit");
    let long = match Long::new(&world) {
        Ok(long) => long,
        Err(why) => return skip(&format!("netem, for a long path: {why}")),
    };
    let _serve = Process::serve(&world, "");
    let (near, far) = (run(&world, &Host::A.nic(1), "10.77.1.2"), run(&world, &long.nic, &long.address));
    let channels = |row: &Value| row["channels"].as_u64().unwrap_or_else(|| panic!("{row}"));
    assert_eq!(channels(&far), channels(&near).max(LONG_CHANNELS_MIN));
    for end in ["socket_buffer_bytes", "peer_socket_buffer_bytes"] {
        for way in ["send", "receive"] {
            let bytes = |row: &Value| row["extra"][end][way].as_u64().unwrap_or_else(|| panic!("{row}"));
            assert!(bytes(&near) <= SHORT_BYTES_MAX, "{end} to {way} over a short path: {near}");
            assert!(bytes(&far) >= LONG_BYTES_MIN, "{end} to {way} over a long path: {far}");
        }
    }
}
