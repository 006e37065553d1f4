"""Measures ferrywire between two GPUs of one host beside what plain sockets, NCCL and NIXL carry there.

Each repetition runs every program once, so that a disturbance affects all of them; the table shows medians. ferrywire checks
its data before it gives a number. See ../README.md for what the columns mean.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
RING_BYTES = 4 << 20
NCCL_PLAIN = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
NCCL_TUNED = {**NCCL_PLAIN, "NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "8"}
LONG = 300
LINK, BOTH_LINKS = "copies alone, one way", "copies alone, both ways"


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", type=pathlib.Path, required=True)
    p.add_argument("--channels", default="1,4,8,16")
    p.add_argument("--sizes", default="64M,1G")
    p.add_argument("--reps", type=int, default=5)
    p.add_argument("--seconds", type=float, default=1.0)
    p.add_argument("--only", default="bulk,small,blocks,bidir,latency,rivals")
    p.add_argument("--memory", default="cuda:0,cuda:1")
    p.add_argument("--json", type=pathlib.Path)
    return p.parse_args()


def call(command, env=None):
    """Runs a program. Returns its output, or raises the reason why there is none."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, env={**os.environ, **(env or {})})
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise RuntimeError(f"{pathlib.Path(command[0]).name}: exit {done.returncode}: {lines[-1]}")
    return done.stdout


def ferrywire(o, *more, seconds=None):
    """Runs ferrywire bench. Returns a list of results, one for each size and direction."""
    here, there = o.memory.split(",")
    command = [o.bin / "ferrywire", "bench", f"--memory={here}", f"--peer-memory={there}", "--json=-",
               f"--seconds={seconds or o.seconds}", *more]
    results = json.loads(call([str(part) for part in command]))["results"]
    assert all(result["verified"] for result in results), results
    return results


def rate(result):
    cpu = result["cpu_s_per_gb"]
    return {"gb_per_s": result["gb_per_s"]["p50"], "cpu": cpu["source"] + cpu["target"]}


def raw(o, connections, bytes_each, call_bytes, placement):
    command = [o.bin / "raw", "--connections", connections, "--size", connections * bytes_each, "--call", call_bytes,
               "--placement", placement, "--seconds", o.seconds, "--json"]
    result = json.loads(call([str(part) for part in command]))
    return {"gb_per_s": result["gb_per_s"], "cpu": sum(result["cpu_s_per_gb"].values())}


