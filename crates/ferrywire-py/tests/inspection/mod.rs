//! What has to be in a wheel and in a source distribution, and what must not: as auditwheel looks at wheels.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use super::environment;

/// Shared libraries that every Linux with glibc has.
const EVERYWHERE: [&str; 6] =
    ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"];

/// The newest glibc that anything linked here may ask for (`release.py` checks what it links against an older one): that of RHEL 9, Ubuntu 22.04 and Debian 12 is no older. It is where libdl
/// and libpthread became part of libc, so that what is linked with any newer one asks for it.
const GLIBC_MAX: [u32; 2] = [2, 34];

/// What NIXL loads. It gets and gives C++'s strings and maps, so that it shares NIXL's library of them.
const NIXL_BACKEND: &str = "libplugin_FERRYWIRE.so";
const OF_CPP: &str = "libstdc++.so.6";

/// The newest libstdc++ that it may ask for: what manylinux_2_28 allows. The wheel for PyPI has the same C++ in it.
const GLIBCXX_MAX: [u32; 3] = [3, 4, 24];

/// Beside the modules themselves.
const FILES: [&str; 4] = [
    "ferrywire/py.typed",
    "ferrywire/_ferrywire.pyi",
    "ferrywire/_ferrywire.abi3.so",
    "ferrywire-{version}.data/scripts/ferrywire",
];

/// A wheel, unpacked.
pub struct Wheel {
    names: BTreeSet<String>,
    folder: std::path::PathBuf,
    file_name: String,
}

impl Wheel {
    /// Unpacks it beside itself.
    pub fn open(wheel: &Path) -> Wheel {
        let folder = wheel.with_extension("unpacked");
        let zip = ["-m", "zipfile"];
        environment::run(Command::new("python3").args(zip).arg("-e").arg(wheel).arg(&folder));
        let listed = environment::run(Command::new("python3").args(zip).arg("-l").arg(wheel));
        let names = listed.lines().skip(1).filter_map(|line| line.split_whitespace().next());
        let file_name = wheel.file_name().expect("a name").to_string_lossy().into_owned();
        Wheel { names: names.map(String::from).collect(), folder, file_name }
    }

    /// The names of those that begin so, as they are installed.
    pub fn files(&self, begin: &str) -> Vec<String> {
        let platlib = format!("ferrywire-{}.data/platlib/", env!("CARGO_PKG_VERSION"));
        let names = self.names.iter().map(|name| name.strip_prefix(&platlib).unwrap_or(name));
        names.filter(|name| name.starts_with(begin)).map(String::from).collect()
    }

    /// One wheel for every Python from 3.11 on; types, command, plugin and backend; nothing that a Linux may lack.
    pub fn has_what_users_need(&self) {
        let version = env!("CARGO_PKG_VERSION");
        let tag = format!("ferrywire-{version}-cp311-abi3-");
        assert!(self.file_name.starts_with(&tag), "{}", self.file_name);
        let told = std::fs::read_to_string(self.folder.join(format!("ferrywire-{version}.dist-info/WHEEL")));
        assert!(told.expect("WHEEL").contains("\nTag: cp311-abi3-"));
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

/// No CUDA, no Python library of a certain version, nothing that a distribution may lack, no path of the machine that
/// built it.
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

/// The newest version of a library that is asked for by these names: `GLIBC_2.17   Flags: none`.
fn newest(listed: &str, begin: &str) -> Option<Vec<u32>> {
    let version = |text: &str| {
        let end = text.find(|letter: char| letter != '.' && !letter.is_ascii_digit()).unwrap_or(text.len());
        text[..end].split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u32>>>()
    };
    listed.split(begin).skip(1).filter_map(version).max()
}

/// What a build reads: of the crates the sources, of the root what the manifests name.
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
