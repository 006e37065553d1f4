//! What went wrong on a comm: kept where workers find it, told where NCCL asks.
//!
//! Its life: none -> recorded by whoever saw it first -> told once, with a line in NCCL's log.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrywire_ncclnet::abi::ResultCode;

use crate::log;

/// What a call came to: nothing, or the code that NCCL is given.
pub type Outcome<T> = Result<T, Fault>;

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What NCCL is told.
    pub code: ResultCode,
    /// What its log is told.
    pub why: String,
}

impl Fault {
    /// The peer is gone, or says what it should not.
    pub fn remote(why: impl fmt::Display) -> Fault {
        Fault { code: ResultCode::REMOTE_ERROR, why: why.to_string() }
    }

    /// This system refused something.
    pub fn system(what: impl fmt::Display, error: &io::Error) -> Fault {
        Fault { code: ResultCode::SYSTEM_ERROR, why: format!("{what}: {error}") }
    }

    /// NCCL was not meant to call so.
    pub fn usage(why: impl fmt::Display) -> Fault {
        Fault { code: ResultCode::INVALID_ARGUMENT, why: why.to_string() }
    }

    /// A connection ended with this error, which may be this host's own.
    pub fn connection(peer: impl fmt::Display, error: &io::Error) -> Fault {
        let what = format_args!("connection with {peer}");
        match error.raw_os_error() {
            Some(libc::EFAULT) => {
                let why =
                    format!("{what}: memory of a request is not there any more: it was freed or unmapped");
                Fault { code: ResultCode::SYSTEM_ERROR, why }
            }
            _ if is_short(error) => Fault::system(what, error),
            _ => Fault::remote(format_args!("{what}: {error}")),
        }
    }
}

/// Whether this process or its host lacks what a connection needs.
pub fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// The first failure of a comm.
#[derive(Debug, Default)]
pub struct Failure {
    first: OnceLock<Fault>,
    told: AtomicBool,
}

impl Failure {
    /// Keeps it, if it is the first.
    pub fn record(&self, fault: Fault) {
        let _ = self.first.set(fault);
    }

    /// Whether there is one.
    pub fn is_some(&self) -> bool {
        self.first.get().is_some()
    }

    /// An error if there was a failure; the first to ask finds a line in the log.
    pub fn check(&self) -> Outcome<()> {
        let Some(fault) = self.first.get() else { return Ok(()) };
        match self.told.swap(true, Ordering::Relaxed) {
            true => Err(Fault { code: fault.code, why: String::new() }),
            false => Err(fault.clone()),
        }
    }
}

/// Writes a failed call to NCCL's log, unless that has been done.
fn told(fault: &Fault) -> ResultCode {
    if !fault.why.is_empty() {
        log::warn(format_args!("{}", fault.why));
    }
    fault.code
}

/// Does what NCCL has called for; a panic stays here.
pub fn guarded(body: impl FnOnce() -> Outcome<()>) -> ResultCode {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ResultCode::SUCCESS,
        // Writing the line is a call of NCCL's, which does not unwind.
        Ok(Err(fault)) => told(&fault),
        Err(_) => ResultCode::INTERNAL_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_does_not_cross_into_nccl() {
        assert_eq!(guarded(|| panic!("a bug, made for a test")), ResultCode::INTERNAL_ERROR);
        assert_eq!(guarded(|| Err(Fault::usage("a mistake"))), ResultCode::INVALID_ARGUMENT);
        assert_eq!(guarded(|| Ok(())), ResultCode::SUCCESS);
    }

    #[test]
    fn what_this_host_lacks_is_not_said_to_be_the_peers() {
        let of = |errno| Fault::connection("10.0.0.2", &io::Error::from_raw_os_error(errno));
        for errno in [libc::ENOBUFS, libc::ENOMEM, libc::EFAULT] {
            assert_eq!(of(errno).code, ResultCode::SYSTEM_ERROR, "{errno}");
        }
        assert!(of(libc::EFAULT).why.contains("memory of a request"));
        for errno in [libc::ECONNRESET, libc::ETIMEDOUT, libc::EPIPE] {
            assert_eq!(of(errno).code, ResultCode::REMOTE_ERROR, "{errno}");
        }
    }

    #[test]
    fn a_failure_has_one_line_however_often_it_is_asked_about() {
        let failure = Failure::default();
        assert_eq!(failure.check(), Ok(()));
        failure.record(Fault::remote("first"));
        failure.record(Fault::usage("second"));
        assert_eq!(failure.check(), Err(Fault::remote("first")));
        assert_eq!(failure.check(), Err(Fault::remote("")));
    }
}
