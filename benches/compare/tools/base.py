"""The base class of a tool, and how programs run in the two namespaces."""

import contextlib
import glob
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass

FOOTPRINT = 256 << 20  # bytes that messages cycle through on each side, if the tool has an option: more than L3
DEPTH = 64


class Unavailable(Exception):
    """The tool, or one cell of its row, cannot be measured; the text gives the reason."""


@dataclass
class Measurement:
    gb_per_s: float
    cpu_source: float  # CPU seconds per GB
    cpu_target: float


@dataclass
class Finished:
    out: str
    cpu_seconds: float


class Tool:
    """One row of the table."""

    name = ""
    method = ""  # one line for the footnote: what is measured, and with which buffers

    def prepare(self, network):
        """Finds the program; raises Unavailable with the reason."""

    def version(self):
        return ""

    def supports(self, size):
        return True

    def throughput(self, network, size, seconds):
        """Returns a Measurement of about `seconds` at this message size."""
        raise NotImplementedError

    def latency(self, network, seconds):
        """Returns the microseconds of an 8-byte round trip, or None."""
        return None


def depth_of(size):
    """Number of transfers in flight: 64, or fewer whose bytes fit the footprint."""
    return max(1, min(DEPTH, FOOTPRINT // size))


def parse_size(text):
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1].upper())
    return int(text[:-1]) << shift if shift else int(text)


def show_size(size):
    for suffix, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{suffix}"
    return str(size)


class Network:
    """The two namespaces, or one with its loopback: data flows from `source` to `target`."""

    source_ip, target_ip, device = "10.213.7.1", "10.213.7.2", "fwcmp0"

    def __init__(self, source_ns, target_ns, venv, cache, binaries, loopback=False):
        if loopback:
            self.source_ip, self.target_ip, self.device = "127.0.0.1", "127.0.0.1", "lo"
        self.source_ns, self.target_ns = source_ns, target_ns
        self.venv, self.cache, self.binaries = venv, cache, binaries
        self.next_port = 20000

    @property
    def python(self):
        return os.path.join(self.venv, "bin", "python")

    def site_packages(self, name):
        """The folder of an installed Python package, or Unavailable."""
        found = glob.glob(os.path.join(self.venv, "lib", "python3*", "site-packages", name))
        if not found:
            raise Unavailable(f"Python package {name} is not installed")
        return found[0]

    def wheel_version(self, distribution):
        """The installed version of a distribution, read from its metadata folder's name."""
        pattern = os.path.join(self.venv, "lib", "python3*", "site-packages", distribution + "-*.dist-info")
        return next((os.path.basename(p)[len(distribution) + 1:-len(".dist-info")] for p in glob.glob(pattern)), "?")

    def port(self):
        """Returns a port that was not used before in these namespaces."""
        self.next_port += 2
        return self.next_port

    def binary(self, name):
        path = os.path.join(self.binaries, name)
        if not os.access(path, os.X_OK):
            raise Unavailable(f"no binary {name}: build it with cargo build --release")
        return path

    @contextlib.contextmanager
    def target(self, command, env=None):
        """Runs a command in the target's namespace for the length of the block."""
        with Process(self.target_ns, command, env) as process:
            yield process

    def source(self, command, seconds, env=None):
        """Runs a command in the source's namespace to its end."""
        with Process(self.source_ns, command, env) as process:
            return process.finish(seconds * 6 + 60)

    def target_listens(self, port, timeout=15.0):
        """Waits for a listener on `port`, without connecting to it."""
        wanted, end = f":{port:04X}", time.monotonic() + timeout
        while time.monotonic() < end:
            tables = subprocess.run(["ip", "netns", "exec", self.target_ns, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
                                    capture_output=True, text=True).stdout
            if any(f[1].endswith(wanted) and f[3] == "0A" for f in map(str.split, tables.splitlines()) if len(f) > 3):
                return
            time.sleep(0.02)
        raise Unavailable(f"the target did not listen within {timeout:g} s")


class Process:
    """A program in a namespace; killed, with what it started, when the block ends."""

    def __init__(self, namespace, command, env=None):
        self.command = command
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self.child = subprocess.Popen(["ip", "netns", "exec", namespace, *command], stdout=self.out, stderr=self.err,
                                      stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **(env or {})})
        self.cpu_seconds = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.cpu_seconds is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.reap(10)
        self.out.close()
        self.err.close()

    def finish(self, timeout):
        """Waits for the end; raises Unavailable with the last error line if it failed."""
        status = self.reap(timeout)
        if status is None:
            raise Unavailable(f"{os.path.basename(self.command[0])} took longer than {timeout:.0f} s")
        if status != 0:
            raise Unavailable(f"{os.path.basename(self.command[0])} ended with {status}: {self.last_error()}")
        return Finished(self.text(self.out), self.cpu_seconds)

    def reap(self, timeout):
        """The exit status, or None if it is still running; notes the CPU time used."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            pid, status, usage = os.wait4(self.child.pid, os.WNOHANG)
            if pid:
                self.cpu_seconds = usage.ru_utime + usage.ru_stime
                self.child.returncode = os.waitstatus_to_exitcode(status)
                return self.child.returncode
            time.sleep(0.01)
        return None

    def last_error(self):
        lines = [l for f in (self.err, self.out) for l in self.text(f).splitlines() if l.strip()]
        return lines[-1].strip()[:200] if lines else "no output"

    @staticmethod
    def text(file):
        file.seek(0)
        return file.read()
