//! One line of a plugin's log, and its text form in a pipe.

use std::ffi::c_int;
use std::fmt::Write;

use crate::abi;
use crate::sanitize::plain;
use ferrywire_proto::limits::PLUGIN_NAME_BYTES_MAX;

/// Severity that a plugin gives a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogLevel {
    /// A level whose lines NCCL never prints.
    None,
    /// The plugin's version line.
    Version,
    /// A warning or an error.
    Warn,
    /// An informational line.
    Info,
    /// The line before the plugin aborts.
    Abort,
    /// The most detailed lines.
    Trace,
    /// A level that NCCL does not define.
    Unknown,
}

impl LogLevel {
    /// The level for the logger's first argument.
    pub fn of(level: c_int) -> LogLevel {
        match level {
            abi::LOG_NONE => LogLevel::None,
            abi::LOG_VERSION => LogLevel::Version,
            abi::LOG_WARN => LogLevel::Warn,
            abi::LOG_INFO => LogLevel::Info,
            abi::LOG_ABORT => LogLevel::Abort,
            abi::LOG_TRACE => LogLevel::Trace,
            _ => LogLevel::Unknown,
        }
    }

    /// The level of `tracing` with which a line of this level is emitted.
    pub fn tracing(self) -> tracing::Level {
        match self {
            LogLevel::Abort => tracing::Level::ERROR,
            LogLevel::Warn => tracing::Level::WARN,
            LogLevel::Version | LogLevel::Info | LogLevel::Unknown => tracing::Level::INFO,
            LogLevel::Trace | LogLevel::None => tracing::Level::TRACE,
        }
    }

    const WORDS: [(LogLevel, &str); 7] = [
        (LogLevel::None, "none"),
        (LogLevel::Version, "version"),
        (LogLevel::Warn, "warn"),
        (LogLevel::Info, "info"),
        (LogLevel::Abort, "abort"),
        (LogLevel::Trace, "trace"),
        (LogLevel::Unknown, "unknown"),
    ];

    fn word(self) -> &'static str {
        LogLevel::WORDS.iter().find(|(level, _)| *level == self).map_or("unknown", |(_, word)| word)
    }

    fn parse(word: &str) -> Option<LogLevel> {
        LogLevel::WORDS.iter().find(|(_, known)| *known == word).map(|(level, _)| *level)
    }
}

/// One line that a plugin logged. No field contains control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Number of the line in this process, over all plugins.
    pub sequence: u64,
    /// Severity of the line.
    pub level: LogLevel,
    /// The plugin that logged the line, where it is known.
    pub plugin: Option<String>,
    /// The device of the call in which the line was logged; `None` outside of calls.
    pub device: Option<i32>,
    /// Source file of the line in the plugin, without directories.
    pub file: String,
    /// Line number in the plugin's source file.
    pub line: i32,
    /// Number of suppressed lines of this place since the previous one that passed.
    pub held_back: u64,
    /// Message text of the line.
    pub text: String,
}

impl LogLine {
    pub(crate) fn new(
        level: LogLevel,
        plugin: Option<String>,
        device: Option<i32>,
        file: &[u8],
        line: i32,
        text: &[u8],
    ) -> LogLine {
        let file = file.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        let file = plain(&file[..file.len().min(PLUGIN_NAME_BYTES_MAX)]);
        let text = plain(text.trim_ascii_end());
        LogLine { sequence: 0, level, plugin, device, file, line, held_back: 0, text }
    }

    /// Whether one statement in the plugin's source wrote both lines.
    pub(super) fn same_place(&self, other: &LogLine) -> bool {
        (self.level, self.line, &self.file) == (other.level, other.line, &other.file)
    }

    /// Formats the line as text for a pipe.
    pub(super) fn to_line(&self) -> String {
        let LogLine { sequence, file, line, held_back, text, .. } = self;
        let level = self.level.word();
        let plugin = plain(self.plugin.as_deref().unwrap_or_default().as_bytes());
        let mut written = format!("{sequence}\t{level}\t{plugin}\t");
        if let Some(device) = self.device {
            let _ = write!(written, "{device}");
        }
        let _ = writeln!(written, "\t{file}\t{line}\t{held_back}\t{text}");
        written
    }

    /// Parses a line that [`tee_to_fd`](super::tee_to_fd) wrote; `None` for other text.
    pub fn parse(written: &str) -> Option<LogLine> {
        let mut fields = written.trim_end_matches('\n').splitn(8, '\t');
        let mut next = || fields.next();
        Some(LogLine {
            sequence: next()?.parse().ok()?,
            level: LogLevel::parse(next()?)?,
            plugin: Some(next()?.to_owned()).filter(|plugin| !plugin.is_empty()),
            device: Some(next()?).filter(|device| !device.is_empty()).map(str::parse).transpose().ok()?,
            file: next()?.to_owned(),
            line: next()?.parse().ok()?,
            held_back: next()?.parse().ok()?,
            text: next()?.to_owned(),
        })
    }

    /// Emits the line as a `tracing` event.
    pub(super) fn trace(&self) {
        let LogLine { device, file, line, held_back, text, .. } = self;
        let plugin = self.plugin.as_deref().unwrap_or("?");
        let held_back = Some(*held_back).filter(|&count| count > 0);
        // `tracing` needs a constant level per call site.
        macro_rules! event {
            ($level:expr) => {
                tracing::event!(target: "ferrywire::plugin", $level, plugin, device, at = format_args!("{file}:{line}"), held_back, "{text}")
            };
        }
        match self.level.tracing() {
            tracing::Level::ERROR => event!(tracing::Level::ERROR),
            tracing::Level::WARN => event!(tracing::Level::WARN),
            tracing::Level::INFO => event!(tracing::Level::INFO),
            _ => event!(tracing::Level::TRACE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_survives_the_pipe() {
        for (level, _) in LogLevel::WORDS {
            for (plugin, device) in [(None, None), (Some("TCPX v7".to_owned()), Some(3))] {
                let mut line =
                    LogLine::new(level, plugin, device, b"/src/net.cc", 812, b"100% of\n\tit \x1b[31m");
                (line.sequence, line.held_back) = (77, 5);
                let written = line.to_line();
                assert_eq!(written.matches('\n').count(), 1);
                assert_eq!((line.file.as_str(), line.text.as_str()), ("net.cc", "100% of  it  [31m"));
                assert_eq!(LogLine::parse(&written), Some(line));
            }
        }
        for wrong in ["", "error: no", "1\twarn\t\t\tx.c", "1\tloud\t\t\tx.c\t1\t0\ttext"] {
            assert_eq!(LogLine::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn levels_have_their_place() {
        let levels = [0, 1, 2, 3, 4, 5, 6, -1].map(|level| LogLevel::of(level).tracing().to_string());
        assert_eq!(levels, ["TRACE", "INFO", "WARN", "INFO", "ERROR", "TRACE", "INFO", "INFO"]);
    }
}
