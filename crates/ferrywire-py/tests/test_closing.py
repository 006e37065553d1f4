"""Closing and deregistering: at either end, during use, and with a peer that hangs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from conftest import LIMIT, Pair, Program

import ferrywire as fw

CLOSED = "closed by this process: the endpoint, or its connection to this peer"


def test_a_peer_that_was_closed_here(pair: Pair):
    source, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    blocks = fw.BlockList(source, target, [0], [0], 8)
    peer = pair.to_far
    peer.close()
    peer.close()
    for use in (
        lambda: peer.write(source, target),
        lambda: peer.read(source, target),
        lambda: peer.write_blocks(blocks),
        lambda: peer.read_blocks(blocks),
        lambda: peer.send(1, source),
        lambda: peer.recv(1, source),
        lambda: peer.send_blocks(1, source, [0], [8]),
        lambda: peer.recv_blocks(1, source, [0], [8]),
        lambda: peer.notify(b"x"),
        lambda: peer.wait_notification(LIMIT),
        peer.poll_notification,
    ):
        with pytest.raises(fw.Closed, match=f"^{CLOSED}$"):
            use()
    assert isinstance(peer.error, fw.Closed) and "closed" in repr(peer) and not peer.stats()["channels"][0]["alive"]
    # The endpoint, its regions and a new connection still work.
    source.write_at(0, b"after it")
    with pair.near.connect(pair.far.metadata(), timeout=LIMIT) as again:
        assert again.write(source, target).wait(LIMIT) == 8


def test_a_peer_that_has_closed(pair: Pair):
    source, target = pair.far.register(bytearray(8)), pair.near.register(bytearray(8)).remote()
    pair.to_far.notify(b"the last").wait(LIMIT)
    pair.to_far.close()
    assert pair.to_near.wait_notification(LIMIT) == b"the last"
    for use in (lambda: pair.to_near.wait_notification(LIMIT), lambda: pair.to_near.write(source, target).wait(LIMIT)):
        with pytest.raises(fw.PeerClosed, match=r"peer .*near.* closed the connection") as closed:
            use()
        assert "near" in closed.value.peer and closed.value.kind == "peer"


def test_a_block_list_over_a_deregistered_region(pair: Pair):
    source, target = pair.near.register(bytearray(16)), pair.far.register(bytearray(16))
    blocks = fw.BlockList(source, target.remote(), [0, 8], [8, 0], 8)
    both = fw.BlockList.join([blocks, fw.BlockList(pair.near.register(bytearray(8)), target.remote(), [0], [0], 8)])
    assert pair.to_far.write_blocks(blocks).wait(LIMIT) == 16
    target.deregister()
    for move in (pair.to_far.write_blocks, pair.to_far.read_blocks):
        with pytest.raises(fw.AccessRefused, match="peer .*far.* refused the access: the peer has no region with that key"):
            move(blocks).wait(LIMIT)
    source.deregister()
    for move in (pair.to_far.write_blocks, pair.to_far.read_blocks):
        for each in (blocks, both):
            with pytest.raises(fw.UsageError, match="^region: the region is deregistered$"):
                move(each)
    with pytest.raises(fw.UsageError, match="^region: the region is deregistered$"):
        fw.BlockList(source, target_of(pair), [0], [0], 8)


def target_of(pair: Pair) -> fw.RemoteRegion:
    return pair.target(bytearray(16))


def writers(pair: Pair, source: fw.Region, target: fw.RemoteRegion) -> tuple[list[threading.Thread], list[Exception]]:
    """Threads that write until that fails, with their errors; each thread has written before this returns."""
    begun, ends = threading.Barrier(9), []

    def work(number: int) -> None:
        under_way = []
        try:
            pair.to_far.write(source, target, source_offset=number << 12, nbytes=4096).wait(LIMIT)
            begun.wait(LIMIT)
            while True:
                under_way.append(pair.to_far.write(source, target, source_offset=number << 12, nbytes=4096))
                if len(under_way) == 4:
                    under_way.pop(0).wait(LIMIT)
        except Exception as error:
            ends.append(error)
        # Posted operations end too.
        for transfer in under_way:
            try:
                transfer.wait(LIMIT)
            except (fw.Closed, fw.Cancelled, fw.UsageError) as error:
                ends.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    begun.wait(LIMIT)
    return threads, ends


@pytest.mark.parametrize("what", ["the region", "the peer", "the endpoint"])
def test_ends_under_8_threads_that_write(pair: Pair, what: str):
    memory = bytearray(8 << 12)
    source, target = pair.near.register(memory), pair.target(bytearray(4096))
    threads, ends = writers(pair, source, target)
    time.sleep(0.05)
    if what == "the region":
        source.deregister()
        # Nothing touches the memory any more: it can be resized.
        memory.extend(b"more")
    else:
        (pair.to_far if what == "the peer" else pair.near).close(LIMIT)
    [thread.join(LIMIT) for thread in threads]
    assert not any(thread.is_alive() for thread in threads) and len(ends) >= 8
    expected = fw.UsageError if what == "the region" else fw.Closed
    assert all(isinstance(error, expected | fw.Cancelled) for error in ends), ends
    # The other operations continue.
    if what == "the region":
        assert pair.to_far.write(pair.near.register(bytes(8)), target).wait(LIMIT) == 8
    assert pair.far.peer_count <= 1 and not pair.far.closed


PEER = """
import ferrywire as fw, sys
endpoint = fw.Endpoint("127.0.0.1:0", label="stopped")
region = endpoint.allocate(16 << 20)
print(endpoint.metadata().hex(), region.descriptor().hex(), flush=True)
peer = endpoint.accept()
print("accepted", flush=True)
sys.stdin.read()
"""

# The peer receives nothing more, so that calls that depend on it wait.
STOPPED = """
import ferrywire as fw, os, signal, socket, sys, threading
from stopping import stop_process
signal.signal(signal.SIGINT, signal.default_int_handler)
silent = socket.create_server(("127.0.0.1", 0))
metadata, descriptor, number = bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
near = fw.Endpoint(label="near")
peer = near.connect(metadata, timeout=60)
sys.stdin.readline()
memory = bytearray(16 << 20)
region = near.register(memory)
stop_process(number)
transfers = [peer.write(region, fw.RemoteRegion(descriptor)) for _ in range(4)]
def connects(): near.connect(silent.getsockname(), timeout=1000)
def deregisters(): region.deregister()
def closes_the_peer(): peer.close(timeout=1000)
def closes(): near.close(timeout=1000)
for act in (connects, deregisters, closes_the_peer, closes):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try: act()
    except KeyboardInterrupt: print("stopped", flush=True)
    else: print(act.__name__, "came to an end", flush=True)
    # Deregistering continues in the background, and freed memory is not used again.
    if act is deregisters or act is closes_the_peer:
        memory = region if act is deregisters else near.register(bytearray(8))
        try: peer.write(memory, fw.RemoteRegion(descriptor), nbytes=8)
        except fw.UsageError as error: print(error, flush=True)
