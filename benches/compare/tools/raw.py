"""Plain sockets: this repository's `raw` program, with messages that are acknowledged like those of the other tools."""

import json

from .base import DEPTH, FOOTPRINT, Measurement, Tool, depth_of

CHOICES = [(1, "paired"), (2, "paired"), (4, "paired"), (1, "free"), (2, "free")]


class Raw(Tool):
    name = "raw"
    method = "plain sockets, acknowledged messages, neighbours joined in one call; best of 1, 2, 4 connections; 256 MiB of buffer"
    extra = ["--batch"]

    def __init__(self):
        self.chosen = {}

    def prepare(self, network):
        self.path = network.binary("raw")

    def version(self):
        return "this repository"

    def throughput(self, network, size, seconds):
        port = network.port()
        with network.target([self.path, "serve", "--listen", f"{network.target_ip}:{port}"]):
            network.target_listens(port)
            if size not in self.chosen:
                probes = [(self.run(network, port, size, 0.2, c)["gb_per_s"], c) for c in CHOICES]
                self.chosen[size] = max(probes)[1]
            got = self.run(network, port, size, seconds, self.chosen[size])
        cpu = got["cpu_s_per_gb"]
        return Measurement(got["gb_per_s"], cpu["source"], cpu["target"])

    def run(self, network, port, size, seconds, choice):
        connections, placement = choice
        return self.connect(network, port, seconds, [
            "--sync", "--size", str(size), "--depth", str(depth_of(size)), "--footprint", str(FOOTPRINT),
            "--connections", str(connections), "--placement", placement, "--seconds", str(seconds), *self.extra])

    def latency(self, network, seconds):
        port = network.port()
        with network.target([self.path, "serve", "--listen", f"{network.target_ip}:{port}"]):
            network.target_listens(port)
            options = ["--mode", "pingpong", "--sizes", "8", "--wait", "spin", "--seconds", str(seconds)]
            return self.connect(network, port, seconds, options)["rtt_us"]["p50"]

    def connect(self, network, port, seconds, options):
        command = [self.path, "connect", f"{network.target_ip}:{port}", "--json", *options]
        return json.loads(network.source(command, seconds).out)


class RawPlain(Raw):
    name = "raw-plain"
    method = f"as raw, but a send call per message, {DEPTH} messages in flight"
    extra = []

    def latency(self, network, seconds):
        return None
