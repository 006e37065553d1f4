"""Measures ferrywire and raw, interleaved, over paths of several lengths, rates and losses; prints one table.

Started by `run`, which made the two namespaces. The path is a veth pair with netem at both ends, or two TUN devices
with the program `delay-line` between them.
"""

import argparse
import contextlib
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import time

SOURCE, TARGET, DEVICE = "10.213.8.1", "10.213.8.2", "fwdelay0"
MESSAGE, WARMUP = 64 << 20, 1


def options():
    p = argparse.ArgumentParser()
    for name in ("bin", "cache", "source-ns", "target-ns"):
        p.add_argument("--" + name, required=True)
    p.add_argument("--path", choices=["line", "netem"])
    p.add_argument("--rtt-ms", type=numbers, default=[0.1, 1, 10])
    p.add_argument("--loss", type=numbers, default=[0, 0.0001])
    p.add_argument("--gbit", type=numbers, default=[1, 10])
    p.add_argument("--sockbuf", type=words, default=["0", "512K", "4M"])
    p.add_argument("--cc", type=words, default=["cubic", "system"])
    p.add_argument("--reps", type=int, default=3)
    p.add_argument("--seconds", type=float, default=3)
    p.add_argument("--bench", default="")
    p.add_argument("--also")
    p.add_argument("--idle", type=float, default=10)
    p.add_argument("--json")
    o = p.parse_args()
    o.json = o.json or os.path.join(o.cache, "result.json")
    return o


def numbers(text):
    return [float(x) for x in text.split(",")]


def words(text):
    return text.split(",")


