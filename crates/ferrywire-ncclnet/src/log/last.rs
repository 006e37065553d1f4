//! The log lines that explain how a plugin ended.
//!
//! The explaining line need not be the last: the plugin's own threads may go on for a moment, and some
//! plugins warn about every piece that they receive. So the lines are chosen by place (source line and
//! level): the newest line of each place comes before a second line of any.

use std::collections::VecDeque;

use super::{LogLevel, LogLine};
use crate::cause::LoggedCause;
use ferrywire_proto::limits::{PLUGIN_LOG_LINES_KEPT, PLUGIN_LOG_LINES_PER_PLACE, PLUGIN_LOG_LINES_TOLD};

fn is_warning(line: &LogLine) -> bool {
    matches!(line.level, LogLevel::Warn | LogLevel::Abort)
}

/// A bounded list of log lines, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LastLines(VecDeque<LogLine>);

impl LastLines {
    /// An empty list of log lines.
    pub const fn new() -> LastLines {
        LastLines(VecDeque::new())
    }

    /// Adds a log line. Lines of one place cannot displace those of all others.
    pub fn keep(&mut self, line: LogLine) {
        let of_place = self.0.iter().filter(|kept| kept.same_place(&line)).count();
        if of_place >= PLUGIN_LOG_LINES_PER_PLACE {
            let oldest = self.0.iter().position(|kept| kept.same_place(&line));
            oldest.map(|at| self.0.remove(at));
        } else if self.0.len() >= PLUGIN_LOG_LINES_KEPT {
            self.0.pop_front();
        }
        self.0.push_back(line);
    }

    /// All kept lines, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &LogLine> {
        self.0.iter()
    }

    /// The newest warning with a known cause, and the cause; `None` if there is no such warning.
    pub fn cause(&self) -> Option<(LoggedCause, &LogLine)> {
        let mut last = self.last_of(is_warning);
        last.sort_unstable();
        last.into_iter().rev().find_map(|at| LoggedCause::of(&self.0[at]).map(|cause| (cause, &self.0[at])))
    }

    /// The most informative warning: one with a known cause, else the newest.
    pub fn warning(&self) -> Option<&LogLine> {
        self.cause().map(|(_, line)| line).or_else(|| self.0.iter().rev().find(|line| is_warning(line)))
    }

    /// The last lines as text: the warning with a known cause; else at most [`PLUGIN_LOG_LINES_TOLD`]
    /// warnings; else other lines.
    pub fn summary(&self) -> String {
        if let Some((_, line)) = self.cause() {
            return format!("the plugin warned: {}", line.text);
        }
        let mut last = self.last_of(is_warning);
        if last.is_empty() {
            last = self.last_of(|_| true);
        }
        last.sort_unstable();
        let texts: Vec<&str> = last.into_iter().map(|at| self.0[at].text.as_str()).collect();
        if texts.is_empty() {
            return "the plugin logged nothing".to_owned();
        }
        format!("the plugin logged last: {}", texts.join(" | "))
    }

    /// Indices of at most [`PLUGIN_LOG_LINES_TOLD`] last lines that `wanted` accepts, those of different
    /// places first.
    fn last_of(&self, wanted: impl Fn(&LogLine) -> bool) -> Vec<usize> {
        let places = self.by_age_in_their_place().into_iter().map(|(_, at)| at);
        places.filter(|&at| wanted(&self.0[at])).take(PLUGIN_LOG_LINES_TOLD).collect()
    }

    /// The index of each line, with the number of newer lines of the same place, sorted by that number, then
    /// newest first.
    fn by_age_in_their_place(&self) -> Vec<(usize, usize)> {
        let newer = |at: usize| self.0.range(at + 1..).filter(|line| line.same_place(&self.0[at])).count();
        let mut lines: Vec<_> = (0..self.0.len()).rev().map(|at| (newer(at), at)).collect();
        lines.sort_by_key(|&(newer, _)| newer);
        lines
    }
}

impl FromIterator<LogLine> for LastLines {
    fn from_iter<I: IntoIterator<Item = LogLine>>(lines: I) -> LastLines {
        let mut last = LastLines::new();
        lines.into_iter().for_each(|line| last.keep(line));
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::LogLevel;

    fn line(place: i32, text: &str) -> LogLine {
        LogLine::new(LogLevel::Warn, None, None, b"x.c", place, text.as_bytes())
    }

    #[test]
    fn one_place_cannot_wash_out_the_others() {
        let flood = (0..1000).map(|n| line(2, &format!("flood {n}")));
        let mut last: LastLines = [line(1, "the cause")].into_iter().chain(flood).collect();
        let texts: Vec<_> = last.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(texts, ["the cause", "flood 996", "flood 997", "flood 998", "flood 999"]);
        (10..100).for_each(|place| last.keep(line(place, "other")));
        assert_eq!(last.iter().count(), PLUGIN_LOG_LINES_KEPT);
    }

    #[test]
    fn lines_of_other_threads_do_not_hide_the_cause() {
        let last: LastLines = [
            line(1, "half a page"),
            line(2, "isend is faulty"),
            line(3, "giving up"),
            line(1, "1 page"),
            line(1, "2 pages"),
            line(1, "3 pages"),
        ]
        .into_iter()
        .collect();
        assert_eq!(last.summary(), "the plugin logged last: isend is faulty | giving up | 3 pages");
        let one_place: LastLines = (0..5).map(|n| line(1, &format!("line {n}"))).collect();
        assert_eq!(one_place.summary(), "the plugin logged last: line 2 | line 3 | line 4");
        assert_eq!(LastLines::new().summary(), "the plugin logged nothing");
    }

    /// TCPX's last lines trace its error through the source. They are informational, not warnings.
    #[test]
    fn a_warning_is_reported_before_information_and_a_known_cause_before_all() {
        let info =
            |place, text: &str| LogLine::new(LogLevel::Info, None, None, b"x.c", place, text.as_bytes());
        let mut last: LastLines = [
            info(1, "unix client prefix /run/tcpx"),
            line(2, "NET/GPUDirectTCPX : no interface found"),
            line(3, "another warning"),
            info(4, "TCPXCHECK net_tcpx.cc:576 -> 3"),
        ]
        .into_iter()
        .collect();
        assert_eq!(last.summary(), "the plugin warned: NET/GPUDirectTCPX : no interface found");
        assert_eq!(last.cause().map(|(cause, _)| cause), Some(LoggedCause::NoInterface));
        for place in 10..13 {
            last.keep(line(place, "newer"));
        }
        assert_eq!(last.cause(), None, "warnings since are about something else");
        let informs: LastLines = [info(1, "about to crash")].into_iter().collect();
        assert_eq!(
            (informs.summary().as_str(), informs.warning()),
            ("the plugin logged last: about to crash", None)
        );
    }
}
