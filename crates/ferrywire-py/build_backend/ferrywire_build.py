"""Builds the wheel: maturin builds the module; cargo builds the `ferrywire` command, the NCCL plugin and the NIXL
backend.

maturin puts either a module or programs into a wheel. It also adds the folder `ferrywire.data`: `scripts` to the
commands, `platlib` to the package. This backend fills the folder before the build and removes it afterwards.

The source distribution has the files that such a build reads, and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import maturin
from maturin import (  # noqa: F401  (the hooks that are maturin's own)
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path("crates/ferrywire-py")
DATA = ROOT / PACKAGE / "ferrywire.data"
# Packages, and what each builds; in the wheel it has the name on the right. Rust gives a library no name with hyphens
# or capitals, and these are what NCCL and NIXL look for.
LIB = Path("platlib/ferrywire/lib")
BESIDE = {
    "ferrywire-cli": ("ferrywire", Path("scripts/ferrywire")),
    "ferrywire-nccl": ("libnccl_net_ferrywire.so", LIB / "libnccl-net-ferrywire.so"),
    "ferrywire-nixl": ("libplugin_ferrywire.so", LIB / "libplugin_FERRYWIRE.so"),
}

# All crates, also those of tests: cargo reads them to build one.
CRATES = sorted(manifest.parent.name for manifest in (ROOT / "crates").glob("*/Cargo.toml"))
OF_A_CRATE = ("Cargo.toml", "build.rs", "src", "shim", "python", "build_backend")
OF_THE_ROOT = ("Cargo.lock", "pyproject.toml", "LICENSE-MIT", "LICENSE-APACHE", "docs/python.md")
NOT_SOURCES = (".so", ".pyc")


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    with _data():
        return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with _data():
        _beside_the_module(_profile(config_settings))
        return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    with _data():
        _beside_the_module(_profile(config_settings))
        return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_sdist(sdist_directory, config_settings=None):
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder, prepare_metadata_for_build_wheel(folder, config_settings), "METADATA").read_bytes()
    version = re.search(rb"^Version: (\S+)$", metadata, re.MULTILINE).group(1).decode()
    name = f"ferrywire-{version}"
    with tarfile.open(Path(sdist_directory, f"{name}.tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path in _sources():
            archive.add(ROOT / path, f"{name}/{path}", recursive=False, filter=_without_owner)
        for path, content in (("Cargo.toml", _workspace()), ("PKG-INFO", metadata)):
            member = _without_owner(tarfile.TarInfo(f"{name}/{path}"))
            member.size, member.mtime = len(content), (ROOT / "Cargo.toml").stat().st_mtime
            archive.addfile(member, io.BytesIO(content))
    return f"{name}.tar.gz"


def _sources():
    """Files that the source distribution contains unchanged, relative to the root."""
    yield from OF_THE_ROOT
    for crate in CRATES:
        for part in (ROOT / "crates" / crate / name for name in OF_A_CRATE):
            for path in sorted(part.rglob("*")) if part.is_dir() else [part] * part.exists():
                if path.is_file() and not str(path).endswith(NOT_SOURCES):
                    yield path.relative_to(ROOT)


def _workspace():
    """The workspace's Cargo.toml without the members that the source distribution lacks."""
    members = json.dumps([f"crates/{crate}" for crate in CRATES])
    text, count = re.subn(r"^members = \[.*\]$", f"members = {members}", (ROOT / "Cargo.toml").read_text(), flags=re.M)
    if count != 1:
        sys.exit(f"{ROOT / 'Cargo.toml'}: no line with the members of the workspace")
    return text.encode()


def _without_owner(member):
    member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
    return member


@contextlib.contextmanager
def _data():
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(DATA, ignore_errors=True)


def _beside_the_module(profile):
    built = _built(profile)
    for name, path in BESIDE.values():
        _copy(built[name], DATA / path)


def _profile(config_settings):
    """The module's profile: maturin takes `--profile` from the build's settings or its environment."""
    given = (config_settings or {}).get("build-args") or os.environ.get("MATURIN_PEP517_ARGS", "")
    arguments = shlex.split(given) if isinstance(given, str) else list(given)
    return arguments[arguments.index("--profile") + 1] if "--profile" in arguments else "release"


def _built(profile):
    """Builds the packages and returns their files by name."""
    # The module's package is left out: maturin builds it with settings of its own. The crates that both builds share
    # have equal features in both (a test of the wheel checks that), so that maturin finds the engine built.
    packages = [argument for package in BESIDE for argument in ("-p", package)]
    arguments = ["cargo", "build", *packages, "--profile", profile]
    told = subprocess.run(
        [*arguments, "--message-format", "json-render-diagnostics"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=False,
    )
    if told.returncode != 0:
        sys.exit(f"{shlex.join(arguments)} failed")
    messages = map(json.loads, told.stdout.splitlines())
    files = [Path(file) for message in messages for file in message.get("filenames", ())]
    return {file.name: file for file in files}


def _copy(built, to):
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(built, to)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-debug", str(to)], check=True)
