//! The plugin calls in flight: on which thread, and since when.
//!
//! A plugin's call may block, spin for ever, or end the process. Each thread records the call it is in, so
//! that a watchdog on another thread can name the call that hangs, and the logger the plugin that logs.
//! Invariant: recording a call takes no lock and only nanoseconds, since it surrounds every `test`.
//! Read next: `net.rs`, which makes the calls.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrywire_proto::limits::PLUGINS_MAX;
use ferrywire_sys::affinity::thread_id;

macro_rules! calls {
    ($($name:ident $word:literal,)+) => {
        /// A function in a plugin's table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        #[repr(u8)]
        pub enum Call {
            $($name,)+
        }

        impl Call {
            const ALL: &[Call] = &[$(Call::$name,)+];

            /// Name of the function in the C interface.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Call::$name => $word,)+
                }
            }
        }
    };
}

calls! {
    Init "init",
    Devices "devices",
    GetProperties "getProperties",
    Listen "listen",
    Connect "connect",
    Accept "accept",
    RegMr "regMr",
    RegMrDmaBuf "regMrDmaBuf",
    DeregMr "deregMr",
    Isend "isend",
    Irecv "irecv",
    Iflush "iflush",
    Test "test",
    CloseSend "closeSend",
    CloseRecv "closeRecv",
    CloseListen "closeListen",
    GetDeviceMr "getDeviceMr",
    IrecvConsumed "irecvConsumed",
    MakeVDevice "makeVDevice",
    Finalize "finalize",
    SetNetAttr "setNetAttr",
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A plugin call that has not returned yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InflightCall {
    /// Name of the plugin.
    pub plugin: String,
    /// The function that was called.
    pub call: Call,
    /// The device that the call concerns; `None` for calls about the whole plugin.
    pub device: Option<i32>,
    /// The kernel's id of the calling thread.
    pub thread: i32,
    /// Time since the call began, accurate to a few milliseconds.
    pub since: Duration,
}

/// Every plugin call of this process that has not returned yet, the longest first.
pub fn inflight_calls() -> Vec<InflightCall> {
    under_way(None)
}

/// Index of a plugin's name in the list of registered plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PluginId(u8);

const _: () = assert!(PLUGINS_MAX <= u8::MAX as usize);

static NAMES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static THREADS: Mutex<Vec<Arc<Slot>>> = Mutex::new(Vec::new());
/// The plugin call during which the last thread ended, and the id of that thread.
static ENDED: Mutex<Option<(Noted, i32)>> = Mutex::new(None);

/// Registers a plugin; `None` when [`PLUGINS_MAX`] are registered.
pub(super) fn register(name: &str) -> Option<PluginId> {
    let mut names = locked(&NAMES);
    let id = u8::try_from(names.len()).ok().filter(|_| names.len() < PLUGINS_MAX)?;
    names.push(name.to_owned());
    Some(PluginId(id))
}

/// Changes a plugin's name in the list of registered plugins.
pub(super) fn rename(id: PluginId, name: &str) {
    if let Some(known) = locked(&NAMES).get_mut(usize::from(id.0)) {
        name.clone_into(known);
    }
}

/// The plugin and device of the call that the current thread is in. On a thread that is in no call, such as
/// one that a plugin started: the only plugin, if just one is loaded.
pub(super) fn speaker() -> (Option<String>, Option<i32>) {
    let word = OWN.try_with(|own| own.slot.word.load(Ordering::Relaxed)).unwrap_or(0);
    let names = locked(&NAMES);
    match (Noted::unpack(word), &names[..]) {
        (Some(noted), names) => (names.get(usize::from(noted.plugin.0)).cloned(), noted.device),
        (None, [only]) => (Some(only.clone()), None),
        (None, _) => (None, None),
    }
}

/// The plugin call in which the current thread ends the process.
pub(super) fn ending_call() -> Option<(String, Call, Option<i32>)> {
    // The C library destroys thread-local values before it runs exit handlers, so the slot may be gone
    // already; its destructor has stored the call in `ENDED`.
    let own = OWN.try_with(|own| own.slot.read()).ok().flatten().map(|(noted, ..)| noted);
    let thread = thread_id();
    let ended = locked(&ENDED).filter(|(_, of)| *of == thread).map(|(noted, _)| noted);
    own.or(ended).map(|noted| (name_of(noted.plugin), noted.call, noted.device))
}

/// Name of a registered plugin.
pub(super) fn name_of(plugin: PluginId) -> String {
    locked(&NAMES).get(usize::from(plugin.0)).cloned().unwrap_or_default()
}

/// Records that the current thread is in a call, until the returned value is dropped.
pub(super) fn enter(plugin: PluginId, call: Call, device: Option<i32>) -> Entered {
    // A thread that is ending has no slot any more; its last calls are not recorded.
    let _ = OWN.try_with(|own| own.begin(plugin, call, device));
    Entered
}

/// The calls in flight of one plugin; `None` for those of all plugins.
pub(super) fn under_way(plugin: Option<PluginId>) -> Vec<InflightCall> {
    let seen: Vec<_> = locked(&THREADS).iter().filter_map(|slot| slot.read()).collect();
    let names = locked(&NAMES);
    let now_ns = now_ns();
    let wanted = seen.into_iter().filter(|(noted, ..)| plugin.is_none_or(|plugin| noted.plugin == plugin));
    let mut calls: Vec<InflightCall> = wanted
        .map(|(noted, started_ns, thread)| InflightCall {
            plugin: names.get(usize::from(noted.plugin.0)).cloned().unwrap_or_default(),
            call: noted.call,
            device: noted.device,
            thread,
            since: Duration::from_nanos(now_ns.saturating_sub(started_ns)),
        })
        .collect();
    calls.sort_by_key(|call| std::cmp::Reverse(call.since));
    calls
}

pub(super) struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        let _ = OWN.try_with(|own| own.slot.word.store(0, Ordering::Release));
    }
}

