"""iperf3: a stream without messages, from one small buffer that stays in cache."""

import contextlib
import json
import os
import shutil
import subprocess

from .base import Measurement, Process, Tool, Unavailable

BLOCK_MAX = 1 << 20  # the largest block iperf3 takes


class Iperf3(Tool):
    name = "iperf3"
    method = "one stream, no messages or acknowledgements, the size is its block; hot buffers of one block"
    pairs = 1

    def prepare(self, network):
        if not shutil.which("iperf3"):
            raise Unavailable("iperf3 is not installed")

    def version(self):
        return subprocess.run(["iperf3", "--version"], capture_output=True, text=True).stdout.split("\n")[0]

    def supports(self, size):
        return size <= BLOCK_MAX

    def throughput(self, network, size, seconds):
        ports = [network.port() for _ in range(self.pairs)]
        with contextlib.ExitStack() as stack:
            for i, port in enumerate(ports):
                stack.enter_context(network.target(
                    self.pinned(i) + ["iperf3", "-s", "-1", "-p", str(port), "-B", network.target_ip]))
                network.target_listens(port)
            clients = [stack.enter_context(Process(network.source_ns, self.pinned(i) + [
                "iperf3", "-c", network.target_ip, "-B", network.source_ip, "-p", str(port), "-C", "cubic",
                "-l", str(size), "-t", str(max(1, round(seconds))), "-J"])) for i, port in enumerate(ports)]
            ends = [json.loads(c.finish(seconds * 6 + 60).out)["end"] for c in clients]
        return self.add_up(ends)

    def pinned(self, index):
        """iperf3 -A changes placement only after start, so the pair is pinned from outside."""
        return ["taskset", "-c", str(index % os.cpu_count())] if self.pairs > 1 else []

    @staticmethod
    def add_up(ends):
        rate = sum(e["sum_received"]["bits_per_second"] for e in ends) / 8e9
        gigabytes = sum(e["sum_received"]["bytes"] for e in ends) / 1e9

        def cpu(which):
            return sum(e["cpu_utilization_percent"][which] / 100 * e["sum_received"]["seconds"] for e in ends) / gigabytes
        return Measurement(rate, cpu("host_total"), cpu("remote_total"))


class Iperf3Pairs(Iperf3):
    name = "iperf3-pairs"
    method = "two streams, each a client and a server process pinned to one core; hot buffers of one block"
    pairs = 2
