"""Tools that are Python libraries: each has one program in peers/, run on both sides with the same options."""

import json
import os

from .base import FOOTPRINT, Measurement, Tool, depth_of

PEERS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "peers")


class PeerTool(Tool):
    program = ""
    options = ()

    def env(self, network):
        return {}

    def throughput(self, network, size, seconds):
        got = self.run(network, size, depth_of(size), seconds)
        return Measurement(got["gb_per_s"], got["cpu_source"], got["cpu_target"])

    def latency(self, network, seconds):
        return self.run(network, 8, 1, seconds)["p50_us"]

    def run(self, network, size, depth, seconds):
        port = network.port()
        common = ["--address", network.target_ip, "--port", str(port), "--size", str(size), "--depth", str(depth),
                  "--seconds", str(seconds), "--footprint", str(FOOTPRINT), *self.options]
        command = [network.python, os.path.join(PEERS, self.program)]
        env = {**self.env(network), "PYTHONDONTWRITEBYTECODE": "1"}
        with network.target(command + ["target", "--own", network.target_ip, *common], env):
            network.target_listens(port, timeout=60)
            done = network.source(command + ["source", "--own", network.source_ip, *common], seconds, env)
        return json.loads(done.out.strip().splitlines()[-1])
