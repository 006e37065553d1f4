//! Counts how often each fault was injected in each phase of a link.

use std::collections::BTreeMap;

/// Counts of injected faults by fault and phase.
#[derive(Clone, Debug, Default)]
pub struct Cover {
    counts: BTreeMap<(&'static str, &'static str), u64>,
}

/// The phases of a link, in the order of its life.
pub const PHASES: [&str; 6] = ["connecting", "idle", "in flight", "channels down", "draining", "over"];

impl Cover {
    /// Counts a fault that was injected in a phase.
    pub fn count(&mut self, fault: &'static str, phase: &'static str) {
        *self.counts.entry((fault, phase)).or_default() += 1;
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Cover) {
        for (key, count) in &other.counts {
            *self.counts.entry(*key).or_default() += count;
        }
    }

    /// The table of counts, one line per fault.
    pub fn table(&self) -> String {
        let mut faults: Vec<&str> = self.counts.keys().map(|(fault, _)| *fault).collect();
        faults.dedup();
        let mut text = format!("{:<26}", "fault");
        PHASES.iter().for_each(|phase| text.push_str(&format!("{phase:>14}")));
        for fault in faults {
            text.push_str(&format!("\n{fault:<26}"));
            for phase in PHASES {
                let count = self.counts.get(&(fault, phase)).copied().unwrap_or(0);
                text.push_str(&format!("{count:>14}"));
            }
        }
        text
    }
}
