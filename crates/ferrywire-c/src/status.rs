//! What every function returns, and the text behind it.
//!
//! Invariant: a panic becomes [`FERRYWIRE_ERROR_INTERNAL`]. Read next: `handles.rs`.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ferrywire::{Error, ErrorKind};

/// Done.
pub const FERRYWIRE_OK: c_int = 0;
/// Not there yet: nothing failed, ask or wait again.
pub const FERRYWIRE_PENDING: c_int = 1;
/// The caller used the library wrongly.
pub const FERRYWIRE_ERROR_USAGE: c_int = -1;
/// This host: its sockets, memory or limits.
pub const FERRYWIRE_ERROR_LOCAL: c_int = -2;
/// A GPU of this host, or its use.
pub const FERRYWIRE_ERROR_GPU: c_int = -3;
/// An NCCL net plugin, or its file.
pub const FERRYWIRE_ERROR_PLUGIN: c_int = -4;
/// The peer or the network to it.
pub const FERRYWIRE_ERROR_PEER: c_int = -5;
/// The other end is not allowed in, or does not let us in.
pub const FERRYWIRE_ERROR_REFUSED: c_int = -6;
/// ferrywire itself: please report it.
pub const FERRYWIRE_ERROR_INTERNAL: c_int = -7;
/// The time was up. What was waited for goes on.
pub const FERRYWIRE_ERROR_TIMEOUT: c_int = -8;
/// The transfer was cancelled.
pub const FERRYWIRE_ERROR_CANCELLED: c_int = -9;
/// The endpoint, or the peer, closed in an orderly way.
pub const FERRYWIRE_ERROR_CLOSED: c_int = -10;
/// The message or value does not fit into the buffer: how many bytes it has was told.
pub const FERRYWIRE_ERROR_TOO_SMALL: c_int = -11;

/// Why a call failed.
pub(crate) struct Failure {
    status: c_int,
    text: String,
}

impl Failure {
    pub fn usage(text: impl Into<String>) -> Failure {
        Failure { status: FERRYWIRE_ERROR_USAGE, text: text.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match &error {
            Error::Cancelled => FERRYWIRE_ERROR_CANCELLED,
            Error::Closed | Error::PeerClosed { .. } => FERRYWIRE_ERROR_CLOSED,
            _ => match error.kind() {
                ErrorKind::Usage => FERRYWIRE_ERROR_USAGE,
                ErrorKind::Local => FERRYWIRE_ERROR_LOCAL,
                ErrorKind::Gpu => FERRYWIRE_ERROR_GPU,
                ErrorKind::Plugin => FERRYWIRE_ERROR_PLUGIN,
                ErrorKind::Peer => FERRYWIRE_ERROR_PEER,
                ErrorKind::Refused => FERRYWIRE_ERROR_REFUSED,
                ErrorKind::Timeout => FERRYWIRE_ERROR_TIMEOUT,
                ErrorKind::Internal => FERRYWIRE_ERROR_INTERNAL,
            },
        };
        Failure { status, text: error.to_string() }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Why this thread's last call that failed did so: what failed, where, and what to try. Empty if none has. The text is
/// valid until the next call that fails on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_last_error() -> *const c_char {
    // A thread that is ending has no text any more.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The library's version.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Runs a call: notes why it failed, and stops panics.
pub(crate) fn call(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panicked(&*panic)));
    result.unwrap_or_else(|failure| {
        let text = failure.text.replace('\0', "\u{fffd}");
        let text = CString::new(text).unwrap_or_default();
        let _ = LAST.try_with(|last| last.replace(text));
        failure.status
    })
}

fn panicked(panic: &(dyn Any + Send)) -> Failure {
    let words = panic.downcast_ref::<&str>().copied();
    let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no words");
    Failure {
        status: FERRYWIRE_ERROR_INTERNAL,
        text: format!("internal error, please report: panicked: {words}"),
    }
}

// ---- arguments ----

/// A text that the caller gave.
///
/// # Safety
/// Null, or a string that ends with a zero.
pub(crate) unsafe fn text<'a>(what: &str, text: *const c_char) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(Failure::usage(format!("{what} is NULL")));
    }
    // SAFETY: by the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::usage(format!("{what} is not UTF-8")))
}

/// An array that the caller gave.
///
/// # Safety
/// Null, or `count` values, which nobody changes during the call.
pub(crate) unsafe fn array<'a, T>(what: &str, from: *const T, count: usize) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if from.is_null() {
        return Err(Failure::usage(format!("{what} is NULL, and {count} of it are announced")));
    }
    if !from.is_aligned() || count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize)
    {
        return Err(Failure::usage(format!("{what}: {count} values cannot lie at {from:p}")));
    }
    // SAFETY: by the caller's promise; alignment and size were looked at.
    Ok(unsafe { std::slice::from_raw_parts(from, count) })
}

