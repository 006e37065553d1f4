//! The ncclNet plugin interface, versions 4 to 12, as C lays it out.
//!
//! A plugin is a shared library that exports one *table* per version it supports: a data object named
//! `ncclNetPlugin_vN` that holds a name and function pointers. A table must be read with the struct of
//! exactly that version: slots, signatures and properties all changed between versions.
//!
//! | file | holds |
//! |---|---|
//! | `constants` | result codes, pointer types, device types, sizes, log levels |
//! | `signatures` | the type of each function, named after the first version with this signature |
//! | `tables` | [`NetV4`] to [`NetV12`] |
//! | `properties` | [`PropertiesV4`] to [`PropertiesV12`], a device's description |
//! | `structs` | device handle, virtual devices, communicator configuration, attributes |
//!
//! Invariant: every size and every offset is written next to its field and checked by the compiler. A
//! struct that drifts from the C layout does not build.
//! Read next: `tables`.

#[macro_use]
mod layout;

mod constants;
mod properties;
mod signatures;
mod structs;
mod tables;
mod version;

pub use constants::*;
pub use properties::*;
pub use signatures::*;
pub use structs::*;
pub use tables::*;
pub use version::Version;

// Linux with 64-bit pointers and 32-bit ints (LP64) is the only platform the layouts are written for.
const _: () = assert!(size_of::<*mut std::ffi::c_void>() == 8 && size_of::<usize>() == 8);
const _: () = assert!(size_of::<std::ffi::c_int>() == 4 && size_of::<std::ffi::c_ulong>() == 8);

/// A table that a library exports. The static holds raw pointers, which Rust would not let threads share
/// otherwise.
///
/// ```
/// use ferrywire_ncclnet::abi::{Exported, NetV7};
///
/// # #[allow(non_upper_case_globals)]
/// #[unsafe(no_mangle)]
/// pub static ncclNetPlugin_v7: Exported<NetV7> =
///     // SAFETY: the name is a literal, and no function is given.
///     unsafe { Exported::new(NetV7 { name: c"Example".as_ptr(), ..NetV7::zeroed() }) };
/// ```
#[derive(Debug)]
#[repr(transparent)]
pub struct Exported<T>(T);

impl<T: Table> Exported<T> {
    /// Wraps a table for export.
    ///
    /// # Safety
    /// `name` must point to a NUL-terminated string that lives as long as the static, and the functions
    /// must be callable from any thread.
    pub const unsafe fn new(table: T) -> Exported<T> {
        Exported(table)
    }

    /// The table that is exported.
    pub const fn table(&self) -> &T {
        &self.0
    }
}

// SAFETY: a table is never written after it was made, and the caller of `new` promised that its name and its
// functions may be used from any thread.
unsafe impl<T: Table> Sync for Exported<T> {}
