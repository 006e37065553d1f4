//! Runs with a plugin happen in a child process, because a plugin may exit, crash or never return.
//!
//! ```text
//!   flags ── parent: prints, stores, decides ── lines over a pipe ── child: endpoint and plugin
//! ```
//!
//! The child is this command with the same arguments. Its environment is complete before it starts; everything else
//! that it needs is in one variable ([`Order`]). It shares the parent's standard error and reports everything else in
//! [`Message`]s. The parent detects its end and calls of the plugin that do not return, reports each in one line, and
//! continues: a failed run keeps its finished results, and a serving end gets a new child on the same port.
//!
//! Invariant: whatever a plugin does, the parent neither ends nor hangs.
//! Read next: [`message`], [`child`], [`supervisor`] (the parent's watch), [`serve`].

pub mod child;
pub mod message;
pub mod serve;
pub mod supervisor;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::OnceLock;

use ferrywire::payload::plugin::{SetBy, Variable};
use serde::{Deserialize, Serialize};

use super::child_secret;
use super::report::Record;
use crate::exit::Outcome;
use crate::nics;
use crate::plan::{ConnectPlan, EnginePlan};
use message::Message;
use supervisor::{Event, Supervisor};

/// The variable that carries the [`Order`] to the child.
const ORDER: &str = "FERRYWIRE_SUPERVISED";

/// Information for a child besides its arguments.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Order {
    /// The address to listen on: the previous child's port.
    pub listen: Option<SocketAddr>,
    /// The addresses to connect to.
    pub connect: Vec<SocketAddr>,
    /// Name and seed of the run.
    pub run: Option<(String, u64)>,
    /// Variables that the parent has set for the plugin.
    pub set_before: Vec<String>,
    /// Text of the file of `--config`. The file itself may be a pipe, or have changed since.
    pub config: Option<String>,
}

impl Order {
    /// The order of this process, if it is a child that runs a plugin.
    pub fn from_env() -> Option<&'static Order> {
        static ORDERED: OnceLock<Option<Order>> = OnceLock::new();
        ORDERED.get_or_init(|| serde_json::from_str(&std::env::var(ORDER).ok()?).ok()).as_ref()
    }

    fn as_variable(&self) -> (&'static str, String) {
        (ORDER, serde_json::to_string(self).unwrap_or_default())
    }
}

/// The variables with which the plugin of this end will be loaded.
pub fn environment(engine: &EnginePlan, listen: Option<SocketAddr>) -> Outcome<Vec<Variable>> {
    nics::check_map(&engine.map, engine.gpus.as_deref().unwrap_or_default())?;
    // A plugin receives the names of NICs once, so they are all that its endpoints will use, also those of other
    // rails in an all-to-all run.
    let mapped = engine.map.nics.values().flatten().filter(|name| nics::is_usable(name));
    let mut nics: Vec<String> = mapped.chain(&engine.nics).cloned().collect();
    nics.sort();
    nics.dedup();
    // The child has the endpoints, so it serves the metrics.
    let of_all = EnginePlan { nics, metrics: None, ..engine.clone() };
    Ok(super::builder(&of_all, listen)?.plugin_environment()?)
}

/// The variables as text: `NAME = value (set by the user)`.
pub fn shown(variables: &[Variable]) -> String {
    let line = |v: &Variable| format!("{} = {} (set by {})\n", v.name, v.value, setter(v.set_by));
    variables.iter().map(line).collect()
}

/// The variables for the stored result: name, value, and the setter.
pub fn stored(variables: &[Variable]) -> BTreeMap<&str, [&str; 2]> {
    variables.iter().map(|v| (v.name, [v.value.as_str(), setter(v.set_by)])).collect()
}

fn setter(by: SetBy) -> &'static str {
    match by {
        SetBy::User => "the user",
        SetBy::Ferrywire => "ferrywire",
    }
}

/// The connecting end: a child measures, and `record` stores what it reports.
pub fn connect(plan: &ConnectPlan, environment: &[Variable], record: &mut Record) -> Outcome {
    let Some(plugin) = &plan.engine.plugin else { unreachable!("the caller has a plugin") };
    let run = Some((plan.run_id.clone(), plan.run.seed));
    let order = Order { connect: plan.addresses.clone(), run, ..Order::default() };
    let hand = |child: &mut Command| child_secret::hand(child, plan.engine.secret.as_deref());
    let mut supervisor = Supervisor::start(plugin, environment, order, hand)?;
    loop {
        match supervisor.next() {
            Event::Said(Message::News(news)) => record.take(*news),
            Event::Said(Message::Outcome(outcome)) => return outcome,
            Event::Said(_) => {}
            Event::Ended(failure) => return Err(failure),
        }
    }
}
