"""ferrywire moves GPU and host memory between machines over ordinary TCP NICs.

>>> import ferrywire as fw
>>> receiver = fw.Endpoint("127.0.0.1:0")
>>> target = receiver.register(bytearray(1 << 20))
>>> sender = fw.Endpoint()
>>> peer = sender.connect(receiver.metadata())
>>> source = sender.register(bytes(1 << 20))
>>> peer.write(source, target.remote(), message=b"here it is").wait(timeout=5)
1048576
>>> receiver.accept(timeout=5).wait_notification(timeout=5)
b'here it is'

Sizes and offsets are in bytes, times in seconds. Every failure raises an :class:`Error`; its class and its ``kind``
tell who has to act. Every wait releases the interpreter's lock and ends on Ctrl-C.
"""

from __future__ import annotations

from . import _exit
from ._errors import (
    AccessRefused,
    Cancelled,
    Closed,
    Error,
    GpuError,
    InternalError,
    LocalError,
    PeerClosed,
    PeerError,
    PeerLost,
    ProtocolViolation,
    Refused,
    TimedOut,
    Truncated,
    Unreachable,
    UsageError,
)
from ._ferrywire import (
    NOTIFY_BYTES_MAX,
    SECRET_BYTES_MIN,
    BlockList,
    Endpoint,
    Peer,
    Region,
    RemoteRegion,
    Transfer,
    __version__,
    wait_any,
)
from ._nccl import nccl_plugin_path
from ._tensors import Shared, fetch, share

__all__ = [
    "NOTIFY_BYTES_MAX",
    "SECRET_BYTES_MIN",
    "AccessRefused",
    "BlockList",
    "Cancelled",
    "Closed",
    "Endpoint",
    "Error",
    "GpuError",
    "InternalError",
    "LocalError",
    "Peer",
    "PeerClosed",
    "PeerError",
    "PeerLost",
    "ProtocolViolation",
    "Refused",
    "Region",
    "RemoteRegion",
    "Shared",
    "TimedOut",
    "Transfer",
    "Truncated",
    "Unreachable",
    "UsageError",
    "__version__",
    "fetch",
    "nccl_plugin_path",
    "share",
    "wait_any",
]

_exit.arrange()
