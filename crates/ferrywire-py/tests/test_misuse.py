"""Each misuse raises immediately, with a message that says what to do, or does the right thing."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import re

import pytest
from conftest import LIMIT, Pair

import ferrywire as fw

np = pytest.importorskip("numpy", reason="needs numpy")


def refuses(message: str, kind: type[Exception] = fw.UsageError):
    return pytest.raises(kind, match=re.escape(message))


def test_an_array_that_is_no_single_run(pair: Pair):
    with refuses("memory: the array is not contiguous (shape (4, 2), strides (32, 16) in bytes), and only one run of bytes"):
        pair.near.register(np.zeros((4, 4))[:, ::2])
    with refuses("pass numpy.ascontiguousarray(x)"):
        pair.near.register(np.zeros((4, 4)).T)


@pytest.mark.parametrize("thing", [5, "text", None, [1, 2], object()])
def test_objects_without_memory_are_refused(pair: Pair, thing: object):
    with refuses(f"memory: {type(thing).__name__} has no memory that can be registered"):
        pair.near.register(thing)


class WithAnObject(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("thing", ctypes.py_object)]


class MaybeAnObject(ctypes.Union):
    _fields_ = [("number", ctypes.c_long), ("thing", ctypes.py_object)]


class Packed(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("number", ctypes.c_int), ("thing", ctypes.py_object)]


OBJECTS = {
    "array": lambda: np.array([1.5, None, "x"], dtype=object),
    "empty": lambda: np.zeros(0, dtype=object),
    "struct": lambda: np.zeros(3, np.dtype([("Offset", "i8"), ("thing", "O")])),
    "struct in a struct": lambda: np.zeros(3, np.dtype([("a", [("b", "i8"), ("c", "O", (2,))])])),
    "view": lambda: memoryview(np.array([None])),
    "py_object": lambda: memoryview((ctypes.py_object * 4)()),
    "structure": lambda: memoryview((WithAnObject * 2)()),
    "py_objects of ctypes": lambda: (ctypes.py_object * 4)(),
    "py_object of ctypes": lambda: ctypes.py_object(),
    "single structure": lambda: WithAnObject(),
    "single element": lambda: np.array(None),
    "struct of an array": lambda: np.zeros(1, np.dtype([("thing", "O")]))[0],
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_arrays_of_objects_are_refused(pair: Pair, make):
    """Registering this would let a peer crash the interpreter."""
    with refuses("memory: the array has elements that are Python objects"):
        pair.near.register(make())


def test_elements_that_may_be_objects_are_refused(pair: Pair):
    for make in (MaybeAnObject, MaybeAnObject * 2, Packed, Packed * 2):
        for thing in (make(), memoryview(make())):
            with refuses("memory: the buffer does not say what its elements are made of"):
                pair.near.register(thing)


def test_arrays_of_objects_are_neither_shared_nor_fetched_into(pair: Pair):
    for make in (OBJECTS["array"], OBJECTS["struct"]):
        with refuses("tensor 'a': memory: the array has elements that are Python objects"):
            fw.share(pair.far, {"a": make()})
        mine = make()
        region = pair.far.register(bytearray(mine.nbytes))
        entry = {"name": "a", "library": "numpy", "dtype": str(mine.dtype), "shape": [3]}
        told = {"version": 1, "tensors": [{**entry, "region": region.descriptor().hex()}]}
        with refuses("tensor 'a': memory: the array has elements that are Python objects"):
            fw.fetch(pair.near, pair.to_far, json.dumps(told).encode(), into={"a": mine})


def test_the_letter_of_objects_in_a_name_is_no_object(pair: Pair):
    named = np.zeros(3, np.dtype([("O", "i4"), ("Of", "f8")]))
    assert pair.near.register(named).nbytes == 36


def test_buffers_that_leave_strides_or_shape_out_are_registered(pair: Pair):
    """Regression: they had no memory that could be registered, said the error."""
    for source, got in (((ctypes.c_int * 3)(1, 2, 3), (ctypes.c_int * 3)()), (ctypes.c_double(1.5), ctypes.c_double())):
        target = pair.target(got)
        assert pair.to_far.write(pair.near.register(source), target).wait(LIMIT) == ctypes.sizeof(source)
        assert bytes(got) == bytes(source)


class OnGpu:
    """An array of a GPU library, by its __cuda_array_interface__."""

    def __init__(self, **changes: object):
        whole = {"shape": (4,), "typestr": "<i4", "data": (0x10000, False), "version": 3, **changes}
        self.__cuda_array_interface__ = {name: value for name, value in whole.items() if value is not KeyError}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": (1 << 62, 4)}, "has shape (4611686018427387904, 4) of \"<i4\": no such array fits into memory"),
        ({"shape": (1 << 61,)}, "has shape (2305843009213693952,) of \"<i4\": no such array fits"),
        ({"shape": (-4,)}, "has shape (-4,) of"),
        ({"shape": (-4, -4)}, "has shape (-4, -4) of"),
        ({"shape": (0, -4)}, "has shape (0, -4) of"),
        ({"shape": (1 << 70,)}, "has \"shape\": (1180591620717411303424,)"),
        ({"shape": "x"}, "has \"shape\": x"),
        ({"strides": (6,)}, "the array is not contiguous (shape (4,), strides (6,) in bytes)"),
        ({"strides": (5,)}, "the array is not contiguous"),
        ({"shape": (4, 4), "strides": (4,)}, "has 1 strides for 2 dimensions"),
        ({"shape": (1 << 60, 1 << 60, 0), "strides": (1,)}, "has 1 strides for 3 dimensions"),
        ({"strides": "none"}, "has \"strides\": none"),
        ({"typestr": "f"}, "has \"typestr\": f"),
        ({"typestr": "<i-4"}, "has \"typestr\": <i-4"),
        ({"typestr": 4}, "has \"typestr\": 4"),
        ({"typestr": "|O8"}, "the array has elements that are Python objects"),
        ({"data": 0x10000}, "has \"data\": 65536"),
        *(({name: KeyError}, f"has no \"{name}\"") for name in ("shape", "typestr", "data")),
        # A complete interface is refused only for its address.
        ({}, "reports memory on a CUDA GPU, but the CUDA driver of this process does not know the address"),
        ({"strides": (4,)}, "does not know the address"),
        ({"typestr": "<U2", "shape": (2, 3), "strides": (24, 8)}, "does not know the address"),
    ],
)
def test_the_gpu_memory_that_an_array_describes_is_checked(pair: Pair, changes: dict[str, object], why: str):
    with refuses(why):
        pair.near.register(OnGpu(**changes))


def test_an_array_without_elements_is_on_no_gpu(pair: Pair):
    for empty in (OnGpu(shape=(0,)), OnGpu(shape=(1 << 62, 4, 0), data=(0, False))):
        assert pair.near.register(empty).nbytes == 0
    wrong = OnGpu()
    wrong.__cuda_array_interface__ = 5
    with refuses("the array's __cuda_array_interface__ is not a dictionary"):
        pair.near.register(wrong)


@pytest.mark.parametrize("offsets", [np.zeros(2), np.zeros(2, np.uint64), np.zeros(2, np.int32)])
def test_offsets_of_another_type(pair: Pair, offsets: np.ndarray):
    source, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    with refuses(f"local_offsets: the array has elements of {offsets.dtype}, must be int64: pass x.astype('int64')"):
        fw.BlockList(source, target, offsets, np.zeros(2, np.int64), 4)
    with refuses("remote_offsets: the array has elements of"):
        fw.BlockList(source, target, [0, 4], offsets, 4)


def test_offsets_of_another_shape_length_or_sign(pair: Pair):
    source, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    with refuses("local_offsets: the array has shape (2, 2), must have one dimension"):
        fw.BlockList(source, target, np.zeros((2, 2), np.int64), [0], 4)
    with refuses("1 given for 2 local offsets"):
        fw.BlockList(source, target, [0, 4], [0], 4)
    with refuses("block 1: the local offset is -4"):
        fw.BlockList(source, target, [0, -4], [0, 0], 4)
    with refuses("are outside the"):
        fw.BlockList(source, target, [0, 4], [0, 5], 4)
    with refuses("local_offsets: not a list of integers"):
        fw.BlockList(source, target, [0, "x"], [0, 4], 4)
    blocks = fw.BlockList(source, target, [0, 4], [0, 4], 4)
    with refuses("block index: 2, but the list has 2 blocks"):
        pair.to_far.write_blocks(blocks, [2])
    with refuses("indices: entry 0 is -1, not the index of a block"):
        pair.to_far.write_blocks(blocks, [-1])


def test_a_range_outside_of_a_region(pair: Pair):
    source, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    with refuses("bytes 0..9 are outside the source region of 8 bytes"):
        pair.to_far.write(source, target, nbytes=9)
    with refuses("bytes 4..12 are outside the target region of 8 bytes"):
        pair.to_far.write(source, target, target_offset=4)
    with refuses("source_offset: -1 is negative"):
        pair.to_far.write(source, target, source_offset=-1)
    with refuses("bytes 6..10 are outside the source region of 8 bytes"):
        source.read_at(6, 4)


def test_read_only_memory_is_never_written_to(pair: Pair):
    constant = b"for ever"
    region = pair.far.register(constant)
    assert not region.writable and "read-only" in repr(region)
    with refuses("target: the region's memory is read-only"):
        pair.to_near.recv(1, region)
    got = bytearray(8)
    back = pair.near.register(got)
    with refuses("target: the region's memory is read-only"):
        pair.to_near.read(region, back.remote())
    with refuses("the region's memory is read-only, and a peer that has the descriptor could write to it"):
        region.remote()
    with refuses("memory: the object is read-only: register a writable copy"):
        pair.far.register(constant, writable=True)
    pair.to_near.write(region, back.remote()).wait(LIMIT)
    assert got == constant


def test_a_region_that_was_deregistered(pair: Pair):
    region = pair.near.register(bytearray(8))
    target = pair.far.register(bytearray(8))
    remote = target.remote()
    with region:
        pair.to_far.write(region, remote).wait(LIMIT)
    region.deregister()
    for use in (lambda: pair.to_far.write(region, remote), region.remote, region.read_at):
        with refuses("region: the region is deregistered"):
            use()
    assert "deregistered" in repr(region)
    target.deregister()
    with pytest.raises(fw.AccessRefused, match="refused the access") as refusal:
        pair.to_far.write(pair.near.register(bytes(8)), remote).wait(LIMIT)
    assert refusal.value.kind == "peer" and "far" in refusal.value.peer


def test_a_region_of_another_endpoint_or_peer(pair: Pair):
    mine, other = pair.near.register(bytearray(8)), pair.far.register(bytearray(8))
    with refuses("region: the region was registered with another endpoint"):
        pair.to_far.write(other, other.remote())
    with refuses("remote region: the region belongs to endpoint"):
        pair.to_far.write(mine, mine.remote())


def test_after_close(pair: Pair):
    region, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    pair.near.close()
    pair.near.close()
    assert pair.near.closed and "closed" in repr(pair.near)
    for use in (
        lambda: pair.near.register(bytearray(1)),
        lambda: pair.near.allocate(1),
        lambda: pair.near.connect(pair.far.metadata()),
        lambda: pair.near.accept(),
        lambda: pair.near.metadata(),
    ):
        with refuses("closed by this process", fw.Closed):
            use()
    with pytest.raises((fw.PeerClosed, fw.Closed), match="closed"):
        pair.to_far.write(region, target).wait(LIMIT)
    pair.to_far.close()


def test_a_timeout_leaves_the_transfer_running(pair: Pair):
    got = bytearray(4)
    transfer = pair.to_near.recv(9, pair.far.register(got))
    assert transfer.poll() is None and not transfer.done()
    with pytest.raises(fw.TimedOut, match="recv with .*near.*0 of 4 bytes moved") as late:
        transfer.wait(timeout=0.01)
    assert isinstance(late.value, TimeoutError)
    with pytest.raises(fw.TimedOut, match="recv with"):
        transfer.wait(LIMIT, stall_timeout=0.01)
    pair.to_far.send(9, pair.near.register(b"late")).wait(LIMIT)
    assert transfer.wait(LIMIT) == 4 and got == b"late"


def test_a_timeout_names_the_peer_and_blames_no_one_yet(pair: Pair):
    transfer = pair.to_far.recv(9, pair.near.register(bytearray(4)))
    name = pair.to_far.name
    waits = (
        lambda limit: transfer.wait(limit),
        lambda limit: transfer.wait(LIMIT, stall_timeout=limit),
        lambda limit: fw.wait_any([transfer], limit),
        lambda limit: pair.to_far.wait_notification(limit),
    )
    for wait in waits:
        for limit, words in ((0.01, "no progress for|not done within"), (0, "^not (done )?yet: ")):
            with pytest.raises(fw.TimedOut, match=words) as late:
                wait(limit)
            assert (late.value.kind, late.value.peer) == ("timeout", name)
    with pytest.raises(fw.TimedOut, match="^not yet: a peer to connect to") as late:
        pair.far.accept(0)
    assert (late.value.kind, late.value.peer) == ("timeout", None)
    transfer.cancel()


def test_a_cancelled_transfer_says_so(pair: Pair):
    transfer = pair.to_near.recv(9, pair.far.register(bytearray(4)))
    transfer.cancel()
    with refuses("cancelled", fw.Cancelled):
        transfer.wait(LIMIT)


def test_a_message_that_is_too_long(pair: Pair):
    transfer = pair.to_near.recv(9, pair.far.register(bytearray(4)))
    pair.to_far.send(9, pair.near.register(b"too long"))
    with refuses("a message of 8 bytes with tag 9 arrived for a buffer of 4", fw.Truncated):
        transfer.wait(LIMIT)
    with refuses(f"notification: {fw.NOTIFY_BYTES_MAX + 1} bytes, at most {fw.NOTIFY_BYTES_MAX} are allowed"):
        pair.to_far.notify(bytes(fw.NOTIFY_BYTES_MAX + 1))


def test_a_configuration_that_cannot_work():
    with refuses("secret: needed to listen beyond loopback: give both ends the same secret"):
        fw.Endpoint("0.0.0.0:0")
    with refuses("secret: must be at least 8 bytes long"):
        fw.Endpoint("0.0.0.0:0", secret=b"short")
    with refuses("listen: \"nonsense\" is not an address: write it as 'host:port'"):
        fw.Endpoint("nonsense")
    with refuses("channels: 0 is not between 1 and"):
        fw.Endpoint(channels=0)
    with refuses("threads: 0 starts no progress thread"):
        fw.Endpoint(threads=0)
    with refuses("accept: this endpoint does not listen: build it with an address"), fw.Endpoint() as endpoint:
        endpoint.accept()
    with refuses("timeout: -1 is not a number of seconds"), fw.Endpoint("127.0.0.1:0") as endpoint:
        endpoint.accept(timeout=-1)
    with refuses("device: \"moon:1\"; expected host, cuda:N or sim:N"), fw.Endpoint() as endpoint:
        endpoint.allocate(1, "moon:1")


def test_no_peer_and_another_peer(pair: Pair):
    with refuses("Connection refused", fw.Unreachable) as gone, fw.Endpoint("127.0.0.1:0") as other:
        metadata = other.metadata()
        other.close()
        pair.near.connect(metadata, timeout=LIMIT)
    assert isinstance(gone.value, ConnectionError) and gone.value.kind == "peer"
    assert gone.value.reason == "connection_refused"
    with fw.Endpoint("127.0.0.1:0", secret=b"one secret") as guarded:
        with refuses("refused", fw.Refused) as stranger:
            pair.near.connect(guarded.metadata(), timeout=LIMIT)
        assert (stranger.value.kind, stranger.value.reason) == ("refused", "secret")
    for nonsense in (b"", b"\x01", b"x" * 40):
        with refuses("metadata: "):
            pair.near.connect(nonsense)
        with refuses("region descriptor: "):
            fw.RemoteRegion(nonsense)
    with refuses("descriptor: the buffer is not contiguous"):
        fw.RemoteRegion(memoryview(bytes(80))[::2])


HOSTILE = os.environ.get("FERRYWIRE_TEST_HOSTILE")


@pytest.mark.skipif(HOSTILE is None, reason="needs a peer that breaks the protocol (run by cargo test)")
def test_a_peer_that_takes_more_than_it_was_offered(pair: Pair):
    with refuses("channels = 256, where ", fw.ProtocolViolation) as caught:
        pair.near.connect(HOSTILE, timeout=LIMIT)
    assert caught.value.kind == "peer" and HOSTILE in caught.value.peer
    assert pair.to_far.notify(b"still here").wait(LIMIT) == 0


def test_an_unknown_name_is_a_network_error(pair: Pair):
    for to in ("no.such.host.invalid:7", ("no.such.host.invalid", 7)):
        with refuses("cannot reach no.such.host.invalid:7: ", fw.Unreachable) as unknown:
            pair.near.connect(to, timeout=LIMIT)
        assert (unknown.value.kind, unknown.value.peer) == ("peer", "no.such.host.invalid:7")
        assert unknown.value.reason == "name_not_resolved"
    with refuses("look up no.such.host.invalid:7: ", fw.LocalError):
        fw.Endpoint("no.such.host.invalid:7")


@pytest.mark.parametrize("text", ["", "host", "host:", ":7", "host:port", "host:65536", "host:-1", "::1", "a\0b:7"])
def test_malformed_addresses_are_refused(pair: Pair, text: str):
    with refuses(" is not an address: write it as 'host:port'"):
        pair.near.connect(text)
    with refuses("listen: "):
        fw.Endpoint(text)


def test_addresses_of_another_kind(pair: Pair):
    whom = "nor an address: 'host:port', ('host', port)"
    for wrong in (None, 7420, [1, 2], 1.5):
        with refuses(f"to: {type(wrong).__name__} is not metadata (bytes), {whom}"):
            pair.near.connect(wrong)
    for wrong in (7420, b"127.0.0.1:0"):
        with refuses(f"listen: {type(wrong).__name__} is not an address: 'host:port', ('host', port)"):
            fw.Endpoint(wrong)
    for port in (-1, 65536, 1 << 200):
        with refuses(f"listen: {port} is not a port: use 0 to 65535"):
            fw.Endpoint(("localhost", port))
    for pair_of_what in (("localhost",), ("localhost", "7"), (7, 7), ("", 7), ("a", 7, 7)):
        with refuses("to: the value is not an address: pass ('host', port)"):
            pair.near.connect(pair_of_what)
    with refuses("secret: int is not text or bytes"):
        fw.Endpoint(secret=5)


@pytest.mark.parametrize("number", [-1, -(1 << 63), 1 << 64, 1 << 200, -(1 << 200)])
def test_numbers_that_do_not_fit_are_refused_by_name(pair: Pair, number: int):
    region, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    why = "negative" if number < 0 else "has more than 64 bits"
    for name, use in (
        ("tag", lambda: pair.to_far.send(number, region)),
        ("tag", lambda: pair.to_far.recv(number, region)),
        ("tag", lambda: pair.to_far.send_blocks(number, region, [0], 8)),
        ("tag", lambda: pair.to_far.recv_blocks(number, region, [0], 8)),
        ("nbytes", lambda: pair.to_far.write(region, target, nbytes=number)),
        ("nbytes", lambda: pair.to_far.recv(1, region, nbytes=number)),
        ("nbytes", lambda: pair.near.allocate(number)),
        ("offset", lambda: pair.to_far.send(1, region, offset=number)),
        ("offset", lambda: region.read_at(number)),
        ("nbytes", lambda: region.read_at(0, number)),
        ("offset", lambda: region.write_at(number, b"x")),
        ("source_offset", lambda: pair.to_far.read(region, target, source_offset=number)),
        ("target_offset", lambda: pair.to_far.write(region, target, target_offset=number)),
        ("sizes", lambda: pair.to_far.send_blocks(1, region, [0], number)),
        ("sizes", lambda: fw.BlockList(region, target, [0], [0], number)),
        ("channels", lambda: fw.Endpoint(channels=number)),
        ("threads", lambda: fw.Endpoint(threads=number)),
        ("chunk_bytes", lambda: fw.Endpoint(chunk_bytes=number)),
        ("window", lambda: fw.Endpoint(window=number)),
        ("socket_buffer_bytes", lambda: fw.Endpoint(socket_buffer_bytes=number)),
    ):
        with pytest.raises(fw.UsageError, match=f"^{name}: .*{why}"):
            use()
    with pytest.raises(TypeError, match="tag"):
        pair.to_far.send("1", region)


def test_memory_of_a_peer_is_a_remote_region(pair: Pair):
    region = pair.near.register(bytearray(8))
    for what, use in (
        ("target", lambda other: pair.to_far.write(region, other)),
        ("source", lambda other: pair.to_far.read(region, other)),
        ("remote", lambda other: fw.BlockList(region, other, [0], [0], 8)),
    ):
        with refuses(f"{what}: a Region names memory of this process, and a RemoteRegion that of a peer: pass region.remote()"):
            use(region)
        with refuses(f"{what}: bytes is not a RemoteRegion"):
            use(b"descriptor")


def test_messages_and_metadata_are_any_buffer_of_bytes(pair: Pair):
    region, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    blocks = fw.BlockList(region, target, [0], [0], 8)
    for kind in (bytes, bytearray, memoryview, lambda text: np.frombuffer(text, np.uint8)):
        pair.to_far.notify(kind(b"alone")).wait(LIMIT)
        pair.to_far.write(region, target, message=kind(b"behind a write")).wait(LIMIT)
        pair.to_far.write_blocks(blocks, message=kind(b"behind blocks")).wait(LIMIT)
        got = [pair.to_near.wait_notification(LIMIT) for _ in range(3)]
        assert got == [b"alone", b"behind a write", b"behind blocks"]
        with fw.Endpoint(secret=kind(b"a secret of 16 b")) as near:
            with refuses("refused", fw.Refused):
                near.connect(kind(pair.far.metadata()), timeout=LIMIT)
    for wrong in ("text", 7, [1], np.zeros(2)):
        with refuses(f"message: {type(wrong).__name__} is not bytes"):
            pair.to_far.notify(wrong)


def test_one_size_does_for_all_blocks(pair: Pair):
    got = bytearray(16)
    received = pair.to_near.recv_blocks(3, pair.far.register(got), [8, 0], np.int64(4))
    pair.to_far.send_blocks(3, pair.near.register(b"abcdefgh"), [4, 0], sizes=4).wait(LIMIT)
    assert received.wait(LIMIT) == 8 and got == b"abcd\0\0\0\0efgh\0\0\0\0"
    with refuses("pieces: 2 offsets and 1 sizes"):
        pair.to_far.send_blocks(3, pair.near.register(bytes(8)), [4, 0], [4])


class OneSize:
    """An array with one entry, which converts to a number as PyTorch's tensors do."""

    ndim = 1

    def __init__(self, size: int):
        self.array = np.array([size])

    def __index__(self) -> int:
        return int(self.array[0])

    def __len__(self) -> int:
        return 1

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_an_array_of_one_size_is_for_one_block(pair: Pair):
    region, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    assert len(fw.BlockList(region, target, [0], [0], OneSize(4))) == 1
    with refuses("2"):
        fw.BlockList(region, target, [0, 4], [0, 4], OneSize(4))
    assert fw.BlockList(region, target, [0, 4], [0, 4], np.array(4)).nbytes == 8


