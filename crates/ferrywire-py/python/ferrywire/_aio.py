"""Awaiting transfers, notifications, peers and blocking calls: one eventfd per event loop.

    await ──▶ poll ──▶ attach to the loop's wakeup, poll ──▶ readable ──▶ all waiting tasks poll again

Nothing is polled on a timer, and no thread is used, except that connecting and closing block and have a thread of
their own. Invariant: a cancelled `await` loses nothing. Looking takes a notification or a peer out of its queue, so
a task polls only in the step in which it returns the result. A cancelled connect or close leaves its thread behind.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from ._ferrywire import Endpoint, PendingCall, Peer, Transfer, Wakeup

# Weak, because a hub's futures refer to the loop: a loop that is closed while a task waits would never be freed. The
# loop's descriptor table and the waiting frames keep the hub alive.
_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[_Hub]] = weakref.WeakKeyDictionary()


class _Hub:
    """The waiting tasks of one event loop, and its wakeup."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Hub:
        known = _hubs.get(loop)
        hub = known() if known is not None else None
        if hub is None:
            hub = cls()
            _hubs[loop] = weakref.ref(hub)
        return hub

    async def wait(self, loop: asyncio.AbstractEventLoop, worth: Callable[[], bool]) -> None:
        """Waits until an attached object may have a result, and `worth` returns true."""
        future = loop.create_future()
        if not self.waiting:
            loop.add_reader(self.wakeup.fileno(), self.turn)
        self.waiting[future] = worth
        try:
            await future
        finally:
            self.waiting.pop(future, None)
            if not self.waiting and not loop.is_closed():
                loop.remove_reader(self.wakeup.fileno())

    def turn(self) -> None:
        self.wakeup.clear()
        for future, worth in list(self.waiting.items()):
            if not future.done() and worth():
                future.set_result(None)


async def _until(
    poll: Callable[[], Any],
    attach: Callable[[Wakeup], None],
    overdue: Callable[[float], Any],
    timeout: float | None,
    done: Callable[[], bool] = lambda: True,
) -> Any:
    """Waits for the first result of `poll` that is not None; `attach` arms the loop's wakeup for it.

    When the time is up, `overdue` returns a last result or raises `TimedOut`. `done` returns whether there
    is a result, without taking it: with a thousand transfers, each that ends wakes only its own task.
    """
    if (found := poll()) is not None:
        return found
    loop = asyncio.get_running_loop()
    hub = _Hub.of(loop)

    def worth() -> bool:
        if not done():
            attach(hub.wakeup)
        return done()

    try:
        async with asyncio.timeout(timeout) as limit:
            while (found := poll()) is None:
                # A result that comes after this makes the wakeup readable; poll once more for an earlier one.
                attach(hub.wakeup)
                if (found := poll()) is not None:
                    break
                await hub.wait(loop, worth)
            return found
    except TimeoutError:
        if not limit.expired():
            raise
    found = poll()
    return found if found is not None else overdue(timeout or 0.0)


async def wait_transfer(transfer: Transfer, timeout: float | None) -> int:
    return await _until(transfer.poll, transfer._arm, transfer._overdue, timeout, transfer.done)


async def wait_notification(peer: Peer, timeout: float | None) -> bytes:
    return await _until(peer.poll_notification, peer._arm, peer._overdue, timeout)


async def accept(endpoint: Endpoint, timeout: float | None) -> Peer:
    return await _until(endpoint.try_accept, endpoint._arm, endpoint._overdue, timeout)


async def pending_call(begin: Callable[..., PendingCall], *arguments: Any) -> Any:
    """Awaits a call that blocks on a thread of its own. Cancelling this leaves the thread behind."""
    begun = begin(*arguments)
    (given,) = await _until(begun.poll, begun._arm, _never, None, begun.done)
    return given


def _never(waited: float) -> Any:
    raise AssertionError(f"waited {waited} s without a limit")


async def leave(thing: Endpoint | Peer, timeout: float, raised: BaseException | None) -> None:
    """Closes an object at the end of an ``async with`` block."""
    try:
        await pending_call(thing._begin_close, timeout)
    except Exception as failed:
        if raised is None:
            raise
        note(raised, failed)


def note(raised: BaseException, failed: Exception) -> None:
    """Adds the failure of closing as a note to the block's own exception, which says more."""
    raised.add_note(f"Closing failed after that: {failed}")


async def itself(thing: Any) -> Any:
    return thing
