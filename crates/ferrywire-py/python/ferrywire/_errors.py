"""What ferrywire raises, sorted by who has to act.

Every exception has ``kind`` (``"usage"``, ``"local"``, ``"gpu"``, ``"peer"``, ``"refused"``, ``"timeout"``, ``"internal"``)
and ``peer``, the name of the remote endpoint where one is concerned, else ``None``. ``reason`` says in one word why a peer is
``PeerLost``, ``Unreachable`` or has ``Refused`` (``"connection_refused"``, ``"secret"``, ``"version"``, ...), else it is ``None``:
programs compare it instead of the message.
"""

from __future__ import annotations

__all__ = [
    "AccessRefused",
    "Cancelled",
    "Closed",
    "Error",
    "GpuError",
    "InternalError",
    "LocalError",
    "PeerClosed",
    "PeerError",
    "PeerLost",
    "ProtocolViolation",
    "Refused",
    "TimedOut",
    "Truncated",
    "Unreachable",
    "UsageError",
]


class Error(Exception):
    """The base of all."""

    kind: str = "usage"
    peer: str | None = None
    reason: str | None = None


class UsageError(Error, ValueError):
    """The caller used a value, region, buffer or configuration wrongly. Nothing was moved."""


class Truncated(UsageError):
    """A message arrived that is longer than the buffer given to ``recv``."""


class Closed(UsageError):
    """The endpoint was closed."""


class Cancelled(Error):
    """The operation was cancelled by its caller."""


class LocalError(Error, OSError):
    """This host: its sockets, memory or limits. ``errno`` is the system's number where it gave one, else ``None``."""

    kind = "local"

    def __str__(self) -> str:
        # Without "[Errno 98]" before words that say it.
        return self.strerror or super().__str__()


class GpuError(Error):
    """A GPU of this host, its driver, or its use."""

    kind = "gpu"


class PeerError(Error):
    """The peer, or the network to it."""

    kind = "peer"


class PeerLost(PeerError, ConnectionError):
    """The peer is gone: killed, stopped, or out of reach over every NIC."""


class PeerClosed(PeerError, ConnectionError):
    """The peer closed in an orderly way."""


class Unreachable(PeerError, ConnectionError):
    """No connection could be made."""


class Refused(PeerError, ConnectionError):
    """The other end is no ferrywire, has another version or secret, or has restarted."""


class AccessRefused(PeerError):
    """The peer refused an access: its region is gone, foreign, or too small."""


class ProtocolViolation(PeerError):
    """The peer did what no ferrywire of this version does."""


class TimedOut(Error, TimeoutError):
    """A wait took longer than its caller allowed. What was waited for goes on, and can be waited for again."""

    kind = "timeout"


class InternalError(Error):
    """A mistake in ferrywire: please report it."""

    kind = "internal"
