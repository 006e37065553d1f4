//! The kernels' source on the CPU, with sanitizers: what they touch, byte by byte, on any machine.

use std::path::Path;
use std::process::Command;

#[test]
fn the_kernels_touch_what_they_may_and_no_more() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernel-{}", std::process::id()));
    let kernels = package.join("../ferrywire-memory/src/unpack/kernel.cu");
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    compiler.args([
        "-std=c++17",
        "-O1",
        "-g",
        "-w",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]);
    compiler.arg(format!("-DKERNELS=\"{}\"", kernels.display())).arg("-o").arg(&program);
    let compiled = compiler.arg(package.join("tests/cuda/kernel.cpp")).output();
    let Ok(compiled) = compiled else {
        return println!("SKIPPED: needs a C++ compiler");
    };
    let said = String::from_utf8_lossy(&compiled.stderr);
    if said.contains("cannot find") {
        return println!("SKIPPED: needs the sanitizers' libraries");
    }
    assert!(compiled.status.success(), "{said}");
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_file(&program).unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("all is right"), "{said}");
}
