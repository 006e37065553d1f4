//! The exit status of the command.

use std::process::Command;

#[test]
fn a_campaign_without_a_seed_is_a_wrong_usage() {
    for of_nothing in [["--seeds", "0"], ["--minutes", "0"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrywire-campaign"));
        let output = command.arg("campaign").args(of_nothing).output().expect("the command starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{of_nothing:?}: {said}");
        assert!(said.starts_with("usage: "), "{of_nothing:?}: {said}");
    }
}
