//! How the shared object is linked: it stays in the process once it was loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // NCCL unloads plugins without a word before; our threads and statics have to outlive that.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-ferrywire.so");
}
