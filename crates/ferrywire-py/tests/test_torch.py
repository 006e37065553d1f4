"""PyTorch tensors on the CPU, and on GPUs if there are some."""

from __future__ import annotations

import gc
import pickle
import re
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
from conftest import LIMIT, Pair, eventually

import ferrywire as fw

torch = pytest.importorskip("torch", reason="needs torch")
# PyTorch's pickling for other processes.
pytest.importorskip("torch.multiprocessing")


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int64", "uint8", "float16"]
)
def test_tensors_of_every_type_are_moved_as_they_are(pair: Pair, dtype: str):
    sent = torch.randint(0, 2, (16, 5)).to(getattr(torch, dtype))
    got = torch.zeros_like(sent)
    pair.to_far.write(pair.near.register(sent), pair.target(got)).wait(LIMIT)
    assert bytes(got.view(-1).view(torch.uint8).tolist()) == bytes(sent.view(-1).view(torch.uint8).tolist())


def test_parameters_and_views(pair: Pair):
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    pair.to_far.write(pair.near.register(torch.ones(4)), pair.target(parameter), nbytes=16).wait(LIMIT)
    assert parameter.sum() == 4
    view = torch.zeros(10, 8)[3:5]
    region = pair.near.register(view)
    assert region.nbytes == 64 and region.writable and region.device == "host"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(4, 8).t(), "memory: the array is not contiguous (shape (8, 4), strides (1, 8) in elements), and only one run of bytes can be registered: pass x.contiguous()"),
        (lambda: torch.zeros(4, 8)[:, ::2], "shape (4, 4), strides (8, 2)"),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj(), "pass x.resolve_conj()"),
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo has no memory that can be registered"),
        (lambda: torch.zeros(3, device="meta"), "a tensor of device meta"),
    ],
    ids=["transposed", "strided", "conjugated", "sparse", "meta"],
)
def test_tensors_without_a_run_of_bytes(pair: Pair, make, why: str):
    with pytest.raises(fw.UsageError, match=re.escape(why)):
        pair.near.register(make())


def test_the_memory_lives_though_the_tensor_is_given_another(pair: Pair):
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    storage = weakref.ref(tensor.untyped_storage())
    region = pair.far.register(tensor)
    tensor.data = torch.ones(3, dtype=torch.uint8)
    gc.collect()
    pair.to_far.write(pair.near.register(bytes(range(200))), region.remote(), nbytes=200).wait(LIMIT)
    assert region.read_at(0, 200) == bytes(range(200)) and tensor.sum() == 3
    region.deregister()
    del storage


