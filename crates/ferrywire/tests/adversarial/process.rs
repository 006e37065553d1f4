//! Observes this process: its log, panics, descriptors and memory, for one test at a time.

use crate::LIMIT;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::Duration;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Tests count descriptors, memory and lines of this process: one at a time.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    let one = PROCESS.write().unwrap_or_else(PoisonError::into_inner);
    lines().lock().unwrap().clear();
    panics();
    one
}

/// For tests that count nothing of this process: they run beside each other, and beside none that counts.
pub fn together() -> RwLockReadGuard<'static, ()> {
    PROCESS.read().unwrap_or_else(PoisonError::into_inner)
}

static PROCESS: RwLock<()> = RwLock::new(());

/// Everything that was logged.
pub fn lines() -> &'static Mutex<Vec<String>> {
    static LINES: OnceLock<Mutex<Vec<String>>> = OnceLock::new();
    LINES.get_or_init(|| {
        tracing_subscriber::registry().with(Capture).init();
        Mutex::default()
    })
}

struct Capture;

impl<S: tracing::Subscriber> Layer<S> for Capture {
    fn on_event(&self, event: &tracing::Event<'_>, _context: Context<'_, S>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        if *event.metadata().level() <= tracing::Level::WARN {
            let mut text = Text(String::new());
            event.record(&mut text);
            lines().lock().unwrap().push(text.0);
        }
    }
}

/// Panics of any thread since the first call.
pub fn panics() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static HOOK: OnceLock<()> = OnceLock::new();
    HOOK.get_or_init(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let engine = thread::current().name().is_some_and(|name| name.starts_with("ferrywire-"));
            COUNT.fetch_add(u64::from(engine), Ordering::SeqCst);
            usual(info);
        }));
    });
    COUNT.load(Ordering::SeqCst)
}

/// Waits until something is so.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    // Looks are counted, so that time in which this process was stopped is not.
    const BETWEEN: Duration = Duration::from_millis(5);
    for _ in 0..LIMIT.as_millis() / BETWEEN.as_millis() {
        if so() {
            return;
        }
        thread::sleep(BETWEEN);
    }
    panic!("never came about: {what}");
}

/// Open files and sockets of this process.
pub fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Resident memory of this process, in bytes.
pub fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    // SAFETY: no memory is passed.
    pages * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize
}
