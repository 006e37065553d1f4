//! Compiles the one C file: the plugins' logger, which is C-variadic and so cannot be written in Rust.

fn main() {
    println!("cargo::rerun-if-changed=src/log/log.c");
    cc::Build::new().file("src/log/log.c").flag("-fvisibility=hidden").compile("ferrywire_nccl_log");
}
