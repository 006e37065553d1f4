//! `raw`: a plain-socket program that is as fast as we can make it.
//!
//! Every "raw" figure of this project comes from here, so this program has to be hard to beat: blocking
//! sockets, one thread per connection and side, no framing, data sent from and received into its final place.
//! It depends on no part of the engine and shares no code with it.
//!
//! Reading order: [`plan`] defines a run, [`flags`] parses the command line, [`session`] makes two processes
//! agree on a run, [`bulk`] and [`pingpong`] are the measured loops, [`best`] searches for the best setting,
//! [`report`] prints.

mod best;
mod bulk;
mod flags;
mod net;
mod pingpong;
mod plan;
mod report;
mod session;
mod sys;

use std::io;
use std::process::ExitCode;

use flags::{Command, Flags};
use session::{Client, LocalServer};

fn main() -> ExitCode {
    let command = match flags::parse(std::env::args().skip(1)) {
        Ok(command) => command,
        Err(message) => {
            eprintln!("raw: {message}\nTry: raw --help");
            return ExitCode::from(2);
        }
    };
    match run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("raw: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> io::Result<()> {
    match command {
        Command::Help => {
            print!("{}", flags::HELP);
            Ok(())
        }
        Command::Serve { listen, child } => {
            if child {
                sys::die_with_parent()?;
            }
            session::serve(&listen, child)
        }
        Command::Local(flags) => {
            let server = LocalServer::spawn()?;
            measure(Client::connect(server.address, &flags)?, &flags)
        }
        Command::Connect { peer, flags } => measure(Client::connect(peer, &flags)?, &flags),
    }
}

fn measure(mut client: Client, flags: &Flags) -> io::Result<()> {
    if flags.plan.is_pingpong() {
        for plan in flags.pingpong_plans() {
            let outcome = client.pingpong(&plan)?;
            report::pingpong(&plan, &outcome, flags.json);
        }
        return Ok(());
    }
    if flags.best {
        let winner = best::search(&mut client, flags)?;
        report::bulk(&winner, flags.json);
        return Ok(());
    }
    let plans: Vec<_> = flags.connection_plans().collect();
    for series in best::interleaved(&mut client, &plans, flags.repetitions)? {
        report::bulk(&series, flags.json);
    }
    Ok(())
}
