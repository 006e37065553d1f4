"""Measures runs of eight simulated GPUs, by ferrywire and by the old system's loop, interleaved, and prints one table per rate.

Started by `run`. Everything is verified. `own` gives each NIC to two GPUs, as on A3-high; `all` gives every GPU all four,
the old system's plan. `one` is a single endpoint with as many channels as the eight have together.
"""

import argparse
import json
import os
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import hosts  # noqa: E402

GPUS = 8
# Values of the plugin's variables, those that ferrywire sets on these links.
SEED_ENVIRONMENT = {"NCCL_DYNAMIC_CHUNK_SIZE": "524288", "NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "1",
                    "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "50000"}


def words(text):
    return text.split(",")


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", required=True)
    p.add_argument("--rate", type=words)
    p.add_argument("--plugin")
    p.add_argument("--sizes", default="64M")
    p.add_argument("--channels", type=int, default=8)
    p.add_argument("--only", type=words, default=["seed", "one"])
    p.add_argument("--reps", type=int, default=3)
    p.add_argument("--seconds", type=float, default=3)
    p.add_argument("--json")
    o = p.parse_args()
    why = hosts.possible()
    if why and (o.rate is None or any(rate != "loopback" for rate in o.rate)):
        print(f"network namespaces need {why}: the links are replaced by loopback", file=sys.stderr)
        o.rate = ["loopback"]
    o.rate = o.rate or ["500mbit", "none"]
    o.plugin = o.plugin or os.path.join(o.bin, "libferrywire_tcpx_sim.so")
    return o


class Runs:
    def __init__(self, o, rate):
        self.o, self.results = o, {}
        # Transfers in flight of each endpoint, by size.
        self.depths = {}
        self.plugin = [] if o.plugin == "tcp" else ["--plugin", o.plugin, "--allow-same-host-gpu"]
        here = None if rate == "loopback" else rate
        # The GPUs receive from this host, which the real plugin forbids.
        self.hosts = hosts.Hosts(os.path.join(o.bin, "ferrywire"), here, {"FERRYWIRE_TCPX_SIM": "same_host=allow"})
        self.plans = ["own", "all"] if here else ["own"]

    def fixed(self, sizes):
        o = self.o
        return [*self.plugin, "--sizes", sizes, "--seconds", str(o.seconds), "--memory", "sim", "--peer-memory", "sim"]

    def eight(self, name, plan):
        self.hosts.serve("--gpus", "0-7", "--memory", "sim", *self.plugin, *self.hosts.nics("b", plan))
        args = ["--gpus", "0-7", "--channels", str(self.o.channels), *self.hosts.nics("a", plan)]
        rows = self.hosts.connect(*self.fixed(self.o.sizes), *args)["results"]
        self.depths = {row["size_bytes"]: row["depth"] for row in rows}
        self.keep(name, rows)

    def seed(self, name, plan):
        """Runs the old system's loop, which sets no variable of the plugin's environment itself."""
        program = [os.path.join(self.o.bin, "seed")]
        options = ["--gpus", str(GPUS), "--channels", str(self.o.channels), "--seconds", str(self.o.seconds)]
        options += ["--spread"] if plan == "all" else []
        for size in sorted(self.depths):
            for host, start, more in ("b", self.hosts.serve, []), ("a", self.hosts.connect, [*options, "--size", str(size)]):
                nics = ",".join(f"v{host}{link}" for link in range(1, hosts.LINKS + 1)) if self.hosts.names else "lo"
                env = {**SEED_ENVIRONMENT, "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": f"={nics}"}
                run = start("--plugin", self.o.plugin, "--nics", nics, *more, program=program, env=env)
            self.add(size, name, run, run["gb_per_s"], run["cpu_s_per_gb"], run["gpu_bytes"])

    def one(self, name):
        nics = ["--nics", "va1,va2,va3,va4"] if self.hosts.names else []
        for size, depth in sorted(self.depths.items()):
            self.hosts.serve("--memory", "sim", *self.plugin)
            # The single endpoint has as many messages in flight as eight endpoints together.
            args = ["--channels", str(GPUS * self.o.channels), "--depth", str(GPUS * depth), *nics]
            self.keep(name, self.hosts.connect(*self.fixed(str(size)), *args)["results"])

    def keep(self, name, rows):
        bad = [row for row in rows if row["verified"] is not True]
        if bad:
            sys.exit(f"{name}: a result is not verified")
        for size in sorted({row["size_bytes"] for row in rows}):
            of_size = [row for row in rows if row["size_bytes"] == size]
            total = of_size[-1]
            cpu = total["cpu_s_per_gb"] or {"source": 0, "target": 0}
            gpus = [sum(nic["tx_bytes"] for nic in row["per_nic"]) for row in of_size[:-1]]
            self.add(size, name, total, total["extra"]["mean_gb_per_s"], cpu["source"] + cpu["target"], gpus)

    def add(self, size, name, run, gb_per_s, cpu, gpus):
        mean = statistics.mean(gpus) if gpus else 0
        self.results.setdefault((size, name), []).append({
            "gb_per_s": gb_per_s, "cpu": cpu, "setup_s": run["setup_s"],
            "least": min(gpus) / mean if mean else 1, "most": max(gpus) / mean if mean else 1})

    def round(self):
        for plan in self.plans:
            self.eight(f"ours, {plan}", plan)
            if "seed" in self.o.only and self.plugin:
                self.seed(f"seed, {plan}", plan)
        if "one" in self.o.only:
            self.one("one endpoint")


def median(results, what):
    return statistics.median(result[what] for result in results)


def table(rate, results):
    print(f"\nlinks: {rate}")
    print(f"{'size':>10}  {'':14}  {'GB/s':>6}  {'of seed':>7}  {'of one':>6}  {'CPU-s/GB':>8}  {'set up':>7}  GPU over mean  each")
    for (size, name), rs in results.items():
        def over(other, rs=rs, size=size):
            base = results.get((size, other))
            return f"{median(rs, 'gb_per_s') / median(base, 'gb_per_s'):.2f}" if base else "-"
        plan = name.split(", ")[-1]
        each = " ".join(f"{r['gb_per_s']:.3f}" for r in rs)
        spread = f"{min(r['least'] for r in rs):.2f} to {max(r['most'] for r in rs):.2f}"
        print(f"{size:>10}  {name:14}  {median(rs, 'gb_per_s'):6.3f}  {over('seed, ' + plan):>7}  {over('one endpoint'):>6}"
              f"  {median(rs, 'cpu'):8.3f}  {median(rs, 'setup_s'):6.2f}s  {spread:13}  {each}", flush=True)


def main():
    o = options()
    everything = {}
    for rate in o.rate:
        runs = Runs(o, rate)
        for _ in range(o.reps):
            runs.round()
        runs.hosts.close()
        table(rate, runs.results)
        everything[rate] = {f"{size} {name}": rs for (size, name), rs in runs.results.items()}
    if o.json:
        with open(o.json, "w") as file:
            json.dump(everything, file)


main()
