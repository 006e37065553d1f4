//! The status that every function returns, the message behind it, and checks of arguments.
//!
//! Invariant: a panic becomes [`FERRYWIRE_ERROR_INTERNAL`]. Read next: `handles.rs`.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ferrywire::{Error, ErrorKind};

/// The call succeeded.
pub const FERRYWIRE_OK: c_int = 0;
/// Nothing failed, and the result is not there yet: call or wait again.
pub const FERRYWIRE_PENDING: c_int = 1;
/// The caller used the library wrongly.
pub const FERRYWIRE_ERROR_USAGE: c_int = -1;
/// A resource of this host failed or is short: sockets, memory, limits.
pub const FERRYWIRE_ERROR_LOCAL: c_int = -2;
/// A GPU of this host failed, or cannot be used in this way.
pub const FERRYWIRE_ERROR_GPU: c_int = -3;
/// An NCCL net plugin failed, or its file cannot be loaded.
pub const FERRYWIRE_ERROR_PLUGIN: c_int = -4;
/// The peer, or the network to it, failed.
pub const FERRYWIRE_ERROR_PEER: c_int = -5;
/// One end refused the other, for example because of its version, secret, identity or configuration.
pub const FERRYWIRE_ERROR_REFUSED: c_int = -6;
/// A defect of ferrywire: please report it.
pub const FERRYWIRE_ERROR_INTERNAL: c_int = -7;
/// The timeout passed. A transfer that was waited for continues.
pub const FERRYWIRE_ERROR_TIMEOUT: c_int = -8;
/// The transfer was cancelled.
pub const FERRYWIRE_ERROR_CANCELLED: c_int = -9;
/// The endpoint or the peer was closed in an orderly way.
pub const FERRYWIRE_ERROR_CLOSED: c_int = -10;
/// The value does not fit into the buffer; the call has set the number of bytes that it needs.
pub const FERRYWIRE_ERROR_TOO_SMALL: c_int = -11;

/// The error of a call: the status that it returns, and its message.
pub(crate) struct Failure {
    status: c_int,
    text: String,
}

impl Failure {
    pub fn usage(text: impl Into<String>) -> Failure {
        Failure { status: FERRYWIRE_ERROR_USAGE, text: text.into() }
    }
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        let error = error.into();
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

/// Returns the message of this thread's last call that failed: what failed, where, and what to try. Empty if no call
/// has failed. The text is valid until the next call on this thread fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_last_error() -> *const c_char {
    // A thread that is ending has already dropped its message.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn ferrywire_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Runs the body of a C function: stores the message of an error and turns a panic into an error.
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
    let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    Failure {
        status: FERRYWIRE_ERROR_INTERNAL,
        text: format!("internal error, please report: panicked: {words}"),
    }
}

// ---- arguments ----

/// Checks a string argument; `what` names it in errors. Returns an error for null and for text that is not
/// UTF-8.
///
/// # Safety
/// `text` is null or a NUL-terminated string.
pub(crate) unsafe fn text<'a>(what: &str, text: *const c_char) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(Failure::usage(format!("{what} is NULL")));
    }
    // SAFETY: the caller promises a NUL-terminated string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::usage(format!("{what} is not UTF-8")))
}

/// Checks an array argument of `count` values; `what` names it in errors. Returns an error for null and for a
/// misaligned pointer.
///
/// # Safety
/// `from` is null or points to `count` values that do not change during the call.
pub(crate) unsafe fn array<'a, T>(what: &str, from: *const T, count: usize) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if from.is_null() {
        return Err(Failure::usage(format!("{what} is NULL, and its count is {count}")));
    }
    if !from.is_aligned() || count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize)
    {
        return Err(Failure::usage(format!(
            "{what}: {from:p} is misaligned, or {count} values exceed the address space"
        )));
    }
    // SAFETY: the caller promises `count` values; alignment and size were checked.
    Ok(unsafe { std::slice::from_raw_parts(from, count) })
}

/// Checks a buffer argument of `count` bytes; `what` names it in errors. Returns an error for null.
///
/// # Safety
/// `from` is null or points to `count` bytes that do not change during the call.
pub(crate) unsafe fn bytes<'a>(what: &str, from: *const c_void, count: usize) -> Result<&'a [u8], Failure> {
    // SAFETY: the caller promises `count` bytes.
    unsafe { array(what, from.cast(), count) }
}

/// An output argument whose pointer was checked.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    /// `place` is null or valid for writing during the call.
    pub unsafe fn new(what: &str, place: *mut T) -> Result<Out<T>, Failure> {
        if place.is_null() || !place.is_aligned() {
            Err(Failure::usage(format!("{what} is NULL or misaligned: give a valid pointer")))
        } else {
            Ok(Out(place))
        }
    }

    pub fn put(&self, value: T) {
        // SAFETY: the caller of `new` promises that the pointer is valid for writing; the old value needs no
        // drop.
        unsafe { self.0.write(value) }
    }
}

/// Writes an optional output argument: null discards the value.
///
/// # Safety
/// `place` is null or valid for writing.
pub(crate) unsafe fn put_if_wanted<T>(place: *mut T, value: T) {
    if !place.is_null() && place.is_aligned() {
        // SAFETY: the caller promises that the pointer is valid for writing.
        unsafe { place.write(value) }
    }
}

/// Copies `from` to a buffer of `capacity` bytes and sets the optional length, also if the buffer is too small.
///
/// # Safety
/// `to` is null or has `capacity` bytes; `reported` is null or valid for writing.
pub(crate) unsafe fn copy_out(
    from: &[u8],
    to: *mut c_void,
    capacity: usize,
    reported: *mut usize,
) -> Result<c_int, Failure> {
    // SAFETY: the caller promises null, or room for the length.
    unsafe { put_if_wanted(reported, from.len()) };
    if from.len() > capacity || (to.is_null() && !from.is_empty()) {
        let text =
            format!("the value has {} bytes and the buffer {capacity}: give a larger buffer", from.len());
        return Err(Failure { status: FERRYWIRE_ERROR_TOO_SMALL, text });
    }
    if !from.is_empty() {
        // SAFETY: the caller's buffer has that many bytes and does not overlap the library's memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.cast(), from.len()) };
    }
    Ok(FERRYWIRE_OK)
}

/// Converts a time limit in milliseconds; a negative value is no limit.
pub(crate) fn limit(milliseconds: i64) -> Duration {
    u64::try_from(milliseconds).map_or(Duration::MAX, Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire::{LossCause, RefusalReason};

    fn last() -> String {
        // SAFETY: a string of this thread, copied before its next call.
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
            status(Error::TimedOut { what: "a".into(), peer: None, timeout: time }),
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
