"""What is awaited: one eventfd per event loop, watched as long as something waits.

    await ──▶ look ──▶ attach to the loop's wakeup, look ──▶ readable ──▶ all that wait look again

Nothing is polled, and no thread is taken; only connecting and closing, which block, have one of their own. An `await` that
is cancelled leaves what it waited for as it is: looking takes a notification or a peer away, so only who returns it
looks, in the same step. Likewise it leaves such a thread behind.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from ._ferrywire import Endpoint, PendingCall, Peer, Transfer, Wakeup

# A loop's descriptor table and the frames that wait keep a hub, and nobody else: its futures refer to the loop, so a loop
# that is closed while something waits would never go.
_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[_Hub]] = weakref.WeakKeyDictionary()


class _Hub:
    """All that waits in one event loop."""

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
        """Until something that is attached has something to give, and looking is `worth` it."""
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
    look: Callable[[], Any],
    attach: Callable[[Wakeup], None],
    overdue: Callable[[float], Any],
    timeout: float | None,
    done: Callable[[], bool] = lambda: True,
) -> Any:
    """The first result of `look` that is not None; `attach` sees to it that it is called in time.

    `overdue` gives what is there when the time is up, or raises the `TimedOut`. While `done` is false, which takes
    nothing away, there is nothing to look for: of a thousand transfers each that ends wakes one that waits.
    """
    if (found := look()) is not None:
        return found
    loop = asyncio.get_running_loop()
    hub = _Hub.of(loop)

    def worth() -> bool:
        if not done():
            attach(hub.wakeup)
        return done()

    try:
        async with asyncio.timeout(timeout) as limit:
            while (found := look()) is None:
                # Looks once more: what comes after this makes the wakeup readable.
                attach(hub.wakeup)
                if (found := look()) is not None:
                    break
                await hub.wait(loop, worth)
            return found
    except TimeoutError:
        if not limit.expired():
            raise
    found = look()
    return found if found is not None else overdue(timeout or 0.0)


async def wait_transfer(transfer: Transfer, timeout: float | None) -> int:
    return await _until(transfer.poll, transfer._arm, transfer._overdue, timeout, transfer.done)


async def wait_notification(peer: Peer, timeout: float | None) -> bytes:
    return await _until(peer.poll_notification, peer._arm, peer._overdue, timeout)


async def accept(endpoint: Endpoint, timeout: float | None) -> Peer:
    return await _until(endpoint.try_accept, endpoint._arm, endpoint._overdue, timeout)


async def errand(begin: Callable[..., PendingCall], *arguments: Any) -> Any:
    """What waits by itself, on a thread of its own; if this is cancelled it is left behind."""
    begun = begin(*arguments)
    (given,) = await _until(begun.poll, begun._arm, _never, None, begun.done)
    return given


def _never(waited: float) -> Any:
    raise AssertionError(f"waited {waited} s without a limit")


async def leave(thing: Endpoint | Peer, timeout: float, raised: BaseException | None) -> None:
    """The end of an ``async with`` block."""
    try:
        await errand(thing._begin_close, timeout)
    except Exception as failed:
        if raised is None:
            raise
        note(raised, failed)


def note(raised: BaseException, failed: Exception) -> None:
    """What a block raised says more than that closing failed after it."""
    raised.add_note(f"Closing failed after that: {failed}")


async def itself(thing: Any) -> Any:
    return thing
