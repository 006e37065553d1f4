//! Tests of the command: the real binary, run as a user runs it.

mod bench;
mod common;
mod faults;
mod usage;
