"""Shared parts of the peer programs: options, a control connection, the timed loop.

The source drives: it asks the target over the control connection (JSON lines) and measures. CPU time is that of the
timed part, on both sides.
"""

import argparse
import json
import mmap
import resource
import socket
import statistics
import sys
import time


def options(**extra):
    p = argparse.ArgumentParser()
    p.add_argument("role", choices=["source", "target"])
    for name in ("address", "own"):
        p.add_argument("--" + name)
    for name in ("port", "size", "depth", "footprint"):
        p.add_argument("--" + name, type=int)
    p.add_argument("--seconds", type=float)
    for name, settings in extra.items():
        p.add_argument("--" + name.replace("_", "-"), **settings)
    return p.parse_args()


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def buffer(size):
    """Page-aligned memory whose pages are present, and its address."""
    import numpy
    memory = mmap.mmap(-1, size)
    view = numpy.frombuffer(memory, dtype=numpy.uint8)
    view[:] = 0x5A
    return view, view.ctypes.data


class Control:
    """JSON lines over one TCP connection."""

    def __init__(self, connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = connection.makefile("rw")

    @staticmethod
    def accept(o):
        with socket.create_server((o.address, o.port)) as listener:
            return Control(listener.accept()[0])

    @staticmethod
    def connect(o):
        return Control(socket.create_connection((o.address, o.port), source_address=(o.own, 0)))

    def send(self, **message):
        self.file.write(json.dumps(message) + "\n")
        self.file.flush()

    def receive(self):
        line = self.file.readline()
        if not line:
            sys.exit("the other side has closed the control connection")
        return json.loads(line)

    def ask(self, **message):
        self.send(**message)
        return self.receive()


def answer_cpu(control):
    """Answers the source's requests for the CPU time of the target, until the source ends the run."""
    while control.receive().get("do") == "cpu":
        control.send(cpu=cpu_seconds())


def timed(o, control, move):
    """Calls `move()`, which moves some bytes to completion and returns how many, for `seconds`; prints the result."""
    end = time.monotonic() + min(0.3, o.seconds / 4)
    while time.monotonic() < end:
        move()
    before, cpu, start = control.ask(do="cpu")["cpu"], cpu_seconds(), time.monotonic()
    moved, times = 0, []
    while time.monotonic() < start + o.seconds:
        began = time.perf_counter()
        moved += move()
        times.append(time.perf_counter() - began)
    elapsed, used = time.monotonic() - start, cpu_seconds() - cpu
    target_used = control.ask(do="cpu")["cpu"] - before
    control.send(do="stop")
    print(json.dumps({"gb_per_s": moved / 1e9 / elapsed, "cpu_source": used / (moved / 1e9),
                      "cpu_target": target_used / (moved / 1e9), "p50_us": statistics.median(times) * 1e6}), flush=True)


class Ring:
    """Keeps `depth` operations in flight: `post(slot)` starts one, `wait(token)` ends it.

    A step posts one operation and, once the ring is full, waits for the oldest.
    """

    def __init__(self, depth, slots, size, post, wait):
        self.depth, self.slots, self.size = depth, slots, size
        self.post, self.wait = post, wait
        self.flight, self.at = [], 0

    def step(self):
        self.flight.append(self.post(self.at))
        self.at = (self.at + 1) % self.slots
        if len(self.flight) < self.depth:
            return 0
        self.wait(self.flight.pop(0))
        return self.size
