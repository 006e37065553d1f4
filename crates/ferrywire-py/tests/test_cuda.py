"""CUDA memory and streams of other libraries, with a stand-in for the driver, so that no GPU is needed.

Its device memory cannot be touched by the CPU, and its streams can be held up.
"""

from __future__ import annotations

import os

import pytest
from conftest import Program

DRIVER = os.environ.get("FERRYWIRE_TEST_DRIVER")
pytestmark = pytest.mark.skipif(DRIVER is None, reason="needs the stand-in for the CUDA driver (run by cargo test)")

GPU = """
import ctypes, sys, types
import ferrywire as fw

cuda = ctypes.CDLL("libcuda.so.1")

def do(name, *arguments):
    failed = getattr(cuda, name)(*arguments)
    assert failed == 0, (name, failed)

do("cuInit", 0)
context = ctypes.c_void_p()
do("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
do("cuCtxSetCurrent", context)

def pinned(nbytes):
    base = ctypes.c_void_p()
    do("cuMemHostAlloc", ctypes.byref(base), ctypes.c_size_t(max(nbytes, 4096)), 3)
    return base

class Array:
    "A library's array on the GPU."
    def __init__(self, count, strides=None, read_only=False):
        address = ctypes.c_uint64()
        do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count * 4))
        self.address, self.nbytes = address.value, count * 4
        # Copies from other memory would block.
        self.pinned = pinned(self.nbytes)
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i4", "data": (self.address, read_only), "strides": strides, "version": 3}
    def put(self, stream, data):
        ctypes.memmove(self.pinned, data, len(data))
        do("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.address), self.pinned, ctypes.c_size_t(len(data)), stream)
    def get(self):
        data = ctypes.create_string_buffer(self.nbytes)
        do("cuMemcpyDtoH_v2", data, ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
        return data.raw

def new_stream():
    stream = ctypes.c_void_p()
    do("cuStreamCreate", ctypes.byref(stream), 1)
    return stream

class Gate:
    "A place in a stream that nothing passes before it is opened."
    def __init__(self, stream):
        word = pinned(8)
        self.word = ctypes.c_uint64.from_address(word.value)
        do("cuStreamWaitValue64_v2", stream, ctypes.c_uint64(word.value), ctypes.c_uint64(1), 0)
    def open(self):
        self.word.value = 1

far, near = fw.Endpoint("127.0.0.1:0"), fw.Endpoint()
to_far = near.connect(far.metadata(), timeout=60)
to_near = far.accept(60)
"""


def run(program: type[Program], code: str) -> str:
    with program(GPU + code, LD_LIBRARY_PATH=DRIVER) as other:
        # The stand-in reports memory that a program has not freed; this was the program's own.
        return other.end(but="stand-in: left ")


def test_memory_of_a_gpu_is_registered_where_it_is(program: type[Program]):
    run(program, """
sent, got, stream = Array(1 << 18), Array(1 << 18), new_stream()
data = bytes(range(256)) * (sent.nbytes // 256)
sent.put(stream, data)
source, target = near.register(sent), far.register(got)
assert (source.device, source.nbytes, source.writable) == ("cuda:0", 1 << 20, True)
to_far.write(source, target.remote(), stream=stream.value).wait(60)
assert got.get() == data and target.read_at(1, 3) == data[1:4]
assert not near.register(Array(4, read_only=True)).writable
for wrong, why in ((Array(4, strides=(8,)), "the array is not contiguous (shape (4,), strides (8,) in bytes)"),):
    try: near.register(wrong)
    except fw.UsageError as error: assert why in str(error), error
    else: raise AssertionError
made = near.allocate(1000, "cuda:0")
made.write_at(0, b"x" * 1000)
assert made.read_at(998) == b"xx" and made.device == "cuda:0"
""")


