"""Runs every tool over the same veth pair, interleaved, and prints one table.

Started by `run`, which made the two namespaces. A tool is a class in tools/ with `prepare`, `throughput` and
`latency`; tools/base.py documents these methods.
"""

import argparse
import json
import os
import statistics
import sys
import time

from tools import TOOLS
from tools.base import Network, Unavailable, parse_size, show_size

REFERENCE_SIZE = 64 << 20  # CPU-s/GB is stated at this size, or at the largest that ran


def options():
    p = argparse.ArgumentParser()
    for name in ("tools", "venv", "cache", "bin", "source-ns", "target-ns"):
        p.add_argument("--" + name, required=True)
    p.add_argument("--mtu", type=int, default=1500)
    p.add_argument("--loopback", action="store_true")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--reps", type=int)
    p.add_argument("--seconds", type=float)
    p.add_argument("--sizes", default="4K,64K,1M,64M,256M")
    p.add_argument("--patience", type=float, default=10.0)
    p.add_argument("--json")
    o = p.parse_args()
    o.reps = o.reps or (2 if o.quick else 5)
    o.seconds = o.seconds or (0.5 if o.quick else 2.0)
    o.sizes = [parse_size(s) for s in o.sizes.split(",")]
    o.json = o.json or os.path.join(o.cache, "result.json")
    return o


def busy_share(seconds=0.1):
    """Share of all cores that other programs use in `seconds`, during which this program sleeps."""
    def sample():
        with open("/proc/stat") as f:
            fields = [int(x) for x in f.readline().split()[1:]]
        return sum(fields), fields[3] + fields[4]
    total, idle = sample()
    time.sleep(seconds)
    total_after, idle_after = sample()
    return 1 - (idle_after - idle) / max(1, total_after - total)


class Quiet:
    """Waits, for a bounded time, until other programs leave the cores idle; counts the measurements that began without that."""

    limit = 0.15

    def __init__(self, patience):
        self.patience, self.measurements, self.disturbed = patience, 0, 0

    def wait(self):
        self.measurements += 1
        end = time.monotonic() + self.patience
        while busy_share() > self.limit:
            if time.monotonic() > end:
                self.disturbed += 1
                return


class Row:
    """One tool's results: a list of measurements per size, round trips, and why anything is missing."""

    def __init__(self, tool):
        self.tool, self.version = tool, ""
        self.rates, self.latencies, self.problems = {}, [], []

    def attempt(self, what, call):
        """Runs one measurement; the first failure of a cell is kept and the cell is not tried again."""
        if self.missing() or any(w == what for w, _ in self.problems):
            return None
        try:
            return call()
        except Unavailable as e:
            self.problems.append((what, str(e)))
        except Exception as e:  # the crash of one tool must not end the comparison
            self.problems.append((what, f"{type(e).__name__}: {e}"))
        return None

    def missing(self):
        return next((reason for what, reason in self.problems if what == "prepare"), None)

    def gb_per_s(self, size):
        return median([m.gb_per_s for m in self.rates.get(size, [])])

    def cpu_size(self):
        ran = [s for s in self.rates if self.rates[s]]
        return max((s for s in ran if s <= REFERENCE_SIZE), default=None)

    def cpu_s_per_gb(self):
        done = self.rates.get(self.cpu_size(), [])
        return median([m.cpu_source + m.cpu_target for m in done])


def median(values):
    return statistics.median(values) if values else None


def measure(rows, network, o, quiet):
    for row in rows:
        row.attempt("prepare", lambda: row.tool.prepare(network))
        row.version = row.attempt("version", row.tool.version) or ""
        note(f"{row.tool.name:14s} {row.version or row.missing() or ''}")
    for rep in range(o.reps):
        for size in o.sizes:
            for row in rows:
                if row.missing() or not row.tool.supports(size):
                    continue
                quiet.wait()
                got = row.attempt(show_size(size), lambda: row.tool.throughput(network, size, o.seconds))
                if got:
                    row.rates.setdefault(size, []).append(got)
                    note(f"{rep + 1}/{o.reps} {row.tool.name:14s} {show_size(size):>5s} {got.gb_per_s:7.2f} GB/s")
        for row in rows:
            quiet.wait()
            got = row.attempt("8 B", lambda: row.tool.latency(network, min(o.seconds, 1.0)))
            if got is not None:
                row.latencies.append(got)


