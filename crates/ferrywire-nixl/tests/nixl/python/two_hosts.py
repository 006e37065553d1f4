"""NIXL's own library with the backend, between two hosts (network namespaces) with two NICs each.

usage: two_hosts.py BACKEND NAMESPACE CASE, run in the other namespace; NAMESPACE is where the target runs. Prints
"CASE: good" at the end.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

LIMIT_S = 60


def until(condition, what):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"


class Target:
    """The agent of the other host."""

    def __init__(self, name="target"):
        command = ["ip", "netns", "exec", NAMESPACE, sys.executable, Path(__file__).parent / "target.py", name, BACKEND]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = name
        assert self.answer() == "ready"

    def answer(self):
        # Other lines are from NIXL's log.
        for line in self.process.stdout:
            if line[:1] in '["{n':
                return json.loads(line)
        raise AssertionError("the target has ended")

    def call(self, *call):
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def register(self, *sizes, kind="DRAM"):
        """Addresses of new memory; the agent's metadata with it."""
        made = self.call("register", sizes, kind)
        return made["addresses"], base64.b64decode(made["metadata"])

    def notifications(self, count, seconds=LIMIT_S):
        return [(sender, base64.b64decode(message)) for sender, message in self.call("notifications", count, seconds)]

    def read(self, index, at, size):
        return base64.b64decode(self.call("read", index, at, size))

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(LIMIT_S) == 0


class Initiator:
    def __init__(self, name="initiator", **parameters):
        self.agent = nixl_agent(name, nixl_agent_config(backends=[] if parameters else [BACKEND]))
        if parameters:
            self.agent.create_backend(BACKEND, parameters)
        self.registered = []

    def memory(self, size):
        array = np.zeros(size, np.uint8)
        descriptors = self.agent.register_memory([(array.ctypes.data, size, 0, "")], "DRAM")
        self.registered.append(descriptors)
        return array

    def handle(self, operation, here, there, peer="target", notification=b"", kinds=("DRAM", "DRAM")):
        """`here` and `there`: lists of address and bytes."""
        lists = [[(address, size, 0) for address, size in each] for each in (here, there)]
        lists = [self.agent.get_xfer_descs(each, kind) for each, kind in zip(lists, kinds)]
        return self.agent.initialize_xfer(operation, *lists, peer, notification)

    def state(self, handle):
        """The state of a post that has ended."""
        states = []

        def ended():
            try:
                states.append(self.agent.check_xfer_state(handle))
            except Exception as error:
                states.append(type(error).__name__)
            return states[-1] != "PROC"

        until(ended, "a transfer")
        return states[-1]

    def post(self, handle):
        try:
            return self.agent.transfer(handle)
        except Exception as error:
            return type(error).__name__

    def move(self, *arguments, **named):
        handle = self.handle(*arguments, **named)
        state = self.post(handle)
        state = self.state(handle) if state == "PROC" else state
        self.agent.release_xfer_handle(handle)
        return state


def sent_bytes(nic):
    return int(Path(f"/sys/class/net/{nic}/statistics/tx_bytes").read_text())


def blocks(base, order, size):
    return [(base + int(at) * size, size) for at in order]


