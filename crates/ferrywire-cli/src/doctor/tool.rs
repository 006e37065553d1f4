//! Another program's answer, waited for no longer than a deadline.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// What the program prints; nothing where it is missing, fails or takes too long.
pub fn output(program: &str, args: &[&str], limit: Duration) -> Option<String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let mut pipe = child.stdout.take()?;
    let (done, said) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let read = pipe.read_to_string(&mut text).map(|_| text);
        drop(done.send(read));
    });
    let text = said.recv_timeout(limit);
    if text.is_err() {
        let _ = child.kill();
    }
    let succeeded = child.wait().is_ok_and(|status| status.success());
    text.ok()?.ok().filter(|_| succeeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_fails_or_hangs_says_nothing() {
        let long = Duration::from_secs(60);
        assert_eq!(output("echo", &["there"], long), Some("there\n".to_owned()));
        assert_eq!(output("no-such-program", &[], long), None);
        assert_eq!(output("false", &[], long), None);
        assert_eq!(output("sleep", &["600"], Duration::from_millis(10)), None);
    }
}
