//! Sets the link flags of the shared object, so that it stays loaded in the process.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // NCCL unloads plugins without a call before, while the plugin's threads and statics must stay.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-ferrywire.so");
}
