//! The kernel's `ethtool` family of generic netlink: settings of NICs.
//!
//! Queries need no rights; changes need CAP_NET_ADMIN. A value that a driver does not report is `None`. The kernel may
//! accept a change without effect, because the driver does something else, so callers read back what they set.
//! Read next: `netlink.rs`, the messages, and `flow.rs`, for settings without netlink messages.

use super::netlink::{AttributeList, Attributes, Family, NetlinkError, Reply};

/// The first attribute of each query, which names the NIC, and the attributes inside it.
const HEADER: u16 = 1;
const HEADER_DEV_NAME: u16 = 2;

/// `ETHTOOL_MSG_FEATURES_*`: messages about features, which are sets of bits.
const FEATURES_GET: u8 = 11;
const FEATURES_SET: u8 = 12;
const FEATURES_CHANGEABLE: u16 = 2;
const FEATURES_WANTED: u16 = 3;
const FEATURES_ACTIVE: u16 = 4;
const FEATURES_FIXED: u16 = 5;
const BITSET_NO_MASK: u16 = 1;
const BITSET_BITS: u16 = 3;
const BITS_BIT: u16 = 1;
const BIT_NAME: u16 = 2;
const BIT_VALUE: u16 = 3;
/// `ETHTOOL_MSG_RINGS_*`: messages about receive and send rings.
const RINGS_GET: u8 = 15;
const RINGS_SET: u8 = 16;
const RINGS_RX_MAX: u16 = 2;
const RINGS_TX_MAX: u16 = 5;
const RINGS_RX: u16 = 6;
const RINGS_TX: u16 = 9;
const RINGS_TCP_DATA_SPLIT: u16 = 11;
const RINGS_HDS_THRESHOLD: u16 = 17;
/// `ETHTOOL_MSG_CHANNELS_GET`: the query for numbers of queues.
const CHANNELS_GET: u8 = 17;
const CHANNELS_RX: u16 = 6;
const CHANNELS_COMBINED: u16 = 9;

/// Name of the feature that flow rules need.
pub const NTUPLE: &str = "rx-ntuple-filter";

/// Whether headers and payload of TCP packets are received into separate buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The driver decides whether headers are split.
    Auto = 0,
    /// Headers and payload are received together.
    Off = 1,
    /// Headers and payload are received into separate buffers. Drivers that split by themselves also report this in
    /// [`Split::Auto`].
    On = 2,
}

/// Settings of a NIC's receive rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// Whether headers are split from payload.
    pub split: Option<Split>,
    /// Size in bytes up to which packets are not split.
    pub threshold_bytes: Option<u32>,
}

/// The state of a NIC's feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Whether the feature is on.
    pub on: bool,
    /// Whether the feature can be changed.
    pub changeable: bool,
}

impl Feature {
    /// Whether the feature is on or can be turned on.
    pub fn can_be_on(self) -> bool {
        self.on || self.changeable
    }
}

/// A netlink connection to the ethtool family.
#[derive(Debug)]
pub struct Ethtool {
    family: Family,
}

impl Ethtool {
    /// Opens a netlink connection to the ethtool family.
    ///
    /// # Errors
    /// The kernel is too old, or netlink is forbidden.
    pub fn open() -> Result<Ethtool, NetlinkError> {
        Ok(Ethtool { family: Family::open("ethtool")? })
    }

    /// Whether a NIC splits headers from payload; `None` if its driver does not report it.
    pub fn header_split(&mut self, nic: &str) -> Result<Option<bool>, NetlinkError> {
        Ok(match self.rings(nic)?.split {
            Some(Split::On) => Some(true),
            Some(Split::Off) => Some(false),
            _ => None,
        })
    }

    /// The settings of a NIC's receive rings.
    pub fn rings(&mut self, nic: &str) -> Result<Rings, NetlinkError> {
        let rings = self.family.ask("ethtool rings-get", RINGS_GET, &about(nic))?;
        let split = match rings.attributes().u8(RINGS_TCP_DATA_SPLIT) {
            Some(0) => Some(Split::Auto),
            Some(1) => Some(Split::Off),
            Some(2) => Some(Split::On),
            _ => None,
        };
        Ok(Rings { split, threshold_bytes: rings.attributes().u32(RINGS_HDS_THRESHOLD) })
    }

    /// Numbers of descriptors of the receive and the send rings: each the present number and the largest. `None` if
    /// the driver does not report all of them.
    pub fn ring_sizes(&mut self, nic: &str) -> Result<Option<[(u32, u32); 2]>, NetlinkError> {
        let rings = self.family.ask("ethtool rings-get", RINGS_GET, &about(nic))?;
        let size = |set, most| Some((rings.attributes().u32(set)?, rings.attributes().u32(most)?));
        Ok(size(RINGS_RX, RINGS_RX_MAX).zip(size(RINGS_TX, RINGS_TX_MAX)).map(|(rx, tx)| [rx, tx]))
    }

