"""Many tensors with their names, shapes and element types: shared by one process, fetched by others in one call.

The one who shares registers its tensors and hands out a description in bytes; whoever has it reads them, all at
once. Works for a torch ``state_dict`` and for dictionaries of numpy arrays.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from ._errors import Closed, Error, LocalError, UsageError
from ._ferrywire import BlockList, Endpoint, Peer, Region, RemoteRegion, Transfer

VERSION = 1
# How long what is broken off may take to end.
CANCEL_SECONDS = 5.0


class Shared:
    """Tensors that peers may fetch, until it is closed."""

    def __init__(self, regions: list[Region], entries: list[dict[str, Any]]) -> None:
        self._regions = regions
        self._entries = entries
        #: Bytes of all tensors.
        self.nbytes: int = sum(region.nbytes for region in regions)

    def describe(self) -> bytes:
        """What :func:`fetch` needs, for any store or message: names, shapes, element types and where the bytes are.

        About 150 bytes for each tensor. Raises :class:`UsageError` where PyTorch has moved one since it was shared.
        """
        for region in self._regions:
            region.descriptor()
        return json.dumps({"version": VERSION, "tensors": self._entries}).encode()

    def close(self) -> None:
        """Takes the memory back: from here on nobody can fetch.

        Raises, once, where operations still use some of it, and keeps that alone: close it again when they have ended.
        """
        kept: list[Region] = []
        first: Exception | None = None
        for region in self._regions:
            try:
                region.deregister()
            except Exception as failed:
                kept.append(region)
                first = first or failed
        self._regions = kept
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            from ._aio import note

            note(error, failed)


def share(endpoint: Endpoint, tensors: Mapping[str, Any]) -> Shared:
    """Registers tensors (torch or numpy, contiguous) for peers to fetch.

    They are read as they are when they are fetched: change them only when nobody does. Raises :class:`UsageError`,
    naming the tensor, where one cannot be registered.
    """
    regions, entries = [], []
    for name, tensor in tensors.items():
        region = _registered(endpoint, name, tensor)
        regions.append(region)
        entries.append(
            {
                "name": name,
                "library": _library(tensor),
                "dtype": _dtype_name(tensor),
                "shape": list(tensor.shape),
                "region": region.descriptor().hex(),
            }
        )
    return Shared(regions, entries)


def fetch(
    endpoint: Endpoint,
    peer: Peer,
    description: bytes,
    *,
    into: Mapping[str, Any] | None = None,
    device: str = "cpu",
    timeout: float | None = None,
) -> dict[str, Any]:
    """Reads all tensors that a peer shares, in one operation for each GPU here, and returns them by name.

    New ones are made, of the library that the peer's are of (torch on ``device``), or they go into those of ``into``,
    which must have the same names, shapes and element types. ``timeout`` is in seconds; a fetch that does not succeed
    is cancelled, and leaves anything in the tensors.

    Raises :class:`UsageError` for what is no description, contradicts itself, or does not match ``into``;
    :class:`LocalError` where this host has no memory for it; :class:`AccessRefused` where the
    tensors are not shared any more, :class:`PeerLost`, :class:`PeerClosed`, :class:`Closed`, :class:`TimedOut`.
    """
    entries = _told(description)
    remotes = [_remote(entry) for entry in entries]
    if into is not None:
        result = _matching(into, entries)
    else:
        result = {e["name"]: _made(e, r.nbytes, device) for e, r in zip(entries, remotes, strict=True)}
    regions: list[Region] = []
    # An operation comes after the work of one GPU, in the current stream of one framework.
    lists: dict[tuple[str, str], list[BlockList]] = {}
    for entry, remote in zip(entries, remotes, strict=True):
        region = _registered(endpoint, entry["name"], result[entry["name"]])
        if region.nbytes != remote.nbytes:
            raise UsageError(f"tensor {entry['name']!r}: {region.nbytes} bytes here, {remote.nbytes} at the peer")
        if region.nbytes:
            regions.append(region)
            lists.setdefault(_order(region, result[entry["name"]]), []).append(BlockList(region, remote, [0], [0], region.nbytes))
    _read_all(peer, list(lists.values()), timeout)
    del lists
    _release(regions)
    return result


def _order(region: Region, tensor: Any) -> tuple[str, str]:
    """What work an operation on it comes after: of which GPU, in the current stream of which library."""
    on_gpu = region.device.startswith("cuda")
    return (region.device, type(tensor).__module__.partition(".")[0]) if on_gpu else ("host", "")


def _read_all(peer: Peer, lists: list[list[BlockList]], timeout: float | None) -> None:
    """Reads each of them, all at once."""
    until = None if timeout is None else time.monotonic() + timeout
    transfers: list[Transfer] = []
    try:
        for together in lists:
            transfers.append(peer.read_blocks(BlockList.join(together)))
        for transfer in transfers:
            transfer.wait(None if until is None else max(0.0, until - time.monotonic()))
    except BaseException:
        # The caller has nothing that it could wait for: the tensors must not change any more.
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            with contextlib.suppress(Error):
                transfer.wait(CANCEL_SECONDS)
        raise


def _told(description: bytes) -> list[dict[str, Any]]:
    """The entries of a description. It came from elsewhere: what is used of it is what :func:`share` writes."""
    try:
        told = json.loads(description)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"description: not one of share(): {error}") from error
    if not isinstance(told, dict):
        raise UsageError("description: not one of share()")
    if told.get("version") != VERSION:
        raise UsageError(f"description: version {told.get('version')}, this ferrywire reads {VERSION}")
    entries = told.get("tensors")
    if not isinstance(entries, list):
        raise UsageError("description: it has no list of tensors")
    for index, entry in enumerate(entries):
        if not _is_entry(entry):
            raise UsageError(f"description: entry {index} does not describe a tensor")
    if len({entry["name"] for entry in entries}) < len(entries):
        raise UsageError("description: a name is there twice")
    return entries


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    texts = all(isinstance(entry.get(key), str) for key in ("name", "library", "dtype", "region"))
    shape = entry.get("shape")
    return texts and isinstance(shape, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)


def _remote(entry: dict[str, Any]) -> RemoteRegion:
    try:
        return RemoteRegion(bytes.fromhex(entry["region"]))
    except ValueError as error:
        raise UsageError(f"tensor {entry['name']!r}: {error}") from error


def _registered(endpoint: Endpoint, name: str, tensor: Any) -> Region:
    try:
        return endpoint.register(tensor, writable=True)
    except Closed:
        raise
    except UsageError as error:
        raise UsageError(f"tensor {name!r}: {error}") from error


def _release(regions: Iterable[Region]) -> None:
    for region in regions:
        region.deregister()


def _matching(into: Mapping[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    names = [entry["name"] for entry in entries]
    if set(into) != set(names):
        missing, more = sorted(set(names) - set(into)), sorted(set(into) - set(names))
        raise UsageError(f"into: the peer has {missing} that are missing there, and has no {more}")
    for entry in entries:
        tensor = into[entry["name"]]
        mine = (list(tensor.shape), _dtype_name(tensor))
        if mine != (entry["shape"], entry["dtype"]):
            raise UsageError(
                f"tensor {entry['name']!r}: shape {mine[0]} of {mine[1]} here, "
                f"shape {entry['shape']} of {entry['dtype']} at the peer"
            )
    return dict(into)


def _library(tensor: Any) -> str:
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(tensor, torch.Tensor) else "numpy"


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _made(entry: dict[str, Any], nbytes: int, device: str) -> Any:
    """A new tensor. What the entry says came from elsewhere: nothing is allocated before it fits its region."""
    dtype, item_bytes = _dtype(entry)
    said = math.prod(entry["shape"]) * item_bytes
    if said != nbytes:
        raise UsageError(
            f"tensor {entry['name']!r}: shape {entry['shape']} of {entry['dtype']} is {said} bytes, "
            f"its region at the peer has {nbytes}"
        )
    try:
        if entry["library"] == "torch":
            import torch

            return torch.empty(entry["shape"], dtype=dtype, device=device)
        import numpy

        return numpy.empty(entry["shape"], dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unknown(entry) from error
    # PyTorch has no other for a device that is none, or full.
    except (MemoryError, RuntimeError) as error:
        raise LocalError(f"tensor {entry['name']!r}: {nbytes} bytes cannot be had: {error}") from error


def _dtype(entry: dict[str, Any]) -> tuple[Any, int]:
    """The element type and its size."""
    if entry["library"] == "torch":
        import torch

        kind = getattr(torch, entry["dtype"], None)
        if not isinstance(kind, torch.dtype):
            raise _unknown(entry)
        return kind, kind.itemsize
    import numpy

    try:
        kind = numpy.dtype(entry["dtype"])
        if kind.hasobject:
            raise TypeError("its bytes would be pointers")
        return kind, kind.itemsize
    except (TypeError, ValueError, SyntaxError) as error:
        raise _unknown(entry) from error


def _unknown(entry: dict[str, Any]) -> UsageError:
    return UsageError(f"tensor {entry['name']!r}: no shape and element type: {entry['shape']} of {entry['dtype']}")
