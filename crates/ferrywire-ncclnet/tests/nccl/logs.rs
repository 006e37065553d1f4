//! Plugin logs reach `tracing`, the list of last lines, and a supervisor's pipe.

use std::fmt::Debug;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use ferrywire_ncclnet::Library;
use ferrywire_ncclnet::log::{LogLevel, LogLine, last_lines, tee_to_fd};
use ferrywire_proto::limits::{PLUGIN_LOG_BURST_LINES, PLUGIN_LOG_LINE_BYTES_MAX, PLUGIN_LOG_LINES_KEPT};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::compile::{alone, broken};

fn load_the_talkative() {
    // SAFETY: broken.c is part of these tests.
    let loaded = unsafe { Library::open(broken("LOGS")).and_then(|library| library.load(None)) };
    loaded.expect("loads");
}

/// Loads the plugin with a supervisor's pipe; returns the lines that came through it.
fn through_a_pipe() -> Vec<LogLine> {
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let collected = std::thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).map(|_| text).expect("text")
    });
    tee_to_fd(Some(writer.as_raw_fd()));
    load_the_talkative();
    tee_to_fd(None);
    drop(writer);
    let text = collected.join().expect("read");
    text.lines().map(|line| LogLine::parse(line).unwrap_or_else(|| panic!("{line:?}"))).collect()
}

fn texts<'a>(lines: &'a [LogLine], file: &str) -> Vec<&'a str> {
    lines.iter().filter(|line| line.file == file).map(|line| line.text.as_str()).collect()
}

#[test]
fn a_supervisor_gets_every_line_that_passes() {
    alone("logs::a_supervisor_gets_every_line_that_passes", || {
        let lines = through_a_pipe();
        assert!(lines.iter().all(|line| line.plugin.as_deref() == Some("Broken plugin")));
        let levels: Vec<_> = lines.iter().filter(|line| line.file == "levels.c").collect();
        assert_eq!(levels.iter().map(|line| line.line).collect::<Vec<_>>(), (100..=106).collect::<Vec<_>>());
        use LogLevel::*;
        let expected = [None, Version, Warn, Info, Abort, Trace, Unknown];
        assert_eq!(levels.iter().map(|line| line.level).collect::<Vec<_>>(), expected);
        assert_eq!(levels[2].text, "level 2");
        let longest = "x".repeat(PLUGIN_LOG_LINE_BYTES_MAX);
        let formatted = [
            "100% of it,  2.50, 1099511627776, -5000000000, c, ff, 7   |",
            "text with %s %n %d",
            longest.as_str(),
            "two lines",
            "",
        ];
        assert_eq!(texts(&lines, "formats.c"), formatted);
        assert_eq!(texts(&lines, "?"), ["no file"]);
        // Lines at level abort always pass, whatever was logged before.
        assert_eq!(texts(&lines, "abort.c").len(), 40);
        assert_eq!(texts(&lines, "thread.c"), ["from a thread of the plugin's own"]);
    });
}

#[test]
fn a_flood_is_counted_instead_of_logged() {
    alone("logs::a_flood_is_counted_instead_of_logged", || {
        let lines = through_a_pipe();
        let flood: Vec<_> = lines.iter().filter(|line| line.file == "flood.c").collect();
        let bursts = flood.len() as u64;
        assert!((PLUGIN_LOG_BURST_LINES..1000).contains(&bursts), "{bursts}");
        // Passed and suppressed lines together are exactly the logged lines.
        let last = flood.last().expect("some");
        let number: u64 = last.text.trim_start_matches("flood ").parse().expect("a number");
        let held_back: u64 = flood.iter().map(|line| line.held_back).sum();
        assert_eq!(number + 1, bursts + held_back);
        let kept = last_lines();
        assert!(kept.len() <= PLUGIN_LOG_LINES_KEPT);
        assert_eq!(texts(&kept, "flood.c").last(), Some(&"flood 999"));
        assert_eq!(texts(&kept, "thread.c").len(), 1);
        assert!(kept.iter().any(|line| line.file == "formats.c"), "the flood washed everything out");
        assert!(kept.is_sorted_by_key(|line| line.sequence));
    });
}

#[test]
fn tracing_gets_level_plugin_and_place() {
    alone("logs::tracing_gets_level_plugin_and_place", || {
        let seen = Collector::default();
        let subscriber = tracing_subscriber::registry().with(seen.clone());
        tracing::subscriber::set_global_default(subscriber).expect("the first of this process");
        load_the_talkative();
        let seen = seen.0.lock().expect("not poisoned");
        let levels: Vec<_> = seen.iter().filter(|event| event.contains("at=levels.c")).cloned().collect();
        let expected = ["TRACE", "INFO", "WARN", "INFO", "ERROR", "TRACE", "INFO"];
        assert_eq!(levels.len(), expected.len(), "{seen:?}");
        for (number, (event, level)) in levels.iter().zip(expected).enumerate() {
            let whole = format!(
                "{level} ferrywire::plugin message=level {number} plugin=\"Broken plugin\" at=levels.c:10{number}"
            );
            assert_eq!(*event, whole);
        }
        assert!(seen.iter().any(|event| event.contains("message=text with %s %n %d")));
    });
}

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Collector {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = Text(format!("{} {}", event.metadata().level(), event.metadata().target()));
        event.record(&mut text);
        self.0.lock().expect("not poisoned").push(text.0);
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!(" {}={value:?}", field.name());
    }
}
