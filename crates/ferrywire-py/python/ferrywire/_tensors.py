"""Shares many named tensors with peers, which fetch all of them in one call.

:func:`share` registers a process's tensors and describes them in bytes; a peer passes the description to
:func:`fetch`, which reads the tensors. Works for a torch ``state_dict`` and for dictionaries of numpy arrays.
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
# How long cancelled transfers may take to end.
CANCEL_SECONDS = 5.0


class Shared:
    """Registered tensors that peers may fetch, until ``close`` is called."""

    def __init__(self, regions: list[Region], entries: list[dict[str, Any]]) -> None:
        self._regions = regions
        self._entries = entries
        self._closed = False
        #: Bytes of all tensors.
        self.nbytes: int = sum(region.nbytes for region in regions)

    def describe(self) -> bytes:
        """The description for :func:`fetch` as bytes: names, shapes, element types and regions of the tensors.

        About 150 bytes for each tensor; the application carries them to the peer. Raises :class:`UsageError` if
        PyTorch has moved a tensor since it was shared, or after ``close``.
        """
        if self._closed:
            raise UsageError("close was called: share the tensors again")
        for region in self._regions:
            region.descriptor()
        return json.dumps({"version": VERSION, "tensors": self._entries}).encode()

    def close(self) -> None:
        """Deregisters the tensors: peers can no longer fetch them.

        If operations still use some tensors, those stay registered and the first error is raised: call ``close``
        again when the operations have ended.
        """
        self._closed = True
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

    A fetch reads the tensors' values at that time, so do not change them during one. Raises :class:`UsageError`,
    which names the tensor, if a tensor cannot be registered.
    """
    regions, entries = [], []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise UsageError(f"tensor {name!r}: names are str, not {type(name).__name__}")
        region = _registered(endpoint, name, tensor)
        regions.append(region)
        entries.append(
            {
                "name": name,
                "library": _library(tensor),
                "dtype": _dtype_name(tensor),
                "shape": _shape(name, tensor),
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
    """Reads all tensors that a peer shares, with one operation for each local GPU, and returns them by name.

    By default new tensors are made, of the library that the peer uses (torch tensors on ``device``). With ``into``
    the bytes go into its tensors, which must have the peer's names, shapes and element types. ``timeout`` is in
    seconds. A fetch that fails is cancelled; the contents of the tensors are then undefined.

    Raises :class:`UsageError` for a description that is malformed, inconsistent, or does not match ``into``, and for a
    ``timeout`` that is negative or not a number;
    :class:`LocalError` if this host has too little memory; :class:`AccessRefused` if the peer no longer shares the
    tensors; :class:`PeerLost`, :class:`PeerClosed`, :class:`Closed`, :class:`TimedOut`.
    """
    if timeout is not None and not timeout >= 0:
        raise UsageError(f"timeout: {timeout} is not a number of seconds")
    entries = _parsed(description)
    remotes = [_remote(entry) for entry in entries]
    if into is not None:
        result = _matching(into, entries)
    else:
        result = {e["name"]: _made(e, r.nbytes, device) for e, r in zip(entries, remotes, strict=True)}
    regions: list[Region] = []
    # One operation can follow the work of one GPU, in the current stream of one framework.
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
    """Returns the GPU and the library whose current stream an operation on the region follows."""
    on_gpu = region.device.startswith("cuda")
    return (region.device, type(tensor).__module__.partition(".")[0]) if on_gpu else ("host", "")


def _read_all(peer: Peer, lists: list[list[BlockList]], timeout: float | None) -> None:
    """Posts a read of each list and waits for all of them."""
    until = None if timeout is None else time.monotonic() + timeout
    transfers: list[Transfer] = []
    try:
        for together in lists:
            transfers.append(peer.read_blocks(BlockList.join(together)))
        for transfer in transfers:
            transfer.wait(None if until is None else max(0.0, until - time.monotonic()))
    except BaseException:
        # The caller gets no transfer to wait for, so the tensors must not change after this raises.
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            with contextlib.suppress(Error):
                transfer.wait(CANCEL_SECONDS)
        raise


def _parsed(description: bytes) -> list[dict[str, Any]]:
    """Parses and checks the entries of a description, which came from another process."""
    try:
        told = json.loads(description)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"description: not made by share().describe(): {error}") from error
    if not isinstance(told, dict):
        raise UsageError("description: not made by share().describe()")
    if told.get("version") != VERSION:
        raise UsageError(
            f"description: version {told.get('version')}, but this ferrywire reads {VERSION}: "
            "install one version on both ends"
        )
    entries = told.get("tensors")
    if not isinstance(entries, list):
        raise UsageError("description: the list of tensors is missing")
    for index, entry in enumerate(entries):
        if not _is_entry(entry):
            raise UsageError(f"description: entry {index} does not describe a tensor")
    if len({entry["name"] for entry in entries}) < len(entries):
        raise UsageError("description: two tensors have the same name")
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
    _shape(name, tensor)
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
        missing, more = sorted(set(names) - set(into)), sorted(set(into) - set(names), key=repr)
        raise UsageError(f"into: give the tensors of the peer: {missing} are missing, and the peer has no {more}")
    for entry in entries:
        tensor = into[entry["name"]]
        mine = (_shape(entry["name"], tensor), _dtype_name(tensor))
        if mine != (entry["shape"], entry["dtype"]):
            raise UsageError(
                f"tensor {entry['name']!r}: shape {mine[0]} of {mine[1]} here, "
                f"shape {entry['shape']} of {entry['dtype']} at the peer"
            )
    return dict(into)


def _shape(name: str, tensor: Any) -> list[int]:
    if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
        raise UsageError(f"tensor {name!r}: {type(tensor).__name__} is no torch tensor or numpy array")
    return list(tensor.shape)


def _library(tensor: Any) -> str:
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(tensor, torch.Tensor) else "numpy"


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _made(entry: dict[str, Any], nbytes: int, device: str) -> Any:
    """Makes a new tensor. The entry came from another process, so its size is compared with its region first."""
    dtype, item_bytes = _dtype(entry)
    said = math.prod(entry["shape"]) * item_bytes
    if said != nbytes:
        raise UsageError(
            f"tensor {entry['name']!r}: shape {entry['shape']} of {entry['dtype']} is {said} bytes, "
            f"and the region at the peer has {nbytes}"
        )
    try:
        if entry["library"] == "torch":
            import torch

            return torch.empty(entry["shape"], dtype=dtype, device=device)
        import numpy

        return numpy.empty(entry["shape"], dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unknown(entry) from error
    # PyTorch raises RuntimeError for an unknown device and for one without memory, AssertionError for CUDA in a build
    # without it.
    except (MemoryError, RuntimeError, AssertionError) as error:
        raise LocalError(f"tensor {entry['name']!r}: cannot allocate {nbytes} bytes: {error}") from error


def _dtype(entry: dict[str, Any]) -> tuple[Any, int]:
    """Returns the element type and its size in bytes."""
    if entry["library"] == "torch":
        try:
            import torch
        except ImportError as error:
            raise LocalError(
                f"tensor {entry['name']!r}: the peer shares tensors of PyTorch, which cannot be imported here: {error}: "
                "install it, or pass into="
            ) from error

        kind = getattr(torch, entry["dtype"], None)
        if not isinstance(kind, torch.dtype):
            raise _unknown(entry)
        return kind, kind.itemsize
    import numpy

    try:
        kind = numpy.dtype(entry["dtype"])
        if kind.hasobject:
            raise TypeError("elements of this type are pointers of this process")
        return kind, kind.itemsize
    except (TypeError, ValueError, SyntaxError) as error:
        raise _unknown(entry) from error


def _unknown(entry: dict[str, Any]) -> UsageError:
    return UsageError(
        f"tensor {entry['name']!r}: not a valid shape and element type: {entry['shape']} of {entry['dtype']}"
    )