def moves():
    """Both operations over both NICs: every byte in its place, notifications after the bytes."""
    target, initiator = Target(), Initiator()
    size, count = 64 << 10, 1024
    (base,), metadata = target.register(size * count)
    assert initiator.agent.add_remote_agent(metadata) in ("target", b"target")
    rng = np.random.default_rng(1)
    source, back = initiator.memory(size * count), initiator.memory(size * count)
    source[:] = rng.integers(0, 256, source.size, np.uint8)
    order = rng.permutation(count)
    before = [sent_bytes(nic) for nic in NICS]
    here, there = blocks(source.ctypes.data, range(count), size), blocks(base, order, size)
    handle = initiator.handle("WRITE", here, there, notification=b"written")

    def both_nics():
        assert initiator.post(handle) == "PROC"
        assert initiator.state(handle) == "DONE"
        assert target.notifications(1) == [("initiator", b"written")]
        return all(sent_bytes(nic) - was > 8 << 20 for nic, was in zip(NICS, before))

    # The share of each NIC depends on scheduling.
    until(both_nics, "bytes over both NICs")
    for at in (0, 1, 500, count - 1):
        assert target.read(0, int(order[at]) * size, size) == source[at * size : (at + 1) * size].tobytes(), at
    here = blocks(back.ctypes.data, range(count), size)
    assert initiator.move("READ", here, there, notification=b"read") == "DONE"
    assert (back == source).all()
    assert target.notifications(1) == [("initiator", b"read")]
    # Lists that NIXL has prepared, with elements selected by index.
    back[:] = 0
    sides = [initiator.agent.prep_xfer_dlist(peer, [(*each, 0) for each in blocks(base_of, range(count), size)], "DRAM")
             for peer, base_of in (("NIXL_INIT_AGENT", back.ctypes.data), ("target", base))]
    chosen = rng.permutation(count)[:300]
    handle = initiator.agent.make_prepped_xfer("READ", sides[0], list(range(300)), sides[1], chosen.tolist(), b"")
    initiator.post(handle)
    assert initiator.state(handle) == "DONE"
    place = {int(to): at for at, to in enumerate(order)}
    for at, there in enumerate(chosen):
        begin = place[int(there)] * size
        assert (back[at * size : (at + 1) * size] == source[begin : begin + size]).all(), at
    initiator.agent.send_notif("target", b"n" * 100_000)
    target.notifications(0)
    until(lambda: target.notifications(1)[-1:] == [("initiator", b"n" * 100_000)], "a long notification")
    target.end()


def gpu():
    """GPU memory at one or both ends; the bytes have arrived when their notification has."""
    import cuda

    target, initiator = Target(), Initiator()
    assert "VRAM_SEG" in initiator.agent.get_backend_mem_types(BACKEND), initiator.agent.get_backend_mem_types(BACKEND)
    size, count = 24 << 10, 512
    total = size * count
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, total, np.uint8)
    host, device = initiator.memory(total), cuda.Memory(total)
    initiator.agent.register_memory([(device.address, total, 0, "")], "VRAM")
    for index, kinds in enumerate([("DRAM", "VRAM"), ("VRAM", "DRAM"), ("VRAM", "VRAM")]):
        data = np.roll(data, 1)
        (base,), metadata = target.register(total, kind=kinds[1])
        initiator.agent.add_remote_agent(metadata)
        here = host.ctypes.data if kinds[0] == "DRAM" else device.address

        def put(value, kind=kinds[0]):
            if kind == "DRAM":
                host[:] = value
            else:
                device.write(value.tobytes())

        put(data)
        order = rng.permutation(count)
        lists = blocks(here, range(count), size), blocks(base, order, size)
        assert initiator.move("WRITE", *lists, notification=b"written", kinds=kinds) == "DONE"
        assert target.notifications(1) == [("initiator", b"written")]
        there = target.read(index, 0, total)
        for at in range(count):
            begin = int(order[at]) * size
            assert there[begin : begin + size] == data[at * size : (at + 1) * size].tobytes(), (kinds, at)
        put(np.zeros(total, np.uint8))
        assert initiator.move("READ", *lists, notification=b"read", kinds=kinds) == "DONE"
        back = host.tobytes() if kinds[0] == "DRAM" else device.read()
        assert back == data.tobytes(), kinds
        assert target.notifications(1) == [("initiator", b"read")]
    # Memory that is registered as the wrong kind.
    for address, kind in ((device.address, "DRAM"), (host.ctypes.data, "VRAM")):
        try:
            initiator.agent.register_memory([(address, total, 0, "")], kind)
        except Exception as error:
            print(f"refused: {error}")
        else:
            raise AssertionError(f"registered as {kind}")
    target.end()


