//! Plugins written in C, one per version and one per defect, compiled here and loaded as any other.
//!
//! `plugin.c` checks every argument of every call, for each version; `broken.c` has one thing wrong each.
//! Both declare the interface for themselves, so that a mistake on the Rust side is not made twice.

mod broken;
mod compile;
mod ending;
mod logs;
mod signatures;
