//! `posted`: the bare loop over an NCCL net plugin.
//!
//! The baseline of ferrywire's plugin transport: two processes on this host, a connection of the plugin and
//! a thread per connection and side, at most a window of requests posted, only the oldest tested, finished receives
//! given back at once. No heads, no acknowledgements, no statistics. Of the engine it uses the layouts of the
//! interface and nothing else.
//!
//! Reading order: [`flags`] says what a run is, [`session`] how the two processes come together, [`pump`] holds the
//! measured loops, [`exchange`] another one, of messages both ways, [`table`] the plugin's functions.

mod exchange;
mod flags;
mod pump;
mod session;
mod sys;
mod table;

use std::process::ExitCode;

fn main() -> ExitCode {
    let flags = match flags::parse(std::env::args().skip(1)) {
        Ok(Some(flags)) => flags,
        Ok(None) => {
            print!("{}", flags::HELP);
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("posted: {message}\nTry: posted --help");
            return ExitCode::from(2);
        }
    };
    let result = match (flags.exchange, flags.target) {
        (false, true) => session::target(&flags),
        (false, false) => session::source(&flags),
        (true, true) => exchange::target(&flags),
        (true, false) => exchange::source(&flags),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("posted: {error}");
            ExitCode::FAILURE
        }
    }
}
