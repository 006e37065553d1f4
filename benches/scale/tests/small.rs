//! A short run of the bench, to keep it working; its figures do not matter.

use std::process::Command;

fn scale(arguments: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_scale"));
    let output = command.args(arguments.split_whitespace()).output().expect("it starts");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (output.status.code(), said.concat())
}

#[test]
fn a_few_peers_connect_move_bytes_and_rest() {
    let (status, said) = scale("--peers 3 --channels 4 --bytes 65536 --idle 1");
    assert_eq!(status, Some(0), "{said}");
    for part in ["3 peers, 4 channels each", "every channel up", "every byte verified", "idle: "] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn what_makes_no_sense_is_bad_usage() {
    for arguments in ["--peers 0", "--peers", "--channels x", "--frobnicate 3"] {
        let (status, said) = scale(arguments);
        assert_eq!(status, Some(2), "{arguments}: {said}");
        assert!(said.contains("usage: scale"), "{said}");
    }
}
