//! Compiles the stand-in for the CUDA driver (`stand_in.c`), for tests of this crate and of the command.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A stand-in that runs kernels too, where [`has_kernels`].
pub const WITH_KERNELS: &str = "KERNELS";

/// Whether this machine can compile the kernels for the CPU.
pub fn has_kernels() -> bool {
    Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into())).arg("--version").output().is_ok()
}

/// A folder in which the driver's names lead to the stand-in, compiled with these options.
pub fn stand_in(defines: &[&str]) -> PathBuf {
    let name = format!("cuda-{}", defines.join("-").replace('=', "-"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let own = format!("{}.{:?}", std::process::id(), std::thread::current().id());
    std::fs::create_dir_all(&folder).unwrap();
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ferrywire");
    let source = |name| package.join("tests/cuda").join(name);
    let made = folder.join(own);
    let kernels = defines.contains(&WITH_KERNELS);
    let (variable, usual) = if kernels { ("CXX", "c++") } else { ("CC", "cc") };
    let mut cc = Command::new(std::env::var_os(variable).unwrap_or_else(|| usual.into()));
    // Emulated threads jump between stacks, which a fortified `longjmp` takes for an error.
    cc.args(["-shared", "-fPIC", "-pthread", "-O2", "-U_FORTIFY_SOURCE", "-Wl,-soname,libcuda.so.1", "-o"]);
    cc.arg(&made);
    cc.args(defines.iter().filter(|define| **define != WITH_KERNELS).map(|define| format!("-D{define}")));
    if kernels {
        let file = package.join("../ferrywire-memory/src/unpack/kernel.cu");
        cc.arg(format!("-DKERNELS=\"{}\"", file.display()));
        cc.args(["-w", "-std=c++17", "-x", "c++"]).arg(source("stand_in_kernels.cpp")).args([
            "-std=gnu17",
            "-x",
            "c",
        ]);
    } else {
        cc.args(["-Wall", "-Werror"]);
    }
    cc.arg(source("stand_in.c"));
    let output = cc.output().expect("a C compiler, which Rust links with");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Others may be loading it under its names right now.
    for name in ["libcuda.so.1", "libcuda.so"] {
        let link = made.with_extension(name);
        std::fs::hard_link(&made, &link).unwrap();
        std::fs::rename(&link, folder.join(name)).unwrap();
    }
    std::fs::remove_file(&made).unwrap();
    folder
}
