"""UCX: its own benchmark over its TCP transport."""

import os
import subprocess

from .base import Measurement, Tool, Unavailable, depth_of

ASSUMED_BYTES_PER_S = 4e9  # for the number of iterations to request: ucx_perftest ends after a count, not after a time
MESSAGES_PER_S = 2e5


class UcxPut(Tool):
    name = "ucx-put"
    method = "ucx_perftest ucp_put_bw, one buffer of the message's size on each side; CPU of both processes, which spin"
    bandwidth, round_trip = "ucp_put_bw", None

    def prepare(self, network):
        root = network.site_packages("libucx")
        self.path = os.path.join(root, "bin", "ucx_perftest")
        self.env = {"LD_LIBRARY_PATH": os.path.join(root, "lib"), "UCX_TLS": "tcp", "UCX_NET_DEVICES": network.device,
                    "UCX_WARN_UNUSED_ENV_VARS": "n"}
        if not os.access(self.path, os.X_OK):
            raise Unavailable("this UCX package has no ucx_perftest")

    def version(self):
        shown = subprocess.run([self.path.replace("ucx_perftest", "ucx_info"), "-v"], capture_output=True, text=True,
                               env={**os.environ, **self.env})
        return "UCX " + next((l.split(":")[-1].strip() for l in shown.stdout.splitlines() if "version" in l.lower()), "?")

    def throughput(self, network, size, seconds):
        iterations = max(4, int(min(seconds * ASSUMED_BYTES_PER_S / size, seconds * MESSAGES_PER_S)))
        warmup = max(1, iterations // 10)
        fields, source, target = self.run(network, seconds, [
            "-t", self.bandwidth, "-s", str(size), "-n", str(iterations), "-w", str(warmup), "-O", str(depth_of(size))])
        gigabytes = (iterations + warmup) * size / 1e9
        return Measurement(float(fields[5]) * (1 << 20) / 1e9, source / gigabytes, target / gigabytes)

    def latency(self, network, seconds):
        if not self.round_trip:
            return None
        iterations = int(20000 * seconds) + 1000
        fields, _, _ = self.run(network, seconds, ["-t", self.round_trip, "-s", "8", "-n", str(iterations), "-w", "1000"])
        return 2 * float(fields[1])

    def run(self, network, seconds, options):
        """The fields of the final line: iterations, percentile, average and overall latency, average and overall MiB/s."""
        port = network.port()
        with network.target([self.path, "-p", str(port)], self.env) as target:
            network.target_listens(port)
            done = network.source([self.path, network.target_ip, "-p", str(port), *options, "-f", "-v"], seconds, self.env)
            target.finish(10)
            return done.out.strip().splitlines()[-1].split(","), done.cpu_seconds, target.cpu_seconds


class UcxTag(UcxPut):
    name = "ucx-tag"
    method = "ucx_perftest tag_bw, round trip of tag_lat; buffers as ucx-put"
    bandwidth, round_trip = "tag_bw", "tag_lat"
