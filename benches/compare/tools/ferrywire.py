"""ferrywire itself, through its own bench command."""

import json
import secrets
import subprocess

from .base import Measurement, Tool, Unavailable, depth_of


class Ferrywire(Tool):
    name = "ferrywire"
    method = "ferrywire bench, one-sided writes, every default but the depth; 8 B us is write and notification, there and back"

    def prepare(self, network):
        self.path = network.binary("ferrywire")
        self.env = {"FERRYWIRE_SECRET": secrets.token_hex(16)}
        if subprocess.run([self.path, "bench", "--help"], capture_output=True).returncode != 0:
            raise Unavailable("this ferrywire binary has no bench command")

    def version(self):
        return subprocess.run([self.path, "--version"], capture_output=True, text=True).stdout.strip()

    def throughput(self, network, size, seconds):
        got = self.run(network, seconds, ["--sizes", str(size), "--depth", str(depth_of(size))])
        cpu = got["cpu_s_per_gb"]
        return Measurement(got["gb_per_s"]["p50"], cpu["source"], cpu["target"])

    def latency(self, network, seconds):
        return 2 * self.run(network, seconds, ["--sizes", "8", "--pattern", "latency"])["latency_us"]["p50"]

    def run(self, network, seconds, options):
        port = network.port()
        address = f"{network.target_ip}:{port}"
        with network.target([self.path, "bench", "serve", "--listen", address, "--once"], self.env):
            network.target_listens(port)
            done = network.source([self.path, "bench", "connect", address, "--memory", "host", "--peer-memory", "host",
                                   "--seconds", str(seconds), "--json", "-", *options], seconds, self.env)
        report = json.loads(done.out)
        if report["error"]:
            raise Unavailable(report["error"])
        return report["results"][-1]
