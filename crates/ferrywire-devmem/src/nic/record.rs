//! The contents of a journal's files: lines of a word and its values. The first line names the NIC, the last is `end`.
//!
//! Invariant: pure conversion of text to values and back; an incomplete text, or one with an unknown line, is not a
//! record.
//! Read next: `settings.rs`.

use std::fmt::Write;
use std::str::FromStr;

use crate::sys::ethtool::{Rings, Split};
use crate::sys::flow::Flow;

const MAGIC: &str = "ferrywire devmem 1";
const END: &str = "end";
const NONE: &str = "-";

/// The NIC that a record is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub boot: String,
    /// Inode number of the network namespace's file.
    pub namespace: u64,
    pub nic: String,
    /// The kernel's index of the NIC; a different index means another NIC of the same name.
    pub index: u32,
}

/// The queues and rules of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Claimed {
    pub queues: Vec<u32>,
    /// The claim's flow rules, with their locations once those are known.
    pub rules: Vec<(Flow, Option<u32>)>,
}

/// The original values of settings that were changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    /// The original ring settings that were changed; the others are `None`.
    pub rings: Rings,
    /// Whether flow rules were off before the first change.
    pub ntuple_was_off: bool,
    pub spread: Option<Spread>,
}

/// The spread of flows without a rule, before and after the changes of claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spread {
    pub before: Vec<u32>,
    /// The spreads that claims have set: the last two, because a killed process may or may not have made the last
    /// change.
    pub ours: Vec<Vec<u32>>,
}

impl Settings {
    pub fn is_empty(&self) -> bool {
        *self == Settings::default()
    }

    /// Adds the original values of an earlier record that was lost. This record may be a later claim's, which took the
    /// changed values for the original ones.
    pub fn preceded_by(mut self, earlier: &Settings) -> Settings {
        self.rings.split = earlier.rings.split.or(self.rings.split);
        self.rings.threshold_bytes = earlier.rings.threshold_bytes.or(self.rings.threshold_bytes);
        self.ntuple_was_off |= earlier.ntuple_was_off;
        self.spread = match (self.spread, earlier.spread.clone()) {
            (Some(spread), Some(earlier))
                if spread.before == earlier.before || earlier.ours.contains(&spread.before) =>
            {
                let ours = [earlier.ours, spread.ours].concat();
                Some(Spread { before: earlier.before, ours })
            }
            (spread, earlier) => spread.or(earlier),
        };
        self
    }

    pub fn text(&self, header: &Header) -> String {
        let mut lines = header.lines();
        if let Some(split) = self.rings.split {
            let _ = writeln!(lines, "split {}", split_word(split));
        }
        if let Some(bytes) = self.rings.threshold_bytes {
            let _ = writeln!(lines, "threshold {bytes}");
        }
        if self.ntuple_was_off {
            lines.push_str("ntuple off\n");
        }
        if let Some(spread) = &self.spread {
            let _ = writeln!(lines, "spread-before {}", joined(&spread.before));
            for ours in &spread.ours {
                let _ = writeln!(lines, "spread-ours {}", joined(ours));
            }
        }
        lines + END + "\n"
    }

    fn take(&mut self, word: &str, values: &str) -> Option<()> {
        match word {
            "split" => self.rings.split = Some(split_of(values)?),
            "threshold" => self.rings.threshold_bytes = Some(values.parse().ok()?),
            "ntuple" if values == "off" => self.ntuple_was_off = true,
            "spread-before" => self.spread = Some(Spread { before: numbers(values)?, ours: Vec::new() }),
            "spread-ours" => self.spread.as_mut()?.ours.push(numbers(values)?),
            _ => return None,
        }
        Some(())
    }
}

impl Claimed {
    pub fn text(&self, header: &Header) -> String {
        let mut lines = header.lines();
        let _ = writeln!(lines, "queues {}", joined(&self.queues));
        for (flow, location) in &self.rules {
            let location = location.map_or(NONE.to_owned(), |location| location.to_string());
            let _ = writeln!(lines, "rule {} {} {} {location}", flow.local, flow.remote, flow.queue);
        }
        lines + END + "\n"
    }

    fn take(&mut self, word: &str, values: &str) -> Option<()> {
        match word {
            "queues" => self.queues = numbers(values)?,
            "rule" => self.rules.push(rule(values)?),
            _ => return None,
        }
        Some(())
    }
}

impl Header {
    fn lines(&self) -> String {
        let Header { boot, namespace, nic, index } = self;
        format!("{MAGIC}\nboot {boot}\nnamespace {namespace}\nnic {nic} {index}\n")
    }

