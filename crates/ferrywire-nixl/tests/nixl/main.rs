//! The NIXL backend: under NIXL's own library, and called through its table by a program in C++.

mod agents;
#[allow(dead_code, reason = "the tests of CUDA memory use all of it")]
#[path = "../../../ferrywire/tests/cuda/driver.rs"]
mod driver;
#[allow(dead_code, reason = "the tests of the Python package use all of it")]
#[path = "../../../ferrywire-py/tests/python/environment.rs"]
mod environment;
#[allow(dead_code, reason = "the test of the wheel uses all of it")]
#[path = "../../../ferrywire-py/tests/python/inspection.rs"]
mod inspection;
mod table;
