//! Fuzz targets for code that reads bytes of the kernel.
//!
//! The targets are not part of any API; `fuzz/smoke` runs them.
//! Read next: `kernel.rs`.

mod kernel;

use ferrywire_proto::fuzz_input::{Input, check_text};

/// Feeds bytes to the readers of control messages and netlink answers, and checks tokens against a model.
pub fn kernel(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 3 {
        0 => kernel::control_messages(&mut input),
        1 => kernel::netlink_answers(&mut input),
        _ => kernel::tokens(&mut input),
    }
}