/// A thread's current call, readable by other threads. `word` is 0 while the thread is in no call.
#[repr(align(64))]
struct Slot {
    word: AtomicU64,
    started_ns: AtomicU64,
    thread: i32,
}

impl Slot {
    /// The call and its start time. `None` when the call changed between reading the two.
    fn read(&self) -> Option<(Noted, u64, i32)> {
        let word = self.word.load(Ordering::Acquire);
        let started_ns = self.started_ns.load(Ordering::Acquire);
        let same = self.word.load(Ordering::Relaxed) == word;
        Noted::unpack(word).filter(|_| same).map(|noted| (noted, started_ns, self.thread))
    }
}

/// The owning thread's handle of its slot.
struct Own {
    slot: Arc<Slot>,
    calls: Cell<u64>,
}

impl Own {
    fn new() -> Own {
        let thread = thread_id();
        let slot = Arc::new(Slot { word: AtomicU64::new(0), started_ns: AtomicU64::new(0), thread });
        locked(&THREADS).push(slot.clone());
        Own { slot, calls: Cell::new(0) }
    }

    fn begin(&self, plugin: PluginId, call: Call, device: Option<i32>) {
        self.calls.set(self.calls.get().wrapping_add(1));
        let word = Noted { plugin, call, device }.pack(self.calls.get());
        // A reader that combined the previous call's word with this time reads a different word the second
        // time: the 0 that ended the previous call was stored before the time.
        self.slot.started_ns.store(now_ns(), Ordering::Release);
        self.slot.word.store(word, Ordering::Release);
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if let Some((noted, _, thread)) = self.slot.read() {
            *locked(&ENDED) = Some((noted, thread));
        }
        locked(&THREADS).retain(|slot| !Arc::ptr_eq(slot, &self.slot));
    }
}

thread_local! {
    static OWN: Own = Own::new();
}

/// A call packed into one word: its number in bits 31..63, device + 1 in 16..31, call in 8..15, plugin + 1 in
/// 0..7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Noted {
    plugin: PluginId,
    call: Call,
    device: Option<i32>,
}

impl Noted {
    fn pack(self, number: u64) -> u64 {
        // Device indices are small. An index out of range is the caller's mistake, and the plugin will reject
        // it.
        let device = self.device.and_then(|device| u64::try_from(device).ok()).map_or(0, |device| device + 1);
        let device = device.min(0x7fff);
        number << 31 | device << 16 | (self.call as u64) << 8 | (u64::from(self.plugin.0) + 1)
    }

    fn unpack(word: u64) -> Option<Noted> {
        let plugin = PluginId(u8::try_from((word & 0xff).checked_sub(1)?).ok()?);
        let call = *Call::ALL.get((word >> 8 & 0xff) as usize)?;
        let device = (word >> 16 & 0x7fff) as i32;
        Some(Noted { plugin, call, device: (device > 0).then(|| device - 1) })
    }
}

/// The coarse monotonic clock, in nanoseconds: cheap enough for every `test`, precise enough for a watchdog.
fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a whole timespec on this stack, and this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_survives_packing() {
        for (index, &call) in Call::ALL.iter().enumerate() {
            let plugin = PluginId(index as u8 * 12);
            for device in [None, Some(0), Some(255), Some(0x7ffe)] {
                let noted = Noted { plugin, call, device };
                assert_eq!(Noted::unpack(noted.pack(1 << 33 | 5)), Some(noted));
            }
        }
        assert_eq!(Noted::unpack(0), None);
        let noted = Noted { plugin: PluginId(254), call: Call::Test, device: None };
        assert_ne!(noted.pack(1), noted.pack(2));
    }

    #[test]
    fn another_thread_sees_a_call_until_it_returns() {
        let plugin = register("clocked").unwrap();
        let (entered, wait) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let call = enter(plugin, Call::Accept, Some(3));
                assert_eq!(speaker(), (Some("clocked".to_owned()), Some(3)));
                entered.wait();
                wait.wait();
                drop(call);
                assert_eq!(under_way(Some(plugin)), []);
            });
            entered.wait();
            let seen = under_way(Some(plugin));
            assert_eq!(seen.len(), 1);
            assert_eq!((seen[0].call, seen[0].device), (Call::Accept, Some(3)));
            assert_eq!(seen[0].plugin, "clocked");
            assert!(inflight_calls().iter().any(|call| call.plugin == "clocked"));
            wait.wait();
            thread.join().unwrap();
        });
        assert_eq!(under_way(Some(plugin)), []);
    }
}
