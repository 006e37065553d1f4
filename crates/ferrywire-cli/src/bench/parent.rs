//! Messages from a process of this command to the process that started it, besides its output for people.
//!
//! Standard output of such a child is a pipe for [`Message`]s, as that of a child with a plugin. The child's output for
//! people goes to standard error.
//! Invariant: the parent parses only messages, so no wording of the output decides anything.
//! Read next: [`super::isolated::message`], the format of messages.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};
use std::thread;

use super::isolated::message::{Assembler, Message, Sender};
use crate::exit::Outcome;
use crate::sys;

/// Tells a child that its standard output is a pipe for messages. No option has this name, so no flag interferes.
const VARIABLE: &str = "FERRYWIRE_TELLS_PARENT";

/// Lets a child of this command send messages to this process.
pub fn ask(command: &mut Command) {
    sys::name_parent(command).env(VARIABLE, "1").stdout(Stdio::piped());
}

/// Keeps a child of this command from sending messages, although this process may send messages to its own parent.
pub fn do_not_ask(command: &mut Command) {
    command.env_remove(VARIABLE);
}

/// The pipe to the parent, if the parent has asked for messages. After the first call, prints go to standard error.
pub fn pipe() -> Option<Arc<Sender>> {
    static PIPE: OnceLock<Option<Arc<Sender>>> = OnceLock::new();
    let take = || {
        std::env::var_os(VARIABLE)?;
        sys::take_stdout().ok().map(|pipe| Arc::new(Sender::new(pipe)))
    };
    PIPE.get_or_init(take).clone()
}

/// Sends this process's outcome to the parent, if the parent has asked for messages.
pub fn tell_outcome(outcome: &Outcome) {
    if let Some(pipe) = pipe() {
        pipe.send(&Message::Outcome(outcome.clone()));
    }
}

/// The messages of a child until it closes its pipe. The pipe is read to its end, because a full pipe would block the child.
pub fn messages(pipe: impl Read + Send + 'static) -> Receiver<Message> {
    let (sender, messages) = mpsc::channel();
    thread::spawn(move || {
        let mut assembler = Assembler::default();
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            if let Some(message) = assembler.take(&line) {
                let _ = sender.send(message);
            }
        }
    });
    messages
}