def restarted():
    """A killed target is an error on every handle; the next process of its name is reached as soon as it is loaded."""
    initiator = Initiator()
    size = 64 << 20
    source = initiator.memory(size)
    source[:] = 3
    for round in range(3):
        target = Target()
        (base,), metadata = target.register(size)
        initiator.agent.add_remote_agent(metadata)
        assert initiator.move("WRITE", [(source.ctypes.data, size)], [(base, size)]) == "DONE"
        assert target.read(0, size - 9, 9) == b"\3" * 9
        handles = [initiator.handle("WRITE", [(source.ctypes.data, size)], [(base, size)]) for _ in range(4)]
        for handle in handles:
            assert initiator.post(handle) == "PROC"
        target.kill()
        states = [initiator.state(handle) for handle in handles]
        assert all(state == "nixlRemoteDisconnectError" for state in states[1:]), states
        since = time.monotonic()
        late = initiator.handle("READ", [(source.ctypes.data, 8)], [(base, 8)])
        state = initiator.post(late)
        assert (initiator.state(late) if state == "PROC" else state) == "nixlRemoteDisconnectError"
        print(f"round {round}: told {time.monotonic() - since:.2f} s after it was posted")
        for handle in [*handles, late]:
            initiator.agent.release_xfer_handle(handle)
        initiator.agent.remove_remote_agent("target")


def first_contact():
    """The network of a new target comes up after the first transfer to it was posted."""
    target, initiator = Target(), Initiator()
    size = 1 << 20
    (base,), metadata = target.register(size)
    initiator.agent.add_remote_agent(metadata)
    source = initiator.memory(size)
    source[:] = 5
    links = [["ip", "-n", NAMESPACE, "link", "set", nic] for nic in NICS]
    for link in links:
        subprocess.run([*link, "down"], check=True)
    handle = initiator.handle("WRITE", [(source.ctypes.data, size)], [(base, size)], notification=b"at last")
    assert initiator.post(handle) == "PROC"
    time.sleep(4)
    assert initiator.agent.check_xfer_state(handle) == "PROC"
    for link in links:
        subprocess.run([*link, "up"], check=True)
    assert initiator.state(handle) == "DONE"
    assert target.notifications(1) == [("initiator", b"at last")] and target.read(0, 0, 1) == b"\5"
    target.end()


def refused():
    """A target with another secret ends the first transfer long before the timeout."""
    os.environ["FERRYWIRE_SECRET"] = "the secret of the target"
    target = Target()
    os.environ["FERRYWIRE_SECRET"] = "the secret of the initiator"
    initiator = Initiator(connect_timeout="3600")
    (base,), metadata = target.register(8)
    initiator.agent.add_remote_agent(metadata)
    source = initiator.memory(8)
    assert initiator.move("WRITE", [(source.ctypes.data, 8)], [(base, 8)]).startswith("nixl")
    target.end()


def nic_down():
    """A NIC that goes down in mid-transfer costs no transfer."""
    target, initiator = Target(), Initiator()
    size = 256 << 20
    (base,), metadata = target.register(size)
    initiator.agent.add_remote_agent(metadata)
    source = initiator.memory(size)
    for round in range(4):
        source[:] = round + 1
        handle = initiator.handle("WRITE", [(source.ctypes.data, size)], [(base, size)], notification=b"over")
        assert initiator.post(handle) == "PROC"
        down = round < 2
        if down:
            time.sleep(0.01)
            subprocess.run(["ip", "link", "set", NICS[1], "down"], check=True)
        assert initiator.state(handle) == "DONE"
        assert target.notifications(1) == [("initiator", b"over")]
        assert all(target.read(0, at, 1) == bytes([round + 1]) for at in range(0, size, 16 << 20))
        if down:
            subprocess.run(["ip", "link", "set", NICS[1], "up"], check=True)
    target.end()