/// The same of bytes.
///
/// # Safety
/// As of [`array`].
pub(crate) unsafe fn bytes<'a>(what: &str, from: *const c_void, count: usize) -> Result<&'a [u8], Failure> {
    // SAFETY: by the caller's promise.
    unsafe { array(what, from.cast(), count) }
}

/// A place for a value; its pointer was looked at.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    /// Null, or a place for a value during the call.
    pub unsafe fn new(what: &str, place: *mut T) -> Result<Out<T>, Failure> {
        match place.is_null() || !place.is_aligned() {
            true => {
                Err(Failure::usage(format!("{what} is NULL or misaligned, and a value is to be put there")))
            }
            false => Ok(Out(place)),
        }
    }

    pub fn put(&self, value: T) {
        // SAFETY: by the promise of whoever made it; what was there needs no drop.
        unsafe { self.0.write(value) }
    }
}

/// Puts a value where it is wanted.
///
/// # Safety
/// Null, or a place for a value.
pub(crate) unsafe fn put_if_wanted<T>(place: *mut T, value: T) {
    if !place.is_null() && place.is_aligned() {
        // SAFETY: by the caller's promise.
        unsafe { place.write(value) }
    }
}

/// Copies to a buffer of `capacity` bytes and tells the length, also when the buffer is too small.
///
/// # Safety
/// `to` is null or has `capacity` bytes; `told` is null or a place for a number.
pub(crate) unsafe fn copy_out(
    from: &[u8],
    to: *mut c_void,
    capacity: usize,
    told: *mut usize,
) -> Result<c_int, Failure> {
    // SAFETY: by the caller's promise.
    unsafe { put_if_wanted(told, from.len()) };
    if from.len() > capacity || (to.is_null() && !from.is_empty()) {
        let text = format!("{} bytes do not fit into a buffer of {capacity}", from.len());
        return Err(Failure { status: FERRYWIRE_ERROR_TOO_SMALL, text });
    }
    if !from.is_empty() {
        // SAFETY: the caller's buffer has that many bytes, and is not ours.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.cast(), from.len()) };
    }
    Ok(FERRYWIRE_OK)
}

/// Milliseconds; less than zero is without end.
pub(crate) fn limit(milliseconds: i64) -> Duration {
    u64::try_from(milliseconds).map_or(Duration::MAX, Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire::{LossCause, RefusalReason};

    fn last() -> String {
        // SAFETY: a string of this thread's, copied before its next call.
        unsafe { CStr::from_ptr(ferrywire_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_status_and_its_words() {
        assert_eq!(call(|| panic!("on purpose")), FERRYWIRE_ERROR_INTERNAL);
        assert_eq!(last(), "internal error, please report: panicked: on purpose");
        assert_eq!(call(|| Err(Failure::usage("zero\0inside"))), FERRYWIRE_ERROR_USAGE);
        assert_eq!(last(), "zero\u{fffd}inside");
        assert_eq!(call(|| Ok(FERRYWIRE_PENDING)), FERRYWIRE_PENDING);
        assert_eq!(last(), "zero\u{fffd}inside", "calls that do not fail leave the words");
    }

    #[test]
    fn every_fault_has_its_status() {
        let status = |error: Error| Failure::from(error).status;
        assert_eq!(status(Error::Closed), FERRYWIRE_ERROR_CLOSED);
        assert_eq!(status(Error::PeerClosed { peer: "a".into() }), FERRYWIRE_ERROR_CLOSED);
        assert_eq!(status(Error::Cancelled), FERRYWIRE_ERROR_CANCELLED);
        let time = Duration::from_secs(1);
        assert_eq!(
            status(Error::Stalled { what: "a".into(), peer: None, waited: time }),
            FERRYWIRE_ERROR_TIMEOUT
        );
        assert_eq!(
            status(Error::TimedOut { what: "a".into(), peer: None, limit: time }),
            FERRYWIRE_ERROR_TIMEOUT
        );
        assert_eq!(status(Error::invalid("a", "b")), FERRYWIRE_ERROR_USAGE);
        assert_eq!(status(Error::Forked { built_in: 1, here: 2 }), FERRYWIRE_ERROR_USAGE);
        let (address, reason, why) = (String::new(), RefusalReason::Secret, String::new());
        assert_eq!(status(Error::Refused { address, reason, why }), FERRYWIRE_ERROR_REFUSED);
        assert_eq!(
            status(Error::PeerLost { peer: "a".into(), cause: LossCause::Silent, why: "b".into() }),
            FERRYWIRE_ERROR_PEER
        );
        assert_eq!(status(Error::Internal("a".into())), FERRYWIRE_ERROR_INTERNAL);
    }
}