def test_nics_that_are_not_there_are_refused_with_those_that_are():
    with pytest.raises(fw.UsageError, match="NIC: nope does not exist or has no address; name one of .*lo"):
        fw.Endpoint(nics=["lo", "nope"])
    fw.Endpoint(nics=["lo"]).close()


def test_this_host_and_its_gpus_are_named(pair: Pair):
    with refuses(f"listen on 127.0.0.1:{pair.far.port}: Address already in use", fw.LocalError) as taken:
        fw.Endpoint(f"127.0.0.1:{pair.far.port}")
    assert taken.value.kind == "local" and taken.value.peer is None and isinstance(taken.value, OSError)
    assert taken.value.errno == errno.EADDRINUSE and str(taken.value) == taken.value.strerror
    assert not str(taken.value).startswith("[Errno")
    again = pickle.loads(pickle.dumps(taken.value))
    assert (again.errno, str(again), again.kind) == (errno.EADDRINUSE, str(taken.value), "local")
    with refuses("cannot allocate host memory: the system has no 1152921504606846976 bytes", fw.LocalError) as much:
        pair.near.allocate(1 << 60)
    assert much.value.errno == errno.ENOMEM
    with refuses("there is no simulated GPU 99999: use 0 to 15", fw.GpuError) as none:
        pair.near.allocate(8, "sim:99999")
    assert none.value.kind == "gpu"


def test_the_plugin_of_sources_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ferrywire._nccl.FILE", "ferrywire/lib/none.so")
    with refuses("none.so: install the package (pip install .), or build the plugin", fw.LocalError) as none:
        fw.nccl_plugin_path()
    assert none.value.errno is None


def test_every_exception_has_its_place():
    from ferrywire import _errors

    for name in _errors.__all__:
        assert issubclass(getattr(fw, name), fw.Error) and name in fw.__all__
    assert issubclass(fw.PeerLost, fw.PeerError) and issubclass(fw.PeerLost, ConnectionError)
    assert issubclass(fw.UsageError, ValueError) and issubclass(fw.TimedOut, TimeoutError)
    assert issubclass(fw.LocalError, OSError)


def test_a_stream_for_memory_that_is_in_none(pair: Pair):
    region, target = pair.near.register(bytearray(8)), pair.target(bytearray(8))
    with refuses("stream: the region is not memory of a CUDA GPU"):
        pair.to_far.write(region, target, stream=0)