    fn parse<'a>(lines: &mut impl Iterator<Item = &'a str>) -> Option<Header> {
        lines.next().filter(|line| *line == MAGIC)?;
        let boot = lines.next()?.strip_prefix("boot ")?.to_owned();
        let namespace = lines.next()?.strip_prefix("namespace ")?.parse().ok()?;
        let (nic, index) = lines.next()?.strip_prefix("nic ")?.split_once(' ')?;
        Some(Header { boot, namespace, nic: nic.to_owned(), index: index.parse().ok()? })
    }
}

/// Parses the record of settings; `None` for a text that is not one.
pub(super) fn settings(text: &str) -> Option<(Header, Settings)> {
    parse(text, Settings::take)
}

/// Parses the record of a claim; `None` for a text that is not one.
pub(super) fn claimed(text: &str) -> Option<(Header, Claimed)> {
    parse(text, Claimed::take)
}

fn parse<T: Default>(text: &str, take: fn(&mut T, &str, &str) -> Option<()>) -> Option<(Header, T)> {
    let mut lines = text.strip_suffix("\nend\n")?.lines();
    let header = Header::parse(&mut lines)?;
    let mut record = T::default();
    for line in lines {
        let (word, values) = line.split_once(' ').unwrap_or((line, ""));
        take(&mut record, word, values)?;
    }
    Some((header, record))
}

fn rule(values: &str) -> Option<(Flow, Option<u32>)> {
    let mut values = values.split(' ');
    let local = values.next()?.parse().ok()?;
    let remote = values.next()?.parse().ok()?;
    let flow = Flow::new(local, remote, values.next()?.parse().ok()?).ok()?;
    let location = match values.next()? {
        NONE => None,
        location => Some(location.parse().ok()?),
    };
    values.next().is_none().then_some((flow, location))
}

fn joined(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

fn numbers(text: &str) -> Option<Vec<u32>> {
    text.split_ascii_whitespace().map(u32::from_str).collect::<Result<_, _>>().ok()
}

fn split_word(split: Split) -> &'static str {
    match split {
        Split::Auto => "auto",
        Split::Off => "off",
        Split::On => "on",
    }
}

fn split_of(word: &str) -> Option<Split> {
    [Split::Auto, Split::Off, Split::On].into_iter().find(|split| split_word(*split) == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header { boot: "b-1".into(), namespace: 4_026_531_840, nic: "eth1".into(), index: 3 }
    }

    fn flow(local: &str, remote: &str) -> Flow {
        Flow::new(local.parse().expect("an address"), remote.parse().expect("an address"), 3).expect("a pair")
    }

    fn some_claim() -> Claimed {
        let four = (flow("10.0.0.1:7420", "10.0.0.2:4000"), Some(63));
        let six = (flow("[2001:db8::1]:7420", "[2001:db8::2]:4000"), None);
        Claimed { queues: vec![2, 3], rules: vec![four, six] }
    }

    fn some_settings() -> Settings {
        let spread = Spread { before: vec![0, 1, 2, 3], ours: vec![vec![0, 1, 2, 0], vec![0, 1, 0, 1]] };
        let rings = Rings { split: Some(Split::Auto), threshold_bytes: Some(256) };
        Settings { rings, ntuple_was_off: true, spread: Some(spread) }
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let claim = some_claim();
        assert_eq!(claimed(&claim.text(&header())), Some((header(), claim)));
        for split in [Split::Auto, Split::Off, Split::On] {
            let mut changed = some_settings();
            changed.rings.split = Some(split);
            assert_eq!(settings(&changed.text(&header())), Some((header(), changed)));
        }
        let nothing = Settings::default();
        assert_eq!(settings(&nothing.text(&header())), Some((header(), nothing)));
    }

    #[test]
    fn a_record_that_was_cut_anywhere_is_none() {
        let text = some_claim().text(&header());
        for cut in 0..text.len() {
            assert_eq!(claimed(&text[..cut]), None, "{:?}", &text[..cut]);
        }
        let text = some_settings().text(&header());
        for cut in 0..text.len() {
            assert_eq!(settings(&text[..cut]), None, "{:?}", &text[..cut]);
        }
    }

    #[test]
    fn odd_lines_make_it_none() {
        let text = some_settings().text(&header());
        for (from, to) in
            [("split auto", "split maybe"), ("ntuple off", "ntuple"), ("threshold 256", "threshold -1")]
        {
            assert!(text.contains(from));
            assert_eq!(settings(&text.replace(from, to)), None, "{to}");
        }
        assert_eq!(settings(&some_claim().text(&header())), None, "of the other kind");
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_harm(text in ".{0,200}", at in 0_usize..200, byte in any::<u8>()) {
            let _ = (claimed(&text), settings(&text));
            let mut bytes = some_claim().text(&header()).into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = claimed(&String::from_utf8_lossy(&bytes));
        }
    }
}
