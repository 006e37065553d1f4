"""Builds the wheel: maturin makes the module, cargo the `ferrywire` command that lies beside it.

maturin puts either a module or programs into a wheel; what lies in the folder `ferrywire.data/scripts` goes in too. The
folder is filled before and removed after.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import maturin
from maturin import (  # noqa: F401  (the hooks that are maturin's own)
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "crates" / "ferrywire-py" / "ferrywire.data"


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    with _scripts():
        return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with _scripts() as scripts:
        _copy(_built(_profile(config_settings)), scripts / "ferrywire")
        return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    with _scripts() as scripts:
        _copy(_built(_profile(config_settings)), scripts / "ferrywire")
        return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


@contextlib.contextmanager
def _scripts():
    scripts = DATA / "scripts"
    shutil.rmtree(DATA, ignore_errors=True)
    scripts.mkdir(parents=True)
    try:
        yield scripts
    finally:
        shutil.rmtree(DATA, ignore_errors=True)


def _profile(config_settings):
    """That of the module: maturin takes `--profile` from the build's settings or its environment."""
    given = (config_settings or {}).get("build-args") or os.environ.get("MATURIN_PEP517_ARGS", "")
    arguments = shlex.split(given) if isinstance(given, str) else list(given)
    return arguments[arguments.index("--profile") + 1] if "--profile" in arguments else "release"


def _built(profile):
    arguments = ["cargo", "build", "-p", "ferrywire-cli", "--bin", "ferrywire", "--profile", profile]
    told = subprocess.run(
        [*arguments, "--message-format", "json-render-diagnostics"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=False,
    )
    if told.returncode != 0:
        sys.exit(f"{shlex.join(arguments)} failed")
    messages = map(json.loads, told.stdout.splitlines())
    built = [message["executable"] for message in messages if message.get("executable")]
    return Path(built[-1])


def _copy(program, to):
    shutil.copy2(program, to)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-debug", str(to)], check=True)