silent.close()
"""


def test_ctrl_c_ends_connecting_deregistering_and_closing(program: type[Program]):
    with program(PEER) as peer:
        with program(STOPPED, *peer.line().split(), str(peer.process.pid)) as other:
            assert peer.line() == "accepted"
            other.tell("go on")
            assert other.end() == f"stopped\nstopped\nregion: the region is deregistered\nstopped\n{CLOSED}\nstopped\n"


# A host whose name server does not answer.
UNANSWERED = """
import ctypes, fcntl, os, signal, socket, struct, sys, threading
NEWUSER, NEWNS, NEWNET, BIND, SET_FLAGS, UP = 0x10000000, 0x20000, 0x40000000, 4096, 0x8914, 1
libc = ctypes.CDLL(None)
refused = libc.unshare(NEWUSER | NEWNS | NEWNET)
if not refused and os.path.exists("/etc/resolv.conf"):
    there = os.path.realpath("/etc/resolv.conf")
    refused = libc.mount(sys.argv[1].encode(), there.encode(), None, BIND, None)
if refused: sys.exit("not allowed")
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(server, SET_FLAGS, struct.pack("16sh", b"lo", UP))
server.bind(("127.0.0.1", 53))
import ferrywire as fw
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupts():
    server.recv(1000)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupts, daemon=True).start()