@pytest.mark.parametrize(
    "stream",
    [
        "stream.value",
        "types.SimpleNamespace(cuda_stream=stream.value)",
        "types.SimpleNamespace(ptr=stream.value)",
        "types.SimpleNamespace(__cuda_stream__=lambda: (0, stream.value))",
    ],
)
def test_a_send_waits_for_the_stream_that_writes_its_source(program: type[Program], stream: str):
    run(program, f"""
sent, got, stream, after = Array(1 << 18), Array(1 << 18), new_stream(), new_stream()
source, target = near.register(sent), far.register(got)
late = pinned(got.nbytes)
for turn in range(1, 4):
    data = bytes([turn]) * sent.nbytes
    gate = Gate(stream)
    sent.put(stream, data)
    transfer = to_far.write(source, target.remote(), stream={stream})
    try: transfer.wait(0.05)
    except fw.TimedOut: pass
    else: raise AssertionError("it did not wait for the stream")
    gate.open()
    transfer.wait(60)
    assert got.get() == data, turn
    # The other direction: work launched after block_stream finds the received bytes.
    data = bytes([turn + 100]) * sent.nbytes
    gate = Gate(stream)
    sent.put(stream, data)
    received = to_near.recv(1, target)
    received.block_stream({stream.replace("stream.value", "after.value")})
    do("cuMemcpyDtoHAsync_v2", late, ctypes.c_uint64(got.address), ctypes.c_size_t(got.nbytes), after)
    to_far.send(1, source, stream={stream})
    gate.open()
    do("cuStreamSynchronize", after)
    assert ctypes.string_at(late, got.nbytes) == data and received.wait(60) == len(data), turn
""")


@pytest.mark.parametrize(
    "call",
    [
        "near.register(bytearray(100))",
        "near.register(array)",
        "to_far.write(source, target, stream=stream.value)",
        "block(to_near.recv(1, sink))",
        "made.pop()",
    ],
)
def test_other_threads_run_while_a_call_waits_for_the_driver(program: type[Program], call: str):
    """With the interpreter's lock held the main thread would not get to see that the call waits, and would hang."""
    run(program, f"""
import threading, time
array, stream, made = Array(4), new_stream(), [near.allocate(4096, "cuda:0")]
source, target, sink = near.register(array), far.allocate(16).remote(), far.allocate(16)
held, waiting = (ctypes.c_int.in_dll(cuda, name) for name in ("calls_held", "calls_waiting"))
done = []
unused = ctypes.c_void_p()
do("cuDevicePrimaryCtxRetain", ctypes.byref(unused), 1)
do("cuCtxSetCurrent", unused)
stream_of_unused = types.SimpleNamespace(device_index=1, ptr=new_stream().value)
do("cuCtxSetCurrent", context)

def block(transfer):
    "The first use of the second GPU."
    transfer.block_stream(stream_of_unused)
    transfer.cancel()

def run():
    do("cuCtxSetCurrent", context)
    done.append(({call}) is not Exception)

thread = threading.Thread(target=run)
held.value = 1
thread.start()
while not waiting.value: time.sleep(0.001)
assert not done
held.value = 0
thread.join(60)
assert done == [True]
""")


TORCH = """
asked = []
class Tensor:
    "As much of PyTorch's as is asked for."
    device, layout, shape = types.SimpleNamespace(type="cuda", index=0), "torch.strided", (1 << 18,)
    def __init__(self, array): self.array = array
    is_contiguous = lambda self: True
    is_conj = is_neg = lambda self: False
    detach = lambda self: self
    numel, element_size = (lambda self: 1 << 18), (lambda self: 4)
    data_ptr = lambda self: self.array.address
def current_stream(device):
    asked.append(device)
    return types.SimpleNamespace(cuda_stream=stream.value)
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.Tensor, torch.cuda = Tensor, types.SimpleNamespace(current_stream=current_stream)
stream = new_stream()
"""