def registrations():
    """One transfer between a thousand registrations; agents that end leave nothing."""
    def counts():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    target = Target()
    size = 8192
    bases, metadata = target.register(*[size] * 1000)
    left = None
    for round in range(5):
        initiator = Initiator(f"initiator {round}")
        initiator.agent.add_remote_agent(metadata)
        arrays = [initiator.memory(size) for _ in range(1000)]
        for index, array in enumerate(arrays):
            array[:] = (index + round) % 251
        here, there = [(array.ctypes.data, size) for array in arrays], [(base, size) for base in bases]
        assert initiator.move("WRITE", here, there, notification=b"all") == "DONE"
        assert target.notifications(1) == [(f"initiator {round}", b"all")]
        for index in range(0, 1000, 37):
            assert target.read(index, 0, size) == bytes([(index + round) % 251]) * size
        for descriptors in initiator.registered:
            initiator.agent.deregister_memory(descriptors)
        initiator.agent.remove_remote_agent("target")
        del initiator
        if round == 1:
            left = counts()
    # A process that starts may ask this one for its counters meanwhile, over a descriptor.
    until = time.monotonic() + 60
    while any(now > before for now, before in zip(counts(), left, strict=True)):
        assert time.monotonic() < until, f"{counts()} descriptors and threads, {left} before"
        time.sleep(0.01)
    target.end()


def stopped():
    """Memory is deregistered while a stopped peer has not answered, and nothing touches it afterwards."""
    target, initiator = Target(), Initiator()
    size = 64 << 20
    (base,), metadata = target.register(size)
    target.call("fill", 0, 7)
    initiator.agent.add_remote_agent(metadata)
    first = initiator.memory(size)
    assert initiator.move("READ", [(first.ctypes.data, size)], [(base, size)]) == "DONE" and first[-1] == 7
    for operation in ("READ", "WRITE"):
        memory = initiator.memory(size)
        handle = initiator.handle(operation, [(memory.ctypes.data, size)], [(base, size)])
        target.process.send_signal(signal.SIGSTOP)
        assert initiator.post(handle) == "PROC"
        initiator.agent.deregister_memory(initiator.registered.pop())
        memory[:] = 1
        target.process.send_signal(signal.SIGCONT)
        state = initiator.state(handle)
        assert state in ("nixlCancelledError", "nixlInvalidParamError"), state
        target.call("fill", 0, 7)
        assert initiator.move("READ", [(first.ctypes.data, size)], [(base, size)], notification=b"after") == "DONE"
        assert target.notifications(1) == [("initiator", b"after")]
        assert (memory == 1).all() and (first == 7).all(), operation
        initiator.agent.release_xfer_handle(handle)
    target.end()


def again():
    """A peer is removed in mid-transfer and added again at once."""
    target, initiator = Target(), Initiator()
    size = 32 << 20
    (base,), metadata = target.register(size)
    source = initiator.memory(size)
    source[:] = 9
    for _ in range(20):
        initiator.agent.add_remote_agent(metadata)
        handle = initiator.handle("WRITE", [(source.ctypes.data, size)], [(base, size)])
        assert initiator.post(handle) in ("PROC", "DONE")
        initiator.agent.remove_remote_agent("target")
        try:
            initiator.agent.release_xfer_handle(handle)
        except Exception as error:
            print(f"release: {type(error).__name__}")
    initiator.agent.add_remote_agent(metadata)
    assert initiator.move("WRITE", [(source.ctypes.data, size)], [(base, size)], notification=b"end") == "DONE"
    assert target.notifications(1)[-1] == ("initiator", b"end") and target.read(0, size - 1, 1) == b"\x09"
    target.end()


def foreign():
    """Under the name of UCX, the metadata of a real UCX agent are refused."""
    other = subprocess.run(
        [sys.executable, "-c", "import base64\nfrom nixl._api import nixl_agent, nixl_agent_config\n"
         "agent = nixl_agent('real', nixl_agent_config(backends=['UCX']))\n"
         "print('metadata', base64.b64encode(agent.get_agent_metadata()).decode())"],
        env={name: value for name, value in os.environ.items() if name != "NIXL_PLUGIN_DIR"},
        stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    metadata = next(line.split()[1] for line in other.stdout.splitlines() if line.startswith("metadata "))
    initiator = Initiator()
    try:
        initiator.agent.add_remote_agent(base64.b64decode(metadata))
    except Exception as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("it was taken")


BACKEND, NAMESPACE, CASE = sys.argv[1:4]
NICS = ("fw0", "fw1")
CASES = (moves, gpu, first_contact, refused, restarted, nic_down, registrations, stopped, again, foreign)
{each.__name__: each for each in CASES}[CASE]()
print(f"{CASE}: good")
