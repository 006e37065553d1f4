//! The C library: its committed header, and programs in C that use it.

mod header;
mod programs;
