"""Lifetimes of registered memory, regions, endpoints, processes and the interpreter."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from conftest import LIMIT, Pair, Program, eventually

import ferrywire as fw

np = pytest.importorskip("numpy", reason="needs numpy")


class Array(np.ndarray):
    """An array whose end can be observed."""


def watched(nbytes: int) -> tuple[Array, weakref.ref[Array]]:
    array = np.zeros(nbytes, np.uint8).view(Array)
    return array, weakref.ref(array)


def test_registered_memory_lives_as_long_as_its_region(pair: Pair):
    array, alive = watched(1 << 20)
    region = pair.far.register(array)
    del array
    gc.collect()
    assert alive() is not None
    pair.to_far.write(pair.near.register(b"\x07" * (1 << 20)), region.remote()).wait(LIMIT)
    assert region.read_at(0, 3) == b"\x07\x07\x07"
    region.deregister()
    eventually(lambda: alive() is None, "the array ends with its region")
    other, alive = watched(100)
    region = pair.far.register(other)
    del region, other
    eventually(lambda: alive() is None, "the array ends with the last reference to its region")


def test_an_object_that_refers_to_its_region_goes_once_that_is_deregistered(pair: Pair):
    array, alive = watched(1 << 20)
    array.region = region = pair.far.register(array)
    remote = region.remote()
    del array, region
    gc.collect()
    # Peers may still write, so the memory must not be freed by itself.
    pair.to_far.write(pair.near.register(b"\x07" * 8), remote, nbytes=8).wait(LIMIT)
    assert alive() is not None and alive()[:9].tolist() == [7] * 8 + [0]
    alive().region.deregister()
    eventually(lambda: alive() is None, "the array ends with its region")


def test_memory_in_flight_lives_until_the_transfer_ends(pair: Pair):
    array, alive = watched(8)
    transfer = pair.to_near.recv(3, pair.far.register(array))
    del array
    gc.collect()
    assert alive() is not None
    with pytest.raises(fw.TimedOut):
        transfer.wait(0.05)
    del transfer
    gc.collect()
    assert alive() is not None
    pair.to_far.send(3, pair.near.register(b"12345678")).wait(LIMIT)
    eventually(lambda: alive() is None, "the array ends with the transfer")


def test_a_bytearray_cannot_be_resized_while_it_is_registered(pair: Pair):
    memory = bytearray(8)
    region = pair.near.register(memory)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    region.deregister()
    eventually(lambda: memory.extend(b"more") is None, "the buffer is given back")


def test_peers_keep_their_endpoint():
    far = fw.Endpoint("127.0.0.1:0")
    peer = fw.Endpoint().connect(far.metadata(), timeout=LIMIT)
    gc.collect()
    far.accept(LIMIT).notify(b"there").wait(LIMIT)
    assert peer.wait_notification(LIMIT) == b"there"
    peer.close()
    far.close()


def test_no_reference_is_left_over_100_000_operations(pair: Pair):
    got, source = bytearray(64), pair.near.register(b"x" * 64)
    target = pair.target(got)
    blocks = fw.BlockList(source, target, [0, 32], [0, 32], 16)
    indices = np.array([1, 0])

    def rounds(count: int) -> None:
        for number in range(count):
            pair.to_far.write(source, target, nbytes=8).wait(LIMIT)
            pair.to_far.write_blocks(blocks, indices).poll()
            if number % 100 == 0:
                pair.to_far.notify(b"n").wait(LIMIT)
                pair.to_near.wait_notification(LIMIT)
                with pytest.raises(fw.UsageError):
                    pair.to_far.write(source, target, nbytes=65)
        pair.to_far.notify(b"end").wait(LIMIT)
        pair.to_near.wait_notification(LIMIT)

    def references() -> list[int]:
        gc.collect()
        return [sys.getrefcount(thing) for thing in (source, target, blocks, indices, pair.to_far, got)]

    rounds(100)
    before = references(), sys.getallocatedblocks()
    many = 50_000 if os.environ.get("FERRYWIRE_LONG") else 5_000
    rounds(many)
    after = references(), sys.getallocatedblocks()
    print(f"{2 * many} operations: {after[1] - before[1]} blocks of the interpreter's more")
    assert after[0] == before[0]
    assert after[1] - before[1] < 1_000, f"{after[1] - before[1]} blocks of the interpreter's more"


class HeapUse(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    names = "arena", "free", "fast", "maps", "mapped", "most", "fast_free", "used", "unused", "top"
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def memory_in_use() -> tuple[int, int]:
    """Bytes that the native heap has given out, and resident bytes of the process without what the heap keeps for later."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = HeapUse
    library.malloc_trim(0)
    use = library.mallinfo2()
    with open("/proc/self/statm") as statm:
        return use.used + use.mapped, int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_endpoints_leave_nothing_behind():
    def threads_and_descriptors() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def steady() -> tuple[int, int]:
        """The values once they have not changed for half a second."""
        last, since = threads_and_descriptors(), time.monotonic()

        def unchanged() -> bool:
            nonlocal last, since
            if (now := threads_and_descriptors()) != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since > 0.5

        eventually(unchanged, "threads and descriptors stay the same")
        return last

    def none_left() -> bool:
        return all(now <= then for now, then in zip(threads_and_descriptors(), before, strict=True))

    def rounds(count: int) -> None:
        for number in range(count):
            far, near = fw.Endpoint("127.0.0.1:0", threads=1), fw.Endpoint(threads=1)
            peer = near.connect(far.metadata(), timeout=LIMIT)
            region = far.register(bytearray(100))
            peer.write(near.register(b"x"), region.remote(), nbytes=1).wait(LIMIT)
            if number % 2:
                near.close()
                far.close()

    rounds(2)
    before = steady()
    # Endpoints that were not closed are closed in the background.
    rounds(10)
    eventually(none_left, "their threads and descriptors are gone")
    settled, many = memory_in_use(), 500 if os.environ.get("FERRYWIRE_LONG") else 20
    rounds(many)
    eventually(none_left, "their threads and descriptors are gone")
    heap, resident = (now - then for now, then in zip(memory_in_use(), settled, strict=True))
    endpoints = 2 * many
    said = f"{endpoints} endpoints: {heap} bytes of heap more, {resident >> 10} KiB of resident memory"
    print(said)
    # Tables and caches grow at first; a leaked endpoint would exceed the allowance for each by far.
    assert heap < (64 << 10) + 100 * endpoints and resident < (1 << 20) + 4096 * endpoints, said


