//! Plugins written in C, one per version and one per defect. The tests compile and load them like any other
//! plugin.
//!
//! `plugin.c` checks every argument of every call, for each version; each case of `broken.c` has one defect.
//! Both declare the interface by themselves, so a mistake on the Rust side is not repeated in them.

mod broken;
mod compile;
mod ending;
mod logs;
mod signatures;
