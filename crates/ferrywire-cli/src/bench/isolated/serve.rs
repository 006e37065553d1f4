//! The serving end with a plugin: a child serves, and a new one replaces it when it dies.

use std::net::SocketAddr;

use super::super::parent;
use super::super::secret_file::{self, Watch};
use super::super::serve::{announce, say, tell_run_over};
use super::message::Message;
use super::supervisor::{Event, Supervisor};
use super::{Order, environment, shown};
use crate::exit::{self, Failure, Outcome};
use crate::plan::ServePlan;
use crate::sys;

/// How one child ended.
enum End {
    /// The child has finished.
    Over(Outcome),
    /// The child died or was killed; the flag is whether the engine has already reported the call that did not
    /// return.
    Died(Failure, bool),
}

/// Serves until stopped, or with `--once` until the first run is over.
pub fn run(mut plan: ServePlan) -> Outcome {
    if plan.child {
        sys::die_with_parent();
    }
    // A child that is started later goes on with the exchange of a secret that the one before it had begun.
    let secrets = secret_file::watch(&plan.engine)?;
    let mut is_first = true;
    loop {
        match one_child(&mut plan, &secrets, is_first)? {
            End::Over(outcome) => return outcome,
            End::Died(failure, _) if plan.once => return Err(failure),
            End::Died(_, true) => {}
            End::Died(failure, false) => exit::complain(&failure.message()),
        }
        is_first = false;
    }
}

fn one_child(plan: &mut ServePlan, secrets: &Watch, is_first: bool) -> Outcome<End> {
    let environment = environment(&plan.engine, Some(plan.listen))?;
    let order = Order { listen: Some(plan.listen), ..Order::default() };
    let Some(plugin) = plan.engine.plugin.clone() else { unreachable!("the caller has a plugin") };
    let mut supervisor = Supervisor::start(&plugin, &environment, order, |child| secrets.hand(child))?;
    let (mut listens, mut failure_told) = (false, false);
    loop {
        match supervisor.next() {
            Event::Said(Message::Listening { addresses, reachable }) => {
                listens = true;
                if let Some(address) = addresses.first() {
                    plan.listen = SocketAddr::new(plan.listen.ip(), address.port());
                }
                if let Some(pipe) = parent::pipe() {
                    pipe.send(&Message::Listening { addresses, reachable });
                } else if is_first {
                    announce(plan, &addresses, &reachable);
                    if plan.verbose {
                        exit::aside(&shown(&environment));
                    }
                } else {
                    say(&format!("listening again on {}", plan.listen));
                }
            }
            Event::Said(Message::RunBegins(_)) => failure_told = false,
            Event::Said(Message::RunOver { name, what, outcome }) => {
                failure_told = outcome.is_err();
                match parent::pipe() {
                    Some(pipe) => pipe.send(&Message::RunOver { name, what, outcome }),
                    None => tell_run_over(plan.once, &name, &what, &outcome),
                }
            }
            Event::Said(Message::Outcome(outcome)) => return Ok(End::Over(outcome)),
            Event::Said(_) => {}
            Event::Ended(Failure::Interrupted) => return Ok(End::Over(Err(Failure::Interrupted))),
            // A child that dies before it listens would do so again.
            Event::Ended(failure) if !listens => return Ok(End::Over(Err(failure))),
            Event::Ended(failure) => return Ok(End::Died(failure, failure_told && supervisor.is_overdue())),
        }
    }
}
