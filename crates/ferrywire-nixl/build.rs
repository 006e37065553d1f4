//! Compiles the C++ side of the boundary and sets the link flags of the shared object.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=shim/shim.cpp");
    println!("cargo::rerun-if-changed=shim/nixl.hpp");
    println!("cargo::rerun-if-changed=shim/core.h");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("shim/shim.cpp")
        .flag("-fvisibility=hidden")
        .flag("-Wno-invalid-offsetof")
        .compile("ferrywire_nixl_shim");
    // NIXL unloads and reloads the library, while its threads and statics must stay.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libplugin_FERRYWIRE.so");
}
