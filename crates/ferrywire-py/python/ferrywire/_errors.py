"""The exceptions of ferrywire, sorted by who has to act.

Every exception has ``kind`` (``"usage"``, ``"local"``, ``"gpu"``, ``"peer"``, ``"refused"``, ``"timeout"``, ``"internal"``)
and ``peer``, the name of the remote endpoint concerned, or ``None``. ``reason`` is the cause of a ``PeerLost``,
``Unreachable`` or ``Refused`` in one word (``"connection_refused"``, ``"secret"``, ``"version"``, ...) and ``None`` for
other exceptions; programs compare it instead of the message.
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
    """The base class of all exceptions of ferrywire."""

    kind: str = "usage"
    peer: str | None = None
    reason: str | None = None


class UsageError(Error, ValueError):
    """The caller used a value, region, buffer or configuration wrongly. Nothing was moved."""


class Truncated(UsageError):
    """A message arrived that is longer than the buffer given to ``recv``."""


class Closed(UsageError):
    """This process closed the endpoint or the peer."""


class Cancelled(Error):
    """The operation was cancelled by its caller."""


class LocalError(Error, OSError):
    """A resource of this host failed or is short: sockets, memory, limits. ``errno`` is the system's number or ``None``."""

    kind = "local"

    def __str__(self) -> str:
        # The message already explains the number, so "[Errno 98]" is left out.
        return self.strerror or super().__str__()


class GpuError(Error):
    """A GPU of this host or its driver failed, or cannot be used in this way."""

    kind = "gpu"


class PeerError(Error):
    """The peer, or the network to it, failed."""

    kind = "peer"


class PeerLost(PeerError, ConnectionError):
    """The peer was lost: killed, stopped, or unreachable over every NIC."""


class PeerClosed(PeerError, ConnectionError):
    """The peer closed in an orderly way."""


class Unreachable(PeerError, ConnectionError):
    """No connection could be made."""


class Refused(PeerError, ConnectionError):
    """One end refused the other, for example because of its version, secret or configuration, or after a restart."""


class AccessRefused(PeerError):
    """The peer refused an access: its region is deregistered or too small, or it holds too many unread notifications."""


class ProtocolViolation(PeerError):
    """The peer broke the protocol of this version."""


class TimedOut(Error, TimeoutError):
    """The timeout passed. A transfer continues and can be waited for again; a connect ends."""

    kind = "timeout"


class InternalError(Error):
    """A defect of ferrywire: please report it."""

    kind = "internal"