class Path:
    """One shape of the path between the two namespaces, for the length of a `with` block."""

    def __init__(self, o, rtt_ms, loss, gbit):
        self.o, self.rtt_ms, self.loss, self.gbit = o, rtt_ms, loss, gbit
        # The queue before the rate limit holds one round trip, like that of a router, and at least a millisecond.
        self.queue_ms = max(1.0, rtt_ms)
        self.line, self.counts = None, None

    def __enter__(self):
        (self.make_netem if self.o.path == "netem" else self.make_line)()
        for ns, address in ((self.o.source_ns, SOURCE), (self.o.target_ns, TARGET)):
            ip(ns, "link", "set", DEVICE, "mtu", "1500", "txqueuelen", "10000", "up")
            ip(ns, "addr", "add", address + "/24", "dev", DEVICE)
        return self

    def __exit__(self, *_):
        if self.line:
            out, _ = self.line.communicate(timeout=20)
            self.counts = json.loads(out.splitlines()[-1])
        else:
            ip(self.o.source_ns, "link", "del", DEVICE)

    def make_line(self):
        command = [os.path.join(self.o.bin, "delay-line"), DEVICE, DEVICE + "t", "--delay-us", str(self.rtt_ms * 500),
                   "--loss", str(self.loss), "--gbit", str(self.gbit), "--queue-ms", str(self.queue_ms)]
        self.line = subprocess.Popen(within(self.o.source_ns, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.line.stdout.readline() != "ready\n":
            sys.exit("SKIPPED: needs /dev/net/tun")
        ip(self.o.source_ns, "link", "set", DEVICE + "t", "netns", self.o.target_ns, "name", DEVICE)

    def make_netem(self):
        ip(self.o.source_ns, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", self.o.target_ns)
        # netem's limit counts packets of up to 64 KiB, those in flight and those that wait.
        rate = ["rate", f"{self.gbit}gbit"] if self.gbit else []
        bdp_bytes = self.gbit * 1.25e5 * (self.rtt_ms / 2 + self.queue_ms)
        limit = max(1000, int(bdp_bytes / 1500)) if self.gbit else 100000
        for ns in (self.o.source_ns, self.o.target_ns):
            check(["tc", "-n", ns, "qdisc", "add", "dev", DEVICE, "root", "netem", "delay", f"{self.rtt_ms * 500}us",
                   "loss", f"{self.loss * 100}%", *rate, "limit", str(limit)])


def check(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"delay: {' '.join(command)}: {done.stderr.strip()}")


def ip(ns, *args):
    check(["ip", "-n", ns, *args])


def within(ns, command):
    return ["ip", "netns", "exec", ns, *command]


def has_netem(ns):
    """Whether this kernel has netem; tries it on the loopback of a namespace of this program."""
    done = subprocess.run(["tc", "-n", ns, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us"], capture_output=True)
    if done.returncode == 0:
        check(["tc", "-n", ns, "qdisc", "del", "dev", "lo", "root"])
    return done.returncode == 0


class Failed(Exception):
    """A failed measurement; the text gives the reason."""


@contextlib.contextmanager
def serving(o, command, port, env):
    """A program listening in the target's namespace."""
    child = subprocess.Popen(within(o.target_ns, command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        wait_for_listener(o, port, child)
        yield
    finally:
        child.kill()
        child.wait()


def wait_for_listener(o, port, child, timeout=30.0):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        table = subprocess.run(within(o.target_ns, ["cat", "/proc/net/tcp"]), capture_output=True, text=True).stdout
        if any(f[1].endswith(f":{port:04X}") and f[3] == "0A" for f in map(str.split, table.splitlines()[1:])):
            return
        if child.poll() is not None:
            raise Failed(f"the target ended with status {child.returncode} before it listened")
        time.sleep(0.02)
    raise Failed(f"the target has not listened on port {port} within {timeout:g} s")


ports = itertools.count(21000, 3)


def measured(o, path, serve, connect):
    """Runs both ends of a program and returns the JSON that the source prints."""
    port = next(ports)
    address, env = f"{TARGET}:{port}", {**os.environ, "FERRYWIRE_SECRET": secrets.token_hex(16)}
    listen = [address] if path.endswith("after-idle") else ["--listen", address]
    with serving(o, [path, *serve, *listen], port, env):
        connect = [word if word != "ADDRESS" else address for word in connect]
        try:
            done = subprocess.run(within(o.source_ns, [path, *connect]), capture_output=True, text=True, env=env,
                                  timeout=o.seconds * 10 + o.idle + 120)
        except subprocess.TimeoutExpired:
            raise Failed("the source took too long") from None
    if done.returncode != 0:
        raise Failed((done.stderr.strip().splitlines() or ["the source failed without output"])[-1][:200])
    return json.loads(done.stdout)


def ferrywire(o, path):
    got = measured(o, path, ["bench", "serve"],
                   ["bench", "connect", "ADDRESS", "--memory", "host", "--peer-memory", "host", "--sizes", str(MESSAGE),
                    "--warmup", str(WARMUP), "--seconds", str(o.seconds), "--json", "-", *o.bench.split()])
    if got["error"]:
        raise Failed(got["error"])
    return got["results"][-1]


def raw(o, connections, sockbuf, control):
    return measured(o, os.path.join(o.bin, "raw"), ["serve"],
                    ["connect", "ADDRESS", "--connections", str(connections), "--sockbuf", sockbuf, "--cc", control,
                     "--placement", "free", "--seconds", str(o.seconds), "--warmup", str(WARMUP * MESSAGE), "--json"])


def measure(o, path):
    """Measures all programs on one path. Returns {name: [rates]}, and the settings that ferrywire chose."""
    rates, chosen, problems = {}, {}, []

    def attempt(name, call):
        try:
            got = call()
        except Failed as e:
            problems.append(f"{name}: {e}")
            return
        rates.setdefault(name, []).append(rate(got))
        if name == "ferrywire":
            chosen.update({k: got[k] for k in ("channels", "congestion_control", "depth")})

    for rep in range(o.reps):
        attempt("ferrywire", lambda: ferrywire(o, os.path.join(o.bin, "ferrywire")))
        if o.also:
            attempt("also", lambda: ferrywire(o, o.also))
        for control, sockbuf in itertools.product(o.cc, o.sockbuf):
            attempt(f"{control}/{sockbuf}", lambda: raw(o, chosen.get("channels", 8), sockbuf, control))
    idle = {}
    if o.idle:
        try:
            idle = measured(o, os.path.join(o.bin, "after-idle"), ["serve"], ["connect", "ADDRESS", str(o.idle)])
        except Failed as e:
            problems.append(f"after-idle: {e}")
    return {"after_idle": idle, "rtt_ms": path.rtt_ms, "loss": path.loss, "gbit": path.gbit, "gb_per_s": rates, "chosen": chosen,
            "problems": problems}


def rate(result):
    """The rate of a result in GB/s, the mean of the run."""
    return result["extra"]["mean_gb_per_s"] if "extra" in result else result["gb_per_s"]


def summary(row):
    """Returns the medians of ferrywire, and the best median of raw for each congestion control with its socket buffers.

    Stores all medians, and the ratio of ferrywire to each best one, in the row.
    """
    medians = {name: statistics.median(values) for name, values in row["gb_per_s"].items()}
    own, also = medians.pop("ferrywire", None), medians.pop("also", None)
    best = {}
    for name, value in medians.items():
        control, sockbuf = name.split("/")
        if value > best.get(control, (0, ""))[0]:
            best[control] = (value, sockbuf)
    row["medians"] = {"ferrywire": own, "also": also, **medians}
    row["share"] = {control: own and own / value for control, (value, _) in best.items()}
    return own, best


def table(o, rows):
    header = ["Gbit/s", "RTT ms", "loss", "ferrywire", "channels", "control"] + ["also"] * bool(o.also)
    for control in o.cc:
        header += [f"raw {control}", "buffers", "share"]
    lines = [header]
    for row in rows:
        own, best = summary(row)
        line = [f"{row['gbit']:g}", f"{row['rtt_ms']:g}", f"{row['loss']:g}", number(own),
                str(row["chosen"].get("channels", "-")), str(row["chosen"].get("congestion_control", "-"))]
        if o.also:
            line.append(number(row["medians"]["also"]))
        for control in o.cc:
            value, sockbuf = best.get(control, (None, "-"))
            line += [number(value), sockbuf, number(row["share"].get(control), 2)]
        lines.append(line)
    if o.idle:
        for line, row in zip(lines[1:], rows):
            line += [number(row["after_idle"].get(f"{name}_ms"), 0) for name in ("first", "warm", "after_idle")]
        header += ["first ms", "warm ms", "idled ms"]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(f"{cell:>{width}s}" for cell, width in zip(line, widths)))
    print(f"\nGB/s (1e9 bytes/s), median of {o.reps} interleaved runs of {o.seconds:g} s; writes of 64 MiB, ferrywire's defaults; raw with "
          f"as many connections and the best of socket buffers {', '.join(o.sockbuf)}; path: {o.path}, {os.cpu_count()} cores.\nms: one write of 64 MiB on new connections, in a row, and after {o.idle:g} s "
          "without a call.")
    for row in rows:
        for problem in row["problems"]:
            print(f"    {row['gbit']:g} Gbit/s, {row['rtt_ms']:g} ms, loss {row['loss']:g}: {problem}")


def number(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}"


def main():
    o = options()
    o.path = o.path or ("netem" if has_netem(o.source_ns) else "line")
    rows = []
    try:
        for gbit, rtt_ms, loss in itertools.product(o.gbit, o.rtt_ms, o.loss):
            path = Path(o, rtt_ms, loss, gbit)
            with path:
                rows.append(measure(o, path))
            rows[-1]["line"] = path.counts
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped; the results of the finished measurements follow", file=sys.stderr)
    table(o, rows)
    with open(o.json, "w") as f:
        json.dump({"schema": 1, "path": o.path, "cores": os.cpu_count(), "kernel": os.uname().release,
                   "time": int(time.time()), "repetitions": o.reps, "seconds": o.seconds, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
