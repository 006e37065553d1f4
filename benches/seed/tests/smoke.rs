//! The old system's loop runs over the simulated plugin, and a wrong byte ends it without a result.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::thread;

/// Length of a message, in bytes: chunks for every channel, and a last one that is short.
const MESSAGE: &str = "5000001";

fn seed() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_seed"));
    command.env("FERRYWIRE_TCPX_SIM", "same_host=allow").env("NCCL_DYNAMIC_CHUNK_SIZE", "524288");
    command.env("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "=lo");
    command.env("NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS", "1000");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The simulated plugin, built with these tests.
fn plugin() -> String {
    let path = std::env::current_exe().unwrap().with_file_name("libferrywire_tcpx_sim.so");
    path.into_os_string().into_string().unwrap()
}

/// Starts a target. Returns its process and the address on which it listens.
fn serve() -> (Child, String) {
    let mut target = seed().args(["serve", "--plugin", &plugin()]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(target.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").expect("an address").to_owned();
    (target, address)
}

fn connect(address: &str) -> Output {
    let run = ["--gpus", "2", "--channels", "3", "--size", MESSAGE, "--seconds", "0.05"];
    seed().args(["connect", address, "--plugin", &plugin()]).args(run).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn it_runs_and_says_how_fast() {
    let (target, address) = serve();
    let source = connect(&address);
    let (said, why) = (text(&source.stdout), text(&source.stderr));
    assert!(source.status.success(), "{why}");
    let rate = said.strip_prefix("{\"gb_per_s\":").and_then(|rest| rest.split(',').next());
    assert!(rate.is_some_and(|rate| rate.parse::<f64>().unwrap() > 0.0), "{said}");
    let moved =
        said.split_once("\"gpu_bytes\":[").and_then(|(_, rest)| rest.split_once(']')).expect("GPUs").0;
    let moved: Vec<u64> = moved.split(", ").map(|bytes| bytes.parse().unwrap()).collect();
    let message: u64 = MESSAGE.parse().unwrap();
    assert!(
        moved.len() == 2 && moved[0] == moved[1] && moved[0] > 0 && moved[0].is_multiple_of(message),
        "{said}"
    );
    assert!(said.ends_with("\"verified\":true}\n"), "{said}");
    assert!(target.wait_with_output().unwrap().status.success());
}

/// Renames message 3 to message 4 on its way to the target, so that wrong data arrive.
#[test]
fn wrong_data_end_both_without_a_number() {
    let (target, address) = serve();
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = between.local_addr().unwrap().to_string();
    let proxy = thread::spawn(move || {
        let (source, target) = (between.accept().unwrap().0, TcpStream::connect(address).unwrap());
        let (mut answers, mut to_source) = (target.try_clone().unwrap(), source.try_clone().unwrap());
        let back = thread::spawn(move || {
            let _ = std::io::copy(&mut answers, &mut to_source);
            let _ = to_source.shutdown(Shutdown::Both);
        });
        for line in BufReader::new(source).lines().map_while(Result::ok) {
            let line = line.replace("message 3 1", "message 4 1");
            if (&target).write_all(format!("{line}\n").as_bytes()).is_err() {
                break;
            }
        }
        let _ = target.shutdown(Shutdown::Both);
        let _ = back.join();
    });
    let source = connect(&here);
    let said = text(&source.stderr);
    assert!(!source.status.success() && source.stdout.is_empty(), "{} {said}", text(&source.stdout));
    assert!(said.contains("wrong GPU 1, message 4: byte 0 is wrong"), "{said}");
    let target = target.wait_with_output().unwrap();
    assert!(!target.status.success() && text(&target.stderr).contains("GPU 1, message 4: byte 0 is wrong"));
    proxy.join().unwrap();
}
