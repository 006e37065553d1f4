//! Findings of `doctor`: each has one subject, its evidence, and a fix.

use serde::Serialize;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// A function does not work.
    Fail,
    /// A function works, but slower than possible or not in all cases.
    Warn,
    /// Information; nothing has to be done.
    Note,
    /// Everything is as it should be.
    Ok,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The check's id, for programs; several NICs have several findings with one id.
    pub id: &'static str,
    pub level: Level,
    /// The NIC, GPU, host or peer that was checked.
    pub subject: String,
    /// The value that was read, and its place.
    pub evidence: String,
    /// The command or change that helps; `None` if nothing has to be done.
    pub fix: Option<String>,
}

impl Finding {
    /// Creates a finding without a problem.
    pub fn ok(id: &'static str, subject: impl Into<String>, evidence: impl Into<String>) -> Finding {
        let (subject, evidence) = (subject.into(), evidence.into());
        Finding { id, level: Level::Ok, subject, evidence, fix: None }
    }

    /// Returns the finding with another level.
    pub fn at(self, level: Level) -> Finding {
        Finding { level, ..self }
    }

    /// Makes the finding a warning with a fix.
    pub fn warn(self, fix: impl Into<String>) -> Finding {
        self.at(Level::Warn).fix(fix)
    }

    /// Makes the finding a failure with a fix.
    pub fn fail(self, fix: impl Into<String>) -> Finding {
        self.at(Level::Fail).fix(fix)
    }

    /// Adds a fix.
    pub fn fix(self, fix: impl Into<String>) -> Finding {
        Finding { fix: Some(fix.into()), ..self }
    }
}

/// For tests: the levels of the findings with this id.
#[cfg(test)]
pub fn levels(findings: &[Finding], id: &str) -> Vec<Level> {
    findings.iter().filter(|finding| finding.id == id).map(|finding| finding.level).collect()
}

/// For tests: a NIC of 100 Gbit/s without a PCI path.
#[cfg(test)]
pub fn nic(name: &str) -> ferrywire_host::topology::Nic {
    use ferrywire_host::topology::{Address, Nic};
    Nic {
        name: name.to_owned(),
        pci: None,
        node: None,
        device: true,
        loopback: false,
        lower: Vec::new(),
        up: true,
        addresses: vec![Address { ip: [10, 0, 0, 1].into(), prefix_len: 24 }],
        speed_mbps: Some(100_000),
        mtu_bytes: 9000,
        driver: None,
        rx_queues: 16,
        tx_queues: 16,
        header_split: None,
        devmem: None,
    }
}