def table(rows, o):
    header = ["tool"] + [show_size(s) for s in o.sizes] + ["CPU-s/GB", "8 B us"]
    lines = [header]
    for row in rows:
        if row.missing():
            lines.append([row.tool.name, "not run: " + row.missing()])
            continue
        cells = [row.tool.name] + [number(row.gb_per_s(s)) for s in o.sizes]
        cpu = number(row.cpu_s_per_gb(), 3)
        if cpu != "-" and row.cpu_size() != REFERENCE_SIZE:
            cpu += f" at {show_size(row.cpu_size())}"
        lines.append(cells + [cpu, number(median(row.latencies), 1)])
    widths = [max(len(l[i]) for l in lines if len(l) == len(header)) for i in range(len(header))]
    for line in lines:
        if len(line) == 2:
            print(f"{line[0]:{widths[0]}s}  {line[1]}")
        else:
            print("  ".join(f"{c:{w}s}" if i == 0 else f"{c:>{w}s}" for i, (c, w) in enumerate(zip(line, widths))))


def number(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def footnotes(rows, o, quiet):
    between = "loopback" if o.loopback else f"veth between two namespaces, MTU {o.mtu}"
    print(f"\nGB/s (1e9 bytes/s), median of {o.reps} interleaved runs of {o.seconds:g} s; {between}, "
          f"cubic, {os.cpu_count()} cores.\nCPU-s/GB: both ends together, at 64M unless said. "
          "8 B us: round trip, or one completed write where marked.")
    if quiet.disturbed:
        print(f"DISTURBED: other programs used more than {quiet.limit:.0%} of the cores when {quiet.disturbed} of "
              f"{quiet.measurements} measurements began.")
    for row in rows:
        if row.missing():
            continue
        print(f"{row.tool.name}: {row.version}; {row.tool.method}")
        for what, reason in row.problems:
            print(f"    {what} failed: {reason}")


def store(rows, o, quiet):
    def one(row):
        return {
            "tool": row.tool.name, "version": row.version, "method": row.tool.method, "not_run": row.missing(),
            "problems": [{"cell": w, "reason": r} for w, r in row.problems],
            "results": [{"size_bytes": s, "gb_per_s": [m.gb_per_s for m in ms],
                         "cpu_s_per_gb": [{"source": m.cpu_source, "target": m.cpu_target} for m in ms]}
                        for s, ms in row.rates.items()],
            "round_trip_8b_us": row.latencies,
        }
    result = {"schema": 1, "loopback": o.loopback, "mtu": o.mtu, "congestion_control": "cubic", "repetitions": o.reps, "seconds": o.seconds,
              "measurements": quiet.measurements, "disturbed": quiet.disturbed, "cores": os.cpu_count(), "kernel": os.uname().release, "time": int(time.time()),
              "tools": [one(r) for r in rows]}
    with open(o.json, "w") as f:
        json.dump(result, f, indent=1)
    note(f"results: {o.json}")


def note(text):
    print(text, file=sys.stderr, flush=True)


def main():
    o = options()
    names = o.tools.split(",")
    unknown = [n for n in names if n not in TOOLS]
    if unknown:
        sys.exit(f"compare: no tool named {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    rows = [Row(TOOLS[n]()) for n in names]
    quiet = Quiet(o.patience)
    network = Network(o.source_ns, o.target_ns, o.venv, o.cache, o.bin, o.loopback)
    try:
        measure(rows, network, o, quiet)
    except KeyboardInterrupt:
        note("stopped; the results of the finished measurements follow")
    table(rows, o)
    footnotes(rows, o, quiet)
    store(rows, o, quiet)


if __name__ == "__main__":
    main()