def test_many_threads_use_one_endpoint(pair: Pair):
    got = np.zeros((8, 1 << 16), np.uint8)
    target = pair.target(got)
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            source = pair.near.register(bytes([number + 1]) * (1 << 16))
            for _ in range(50):
                pair.to_far.write(source, target, target_offset=number << 16).wait(LIMIT)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and (got == np.arange(1, 9, dtype=np.uint8)[:, None]).all()


SETUP = """
import ferrywire as fw, os, signal, sys, threading, time
# A shell starts background processes with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
far, near = fw.Endpoint("127.0.0.1:0", label="far"), fw.Endpoint(label="near")
to_far = near.connect(far.metadata(), timeout=60)
to_near = far.accept(timeout=60)
"""


def test_other_threads_run_while_one_waits(program: type[Program]):
    with program(SETUP + """
def tick():
    for _ in range(20): time.sleep(0.001)
    to_near.notify(b"ticked")
threading.Thread(target=tick, daemon=True).start()
# Without the other thread the wait has no end.
assert to_far.wait_notification(timeout=60) == b"ticked"
""") as other:
        other.end()


def test_ctrl_c_ends_every_wait(program: type[Program]):
    with program(SETUP + """
import asyncio
region = near.register(bytearray(4))
pending = to_far.recv(1, region)
slow = fw.Endpoint(label="slow")
async def awaited(): await to_far.recv(2, near.allocate(4))
any_of = lambda: fw.wait_any([pending])
for wait in (pending.wait, any_of, to_far.wait_notification, far.accept, lambda: asyncio.run(awaited())):
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait()
    except KeyboardInterrupt: print("stopped", flush=True)
to_near.send(1, far.register(b"goes")).wait(60)
print(pending.wait(60), region.read_at())
""") as other:
        assert other.end().split("\n")[:6] == ["stopped"] * 5 + ["4 b'goes'"]


