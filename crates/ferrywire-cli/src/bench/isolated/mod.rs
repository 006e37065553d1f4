//! A plugin may exit, crash or never return: what runs with one runs in a child process.
//!
//! ```text
//!   what was typed ── parent: prints, stores, decides ── lines over a pipe ── child: endpoint and plugin
//! ```
//!
//! The child is this command once more, with the same arguments. Its environment is complete before it
//! starts; what else it must know is in one variable ([`Order`]). It has the parent's standard error; all
//! else that it has to say it says in [`Message`]s. The parent notices its end, and calls of the plugin that
//! do not return, tells them in one line, and goes on: a failed run has its finished results, a serving end
//! gets a fresh child on the same port.
//!
//! Invariant: whatever a plugin does, the parent neither ends nor hangs.
//! Read next: [`message`], [`child`], [`supervisor`] (the parent's watch), [`serve`].

pub mod child;
pub mod message;
pub mod serve;
pub mod supervisor;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::OnceLock;

use ferrywire::payload::plugin::{SetBy, Variable};
use serde::{Deserialize, Serialize};

use super::report::Record;
use crate::exit::Outcome;
use crate::nics;
use crate::plan::{ConnectPlan, EnginePlan};
use message::Message;
use supervisor::{Event, Supervisor};

/// Carries the [`Order`] to the child.
const ORDER: &str = "FERRYWIRE_SUPERVISED";

/// What a child must know beside its arguments.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Order {
    /// Where to listen: the port of the child before.
    pub listen: Option<SocketAddr>,
    /// Where to connect.
    pub connect: Vec<SocketAddr>,
    /// Name and seed of the run.
    pub run: Option<(String, u64)>,
    /// Variables that the parent set for the plugin.
    pub set_before: Vec<String>,
}

impl Order {
    /// The order of this process, if it is such a child.
    pub fn from_env() -> Option<&'static Order> {
        static ORDERED: OnceLock<Option<Order>> = OnceLock::new();
        ORDERED.get_or_init(|| serde_json::from_str(&std::env::var(ORDER).ok()?).ok()).as_ref()
    }

    fn as_variable(&self) -> (&'static str, String) {
        (ORDER, serde_json::to_string(self).unwrap_or_default())
    }
}

/// The variables that the plugin of this end will be loaded with.
pub fn environment(engine: &EnginePlan, listen: Option<SocketAddr>) -> Outcome<Vec<Variable>> {
    nics::check_map(&engine.map, engine.gpus.as_deref().unwrap_or_default())?;
    // A plugin is told once of all NICs that its endpoints will use, those of other rails in a mesh among them.
    let mapped = engine.map.nics.values().flatten().filter(|name| nics::is_usable(name));
    let mut nics: Vec<String> = mapped.chain(&engine.nics).cloned().collect();
    nics.sort();
    nics.dedup();
    let of_all = EnginePlan { nics, ..engine.clone() };
    Ok(super::builder(&of_all, listen)?.plugin_environment()?)
}

/// The variables in words: `NAME = value (set by the user)`.
pub fn shown(variables: &[Variable]) -> String {
    let line = |v: &Variable| format!("{} = {} (set by {})\n", v.name, v.value, setter(v.set_by));
    variables.iter().map(line).collect()
}

/// The variables as they are stored: name, value and who set it.
pub fn stored(variables: &[Variable]) -> BTreeMap<&str, [&str; 2]> {
    variables.iter().map(|v| (v.name, [v.value.as_str(), setter(v.set_by)])).collect()
}

fn setter(by: SetBy) -> &'static str {
    match by {
        SetBy::User => "the user",
        SetBy::Ferrywire => "ferrywire",
    }
}

/// The connecting end: a child measures, and the record here takes what it tells.
pub fn connect(plan: &ConnectPlan, environment: &[Variable], record: &mut Record) -> Outcome {
    let Some(plugin) = &plan.engine.plugin else { unreachable!("the caller has a plugin") };
    let run = Some((plan.run_id.clone(), plan.run.seed));
    let order = Order { connect: plan.addresses.clone(), run, ..Order::default() };
    let mut supervisor = Supervisor::start(plugin, environment, order, plan.engine.secret.as_deref())?;
    loop {
        match supervisor.next() {
            Event::Said(Message::News(news)) => record.take(*news),
            Event::Said(Message::Outcome(outcome)) => return outcome,
            Event::Said(_) => {}
            Event::Ended(failure) => return Err(failure),
        }
    }
}