try: fw.Endpoint("a-host.example:0")
except KeyboardInterrupt: print("stopped", flush=True)
except fw.LocalError: sys.exit("no name server is asked")
finally: server.close()
"""


# Regression: Ctrl-C was noticed when the name server's time was over.
def test_ctrl_c_ends_the_look_up_of_the_address_to_listen_on(program: type[Program], tmp_path: Path):
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:5\n")
    with program(UNANSWERED, str(conf)) as other:
        out, complaints = other.process.communicate(timeout=LIMIT)
    if complaints in ("not allowed\n", "no name server is asked\n"):
        pytest.skip(f"needs namespaces and a name server: {complaints}")
    assert (out, complaints) == ("stopped\n", "")


@pytest.mark.parametrize("what", ["a region", "what is shared"])
def test_an_exception_of_a_block_is_raised_while_operations_use_its_memory(pair: Pair, what: str):
    if what == "a region":
        block = region = pair.far.register(bytearray(8))
        in_flight = pair.to_near.recv(1, region)
    else:
        np = pytest.importorskip("numpy", reason="needs numpy")
        block = fw.share(pair.far, {"a": np.zeros(1, np.int64), "b": np.ones(1, np.int64)})
        region, other = block._regions
        in_flight = pair.to_near.recv(1, region)
    with pytest.raises(KeyError, match="body") as raised, block:
        raise KeyError("body")
    assert ["operations still use it" in note for note in raised.value.__notes__] == [True]
    if what == "what is shared":
        # An unused region is not kept because of the others.
        with pytest.raises(fw.UsageError, match="the region is deregistered"):
            other.read_at()
    # A block that raised nothing has no further note.
    with pytest.raises(fw.UsageError, match="operations still use it: wait for them, or cancel them, first"), block:
        pass
    in_flight.cancel()
    with block:
        pass
    with pytest.raises(fw.UsageError, match="the region is deregistered"):
        region.read_at()


def test_a_close_that_could_not_begin_can_be_tried_again(program: type[Program]):
    code = """
import ctypes, resource, time
import ferrywire as fw

endpoint = fw.Endpoint("127.0.0.1:0")

# Memory for the objects below, which then need no new memory.
del [bytes(400) for _ in range(5000)][:]
time.sleep(0.2)
# glibc keeps the stack of a detached thread that has ended, and would start a new thread on it, until a thread is
# joined.
libc, number = ctypes.CDLL(None), ctypes.c_ulong()
assert libc.pthread_create(ctypes.byref(number), None, ctypes.cast(libc.getpid, ctypes.c_void_p), None) == 0
assert libc.pthread_join(number, None) == 0

def without_room_for_a_thread(close):
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Below the present use, so that memory freed by other threads is not enough.
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
    try: close()
    except fw.LocalError as error: failed = error
    else: failed = None
    finally: resource.setrlimit(resource.RLIMIT_AS, before)
    assert "start a thread" in str(failed), failed
    assert not endpoint.closed
    endpoint.metadata()

without_room_for_a_thread(endpoint.close)
without_room_for_a_thread(lambda: endpoint._begin_close(5.0))
endpoint.close()
assert endpoint.closed
"""
    # No stack is kept after a thread was joined.
    with program(code, GLIBC_TUNABLES="glibc.pthread.stack_cache_size=0") as other:
        out, complaints = other.process.communicate(timeout=LIMIT)
    assert (other.process.returncode, complaints) == (0, ""), (other.process.returncode, out, complaints)


def test_the_end_of_a_subinterpreter_closes_nothing(program: type[Program]):
    with program("""
import sys
import ferrywire as fw
try:
    import _interpreters
    create, run, destroy = lambda: _interpreters.create("legacy"), _interpreters.run_string, _interpreters.destroy
except ImportError:
    import _xxsubinterpreters
    create = lambda: _xxsubinterpreters.create(isolated=False)
    run, destroy = _xxsubinterpreters.run_string, _xxsubinterpreters.destroy
far, near = fw.Endpoint("127.0.0.1:0"), fw.Endpoint()
to_far = near.connect(far.metadata(), timeout=60)
to_near = far.accept(60)
other = create()
run(other, f'''
import sys
sys.path[:] = {sys.path!r}
try:
    import ferrywire
    print("imported", flush=True)
except ImportError as error:
    print(error, flush=True)
''')
destroy(other)
to_far.notify(b"still here")
assert to_near.wait_notification(60) == b"still here"
""") as other:
        assert "works in the main interpreter of a process alone" in other.end()