@pytest.mark.parametrize("held", ["in the module", "nowhere", "in a cycle"])
def test_the_interpreter_ends_with_transfers_in_flight(program: type[Program], held: str):
    keep = {"in the module": "kept = transfers", "nowhere": "del transfers", "in a cycle": "transfers.append(transfers)"}
    with program(SETUP + f"""
big = near.register(bytearray(32 << 20)); target = far.register(bytearray(32 << 20))
transfers = [to_far.write(big, target.remote()) for _ in range(20)]
transfers.append(to_far.recv(1, near.register(bytearray(4))))
{keep[held]}
print("leaves", flush=True)
""") as other:
        assert other.end() == "leaves\n"


RECEIVER = """
import ferrywire as fw, sys
endpoint = fw.Endpoint("127.0.0.1:0", label="receiver")
region = endpoint.allocate(8 << 20)
print(endpoint.metadata().hex(), region.descriptor().hex(), flush=True)
peer = endpoint.accept(60)
print(peer.wait_notification(60), region.read_at((8 << 20) - 1), flush=True)
try: peer.wait_notification(60)
except fw.PeerClosed: print("closed", flush=True)
"""

# At the program's end nothing has been received, because its peer was stopped.
SENDER = """
import asyncio, ferrywire as fw, sys
from stopping import stop_process
def begins(metadata, descriptor, number):
    near = fw.Endpoint(label="sender")
    peer = near.connect(bytes.fromhex(metadata), timeout=60)
    source = near.register(b"x" * (8 << 20))
    stop_process(int(number))
    peer.write(source, fw.RemoteRegion(bytes.fromhex(descriptor)), message=b"all")
    return near
async def is_closed(near):
    try: await asyncio.wait_for(near.close_async(), 0.01)
    except TimeoutError: pass
# The first transfer is to a peer that receives nothing at all.
for arguments in (sys.argv[5:], sys.argv[2:5]):
    if not arguments: continue
    near = begins(*arguments)
    if sys.argv[1] == "it is closed": asyncio.run(is_closed(near))
    del near
print("leaves", flush=True)
"""


@pytest.mark.parametrize("how", ["nobody has it any more", "it is closed", "others are stuck"])
def test_posted_data_arrive_though_the_program_ends_as(program: type[Program], how: str):
    """An endpoint that was just dropped or is being closed gets as much time at exit as an open one."""
    with program(RECEIVER) as takes, program(RECEIVER) as stuck:
        ends = [takes, stuck] if how == "others are stuck" else [takes]
        arguments = [argument for end in ends for argument in (*end.line().split(), str(end.process.pid))]
        with program(SENDER, how, *arguments) as sender:
            assert sender.line() == "leaves"
            # Without a wait the program would have ended by now.
            time.sleep(0.1)
            os.kill(takes.process.pid, signal.SIGCONT)
            assert takes.end() == "b'all' b'x'\nclosed\n"
            sender.end()


def test_the_interpreter_ends_while_another_thread_waits(program: type[Program]):
    with program(SETUP + """
def wait():
    try: to_far.wait_notification()
    except fw.Error: pass
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.1)
print("leaves", flush=True)
""") as other:
        assert other.end() == "leaves\n"


BUSY = """
def again(act):
    while True:
        try: act()
        except fw.Error: pass
def registers(): near.register(bytearray(100))
acts = {
    "waits": lambda: to_far.wait_notification(0.001), "polls": to_far.poll_notification, "registers": registers,
    "accepts": lambda: far.accept(0.001), "connects": lambda: near.connect("127.0.0.1:1", 0.01),
}
for _ in range(4): threading.Thread(target=again, args=(acts[sys.argv[1]],), daemon=True).start()
kept = [near.register(bytearray(100)) for _ in range(200)]
class Lasts:
    "Lets the other threads have the interpreter while it ends."
    sleep, write = staticmethod(time.sleep), staticmethod(os.write)
    def __del__(self): self.sleep(0.1); self.write(1, b"ends\\n")
sys.lasts = Lasts()
time.sleep(0.05)
"""


