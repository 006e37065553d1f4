//! Failures of comms: recorded by workers, reported when NCCL asks.
//!
//! A failure's life: none -> recorded by the first thread that sees it -> reported once, with a line in NCCL's log.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrywire_ncclnet::abi::ResultCode;

use crate::log;

/// The outcome of a call: a value, or a fault with NCCL's code.
pub type Outcome<T> = Result<T, Fault>;

/// A failed call of NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The result code that NCCL gets.
    pub code: ResultCode,
    /// The message for NCCL's log, which says what failed.
    pub why: String,
}

impl Fault {
    /// The fault of a peer that was lost or broke the protocol.
    pub fn remote(why: impl fmt::Display) -> Fault {
        Fault { code: ResultCode::REMOTE_ERROR, why: why.to_string() }
    }

    /// The fault of a system call that failed on this host.
    pub fn system(what: impl fmt::Display, error: &io::Error) -> Fault {
        Fault { code: ResultCode::SYSTEM_ERROR, why: format!("{what}: {error}") }
    }

    /// The fault of a call that NCCL must not make.
    pub fn usage(why: impl fmt::Display) -> Fault {
        Fault { code: ResultCode::INVALID_ARGUMENT, why: why.to_string() }
    }

    /// The fault of a connection that failed. Some of these errors are this host's own.
    pub fn connection(peer: impl fmt::Display, error: &io::Error) -> Fault {
        let what = format_args!("connection with {peer}");
        match error.raw_os_error() {
            Some(libc::EFAULT) => {
                let why = format!("{what}: memory of a pending request was freed or unmapped");
                Fault { code: ResultCode::SYSTEM_ERROR, why }
            }
            _ if is_short(error) => Fault::system(what, error),
            _ => Fault::remote(format_args!("{what}: {error}")),
        }
    }
}

/// Whether the error is a lack of a resource in this process or host.
pub fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// The first failure of a comm.
#[derive(Debug, Default)]
pub struct Failure {
    first: OnceLock<Fault>,
    reported: AtomicBool,
}

impl Failure {
    /// Records a fault as the comm's failure, if it is the first.
    pub fn record(&self, fault: Fault) {
        let _ = self.first.set(fault);
    }

    /// Whether the comm has failed.
    pub fn is_some(&self) -> bool {
        self.first.get().is_some()
    }

    /// Returns the failure as an error, if there is one; the first such call logs it.
    pub fn check(&self) -> Outcome<()> {
        let Some(fault) = self.first.get() else { return Ok(()) };
        if self.reported.swap(true, Ordering::Relaxed) {
            Err(Fault { code: fault.code, why: String::new() })
        } else {
            Err(fault.clone())
        }
    }
}

/// Logs a fault, unless that has been done, and returns its code.
fn log_fault(fault: &Fault) -> ResultCode {
    if !fault.why.is_empty() {
        log::warn(format_args!("{}", fault.why));
    }
    fault.code
}

/// Runs the body of a call of NCCL; a panic becomes a result code.
pub fn guarded(body: impl FnOnce() -> Outcome<()>) -> ResultCode {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ResultCode::SUCCESS,
        // NCCL's logger is called outside of the panic guard, because it does not unwind.
        Ok(Err(fault)) => log_fault(&fault),
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
    fn a_lack_of_local_resources_is_a_system_error() {
        let of = |errno| Fault::connection("10.0.0.2", &io::Error::from_raw_os_error(errno));
        for errno in [libc::ENOBUFS, libc::ENOMEM, libc::EFAULT] {
            assert_eq!(of(errno).code, ResultCode::SYSTEM_ERROR, "{errno}");
        }
        assert!(of(libc::EFAULT).why.contains("memory of a pending request"));
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
