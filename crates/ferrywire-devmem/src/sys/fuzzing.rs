//! What the fuzzer feeds: what the kernel writes.
//!
//! Not a part of any API; `fuzz/smoke` runs it. Read next: `kernel.rs`.

mod kernel;

use ferrywire_proto::fuzz_input::{Input, check_text};

/// What the kernel writes about devmem TCP: control messages and netlink answers; and tokens, against a model.
pub fn kernel(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 3 {
        0 => kernel::control_messages(&mut input),
        1 => kernel::netlink_answers(&mut input),
        _ => kernel::tokens(&mut input),
    }
}
