"""What is awaited: one eventfd per event loop, watched as long as something waits.

    await ──▶ look ──▶ attach to the loop's wakeup ──▶ readable ──▶ look at all that wait

No thread is taken, and nothing is polled. An `await` that is cancelled leaves what it waited for as it is.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from ._ferrywire import Endpoint, Peer, Transfer, Wakeup

_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Hub] = weakref.WeakKeyDictionary()


class _Hub:
    """All that waits in one event loop."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.waiting: dict[asyncio.Future[Any], Callable[[], Any]] = {}

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Hub:
        hub = _hubs.get(loop)
        if hub is None:
            hub = _hubs[loop] = cls()
        return hub

    async def wait(self, loop: asyncio.AbstractEventLoop, look: Callable[[], Any]) -> Any:
        future = loop.create_future()
        if not self.waiting:
            loop.add_reader(self.wakeup.fileno(), self.turn)
        self.waiting[future] = look
        try:
            return await future
        finally:
            self.waiting.pop(future, None)
            if not self.waiting and not loop.is_closed():
                loop.remove_reader(self.wakeup.fileno())

    def turn(self) -> None:
        self.wakeup.clear()
        for future, look in list(self.waiting.items()):
            if future.done():
                continue
            try:
                found = look()
            except BaseException as error:
                future.set_exception(error)
            else:
                if found is not None:
                    future.set_result(found)


async def _until(
    look: Callable[[], Any],
    attach: Callable[[Wakeup], None],
    overdue: Callable[[float], None],
    timeout: float | None,
) -> Any:
    """The first result of `look` that is not None; `attach` sees to it that it is called in time."""
    if (found := look()) is not None:
        return found
    loop = asyncio.get_running_loop()
    hub = _Hub.of(loop)

    def look_again() -> Any:
        # Attached first: what comes in between makes the wakeup readable again.
        attach(hub.wakeup)
        return look()

    attach(hub.wakeup)
    try:
        async with asyncio.timeout(timeout) as limit:
            return await hub.wait(loop, look_again)
    except TimeoutError:
        if not limit.expired():
            raise
        overdue(timeout or 0.0)
        raise


async def wait_transfer(transfer: Transfer, timeout: float | None) -> int:
    return await _until(transfer.poll, transfer._wake, transfer._overdue, timeout)


async def wait_notification(peer: Peer, timeout: float | None) -> bytes:
    return await _until(peer.poll_notification, peer._wake, peer._overdue, timeout)


async def accept(endpoint: Endpoint, timeout: float | None) -> Peer:
    return await _until(endpoint.try_accept, endpoint._wake, endpoint._overdue, timeout)


async def itself(thing: Any) -> Any:
    return thing
