"""Dictionaries of arrays, shared by one process and fetched by another."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
import types

import pytest
from conftest import LIMIT, Pair, Program
from stopping import stop_process

import ferrywire as fw

np = pytest.importorskip("numpy", reason="needs numpy")


def test_arrays_arrive_with_their_shapes_and_types(pair: Pair):
    state = {"a.weight": np.random.default_rng(1).random((3, 5)), "step": np.array(7), "none": np.zeros((0, 2), np.int8)}
    shared = fw.share(pair.far, state)
    assert shared.nbytes == 3 * 5 * 8 + 8
    got = fw.fetch(pair.near, pair.to_far, shared.describe(), timeout=LIMIT)
    assert list(got) == list(state)
    for name, array in state.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape) and (got[name] == array).all()
    state["step"][...] = 8
    assert fw.fetch(pair.near, pair.to_far, shared.describe(), into=got) == got and got["step"] == 8
    told = shared.describe()
    shared.close()
    with pytest.raises(fw.AccessRefused):
        fw.fetch(pair.near, pair.to_far, told, timeout=LIMIT)


def test_tensors_that_are_no_longer_shared_are_not_described(pair: Pair):
    for state in ({"a": np.zeros(3)}, {}):
        with fw.share(pair.far, state) as shared:
            shared.describe()
        with pytest.raises(fw.UsageError, match="^close was called"):
            shared.describe()


def test_a_timeout_that_is_none_is_refused_before_anything_is_read(pair: Pair):
    mine = np.ones(3)
    with fw.share(pair.far, {"a": np.zeros(3)}) as shared:
        for timeout in (float("nan"), -1, -0.5):
            with pytest.raises(fw.UsageError, match=f"^timeout: {timeout} is not a number of seconds$"):
                fw.fetch(pair.near, pair.to_far, shared.describe(), into={"a": mine}, timeout=timeout)
        assert mine.all()


def test_a_mismatch_is_named(pair: Pair):
    with fw.share(pair.far, {"a": np.zeros(3), "b": np.zeros(4, np.float32)}) as shared:
        told = shared.describe()
        for into, why in (
            ({"a": np.zeros(3)}, "into: give the tensors of the peer: ['b'] are missing, and the peer has no []"),
            ({"a": np.zeros(2), "b": np.zeros(4, np.float32)}, "tensor 'a': shape [2] of float64 here, shape [3]"),
            ({"a": np.zeros(3), "b": np.zeros(4)}, "tensor 'b': shape [4] of float64 here, shape [4] of float32 at"),
            ({1: np.zeros(3), "b": 3, ("c",): 4}, "['a'] are missing, and the peer has no [('c',), 1]"),
            ({"a": [1], "b": np.zeros(4, np.float32)}, "tensor 'a': list is no torch tensor or numpy array"),
        ):
            with pytest.raises(fw.UsageError, match=re.escape(why)):
                fw.fetch(pair.near, pair.to_far, told, into=into)
    # Regression: these were AttributeError and TypeError, or an error of the peer that fetched them.
    with pytest.raises(fw.UsageError, match="tensor 1: names are str, not int"):
        fw.share(pair.far, {1: np.zeros(3)})
    with pytest.raises(fw.UsageError, match="tensor 'a': bytearray is no torch tensor or numpy array"):
        fw.share(pair.far, {"a": bytearray(3)})
    with pytest.raises(fw.UsageError, match="tensor 'a': memory: the array is not contiguous"):
        fw.share(pair.far, {"a": np.zeros((3, 3)).T})
    with pytest.raises(fw.UsageError, match="description: version 99"):
        fw.fetch(pair.near, pair.to_far, b'{"version": 99}')


def test_a_description_that_is_none_is_refused(pair: Pair):
    with fw.share(pair.far, {"a": np.zeros(3)}) as shared:
        good = shared.describe()
    whole = json.loads(good)
    (entry,) = whole["tensors"]

    def altered(**changes: object) -> bytes:
        return json.dumps({**whole, "tensors": [{**entry, **changes}]}).encode()

    for told in (
        *(b"", b"\xff\xfe\xff", b"{", b"[]", b"7", b"[" * 100_000, good[:-1], b'{"version": 1}', None),
        *(json.dumps({**whole, "tensors": tensors}).encode() for tensors in (None, {}, [None], [{}], [entry, entry])),
        *(altered(**{key: None}) for key in entry),
        *(altered(region=region) for region in ("", "no", "00", entry["region"][:-2])),
        *(altered(shape=shape) for shape in ([-1], [1.5], ["3"], [True], 3, [1 << 62, 1 << 62], [1 << 70], [1] * 100)),
        *(altered(dtype=dtype) for dtype in ("", "nonsense", "object", "O,i4", "(", "[('a'")),
        altered(shape=[4]),
    ):
        with pytest.raises(fw.UsageError):
            fw.fetch(pair.near, pair.to_far, told)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_description_that_contradicts_its_regions_allocates_nothing(pair: Pair, library: str):
    if library == "torch":
        pytest.importorskip("torch", reason="needs torch")
    with fw.share(pair.far, {"a": np.zeros(3, np.float32)}) as shared:
        (entry,) = json.loads(shared.describe())["tensors"]

        def altered(**changes: object) -> bytes:
            whole = {"version": 1, "tensors": [{**entry, "library": library, **changes}]}
            return json.dumps(whole).encode()

        for changes, said in (
            ({"shape": [1 << 40]}, 1 << 42),
            ({"shape": [1 << 62, 4]}, 1 << 66),
            ({"shape": [0, 1 << 62]}, 0),
            ({"shape": [4]}, 16),
            ({"dtype": "float64"}, 24),
        ):
            with pytest.raises(fw.UsageError, match=f"^tensor 'a': shape .* is {said} bytes, and the region at the peer has 12$"):
                fw.fetch(pair.near, pair.to_far, altered(**changes))
        got = fw.fetch(pair.near, pair.to_far, altered(), timeout=LIMIT)["a"]
        assert list(got.shape) == [3] and not got.any()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_memory_that_is_not_there_is_named(pair: Pair, library: str):
    if library == "torch":
        pytest.importorskip("torch", reason="needs torch")
    with fw.share(pair.far, {"a": np.zeros(1, np.float32)}) as shared:
        (entry,) = json.loads(shared.describe())["tensors"]
        descriptor = bytearray.fromhex(entry["region"])
        # A wrong but consistent description of a peer.
        descriptor[25:33] = (1 << 60).to_bytes(8, "little")
        lie = {**entry, "library": library, "shape": [1 << 58], "region": descriptor.hex()}
        with pytest.raises(fw.LocalError, match=f"^tensor 'a': cannot allocate {1 << 60} bytes: "):
            fw.fetch(pair.near, pair.to_far, json.dumps({"version": 1, "tensors": [lie]}).encode())


def test_a_fetch_of_tensors_of_pytorch_without_it_is_an_error_that_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    with fw.share(pair.far, {"a": np.zeros(1)}) as shared:
        (entry,) = json.loads(shared.describe())["tensors"]
        told = json.dumps({"version": 1, "tensors": [{**entry, "library": "torch"}]}).encode()
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(fw.LocalError, match="^tensor 'a': the peer shares tensors of PyTorch, which cannot be imported "):
            fw.fetch(pair.near, pair.to_far, told)

        def empty(*_: object, **__: object) -> None:
            raise AssertionError("Torch not compiled with CUDA enabled")

        kind = type("dtype", (), {"itemsize": 8})
        without_cuda = types.SimpleNamespace(dtype=kind, float64=kind(), empty=empty, Tensor=())
        monkeypatch.setitem(sys.modules, "torch", without_cuda)
        with pytest.raises(fw.LocalError, match="^tensor 'a': cannot allocate 8 bytes: Torch not compiled"):
            fw.fetch(pair.near, pair.to_far, told, device="cuda")


class Wrapper:
    """As a DTensor of PyTorch is: it has a shape, and its memory is that of the tensors it wraps."""

    device, layout = types.SimpleNamespace(type="cpu"), "torch.strided"

    def __init__(self, raises: bool):
        self.raises = raises

    def data_ptr(self) -> int:
        if self.raises:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return 0

    def detach(self) -> Wrapper:
        return self

    def numel(self) -> int:
        return 4

    def element_size(self) -> int:
        return 8

    def is_contiguous(self) -> bool:
        return True

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj


@pytest.mark.parametrize("raises", [False, True])
def test_a_tensor_that_wraps_others_is_refused_with_the_way_to_its_memory(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, raises: bool
):
    """Regression: the null pointer was the error, or one that is no error of ferrywire."""
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Wrapper))
    with pytest.raises(fw.UsageError, match=r"^memory: a Wrapper has no memory of its own: .* x\.to_local\(\)$"):
        pair.near.register(Wrapper(raises))


PEER = """
import ferrywire as fw, numpy as np, sys
endpoint = fw.Endpoint("127.0.0.1:0")
shared = fw.share(endpoint, {"a": np.zeros(1 << 20)})
print(endpoint.metadata().hex(), shared.describe().hex(), flush=True)
peer = endpoint.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


def test_a_fetch_that_is_broken_off_writes_no_more(program: type[Program], monkeypatch: pytest.MonkeyPatch):
    # A stopped peer does not confirm the end.
    monkeypatch.setattr("ferrywire._tensors.CANCEL_SECONDS", 0.5)
    with program(PEER) as other, fw.Endpoint() as near:
        metadata, told = map(bytes.fromhex, other.line().split())
        peer = near.connect(metadata, LIMIT)
        assert other.line() == "accepted"
        mine = np.ones(1 << 20)
        stop_process(other.process.pid)
        try:
            with pytest.raises(fw.TimedOut, match="read with"):
                fw.fetch(near, peer, told, into={"a": mine}, timeout=0.05)
        finally:
            other.process.send_signal(signal.SIGCONT)
        before = mine.copy()
        # The peer answers all earlier requests before this one.
        peer.notify(b"still here").wait(LIMIT)
        time.sleep(0.2)
        assert (mine == before).all()
        # The next fetch works.
        assert not fw.fetch(near, peer, told, into={"a": mine}, timeout=LIMIT)["a"].any()
