//! The child process: does the work, and reports everything to the parent.
//!
//! Standard output is the pipe to the parent; a plugin's own output goes to standard error.
//! Read next: `message.rs`.

use std::sync::Arc;
use std::time::Duration;

use ferrywire_ncclnet::{InflightCall, inflight_calls, log};

use super::super::{connect, ranks, serve};
use super::Order;
use super::message::{Call, Message, Sender};
use crate::exit::{self, Failure, Outcome};
use crate::plan::{ConnectPlan, Plan, RanksPlan, ServePlan};
use crate::sys;

/// How often the child reports that it lives, and the plugin's pending call.
const ALIVE_INTERVAL: Duration = Duration::from_millis(200);

/// Carries out the plan, reports the outcome, and ends the process without running the plugin's exit handlers.
pub fn run(plan: Plan, order: &Order) -> Outcome {
    sys::die_with_parent();
    let pipe = sys::take_stdout().map_err(|error| Failure::failed(error.to_string()))?;
    let sender = Arc::new(Sender::new(pipe));
    log::tee_to_fd(Some(sender.descriptor()));
    tell_that_alive(sender.clone())?;
    let outcome = match plan {
        Plan::Loopback(plan) | Plan::Connect(plan) => connect_end(*plan, order, &sender),
        Plan::Ranks(plan) => rank(*plan, order, &sender),
        Plan::Serve(plan) => serve_end(*plan, order, &sender),
        _ => Err(Failure::failed("internal error, please report: a child without a plugin")),
    };
    sender.send(&Message::Outcome(outcome));
    sys::exit_now(0)
}

fn connect_end(mut plan: ConnectPlan, order: &Order, sender: &Sender) -> Outcome {
    if let Some(plugin) = &mut plan.engine.plugin {
        plugin.set_before.clone_from(&order.set_before);
    }
    plan.addresses.clone_from(&order.connect);
    if let Some((run_id, seed)) = &order.run {
        (plan.run_id, plan.run.seed) = (run_id.clone(), *seed);
    }
    sender.send(&Message::Stage("while it was started".to_owned()));
    connect::measure(&plan, &mut |news| sender.send(&Message::News(Box::new(news))), &|stage| {
        sender.send(&Message::Stage(stage.to_owned()))
    })
}

fn rank(mut plan: RanksPlan, order: &Order, sender: &Sender) -> Outcome {
    if let Some(plugin) = &mut plan.bench.engine.plugin {
        plugin.set_before.clone_from(&order.set_before);
    }
    if let Some((run_id, seed)) = &order.run {
        (plan.bench.run_id, plan.bench.run.seed) = (run_id.clone(), *seed);
    }
    sender.send(&Message::Stage("while it was started".to_owned()));
    let tell = &mut |news| sender.send(&Message::News(Box::new(news)));
    ranks::measure(&plan, (tell, &|stage| sender.send(&Message::Stage(stage.to_owned()))))
}

fn serve_end(mut plan: ServePlan, order: &Order, sender: &Arc<Sender>) -> Outcome {
    if let Some(plugin) = &mut plan.engine.plugin {
        plugin.set_before.clone_from(&order.set_before);
    }
    plan.listen = order.listen.unwrap_or(plan.listen);
    sender.send(&Message::Stage("while it was started".to_owned()));
    serve::serve(plan, &serve::Voice::Parent(sender.clone()))
}

fn tell_that_alive(sender: Arc<Sender>) -> Outcome {
    let tell = move || {
        loop {
            sender.send(&Message::Alive(inflight_calls().first().map(described)));
            std::thread::sleep(ALIVE_INTERVAL);
        }
    };
    exit::attend("alive", tell)
}

fn described(call: &InflightCall) -> Call {
    let device = call.device.map_or_else(String::new, |device| format!(" on device {device}"));
    Call { what: format!("{}{device}", call.call), under_way_ms: call.since.as_millis() as u64 }
}
