//! What the kernel's `ethtool` interface tells about NICs: a family of generic netlink.
//!
//! Only questions, which need no rights.
//! Read next: `netlink.rs`, how they are asked.

use super::netlink::{Attributes, Family, NetlinkError};

/// `ETHTOOL_MSG_RINGS_GET` and the attributes of question and answer.
const RINGS_GET: u8 = 15;
const RINGS_HEADER: u16 = 1;
const HEADER_DEV_NAME: u16 = 2;
const RINGS_TCP_DATA_SPLIT: u16 = 11;
const SPLIT_OFF: u8 = 1;
const SPLIT_ON: u8 = 2;

/// A connection to the kernel's ethtool family.
#[derive(Debug)]
pub struct Ethtool {
    family: Family,
}

impl Ethtool {
    /// Opens it; an error where the kernel is too old or netlink is forbidden.
    pub fn open() -> Result<Ethtool, NetlinkError> {
        Ok(Ethtool { family: Family::open("ethtool")? })
    }

    /// Whether a NIC splits headers from payload; `None` where its driver does not tell.
    pub fn header_split(&mut self, nic: &str) -> Result<Option<bool>, NetlinkError> {
        let question = Attributes::new().nest(RINGS_HEADER, Attributes::new().text(HEADER_DEV_NAME, nic));
        let rings = self.family.ask("ethtool rings-get", RINGS_GET, &question)?;
        Ok(match rings.attributes().u8(RINGS_TCP_DATA_SPLIT) {
            Some(SPLIT_ON) => Some(true),
            Some(SPLIT_OFF) => Some(false),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_answers() {
        let mut ethtool = match Ethtool::open() {
            Ok(ethtool) => ethtool,
            Err(error) => return println!("SKIPPED: needs the kernel's ethtool netlink: {error}"),
        };
        let missing = ethtool.header_split("no-such-nic").expect_err("there is none");
        assert_eq!(missing.errno, libc::ENODEV);
        // Loopback has no rings to tell of: either an answer without, or a refusal.
        assert_eq!(ethtool.header_split("lo").unwrap_or(None), None);
    }
}