    /// Changes the ring settings that are not `None`.
    pub fn set_rings(&mut self, nic: &str, rings: Rings) -> Result<(), NetlinkError> {
        let mut order = about(nic);
        if let Some(split) = rings.split {
            order = order.u8(RINGS_TCP_DATA_SPLIT, split as u8);
        }
        if let Some(bytes) = rings.threshold_bytes {
            order = order.u32(RINGS_HDS_THRESHOLD, bytes);
        }
        self.family.order("ethtool rings-set", RINGS_SET, &order).map(drop)
    }

    /// The state of a NIC's feature, for example of [`NTUPLE`].
    pub fn feature(&mut self, nic: &str, name: &str) -> Result<Feature, NetlinkError> {
        let features = self.family.ask("ethtool features-get", FEATURES_GET, &about(nic))?;
        Ok(feature_in(&features, name))
    }

    /// Turns a NIC's feature on or off.
    pub fn set_feature(&mut self, nic: &str, name: &str, on: bool) -> Result<(), NetlinkError> {
        let bit = Attributes::new().text(BIT_NAME, name);
        let bit = if on { bit.flag(BIT_VALUE) } else { bit };
        let bits = Attributes::new().nest(BITS_BIT, bit);
        // The request has no "no mask" attribute, so that only the named bits change.
        let order = about(nic).nest(FEATURES_WANTED, Attributes::new().nest(BITSET_BITS, bits));
        self.family.order("ethtool features-set", FEATURES_SET, &order).map(drop)
    }

    /// Number of receive queues that the NIC uses.
    pub fn rx_queues(&mut self, nic: &str) -> Result<u32, NetlinkError> {
        let channels = self.family.ask("ethtool channels-get", CHANNELS_GET, &about(nic))?;
        let count = |kind| channels.attributes().u32(kind).unwrap_or(0);
        Ok(count(CHANNELS_RX).saturating_add(count(CHANNELS_COMBINED)))
    }
}

/// The beginning of a query about a NIC.
fn about(nic: &str) -> Attributes {
    Attributes::new().nest(HEADER, Attributes::new().text(HEADER_DEV_NAME, nic))
}

fn feature_in(features: &Reply, name: &str) -> Feature {
    let has = |kind| features.attributes().nest(kind).is_some_and(|set| has_bit(set, name));
    Feature { on: has(FEATURES_ACTIVE), changeable: has(FEATURES_CHANGEABLE) && !has(FEATURES_FIXED) }
}

/// Whether a bit is in a set. Without a mask all listed bits are in it; with a mask those that have a value.
fn has_bit(set: AttributeList<'_>, name: &str) -> bool {
    let all = set.find(BITSET_NO_MASK).is_some();
    let Some(bits) = set.nest(BITSET_BITS) else { return false };
    let bits = bits.into_iter().filter(|(kind, _)| *kind == BITS_BIT).map(|(_, bit)| AttributeList::new(bit));
    bits.into_iter().any(|bit| bit.text(BIT_NAME) == Some(name) && (all || bit.find(BIT_VALUE).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> Option<Ethtool> {
        Ethtool::open().map_err(|error| println!("SKIPPED: needs the kernel's ethtool netlink: {error}")).ok()
    }

    #[test]
    fn the_kernel_answers() {
        let Some(mut ethtool) = open() else { return };
        let missing = ethtool.header_split("no-such-nic").expect_err("there is none");
        assert_eq!(missing.errno, libc::ENODEV);
        // Loopback has no rings: the kernel answers without values, or refuses.
        assert_eq!(ethtool.header_split("lo").unwrap_or(None), None);
        assert_eq!(ethtool.ring_sizes("lo").unwrap_or(None), None);
    }

    #[test]
    fn features_are_listed_by_name() {
        let Some(mut ethtool) = open() else { return };
        let feature =
            |ethtool: &mut Ethtool, name| ethtool.feature("lo", name).expect("loopback has features");
        // Loopback always segments in software and never has flow rules.
        assert!(feature(&mut ethtool, "tx-tcp-segmentation").on);
        assert_eq!(feature(&mut ethtool, NTUPLE), Feature { on: false, changeable: false });
        assert_eq!(feature(&mut ethtool, "no-such-feature"), Feature { on: false, changeable: false });
        let fixed = feature(&mut ethtool, "loopback");
        assert_eq!(fixed, Feature { on: true, changeable: false });
    }

    #[test]
    fn changes_that_cannot_be_are_refused() {
        let Some(mut ethtool) = open() else { return };
        let rings = Rings { split: Some(Split::On), threshold_bytes: Some(0) };
        for error in [ethtool.set_rings("lo", rings), ethtool.set_feature("lo", "no-such-feature", true)] {
            let error = error.expect_err("loopback cannot");
            assert!(matches!(error.errno, libc::EOPNOTSUPP | libc::EPERM | libc::EINVAL), "{error}");
        }
        assert_eq!(ethtool.rx_queues("no-such-nic").expect_err("there is none").errno, libc::ENODEV);
    }
}