@pytest.mark.parametrize("what", ["waits", "polls", "registers", "accepts", "connects"])
def test_the_interpreter_ends_while_other_threads_are_busy(program: type[Program], what: str):
    with program(SETUP + BUSY, what, options=("-X", "dev", "-X", "faulthandler")) as other:
        assert other.end() == "ends\n"


def test_an_exception_of_a_block_is_raised_though_closing_fails(program: type[Program]):
    # In a forked child closing fails at once.
    with program(SETUP + """
import asyncio
async def leaves(thing, error):
    async with thing:
        if error: raise error
def leaves_at_once(thing, error):
    with thing:
        if error: raise error
things = [fw.Endpoint() for _ in range(4)]
child = os.fork()
if child == 0:
    for leave in (leaves_at_once, lambda *both: asyncio.run(leaves(*both))):
        for thing in (things.pop(), to_far):
            try: leave(thing, KeyError("body"))
            except KeyError as error: assert "Closing failed after that: " in error.__notes__[0], error.__notes__
        for thing in (things.pop(), to_far):
            try: leave(thing, None)
            except fw.UsageError as error: assert "was built in process" in str(error)
            else: raise AssertionError(f"{thing} was closed")
    print("all", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""", options=()) as other:
        assert other.end() == "all\n"


CHILD = """
import ferrywire as fw

def child(metadata, region):
    with fw.Endpoint() as near, near.connect(metadata, timeout=60) as peer:
        peer.write(near.register(b"spawned"), region, message=b"done").wait(60)
"""


def test_a_spawned_process_has_endpoints_of_its_own(program: type[Program], tmp_path: Path):
    (tmp_path / "work.py").write_text(CHILD)
    with program("""
import ferrywire as fw, multiprocessing, sys
sys.path.insert(0, sys.argv[1])
import work
with fw.Endpoint("127.0.0.1:0") as far:
    got = bytearray(7)
    region = far.register(got)
    spawn = multiprocessing.get_context("spawn")
    # A pickled region arrives as a RemoteRegion.
    spawned = spawn.Process(target=work.child, args=(far.metadata(), region))
    spawned.start()
    peer = far.accept(60)
    print(peer.wait_notification(60), bytes(got), flush=True)
    spawned.join(60)
    assert spawned.exitcode == 0
""", str(tmp_path)) as other:
        assert other.end() == "b'done' b'spawned'\n"


def test_a_forked_child_gets_an_error_at_once(program: type[Program]):
    with program(SETUP + """
region = near.register(bytearray(8)); remote = far.register(bytearray(8)).remote()
transfer = to_far.recv(1, region)
def refused(use):
    try: use()
    except fw.UsageError as error: assert f"the endpoint was built in process {parent}" in str(error), error
    else: raise AssertionError("nothing was refused")
parent = os.getpid()
child = os.fork()
if child == 0:
    for use in (lambda: to_far.write(region, remote), lambda: transfer.wait(60), lambda: far.accept(60),
                lambda: to_far.wait_notification(60), lambda: near.connect("127.0.0.1:1"),
                lambda: near.register(bytearray(1))):
        refused(use)
    del region, transfer, to_far, near
    # An endpoint of the child works, and ends with the child.
    mine, other = fw.Endpoint("127.0.0.1:0"), fw.Endpoint()
    other.connect(mine.metadata()).notify(b"child")
    print(mine.accept(60).wait_notification(60), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
to_near.send(1, far.register(b"12345678")).wait(60)
print(transfer.wait(60), flush=True)
""") as other:
        assert other.end().split("\n")[:2] == ["b'child'", "8"]


def test_a_forked_child_waits_for_no_thread_of_its_parent(program: type[Program]):
    with program(SETUP + """
region = near.register(bytearray(8))
# A thread that releases memory needs the interpreter, which this thread keeps until it has forked.
sys.setswitchinterval(1000)
del region
until = time.monotonic() + 0.2
while time.monotonic() < until: pass
child, since = os.fork(), time.monotonic()
if child == 0: sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert time.monotonic() - since < 4, time.monotonic() - since
to_far.notify(b"goes on").wait(60)
print(to_near.wait_notification(60), flush=True)
""") as other:
        assert other.end() == "b'goes on'\n"
