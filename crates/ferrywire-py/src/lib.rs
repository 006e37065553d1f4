//! The Python package's native half: thin classes around the engine's own.
//!
//! A call goes through `endpoint` or `peer` and `region` ([`tensor`] finds the bytes of a Python object) to the engine,
//! and returns a `transfer`. [`waiting`] waits without the interpreter's lock; [`errors`] turns the engine's errors
//! into exceptions. Exceptions, asyncio and logging are written in Python, in `python/ferrywire/`.
//!
//! Invariant: no thread of the engine ever waits for the interpreter's lock. Read next: `endpoint.rs`, `peer.rs`,
//! `transfer.rs`.

mod blocks;
mod dlpack;
mod endpoint;
mod errors;
mod integers;
mod logs;
mod options;
mod peer;
mod region;
mod shutdown;
mod stats;
mod stream;
mod tensor;
mod transfer;
mod waiting;
mod wakeup;

use pyo3::prelude::*;

/// The native module `ferrywire._ferrywire`, whose classes and functions the package exports.
#[pymodule]
#[pyo3(name = "_ferrywire")]
mod native {
    #[pymodule_export]
    use crate::blocks::BlockList;
    #[pymodule_export]
    use crate::endpoint::Endpoint;
    #[pymodule_export]
    use crate::logs::{log_level, log_stop, log_take};
    #[pymodule_export]
    use crate::peer::Peer;
    #[pymodule_export]
    use crate::region::{Region, RemoteRegion};
    #[pymodule_export]
    use crate::shutdown::shutdown;
    #[pymodule_export]
    use crate::transfer::{Transfer, wait_any};
    #[pymodule_export]
    use crate::waiting::PendingCall;
    #[pymodule_export]
    use crate::wakeup::Wakeup;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        // SAFETY: the interpreter runs this, so the thread is attached to one.
        if unsafe { pyo3::ffi::PyInterpreterState_GetID(pyo3::ffi::PyInterpreterState_Get()) } != 0 {
            // Its end would close the endpoints of the whole process.
            return Err(pyo3::exceptions::PyImportError::new_err(
                "ferrywire works in the main interpreter of a process alone, and this is a subinterpreter: import it there",
            ));
        }
        crate::logs::start();
        ferrywire::metrics::set_face("python");
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("NOTIFY_BYTES_MAX", ferrywire::limits::NOTIFY_BYTES_MAX)?;
        module.add("SECRET_BYTES_MIN", ferrywire::limits::SECRET_BYTES_MIN)
    }
}