def test_the_current_stream_of_torch_is_asked_for(program: type[Program]):
    run(program, TORCH + """
sent, got = Array(1 << 18), Array(1 << 18)
source, target = near.register(Tensor(sent)), far.register(Tensor(got))
blocks = fw.BlockList(source, target.remote(), [0, 4096], [0, 4096], [4096, sent.nbytes - 4096])
for turn in range(1, 4):
    data = bytes([turn]) * sent.nbytes
    gate = Gate(stream)
    sent.put(stream, data)
    transfer = to_far.write_blocks(blocks)
    try: transfer.wait(0.05)
    except fw.TimedOut: pass
    else: raise AssertionError("it did not wait for the stream")
    gate.open()
    transfer.wait(60)
    assert got.get() == data, turn
assert asked == [0] * 3
received = to_near.recv(1, target)
to_far.send(1, source)
received.block_stream()
received.wait(60)
assert asked == [0] * 6
del source, target, blocks, received
""")


def test_memory_of_no_library_beside_a_tensor_of_torch_takes_no_order_away(program: type[Program]):
    run(program, TORCH + """
sent, got = Array(1 << 18), Array(1 << 18)
own, there = near.allocate(4096, "cuda:0"), far.allocate(4096, "cuda:0")
own.write_at(0, b"x" * 4096)
source, target = near.register(Tensor(sent)), far.register(Tensor(got))
half = sent.nbytes // 2
lists = [
    fw.BlockList(own, there.remote(), [0], [0], 4096),
    fw.BlockList(source, target.remote(), [0, half], [0, half], half),
]
for turn, blocks in enumerate((lists, lists[::-1]), 1):
    data = bytes([turn]) * sent.nbytes
    gate = Gate(stream)
    sent.put(stream, data)
    transfer = to_far.write_blocks(fw.BlockList.join(blocks))
    try: transfer.wait(0.05)
    except fw.TimedOut: pass
    else: raise AssertionError("it did not wait for the stream")
    gate.open()
    transfer.wait(60)
    assert got.get() == data and there.read_at(4095) == b"x", turn
# Two libraries each have a current stream, in no known order.
cupy = sys.modules["cupy"] = types.ModuleType("cupy")
class ndarray(Array):
    __module__ = "cupy"
cupy.cuda = types.SimpleNamespace(get_current_stream=lambda device_id: types.SimpleNamespace(ptr=stream.value))
other, its = near.register(ndarray(1024)), far.allocate(4096, "cuda:0")
both = fw.BlockList.join([*lists, fw.BlockList(other, its.remote(), [0], [0], 4096)])
for post in (to_far.write_blocks, to_far.read_blocks):
    try: post(both)
    except fw.UsageError as error: assert "memory of Torch and of Cupy" in str(error), error
    else: raise AssertionError("it chose one of two streams")
    transfer = post(both, stream=stream.value)
    try: transfer.block_stream()
    except fw.UsageError as error: assert "pass stream=" in str(error), error
    else: raise AssertionError("it chose one of two streams")
    transfer.wait(60)
del own, source, target, blocks, lists, both, there, other, its
""")


# CuPy shares its arrays by DLPack; this capsule is made by hand.
CUPY = """
class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
exported, asked = [], []
class ndarray:
    __module__ = "cupy"
    def __init__(self, array):
        self.array, self.shape = array, (ctypes.c_int64 * 1)(array.nbytes // 4)
        # The data begin at an offset from the address.
        self.tensor = Tensor(array.address - 4, 2, 0, 1, 0, 32, 1, ctypes.addressof(self.shape), None, 4)
    def __dlpack_device__(self): return (2, 0)
    def __dlpack__(self, *, stream, max_version=None):
        exported.append(stream)
        return capsule(ctypes.addressof(self.tensor), b"dltensor", None)
cupy = sys.modules["cupy"] = types.ModuleType("cupy")
stream = new_stream()
"""


