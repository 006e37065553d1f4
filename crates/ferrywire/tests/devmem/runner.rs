//! Runs the tests of the VM in the VM. Read next: `boot.rs`.

use super::boot;

#[test]
fn the_kernel_does_what_we_rely_on() {
    boot::pass_in_the_vm(&[1500, 9000], 400, &[]);
}
