//! Runs the tests of the VM in the VM.
//! Read next: `boot.rs`.

use super::boot;

/// The tests that the gate has time for.
#[test]
fn the_kernel_does_what_we_rely_on() {
    boot::pass_in_the_vm(&[1500], 400, &[]);
}

#[test]
fn devmem_passes_at_both_mtus() {
    if std::env::var_os("FERRYWIRE_LONG").is_some() {
        boot::pass_in_the_vm(&[1500, 9000], 900, &[])
    } else {
        println!("SKIPPED: needs FERRYWIRE_LONG=1, since it takes minutes")
    }
}