def raw_both_ways(o, connections):
    """Runs `raw` twice at once, with `connections` connections each: loopback has no direction."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: raw(o, connections, RING_BYTES, 1 << 20, "free"), range(2)))
    rates = [run["gb_per_s"] for run in runs]
    return {"gb_per_s": sum(rates), "cpu": sum(run["cpu"] * rate for run, rate in zip(runs, rates)) / sum(rates)}


def better(*results):
    return max(results, key=lambda result: result["gb_per_s"])


def plain(program, connections, copies):
    """A thread per connection, blocking sockets, rings of pinned slots: with copies of the GPUs, or without."""
    line = call([str(program), str(connections), "512", "4", str(int(copies))])
    return {"gb_per_s": float(re.search(r"([0-9.]+) GB/s", line)[1]), "cpu": float(re.search(r"([0-9.]+) CPU", line)[1])}


def links(o, program):
    """The rate of copies alone between pinned memory and the slower of the GPUs: one way, and both ways together."""
    each = [dict(re.findall(r"(\w+) ([0-9.]+) GB/s", call([str(program), "link", memory.removeprefix("cuda:")])))
            for memory in sorted(set(o.memory.split(","))) if memory.startswith("cuda:")]
    slowest = lambda *ways: min(float(gpu[way]) for gpu in each for way in ways)
    return {LINK: {"gb_per_s": slowest("out", "in"), "cpu": None}, BOTH_LINKS: {"gb_per_s": slowest("both"), "cpu": None}}


def compiled(folder):
    if not shutil.which("nvcc"):
        print("SKIPPED: plain rings with copies: needs nvcc", file=sys.stderr)
        return None
    program = pathlib.Path(folder) / "plain"
    call(["nvcc", "-O2", "-std=c++17", "-o", str(program), str(HERE / "plain.cu"), "-lcuda"])
    return program


def peer(name, env=None):
    """Runs the peer program of another library. Returns its results, as JSON lines."""
    return [json.loads(line) for line in call([sys.executable, str(HERE / "peers" / name)], env).splitlines()
            if line.startswith("{")]


def has(module):
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0


class Series:
    """The results of all repetitions, by name, in the order in which the names were measured first."""

    def __init__(self, o):
        self.o, self.found, self.failed = o, {}, {}

    def measure(self, name, run):
        if name in self.failed:
            return
        try:
            found = run()
        except (RuntimeError, subprocess.TimeoutExpired, KeyError, ValueError) as error:
            self.failed[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)
            return
        self.found.setdefault(name, []).append(found)

    def median(self, name, key="gb_per_s"):
        values = [result[key] for result in self.found.get(name, []) if result.get(key) is not None]
        return statistics.median(values) if values else None

    def show(self, name, more=""):
        if name not in self.found:
            return print(f"  {name:44} -   {self.failed.get(name, 'not run')}")
        rates = sorted(result["gb_per_s"] for result in self.found[name])
        cpu = self.median(name, "cpu")
        cpu = f"{cpu:.2f} CPU s/GB" if cpu is not None else ""
        print(f"  {name:44} {statistics.median(rates):6.2f} GB/s  ({rates[0]:.2f} to {rates[-1]:.2f})  {cpu}  {more}")

    def ratio(self, name, other):
        mine, theirs = self.median(name), self.median(other)
        return f"{mine / theirs:.2f} of {other}" if mine and theirs else ""


def main():
    o = options()
    parts, channels = o.only.split(","), [int(each) for each in o.channels.split(",")]
    sizes = o.sizes.split(",")
    series = Series(o)
    rivals = "rivals" in parts
    torch, nixl = rivals and has("torch"), rivals and has("nixl")
    with tempfile.TemporaryDirectory() as folder:
        floor = compiled(folder) if {"bulk", "bidir"} & set(parts) else None
        for _ in range(o.reps):
            repetition(o, series, parts, channels, sizes, floor)
            if torch:
                for name, env in (("default", NCCL_PLAIN), ("tuned", NCCL_TUNED)):
                    series.measure(f"NCCL send/recv, {name}", lambda: peer("nccl_peer.py", env)[0])
            if nixl:
                series.measure("NIXL write", lambda: peer("nixl_peer.py", {"UCX_TLS": "tcp,cuda_copy"})[0])
    report(o, series, parts, channels, sizes)
    if o.json:
        o.json.write_text(json.dumps({"found": series.found, "failed": series.failed}, indent=1))
    ours = ("ferrywire", "half a round trip")
    sys.exit(1 if any(name.startswith(ours) for name in series.failed) else 0)


def repetition(o, series, parts, channels, sizes, floor):
    if floor and "cuda" in o.memory:
        found = {}
        series.measure(LINK, lambda: found.update(links(o, floor)) or found[LINK])
        series.measure(BOTH_LINKS, lambda: found[BOTH_LINKS])
    if "bulk" in parts:
        for size in sizes:
            series.measure(f"ferrywire {size}, default", lambda: rate(ferrywire(o, f"--sizes={size}")[0]))
        for n in channels:
            for size in sizes:
                series.measure(f"ferrywire {size}, {n} channels",
                               lambda: rate(ferrywire(o, f"--sizes={size}", f"--channels={n}")[0]))
            series.measure(f"raw, rings, {n} connections", lambda: better(
                *(raw(o, n, RING_BYTES, 1 << 20, placement) for placement in ("paired", "free"))))
            series.measure(f"raw, hot 256 KiB, {n} connections", lambda: better(
                *(raw(o, n, 256 << 10, 256 << 10, placement) for placement in ("paired", "free"))))
            if floor:
                series.measure(f"plain rings and copies, {n}", lambda: plain(floor, n, True))
    if "small" in parts:
        for size, depth in (("64K", 16), ("1M", 16), ("1M", 64)):
            series.measure(f"ferrywire {size} at depth {depth}",
                           lambda: rate(ferrywire(o, f"--sizes={size}", f"--depth={depth}")[0]))
    if "blocks" in parts:
        for blocks in (16384, 100000):
            for each in (4, 16, 64):
                if blocks * each > 2 << 20:
                    continue
                size = blocks * each << 10
                series.measure(f"ferrywire {blocks} blocks of {each} KiB", lambda: rate(
                    ferrywire(o, f"--sizes={size}", f"--blocks={blocks}", "--depth=1")[0]))
    if "bidir" in parts:
        both = lambda: [each for each in ferrywire(o, "--sizes=64M", "--pattern=bidir") if each["direction"] == "both"]
        series.measure("ferrywire 64M, both directions", lambda: rate(both()[0]))
        series.measure("raw, both directions", lambda: raw_both_ways(o, 16))
    if "latency" in parts:
        for size in ("8", "4K", "64K"):
            def half(size=size):
                result = ferrywire(o, f"--sizes={size}", "--pattern=latency")[0]
                return {"gb_per_s": 0.0, "cpu": None, **result["latency_us"]}
            series.measure(f"half a round trip, {size}", half)


def report(o, series, parts, channels, sizes):
    here, there = o.memory.split(",")
    print(f"{here} to {there}, loopback TCP, medians of {o.reps}")
    largest = f"ferrywire {sizes[0]}, default"
    if "bulk" in parts:
        for size in sizes:
            series.show(f"ferrywire {size}, default")
        for n in channels:
            for size in sizes:
                name = f"ferrywire {size}, {n} channels"
                others = f"raw, rings, {n} connections", f"plain rings and copies, {n}", LINK
                ratios = [series.ratio(name, other) for other in others]
                series.show(name, "; ".join(each for each in ratios if each))
            for name in ("raw, rings, {} connections", "raw, hot 256 KiB, {} connections", "plain rings and copies, {}"):
                series.show(name.format(n))
    for name in [name for name in series.found | series.failed if re.match(r"ferrywire .*(depth|blocks|both)", name)]:
        blocks = re.search(r"(\d+) blocks of (\d+) KiB", name)
        median = series.median(name)
        ns = f"{int(blocks[2]) * 1024 / median:.0f} ns per block; " if blocks and median else ""
        others = ("raw, both directions", BOTH_LINKS) if name.endswith("both directions") else (largest,)
        series.show(name, ns + "; ".join(filter(None, (series.ratio(name, other) for other in others))))
    if "raw, both directions" in series.found:
        series.show("raw, both directions", "16 connections each way")
    for name in (LINK, BOTH_LINKS):
        if name in series.found:
            series.show(name, "of a GPU and pinned memory, by its copy engines")
    for name in [name for name in series.found | series.failed if name.startswith("half a round trip")]:
        p50, p99 = series.median(name, "p50"), series.median(name, "p99")
        print(f"  {name:44} p50 {p50:.1f} us, p99 {p99:.1f} us" if p50 else f"  {name:44} -   {series.failed.get(name)}")
    for name in [name for name in series.found | series.failed if name.startswith(("NCCL", "NIXL"))]:
        mine, theirs = series.median(largest), series.median(name)
        series.show(name, f"ferrywire: {mine / theirs:.1f} times as much" if mine and theirs else "")


main()