def shared_by_itself(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


def shared_by_a_queue(tensor: torch.Tensor) -> None:
    # A queue does this to a tensor before it sends it.
    ForkingPickler.dumps(tensor)


def resized(tensor: torch.Tensor) -> None:
    tensor.resize_(1 << 22)


def storage_emptied(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("move", [shared_by_itself, shared_by_a_queue, resized, storage_emptied])
def test_a_tensor_that_is_moved_is_found_before_its_old_memory_is_used(pair: Pair, move):
    """Freed memory must not be touched: neither by this process nor by peers that have the description."""
    tensor, other = torch.zeros(1 << 20), torch.zeros(1 << 20)
    uses = {
        "write": lambda region: pair.to_far.write(region, remote),
        "read": lambda region: pair.to_far.read(region, remote),
        "send": lambda region: pair.to_far.send(1, region),
        "recv": lambda region: pair.to_far.recv(1, region),
        "send_blocks": lambda region: pair.to_far.send_blocks(1, region, [0], [8]),
        "recv_blocks": lambda region: pair.to_far.recv_blocks(1, region, [0], [8]),
        "read_at": lambda region: region.read_at(0, 8),
        "write_at": lambda region: region.write_at(0, b"12345678"),
        "descriptor": lambda region: region.descriptor(),
        "remote": lambda region: region.remote(),
        "pickle": pickle.dumps,
    }
    remote = pair.target(other)
    # Each of them is the first to detect it once.
    regions = {name: pair.near.register(tensor) for name in (*uses, "write_blocks", "read_blocks")}
    for name in ("write_blocks", "read_blocks"):
        blocks = fw.BlockList(regions[name], remote, [0], [0], 8)
        uses[name] = lambda _, post=getattr(pair.to_far, name), blocks=blocks: post(blocks)
    held = regions["write"].remote()
    move(tensor)
    for name, use in uses.items():
        for _ in range(2):
            with pytest.raises(fw.UsageError, match=r"region: the tensor's memory has been moved .* call share_memory_\(\) before"):
                use(regions[name])
                raise AssertionError(name)
    with pytest.raises(fw.AccessRefused):
        pair.to_near.read(pair.far.register(bytearray(8)), held, nbytes=8).wait(LIMIT)
    for region in regions.values():
        region.deregister()


def test_a_tensor_that_is_shared_before_it_is_registered_is_as_any(pair: Pair):
    tensor = torch.zeros(1 << 10).share_memory_()
    region = pair.far.register(tensor)
    ForkingPickler.dumps(tensor)
    pair.to_far.write(pair.near.register(torch.ones(1 << 10)), region.remote()).wait(LIMIT)
    assert tensor.sum() == 1 << 10


def test_a_shared_tensor_that_was_moved_is_not_described(pair: Pair):
    tensor = torch.zeros(1 << 20)
    shared = fw.share(pair.far, {"a": tensor})
    assert shared.describe()
    tensor.share_memory_()
    with pytest.raises(fw.UsageError, match="the tensor's memory has been moved"):
        shared.describe()
    shared.close()


def test_a_registered_tensor_is_kept_and_let_go(pair: Pair):
    before = torch.zeros(8)
    region = pair.far.register(before)
    gone = weakref.ref(before)
    address = before.data_ptr()
    del before
    gc.collect()
    pair.to_far.write(pair.near.register(b"12345678"), region.remote(), nbytes=8).wait(LIMIT)
    assert region.read_at(0, 8) == b"12345678" and address
    del region
    eventually(lambda: gone() is None, "the tensor is let go")


def test_a_tensor_that_refers_to_its_region_is_let_go(pair: Pair):
    tensor = torch.zeros(8)
    tensor.region = pair.far.register(tensor)
    gone = weakref.ref(tensor.region)
    del tensor
    eventually(lambda: gone() is None, "the tensor goes, and its region with it")


def test_offsets_may_be_tensors(pair: Pair):
    got = torch.zeros(64, dtype=torch.uint8)
    source, target = pair.near.register(torch.arange(64, dtype=torch.uint8)), pair.target(got)
    blocks = fw.BlockList(source, target, torch.arange(4) * 16, torch.tensor([48, 32, 16, 0]), torch.tensor([8] * 4))
    pair.to_far.write_blocks(blocks, torch.tensor([0, 3])).wait(LIMIT)
    assert got[48:56].tolist() == list(range(8)) and got[:8].tolist() == list(range(48, 56))
    every_other = torch.arange(8)[::2]
    assert len(fw.BlockList(source, target, every_other, every_other, 1)) == 4
    for wrong, name in ((torch.zeros(2), "torch.float32"), (torch.zeros(2, dtype=torch.int32), "torch.int32")):
        with pytest.raises(fw.UsageError, match=f"the array has elements of {name}, must be int64"):
            fw.BlockList(source, target, wrong, wrong, 1)


def test_a_state_dict_is_fetched_in_one_call(pair: Pair):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32)).to(torch.bfloat16)
    other = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32)).to(torch.bfloat16)
    with fw.share(pair.far, model.state_dict()) as shared:
        state = fw.fetch(pair.near, pair.to_far, shared.describe(), timeout=LIMIT)
        assert list(state) == list(model.state_dict())
        fw.fetch(pair.near, pair.to_far, shared.describe(), into=other.state_dict(), timeout=LIMIT)
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name
        assert torch.equal(other.state_dict()[name], tensor), name


needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA GPU")


@needs_gpus
def test_a_tensor_that_a_kernel_is_still_writing_is_sent_as_it_will_be(pair: Pair):
    sent, got = torch.zeros(32 << 20, device="cuda"), torch.zeros(32 << 20, device="cuda")
    source, target = pair.near.register(sent), pair.target(got)
    for turn in range(1, 6):
        torch.cuda._sleep(50_000_000)
        sent.fill_(turn)
        pair.to_far.write(source, target).wait(LIMIT)
        assert (got == turn).all()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        sent.fill_(7)
    transfer = pair.to_far.write(source, target, stream=stream)
    transfer.block_stream()
    assert (got == 7).all()
    transfer.wait(LIMIT)
