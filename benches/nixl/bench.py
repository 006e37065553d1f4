#!/usr/bin/env python3
"""Compares NIXL over ferrywire and NIXL over UCX, alternating, with the same script and block lists; verifies both ends.

    python3 bench.py --library target/release/libplugin_ferrywire.so [--memory VRAM] [--rounds 5] [--command target/release/ferrywire]

Host memory goes between two network namespaces (root), joined by one veth pair; GPU memory from device 0 to device 1 (or 0,
where there is one) of this host, over the loopback, with shared memory and peer access off. Variants: `ucx`, NIXL's default,
held to TCP as between two hosts; `ucx-tuned`, the best settings that were found; `ferrywire`; and, with `--command`, `engine`:
`ferrywire bench --blocks`. Needs the wheels nixl and numpy; not PyTorch.

Each figure is the median over the rounds of GB/s (1e9) over the whole time, with `--depth` transfers in flight (default 1).
`p50` is the median rate of intervals in which as many transfers ended as are in flight; `engine` reports its own intervals.
`post` is the time of the call that posts, per descriptor. In rows with `new` each transfer is created, posted and released;
in the others it is prepared once and posted repeatedly.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
CASES = [(64 << 10, 1024), (1 << 20, 64), (64 << 20, 1)]
UCX = {"UCX_TLS": "tcp,cuda_copy", "NIXL_LOG_LEVEL": "ERROR"}
TUNED = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k", "UCX_TCP_SNDBUF": "4m", "UCX_TCP_RCVBUF": "4m"}
LIMIT_S = 120


class Memory:
    """Memory of the host or a GPU, filled with a pattern that depends on a seed and the offset."""

    def __init__(self, kind, size, device):
        import numpy

        self.numpy, self.size, self.device = numpy, size, device
        if kind == "VRAM":
            sys.path.insert(0, str(HERE.parents[2] / "crates/ferrywire-nixl/tests/nixl/python"))
            import cuda

            self.gpu, self.pages = cuda.Memory(size, device), None
            self.address = self.gpu.address
        else:
            # Huge pages, as in `ferrywire bench`: with pages of 4 KiB the benchmark would compare the copies of pages.
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            self.pages = self.numpy.frombuffer(pages, numpy.uint8)
            self.address = self.pages.ctypes.data

    def pattern(self, seed):
        words = self.numpy.arange(self.size // 8, dtype=self.numpy.uint64) * 0x9E3779B97F4A7C15 + seed
        return words.view(self.numpy.uint8)

    def fill(self, data):
        if self.pages is None:
            self.gpu.write(data.tobytes())
        else:
            self.pages[:] = data

    def contents(self):
        return self.numpy.frombuffer(self.gpu.read(), self.numpy.uint8) if self.pages is None else self.pages


def order(count):
    """Index of the target of block i: consecutive blocks are never adjacent in the target."""
    import numpy

    return numpy.random.default_rng(count).permutation(count)


def agent(name, backend, tuned):
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError:
        # `nixl` requires the build for PyTorch's version of CUDA; the other build works as well for this benchmark.
        from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=not tuned, backends=[backend]))


def target(arguments):
    """The passive end: answers lines on standard input."""
    size = max(bytes * count for bytes, count in CASES)
    # UCX's bytes are moved by the progress thread, because this end makes no calls that move them.
    nixl, memory = agent("target", arguments.backend, False), Memory(arguments.memory, size, arguments.device)
    nixl.register_memory([(memory.address, size, memory.device, "")], arguments.memory)
    print(json.dumps({"address": memory.address, "device": memory.device, "metadata": nixl.get_agent_metadata().hex()}), flush=True)
    for line in sys.stdin:
        call = line.split()
        if call[0] == "fill":
            memory.fill(memory.pattern(int(call[1])))
        elif call[0] == "poison":
            memory.fill(memory.numpy.full(memory.size, 0xEE, memory.numpy.uint8))
        elif call[0] == "verify":
            bytes, count, seed = map(int, call[1:])
            got = memory.contents()[: bytes * count].reshape(count, bytes)[order(count)].reshape(-1)
            print(json.dumps(bool((got == memory.pattern(seed)[: bytes * count]).all())), flush=True)
            continue
        print(json.dumps(time.process_time()), flush=True)


def initiator(arguments):
    size = max(bytes * count for bytes, count in CASES)
    nixl, memory = agent("initiator", arguments.backend, arguments.tuned), Memory(arguments.memory, size, arguments.device)
    nixl.register_memory([(memory.address, size, memory.device, "")], arguments.memory)
    there = json.loads(sys.stdin.readline())
    nixl.add_remote_agent(bytes.fromhex(there["metadata"]))

    def ask(line):
        print(line, flush=True)
        return json.loads(sys.stdin.readline())

    results = []
    for operation in ("WRITE", "READ"):
        for block, count in CASES:
            at = order(count)
            local = [(memory.address + index * block, block, memory.device) for index in range(count)]
            remote = [(there["address"] + int(at[index]) * block, block, there["device"]) for index in range(count)]
            lists = [nixl.get_xfer_descs(each, arguments.memory) for each in (local, remote)]
            create = lambda: nixl.initialize_xfer(operation, *lists, "target", b"")

            def post(handle):
                began = time.perf_counter()
                assert nixl.transfer(handle) in ("PROC", "DONE")
                return time.perf_counter() - began

            def finish(handle):
                while (state := nixl.check_xfer_state(handle)) == "PROC":
                    pass
                assert state == "DONE", state

            def move(handle):
                post(handle)
                finish(handle)

            # The data are verified before the timed part, and again after it.
            def verified(handle, seed):
                if operation == "WRITE":
                    memory.fill(memory.pattern(seed))
                    ask("poison")
                    move(handle)
                    assert ask(f"verify {block} {count} {seed}"), f"{operation} {block} x {count}: wrong bytes"
                else:
                    memory.fill(memory.numpy.zeros(size, memory.numpy.uint8))
                    ask(f"fill {seed}")
                    move(handle)
                    expected = memory.pattern(seed)[: block * count].reshape(count, block)[at].reshape(-1)
                    assert (memory.contents()[: block * count] == expected).all(), f"{operation}: wrong bytes"

            handle = create()
            verified(handle, 7)
            row = {"operation": operation, "block": block, "count": count}
            for new in (False, True):
                moved, posts, ends, cpu = 0, [], [], time.process_time() + ask("cpu")
                began = time.perf_counter()
                idle, posted = [handle, *(create() for _ in range(arguments.depth - 1))], []
                while True:
                    spent = time.perf_counter() - began
                    assert spent < LIMIT_S, "a transfer has not ended in time"
                    if spent < arguments.seconds or moved < 3 * block * count:
                        while len(posted) < arguments.depth:
                            posted.append(create() if new else idle.pop())
                            posts.append(post(posted[-1]))
                    elif not posted:
                        break
                    oldest = posted.pop(0)
                    finish(oldest)
                    moved += block * count
                    ends.append(time.perf_counter())
                    if new:
                        nixl.release_xfer_handle(oldest)
                    else:
                        idle.append(oldest)
                spent = time.perf_counter() - began
                for each in (each for each in idle if each is not handle):
                    nixl.release_xfer_handle(each)
                cpu = time.process_time() + ask("cpu") - cpu
                name = "new " if new else ""
                row[f"{name}gb_per_s"] = moved / spent / 1e9
                # The transfers in flight end together.
                starts = [began] * arguments.depth + ends
                times = [end - start for start, end in zip(starts, ends)][arguments.depth - 1:]
                row[f"{name}p50_gb_per_s"] = arguments.depth * block * count / statistics.median(times) / 1e9
                row[f"{name}post_us_per_descriptor"] = statistics.median(posts) / count * 1e6
                row[f"{name}cpu_s_per_gb"] = cpu / (moved / 1e9)
            verified(handle, 8)
            nixl.release_xfer_handle(handle)
            results.append(row)
    print(json.dumps({"results": results}), flush=True)


def ends(arguments, variant, folders):
    """Runs all cases of one variant. Returns its rows."""
    backend = "FERRYWIRE" if variant == "ferrywire" else "UCX"
    tuned = variant == "ucx-tuned"
    env = {name: value for name, value in os.environ.items() if name != "NIXL_PLUGIN_DIR"} | UCX | (TUNED if tuned else {})
    if backend == "FERRYWIRE":
        env |= {"NIXL_PLUGIN_DIR": str(folders / "plugins"), "FERRYWIRE_LOG": "error"}
    if arguments.memory == "DRAM":
        env["UCX_TLS"], env["UCX_NET_DEVICES"] = "tcp", "fw0"
    else:
        env["UCX_NET_DEVICES"] = "lo"

    def start(role, host, device):
        place = ["ip", "netns", "exec", host] if host else []
        command = [*place, sys.executable, HERE, role, "--backend", backend, "--memory", arguments.memory, "--device", str(device)]
        command += ["--seconds", str(arguments.seconds), "--depth", str(arguments.depth), *(["--tuned"] if tuned else [])]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def line(process, other=None):
        for text in process.stdout:
            if text[:1] in "{tf0123456789" or text.split()[:1] in (["poison"], ["fill"], ["verify"], ["cpu"]):
                return text
        raise SystemExit(f"{variant}: a process of the benchmark ended with status {process.wait()}")

    there = start("target", HOSTS[1], arguments.devices[1])
    here = start("initiator", HOSTS[0], arguments.devices[0])
    try:
        here.stdin.write(line(there))
        here.stdin.flush()
        while True:
            said = line(here)
            if said.startswith("{"):
                return json.loads(said)["results"]
            there.stdin.write(said)
            there.stdin.flush()
            here.stdin.write(line(there))
            here.stdin.flush()
    finally:
        for process in (here, there):
            process.kill()
            process.wait()


def engine(arguments):
    """Measures the same transfers with ferrywire's own benchmark."""
    rows, env = [], os.environ | {"FERRYWIRE_SECRET": "of this benchmark alone"}
    place = lambda host: ["ip", "netns", "exec", host] if host else []
    serve = [*place(HOSTS[1]), arguments.command, "bench", "serve", "--listen", f"{ADDRESSES[1]}:7420"]
    server = subprocess.Popen(serve, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1)
    try:
        for operation in ("WRITE", "READ"):
            for block, count in CASES:
                memory = ["--memory", "host"] if arguments.memory == "DRAM" else [
                    "--memory", f"cuda:{arguments.devices[0]}", "--peer-memory", f"cuda:{arguments.devices[1]}"]
                connect = [*place(HOSTS[0]), arguments.command, "bench", "connect", f"{ADDRESSES[1]}:7420", "--op", operation.lower()]
                connect += [*memory, "--sizes", str(block * count), "--blocks", str(count), "--depth", str(arguments.depth), "--seconds",
                            str(2 * arguments.seconds), "--json", "-"]
                done = subprocess.run(connect, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                if done.returncode != 0:
                    raise SystemExit(f"ferrywire bench connect failed: {done.stderr}")
                result = json.loads(done.stdout)["results"][0]
                rows.append({"operation": operation, "block": block, "count": count, "gb_per_s": result["gb_per_s"]["p50"]})
    finally:
        server.kill()
        server.wait()
    return rows


def make_hosts():
    run = lambda text: subprocess.run(["ip", *text.split()], check=True)
    for host in HOSTS:
        run(f"netns add {host}")
        run(f"-n {host} link set lo up")
    run(f"-n {HOSTS[0]} link add fw0 type veth peer name fw0 netns {HOSTS[1]}")
    for host, address in zip(HOSTS, ADDRESSES):
        run(f"-n {host} addr add {address}/24 dev fw0")
        run(f"-n {host} link set fw0 up")
    # UCX does not use a device that has no carrier yet.
    time.sleep(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["target", "initiator"], help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--tuned", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--library", help="libplugin_ferrywire.so")
    parser.add_argument("--command", help="the ferrywire command, for the variant engine")
    parser.add_argument("--memory", choices=["DRAM", "VRAM"], default="DRAM")
    parser.add_argument("--devices", default="0,1", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--variants", default="ucx,ucx-tuned,ferrywire")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=1, help="transfers in flight")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each case, in each round")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    if arguments.role:
        return {"target": target, "initiator": initiator}[arguments.role](arguments)
    if not arguments.library:
        parser.error("--library is needed: build it with cargo build --release -p ferrywire-nixl")
    variants = arguments.variants.split(",") + (["engine"] if arguments.command else [])
    folders = Path(tempfile.mkdtemp())
    (folders / "plugins").mkdir()
    shutil.copy(arguments.library, folders / "plugins/libplugin_FERRYWIRE.so")
    global HOSTS, ADDRESSES
    HOSTS, ADDRESSES = ("", ""), ("127.0.0.1", "127.0.0.1")
    if arguments.memory == "DRAM":
        HOSTS = tuple(f"fw-bench-{os.getpid()}-{end}" for end in "ab")
        ADDRESSES = ("10.213.9.1", "10.213.9.2")
    figures = {}
    try:
        if HOSTS[0]:
            make_hosts()
        for round in range(arguments.rounds):
            for variant in variants:
                rows = engine(arguments) if variant == "engine" else ends(arguments, variant, folders)
                for row in rows:
                    key = (row.pop("operation"), row.pop("block"), row.pop("count"))
                    for name, value in row.items():
                        figures.setdefault(key, {}).setdefault(variant, {}).setdefault(name, []).append(value)
                print(f"round {round + 1} of {arguments.rounds}: {variant}", file=sys.stderr)
    finally:
        for host in filter(None, HOSTS):
            subprocess.run(["ip", "netns", "del", host], check=False)
        shutil.rmtree(folders)
    report(figures, variants)
    if arguments.json:
        rows = [{"case": key, "variants": value} for key, value in figures.items()]
        Path(arguments.json).write_text(json.dumps(rows, indent=1))


def report(figures, variants):
    median = lambda values: statistics.median(values) if values else float("nan")
    for key, by_variant in figures.items():
        operation, block, count = key
        print(f"{operation} {block >> 10} KiB x {count}")
        for variant in variants:
            of = by_variant.get(variant, {})
            if not of:
                continue
            text = "  {:10} {:6.2f} GB/s".format(variant, median(of["gb_per_s"]))
            if "post_us_per_descriptor" in of:
                text += " (p50 {:.2f}), new {:6.2f} (p50 {:.2f}); post {:.3f} us per descriptor; {:.2f} CPU-s/GB".format(
                    median(of["p50_gb_per_s"]), median(of["new gb_per_s"]), median(of["new p50_gb_per_s"]), median(of["post_us_per_descriptor"]), median(of["cpu_s_per_gb"]))
            print(text + "   (" + " ".join(f"{value:.2f}" for value in of["gb_per_s"]) + ")")


if __name__ == "__main__":
    main()
