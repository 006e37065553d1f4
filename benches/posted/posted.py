"""Measures ferrywire and the bare loop over one plugin, interleaved, and prints one table.

Started by `run`. Both get the same variables, the same chunk and window, and move over 256 MiB of memory on each side;
ferrywire verifies nothing here, and the bare loop verifies before its clock starts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import sizes  # noqa: E402

FOOTPRINT, CHUNK, WINDOW = 256 << 20, 512 << 10, 16
# The variables that ferrywire would set itself, also for the bare loop; and loopback, which plugins leave out by default.
ENVIRONMENT = {
    "NCCL_DYNAMIC_CHUNK_SIZE": str(CHUNK),
    "NCCL_SOCKET_NTHREADS": "1",
    "NCCL_NSOCKS_PERTHREAD": "1",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "=lo",
    "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "50000",
}
# Options of the simulated plugin: each test moves every request by a step, and receives log no warning.
UNLIMITED = "one_step=off,host_warning=off"


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", required=True)
    p.add_argument("--plugin")
    p.add_argument("--channels", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    p.add_argument("--sizes", type=lambda text: text.split(","), default=["64M", "256M"])
    p.add_argument("--reps", type=int, default=3)
    p.add_argument("--seconds", type=float, default=1.5)
    p.add_argument("--bench", default="")
    p.add_argument("--also")
    p.add_argument("--json")
    o = p.parse_args()
    o.plugin = o.plugin or os.path.join(o.bin, "libferrywire_tcpx_sim.so")
    return o


def measured(command, seconds):
    env = {**ENVIRONMENT, "FERRYWIRE_TCPX_SIM": UNLIMITED, **os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds * 10 + 120)
    except subprocess.TimeoutExpired:
        sys.exit(f"posted: {' '.join(command)} took too long")
    if done.returncode != 0:
        sys.exit(f"posted: {' '.join(command)}: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout)


def bare(o, channels, extra):
    command = [os.path.join(o.bin, "posted"), "--plugin", o.plugin, "--comms", str(channels), "--chunk", str(CHUNK),
               "--window", str(WINDOW), "--footprint", str(FOOTPRINT), "--seconds", str(o.seconds), *extra]
    got = measured(command, o.seconds)
    return got["gb_per_s"], got["cpu_s_per_gb"]


def ferrywire(o, program, channels, size):
    depth = max(1, FOOTPRINT // sizes.parse(size))
    command = [program, "bench", "--transport", "plugin", "--plugin", o.plugin, "--channels", str(channels),
               "--sizes", size, "--depth", str(depth), "--chunk", str(CHUNK), "--window", str(WINDOW),
               "--seconds", str(o.seconds), "--verify", "off", "--json", "-", *o.bench.split()]
    got = measured(command, o.seconds)
    result = got["results"][-1]
    cpu = result["cpu_s_per_gb"]
    return result["gb_per_s"]["p50"], cpu["source"] + cpu["target"]


def measure(o, channels):
    """The results of every program in each repetition: {name: [(GB/s, CPU-s/GB)]}."""
    contenders = {"bare": lambda: bare(o, channels, []), "bare, pinned": lambda: bare(o, channels, ["--pin"])}
    for name, program in (("ferrywire", os.path.join(o.bin, "ferrywire")), ("also", o.also)):
        for size in o.sizes if program else []:
            contenders[f"{name} {size}"] = lambda program=program, size=size: ferrywire(o, program, channels, size)
    results = {name: [] for name in contenders}
    for _ in range(o.reps):
        for name, call in contenders.items():
            results[name].append(call())
    return results


def median(results, column=0):
    return statistics.median(result[column] for result in results)


def main():
    o = options()
    everything = {}
    print(f"{'channels':>8}  {'':16}  {'GB/s':>6}  {'of bare':>7}  {'CPU-s/GB':>8}  each")
    for channels in o.channels:
        everything[channels] = results = measure(o, channels)
        best = max(median(rs) for name, rs in results.items() if name.startswith("bare"))
        for name, rs in results.items():
            each = " ".join(f"{r[0]:.2f}" for r in rs)
            print(f"{channels:>8}  {name:16}  {median(rs):6.2f}  {median(rs) / best:7.2f}  {median(rs, 1):8.3f}  {each}", flush=True)
    if o.json:
        with open(o.json, "w") as file:
            json.dump(everything, file)


main()
