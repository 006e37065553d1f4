//! What the doctor says: one thing each, with what was read and what to do.

use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Something does not work.
    Fail,
    /// It works, slower than it might, or not for everything.
    Warn,
    /// Good to know.
    Note,
    /// As it should be.
    Ok,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Names the question, for programs; several NICs have several findings with one id.
    pub id: &'static str,
    /// How much it matters.
    pub level: Level,
    /// What it is about: a NIC, a GPU, this host, a peer.
    pub subject: String,
    /// What was read, and where.
    pub evidence: String,
    /// What to type or change; nothing where nothing is to be done.
    pub fix: Option<String>,
}

impl Finding {
    /// All is well.
    pub fn ok(id: &'static str, subject: impl Into<String>, evidence: impl Into<String>) -> Finding {
        let (subject, evidence) = (subject.into(), evidence.into());
        Finding { id, level: Level::Ok, subject, evidence, fix: None }
    }

    /// The same finding, where it matters so much.
    pub fn at(self, level: Level) -> Finding {
        Finding { level, ..self }
    }

    /// The same finding as a warning, with what to do.
    pub fn warn(self, fix: impl Into<String>) -> Finding {
        self.at(Level::Warn).fix(fix)
    }

    /// The same finding as a failure, with what to do.
    pub fn fail(self, fix: impl Into<String>) -> Finding {
        self.at(Level::Fail).fix(fix)
    }

    /// The same finding with what to do.
    pub fn fix(self, fix: impl Into<String>) -> Finding {
        Finding { fix: Some(fix.into()), ..self }
    }
}

/// What the unit tests of findings ask.
#[cfg(test)]
pub fn levels(findings: &[Finding], id: &str) -> Vec<Level> {
    findings.iter().filter(|finding| finding.id == id).map(|finding| finding.level).collect()
}

/// A NIC of 100 Gbit/s without a place on the PCI bus.
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
