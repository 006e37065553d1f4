//! What users do: `pip install .`, then the command and the module, in an environment that has nothing else.

mod environment;

use std::path::Path;
use std::process::Command;

/// Moves some bytes and says which libraries came along.
const FIRST_TRANSFER: &str = r#"
import ferrywire as fw, sys
far, near = fw.Endpoint("127.0.0.1:0"), fw.Endpoint()
got = bytearray(1 << 20)
target = far.register(got)
peer = near.connect(far.metadata())
peer.write(near.register(b"\x07" * len(got)), target.remote()).wait(timeout=60)
assert got == b"\x07" * len(got)
print("moved", fw.__version__, fw._ferrywire.__file__, sorted({"numpy", "torch"} & set(sys.modules)))
"#;

/// Shared libraries that every Linux with glibc has.
const EVERYWHERE: [&str; 6] =
    ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"];

#[test]
fn an_installation_from_the_sources_works() {
    let Some(python) = environment::python("wheel", &["maturin>=1.9.4,<2"]) else {
        return;
    };
    let target = environment::folder("..").canonicalize().expect("the target folder");
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--force-reinstall"];
    let mut pip = Command::new(&python);
    // What the build needs is here already: nothing depends on a package index any more.
    pip.args(install).args(["--no-index", "--no-build-isolation"]).arg(environment::root());
    let bin = python.parent().expect("a folder").display();
    let path = format!("{bin}:{}", std::env::var("PATH").unwrap_or_default());
    pip.env("CARGO_TARGET_DIR", target).env("PATH", path);
    environment::run(&mut pip);

    let said = environment::run(Command::new(&python).args(["-I", "-W", "error", "-c", FIRST_TRANSFER]));
    let words: Vec<&str> = said.split_whitespace().collect();
    assert_eq!((words[0], words[1], words[3]), ("moved", env!("CARGO_PKG_VERSION"), "[]"), "{said}");
    needs_nothing_else(Path::new(words[2]));

    let command = python.with_file_name("ferrywire");
    needs_nothing_else(&command);
    let table =
        environment::run(Command::new(&command).args(["bench", "--sizes", "64K", "--memory", "host"]));
    assert!(table.contains(" 64K ") && table.contains(" yes"), "{table}");
}

/// No CUDA, no Python library of a certain version, nothing that a distribution may lack.
fn needs_nothing_else(file: &Path) {
    let listed = match Command::new("readelf").arg("-d").arg(file).output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(_) => {
            return println!("SKIPPED: needs readelf (binutils), for the libraries of {}", file.display());
        }
    };
    let needed = listed.lines().filter(|line| line.contains("(NEEDED)"));
    for line in needed {
        let library = line.split(['[', ']']).nth(1).unwrap_or(line);
        assert!(EVERYWHERE.contains(&library), "{} needs {library}", file.display());
    }
}