@pytest.mark.parametrize(
    ("parameters", "expected"), [("device_id=-1", "[0] * 3"), ("", "[None] * 3")], ids=["newer", "older"]
)
def test_the_current_stream_of_cupy_is_asked_for(program: type[Program], parameters: str, expected: str):
    run(program, CUPY + f"""
def get_current_stream({parameters}):
    asked.append(locals().get("device_id"))
    return types.SimpleNamespace(ptr=stream.value)
cupy.cuda = types.SimpleNamespace(get_current_stream=get_current_stream)
sent, got = Array(1 << 18), Array(1 << 18)
source, target = near.register(ndarray(sent)), far.register(ndarray(got))
# Sharing the arrays did not wait for a stream.
assert (source.device, source.nbytes, source.writable, exported) == ("cuda:0", 1 << 20, True, [-1, -1])
for turn in range(1, 4):
    data = bytes([turn]) * sent.nbytes
    gate = Gate(stream)
    sent.put(stream, data)
    transfer = to_far.write(source, target.remote())
    try: transfer.wait(0.05)
    except fw.TimedOut: pass
    else: raise AssertionError("it did not wait for the stream")
    gate.open()
    transfer.wait(60)
    assert got.get() == data, turn
assert asked == {expected}, asked
""")


def test_a_hold_without_a_stream_to_be_found_says_so(program: type[Program]):
    run(program, """
own, plain = far.allocate(1 << 20, "cuda:0"), near.allocate(1 << 20)
host = far.allocate(4096)
stream = new_stream()
received = to_near.recv(1, own)
try: received.block_stream()
except fw.UsageError as error: assert "pass stream=" in str(error), error
else: raise AssertionError("no stream waits, and nobody is told")
received.block_stream(stream.value)
to_far.send(1, plain)
do("cuStreamSynchronize", stream)
assert received.wait(60) == 1 << 20
# Host memory has no current stream, but a stream can wait for it.
received = to_near.recv(2, host)
received.block_stream()
try: received.block_stream(stream.value)
except fw.UsageError as error: assert "which one it is of" in str(error), error
else: raise AssertionError
received.block_stream(types.SimpleNamespace(cuda_stream=stream.value, device_index=0))
assert cuda.cuStreamQuery(stream) != 0
to_far.send(2, plain, nbytes=4096)
do("cuStreamSynchronize", stream)
assert received.wait(60) == 4096
del own, plain, host, received
""")


def test_a_stream_that_is_none(program: type[Program]):
    run(program, """
source, target = near.register(Array(4)), far.register(Array(4)).remote()
try: to_far.write(source, target, stream="none")
except fw.UsageError as error: assert "str is not a CUDA stream" in str(error), error
else: raise AssertionError
""")


def test_without_a_driver_a_gpu_is_an_error_with_a_name(program: type[Program]):
    with program("""
import ferrywire as fw
endpoint = fw.Endpoint()
try: endpoint.allocate(1000, "cuda:0")
except fw.GpuError as error: print(error.kind, error, flush=True)
else: print("made", flush=True)
""", LD_LIBRARY_PATH="/nonexistent") as other:
        said = other.end()
    # On a machine with a driver it may be found elsewhere.
    assert said.startswith("gpu no CUDA driver: libcuda.so.1 cannot be loaded") or said == "made\n"


def test_a_model_on_two_gpus_is_fetched_in_one_call(program: type[Program]):
    run(program, """
second = ctypes.c_void_p()
do("cuDevicePrimaryCtxRetain", ctypes.byref(second), 1)

class Tensor(Array):
    dtype = "int32"
    def __init__(self, count, on):
        do("cuCtxSetCurrent", on)
        super().__init__(count)
        self.shape, self.on = (count,), on
        do("cuCtxSetCurrent", context)
    def fill(self, data):
        do("cuCtxSetCurrent", self.on)
        stream = new_stream()
        self.put(stream, data)
        do("cuStreamSynchronize", stream)
        do("cuCtxSetCurrent", context)

def model():
    return {f"layer{n}": Tensor(1000 + n, second if n % 2 else context) for n in range(6)}

theirs, mine = model(), model()
for n, tensor in enumerate(theirs.values()):
    tensor.fill(bytes([n + 1]) * tensor.nbytes)
with fw.share(far, theirs) as shared:
    got = fw.fetch(near, to_far, shared.describe(), into=mine, timeout=60)
assert got == mine and {near.register(tensor).device for tensor in mine.values()} == {"cuda:0", "cuda:1"}
for n, tensor in enumerate(mine.values()):
    assert tensor.get() == bytes([n + 1]) * tensor.nbytes, n
""")
