//! The required and the forbidden contents of a wheel and of a source distribution, by checks like those of auditwheel.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use super::environment;

/// Shared libraries that every Linux with glibc has.
const EVERYWHERE: [&str; 6] =
    ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"];

/// The newest glibc that a library linked on this host may need; RHEL 9, Ubuntu 22.04 and Debian 12 have it. In this
/// version libdl and libpthread became part of libc, so everything linked against a newer glibc needs it. (`release.py`
/// links against an older glibc and checks that.)
const GLIBC_MAX: [u32; 2] = [2, 34];

/// The library that NIXL loads. It exchanges C++ strings and maps with NIXL, so both use one libstdc++.
const NIXL_BACKEND: &str = "libplugin_FERRYWIRE.so";
const OF_CPP: &str = "libstdc++.so.6";

/// The newest libstdc++ that the backend may need: that of manylinux_2_28. The wheel for PyPI has the same C++ code.
const GLIBCXX_MAX: [u32; 3] = [3, 4, 24];

/// Files of the wheel besides its modules.
const FILES: [&str; 4] = [
    "ferrywire/py.typed",
    "ferrywire/_ferrywire.pyi",
    "ferrywire/_ferrywire.abi3.so",
    "ferrywire-{version}.data/scripts/ferrywire",
];

/// An unpacked wheel.
pub struct Wheel {
    names: BTreeSet<String>,
    folder: std::path::PathBuf,
    file_name: String,
}

impl Wheel {
    /// Unpacks a wheel into a folder beside it.
    pub fn open(wheel: &Path) -> Wheel {
        let folder = wheel.with_extension("unpacked");
        let zip = ["-m", "zipfile"];
        environment::run(Command::new("python3").args(zip).arg("-e").arg(wheel).arg(&folder));
        let listed = environment::run(Command::new("python3").args(zip).arg("-l").arg(wheel));
        let names = listed.lines().skip(1).filter_map(|line| line.split_whitespace().next());
        let file_name = wheel.file_name().expect("a name").to_string_lossy().into_owned();
        Wheel { names: names.map(String::from).collect(), folder, file_name }
    }

    /// The installed files whose names begin with `begin`.
    pub fn files(&self, begin: &str) -> Vec<String> {
        let platlib = format!("ferrywire-{}.data/platlib/", env!("CARGO_PKG_VERSION"));
        let names = self.names.iter().map(|name| name.strip_prefix(&platlib).unwrap_or(name));
        names.filter(|name| name.starts_with(begin)).map(String::from).collect()
    }

    /// Checks that the wheel is for every Python from 3.11 on, has types, command, plugin and backend, and needs no library
    /// that a Linux may lack.
    pub fn has_what_users_need(&self) {
        let version = env!("CARGO_PKG_VERSION");
        let tag = format!("ferrywire-{version}-cp311-abi3-");
        assert!(self.file_name.starts_with(&tag), "{}", self.file_name);
        let reported =
            std::fs::read_to_string(self.folder.join(format!("ferrywire-{version}.dist-info/WHEEL")));
        assert!(reported.expect("WHEEL").contains("\nTag: cp311-abi3-"));
        for name in FILES.map(|name| name.replace("{version}", version)) {
            assert!(self.names.contains(&name), "{name} is not in {:?}", self.names);
        }
        let libraries =
            ["libnccl-net-ferrywire.so", NIXL_BACKEND].map(|name| format!("ferrywire/lib/{name}"));
        assert!(self.files("ferrywire/lib/") == libraries, "{:?}", self.names);
        let programs: Vec<_> = self.names.iter().filter(|name| is_elf(&self.folder.join(name))).collect();
        assert_eq!(programs.len(), 4, "module, command, plugin, backend: {programs:?}");
        for name in programs {
            needs_nothing_else(&self.folder.join(name));
        }
    }
}

fn is_elf(file: &Path) -> bool {
    std::fs::read(file).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF"))
}

/// Checks that a library needs no CUDA, no specific version of Python, nothing that a distribution may lack, and contains
/// no path of the machine that built it.
pub fn needs_nothing_else(file: &Path) {
    let Ok(output) = Command::new("readelf").args(["-W", "-d", "-V"]).arg(file).output() else {
        return println!("SKIPPED: needs readelf (binutils), for the libraries of {}", file.display());
    };
    let of_cpp = file.ends_with(NIXL_BACKEND).then_some(OF_CPP);
    let (listed, file) = (String::from_utf8_lossy(&output.stdout), file.display());
    let mut libraries = 0;
    for line in listed.lines().filter(|line| line.contains("(NEEDED)")) {
        let library = line.split(['[', ']']).nth(1).unwrap_or(line);
        assert!(EVERYWHERE.contains(&library) || of_cpp == Some(library), "{file} needs {library}");
        libraries += 1;
    }
    assert!(libraries > 0, "{file}: {listed}");
    assert!(!listed.contains("(RPATH)") && !listed.contains("(RUNPATH)"), "{file} names folders: {listed}");
    let newest = newest(&listed, "GLIBC_").unwrap_or_else(|| panic!("{file} asks for no glibc: {listed}"));
    assert!(newest <= GLIBC_MAX.to_vec(), "{file} needs glibc {newest:?}");
    let newest = self::newest(&listed, "GLIBCXX_").unwrap_or_default();
    assert!(newest <= GLIBCXX_MAX.to_vec(), "{file} needs libstdc++ {newest:?}");
}

/// The newest version of a library among names like `GLIBC_2.17   Flags: none`.
fn newest(listed: &str, begin: &str) -> Option<Vec<u32>> {
    let version = |text: &str| {
        let end = text.find(|letter: char| letter != '.' && !letter.is_ascii_digit()).unwrap_or(text.len());
        text[..end].split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u32>>>()
    };
    listed.split(begin).skip(1).filter_map(version).max()
}

/// Checks that the source distribution has only files that a build reads: sources of the crates, and files of the root that
/// the manifests name.
pub fn sdist_has_no_more_than_it_needs(listed: &str) {
    let begin = format!("ferrywire-{}/", env!("CARGO_PKG_VERSION"));
    let names: BTreeSet<&str> =
        listed.split_whitespace().map(|name| name.strip_prefix(&begin).unwrap_or(name)).collect();
    let root = [
        "Cargo.lock",
        "Cargo.toml",
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "PKG-INFO",
        "docs/python.md",
        "pyproject.toml",
    ];
    let (of_crates, others): (Vec<&str>, Vec<&str>) =
        names.iter().partition(|name| name.starts_with("crates/"));
    assert_eq!(others, root);
    for name in of_crates {
        let part = name.split('/').nth(2).unwrap_or(name);
        let needed = ["Cargo.toml", "build.rs", "src", "shim", "python", "build_backend"].contains(&part);
        assert!(needed && !name.ends_with(".so") && !name.contains("__pycache__"), "{name}");
    }
    assert!(names.contains("crates/ferrywire-py/build_backend/ferrywire_build.py"), "{names:?}");
}
