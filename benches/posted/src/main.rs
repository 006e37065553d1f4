//! `posted`: the bare loop over an NCCL net plugin.
//!
//! The baseline of ferrywire's plugin transport: two processes on this host, a connection of the plugin and a
//! thread per connection and side, at most a window of requests posted, only the oldest tested, finished
//! receives given back at once. No headers, no acknowledgements, no statistics. It uses the engine's layouts
//! of the plugin interface, and nothing else of the engine.
//!
//! Reading order: [`flags`] (the parameters of a run), [`session`] (the protocol of the two processes), [`pump`] (the
//! measured loops), [`exchange`] (another loop, with messages in both directions), [`table`] (the plugin's functions).

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
