"""Shared by the tests: a pair of connected endpoints, and separate Python programs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field

import pytest

import ferrywire as fw

# Longer than any step takes on a working machine: a longer wait hangs.
LIMIT = 90.0
# Where separate programs find modules: those of the tests first.
SEARCHED = list(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
# The promised time for detecting a killed peer, although its kernel reports the end immediately.
LOSS_IS_TOLD = 15.0


@dataclass
class Pair:
    """Two connected endpoints of this process; `near` has connected to `far`."""

    near: fw.Endpoint
    far: fw.Endpoint
    to_far: fw.Peer
    to_near: fw.Peer
    kept: list[fw.Region] = field(default_factory=list)

    def target(self, memory: object) -> fw.RemoteRegion:
        """Memory of `far` and its remote region for `near`, registered until the end of the test."""
        self.kept.append(self.far.register(memory))
        return self.kept[-1].remote()


@pytest.fixture
def pair():
    with fw.Endpoint("127.0.0.1:0", label="far") as far, fw.Endpoint(label="near") as near:
        to_far = near.connect(far.metadata(), timeout=LIMIT)
        to_near = far.accept(timeout=LIMIT)
        yield Pair(near, far, to_far, to_near)
        to_far.close()


# In development mode asyncio logs every step of more than 0.1 s, which a busy machine makes of any step.
NO_SLOW_STEPS = 'import logging; logging.getLogger("asyncio").addFilter(lambda record: " took " not in record.msg)'


class Program:
    """A separate Python program in development mode."""

    def __init__(self, code: str, *arguments: str, options: tuple[str, ...] = ("-X", "dev"), **environment: str):
        self.process = subprocess.Popen(
            [sys.executable, *options, "-W", "error", "-c", f"{NO_SLOW_STEPS}\n{textwrap.dedent(code)}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(SEARCHED), **environment},
        )

    def line(self) -> str:
        """Returns the next line of output; fails with the program's errors if there is none."""
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"it printed nothing more: {self.process.communicate(timeout=LIMIT)[1]}")
        return line.rstrip("\n")

    def tell(self, text: str) -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self, but: str | None = None) -> str:
        """Waits for success without warnings, except lines that begin with `but`; returns the rest of the output."""
        try:
            out, complaints = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it hangs: {self.process.communicate()}") from None
        if but:
            complaints = "".join(line for line in complaints.splitlines(True) if not line.startswith(but))
        assert (self.process.returncode, complaints) == (0, ""), (self.process.returncode, out, complaints)
        return out

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.kill()
        if not self.process.stdout.closed:
            self.process.communicate(timeout=LIMIT)


@pytest.fixture
def program():
    return Program


def eventually(condition, what: str) -> None:
    """Repeats a check until it holds, with a garbage collection each time."""
    import time

    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, f"not within {LIMIT} s: {what}"
        gc.collect()
        time.sleep(0.01)
