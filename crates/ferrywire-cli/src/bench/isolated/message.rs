//! Messages from a child to its parent: JSON in lines that other writers of the pipe cannot break.
//!
//! The plugin's log lines go through the same pipe, from any thread. The kernel keeps writes up to `PIPE_BUF` bytes
//! together, so a longer message is sent in parts.
//! Invariant: a line is one write, and no longer than [`LINE_BYTES_MAX`].

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use super::super::report::News;
use crate::exit::Outcome;

/// Longest line of a message, in bytes: below `PIPE_BUF`, which is 4096.
const LINE_BYTES_MAX: usize = 4000;
/// First byte of a part that is not the last.
const PART: u8 = b'+';
/// First byte of the last part.
const LAST_PART: u8 = b'.';

/// One message of the child.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// The child lives; with the plugin's call that has been pending for longest.
    Alive(Option<Call>),
    /// The current stage, in the words of the error if the plugin ends the process in it: "while connecting".
    Stage(String),
    /// The serving end listens.
    Listening {
        /// The addresses on which it listens.
        addresses: Vec<SocketAddr>,
        /// The addresses that other hosts may reach.
        reachable: Vec<SocketAddr>,
    },
    /// The serving end begins a run with this peer.
    RunBegins(String),
    /// The serving end has finished a run.
    RunOver {
        /// The peer's name.
        name: String,
        /// A description of the run.
        what: String,
        /// The run's outcome.
        outcome: Outcome,
    },
    /// An addition to the connecting end's record of the run.
    News(Box<News>),
    /// The outcome of the child process.
    Outcome(Outcome),
}

/// A pending call of the plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The plugin's function and its device.
    pub what: String,
    /// How long the call has been pending, in milliseconds.
    pub under_way_ms: u64,
}

/// The child's end of the pipe.
#[derive(Debug)]
pub struct Sender(Mutex<File>);

impl Sender {
    /// Creates a sender that writes to this pipe.
    pub fn new(pipe: File) -> Sender {
        Sender(Mutex::new(pipe))
    }

    /// The pipe's descriptor, for other writers of whole lines.
    pub fn descriptor(&self) -> RawFd {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).as_raw_fd()
    }

    /// Sends a message. If the parent is gone, the message is lost.
    pub fn send(&self, message: &Message) {
        let Ok(text) = serde_json::to_vec(message) else { return };
        let mut pipe = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let parts: Vec<&[u8]> = text.chunks(LINE_BYTES_MAX - 2).collect();
        for (i, part) in parts.iter().enumerate() {
            let first = if i + 1 == parts.len() { LAST_PART } else { PART };
            if pipe.write_all(&[&[first], *part, b"\n"].concat()).is_err() {
                return;
            }
        }
    }
}

/// Reassembles messages from the lines of the pipe.
#[derive(Debug, Default)]
pub struct Assembler(Vec<u8>);

impl Assembler {
    /// Takes a line; returns the message that it completes. Lines of other writers are not messages.
    pub fn take(&mut self, line: &[u8]) -> Option<Message> {
        let (first, rest) = line.split_first()?;
        match *first {
            PART => self.0.extend_from_slice(rest),
            LAST_PART => {
                self.0.extend_from_slice(rest);
                return serde_json::from_slice(&std::mem::take(&mut self.0)).ok();
            }
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn messages_of_any_length_survive_lines_of_others_between_them() {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let sender = Sender::new(File::from(std::os::fd::OwnedFd::from(writer)));
        for bytes in [0, 1, LINE_BYTES_MAX, 10 * LINE_BYTES_MAX + 7] {
            sender.send(&Message::Stage("ä".repeat(bytes / 2)));
        }
        drop(sender);
        let mut all = Vec::new();
        reader.read_to_end(&mut all).expect("bytes");
        let mut assembler = Assembler::default();
        let mut lengths = Vec::new();
        for line in all.split(|byte| *byte == b'\n') {
            assert!(line.len() < LINE_BYTES_MAX);
            assert!(assembler.take(b"what a plugin logs").is_none());
            if let Some(Message::Stage(text)) = assembler.take(line) {
                assert!(text.chars().all(|c| c == 'ä'));
                lengths.push(text.chars().count());
            }
        }
        assert_eq!(lengths, [0, 0, LINE_BYTES_MAX / 2, (10 * LINE_BYTES_MAX + 7) / 2]);
    }
}
