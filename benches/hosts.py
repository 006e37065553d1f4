"""Two hosts for a benchmark of several GPUs: network namespaces joined by four shaped links, or this host's loopback.

Host A is where `connect` runs, host B where `serve` does; NIC i of either is on a subnet of its own. `close` ends what
was started here and removes the namespaces.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time

LINKS = 4
DEADLINE_S = 180


def possible():
    """Returns the reason why this host cannot have the namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "root"
    for tool in ("ip", "tc"):
        if subprocess.run(["sh", "-c", f"command -v {tool}"], capture_output=True).returncode != 0:
            return tool
    return None


def call(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def free_port():
    """Returns a free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hosts:
    """`rate` is the rate of each link in the notation of tc; with None both hosts are this host's loopback."""

    def __init__(self, program, rate, environment):
        self.program, self.rate, self.serving = program, rate, None
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith("FERRYWIRE_")}, **environment,
                    "FERRYWIRE_SECRET": "a secret of this benchmark"}
        self.names = {}
        atexit.register(self.close)
        if rate:
            self.names = {host: f"fwhosts-{os.getpid()}-{host}" for host in "ab"}
            self.make()

    def make(self):
        for name in self.names.values():
            call("ip", "netns", "add", name)
            call("ip", "-n", name, "link", "set", "lo", "up")
        for link in range(1, LINKS + 1):
            call("ip", "link", "add", f"va{link}", "netns", self.names["a"], "type", "veth",
                 "peer", "name", f"vb{link}", "netns", self.names["b"])
            for host, last in (("a", 1), ("b", 2)):
                name, nic = self.names[host], f"v{host}{link}"
                call("ip", "-n", name, "addr", "add", f"10.77.{link}.{last}/24", "dev", nic)
                call("ip", "-n", name, "link", "set", nic, "up")
                if self.rate != "none":
                    call("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", nic, "root", "tbf",
                         "rate", self.rate, "burst", "512k", "latency", "20ms")

        for host in "ab":
            for link in range(1, LINKS + 1):
                while '"operstate":"UP"' not in call("ip", "-n", self.names[host], "-j", "link", "show", "dev", f"v{host}{link}"):
                    time.sleep(0.01)

    def on(self, host, command):
        return ["ip", "netns", "exec", self.names[host], *command] if self.names else command

    def nics(self, host, plan):
        """The value of --gpu-nics for eight GPUs: two GPUs on each NIC (own), or each GPU on all NICs (all)."""
        if not self.names:
            return []
        named = [f"v{host}{link}" for link in range(1, LINKS + 1)]
        if plan == "all":
            return ["--gpu-nics", f"0-7={','.join(named)}"]
        return ["--gpu-nics", ",".join(f"{2 * i}-{2 * i + 1}={nic}" for i, nic in enumerate(named))]

    def serve(self, *args, program=(), env=()):
        """Starts the target: `ferrywire bench serve`, or another program with the same arguments."""
        self.stop()
        port = 7420 if self.names else free_port()
        listen = f"0.0.0.0:{port}" if self.names else f"127.0.0.1:{port}"
        command = self.on("b", [*(program or (self.program, "bench")), "serve", "--listen", listen, *args])
        self.serving = subprocess.Popen(command, env={**self.env, **dict(env)}, stdout=subprocess.PIPE, text=True)
        # `serve` prints a line once it listens.
        if not self.serving.stdout.readline():
            sys.exit("the target process ended before it listened: see its messages above")
        self.address = f"10.77.1.2:{port}" if self.names else f"127.0.0.1:{port}"

    def connect(self, *args, program=(), env=()):
        """Runs `connect` and returns its JSON."""
        words = (*program, "connect", self.address) if program else (self.program, "bench", "connect", self.address, "--json", "-")
        command = self.on("a", [*words, *args])
        try:
            done = subprocess.run(command, env={**self.env, **dict(env)}, capture_output=True, text=True, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            sys.exit(f"{' '.join(command)} took too long")
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: {done.stderr.strip()[-600:]}")
        return json.loads(done.stdout)

    def stop(self):
        serving, self.serving = self.serving, None
        if serving:
            # With a plugin `serve` has a child process, which it ends on SIGINT.
            serving.send_signal(signal.SIGINT)
            serving.wait()

    def close(self):
        self.stop()
        names, self.names = self.names, {}
        for name in names.values():
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                subprocess.run(["kill", "-KILL", pid], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
