//! What a process of this command tells the process that started it, beside what it prints for people.
//!
//! Standard output of such a child is a pipe for [`Message`]s, as that of a child with a plugin is. What a child prints
//! goes to standard error, where nothing is looked for: no wording of it decides anything.
//! Read next: [`super::isolated::message`], how messages travel.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};
use std::thread;

use super::isolated::message::{Assembler, Message, Sender};
use crate::exit::Outcome;
use crate::sys;

/// Tells a child that its standard output is a pipe for messages. As its name says no option, no flag is in its way.
const VARIABLE: &str = "FERRYWIRE_TELLS_PARENT";

/// Has a child of this command tell this process what happens.
pub fn ask(command: &mut Command) {
    command.env(VARIABLE, "1").stdout(Stdio::piped());
}

/// Has a child of this command tell nobody, though this process may be such a child itself.
pub fn do_not_ask(command: &mut Command) {
    command.env_remove(VARIABLE);
}

/// The pipe to the parent, where the parent has asked for it. From the first call on, what is printed goes to standard error.
pub fn pipe() -> Option<Arc<Sender>> {
    static PIPE: OnceLock<Option<Arc<Sender>>> = OnceLock::new();
    let take = || {
        std::env::var_os(VARIABLE)?;
        sys::take_stdout().ok().map(|pipe| Arc::new(Sender::new(pipe)))
    };
    PIPE.get_or_init(take).clone()
}

/// Tells the parent, if it has asked, how this process ends.
pub fn tell_outcome(outcome: &Outcome) {
    if let Some(pipe) = pipe() {
        pipe.send(&Message::Outcome(outcome.clone()));
    }
}

/// What a child says, until it closes its pipe. The pipe is read to its end: a full one would stop the child.
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
