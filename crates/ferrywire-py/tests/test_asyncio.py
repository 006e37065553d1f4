"""Awaiting operations without threads and without polling."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from conftest import LIMIT, LOSS_IS_TOLD, Pair, Program

import ferrywire as fw
from ferrywire import _aio


def test_transfers_and_notifications_are_awaited(pair: Pair):
    async def far_side() -> bytes:
        return await pair.to_near.wait_notification_async(LIMIT)

    async def main():
        got = bytearray(1 << 20)
        target = pair.target(got)
        source = pair.near.register(b"\x07" * len(got))
        told = asyncio.create_task(far_side())
        assert await pair.to_far.write(source, target, message=b"there") == len(got)
        assert await told == b"there" and got == b"\x07" * len(got)
        assert await pair.to_far.write(source, target).wait_async(LIMIT) == len(got)
        transfers = [pair.to_far.write(source, target, nbytes=8) for _ in range(1000)]
        assert await asyncio.gather(*transfers) == [8] * 1000

    asyncio.run(main())
    asyncio.run(main())


def test_endpoints_connect_and_accept_in_one_loop():
    async def main():
        async with fw.Endpoint("127.0.0.1:0") as far, fw.Endpoint() as near:
            accepted = asyncio.create_task(far.accept_async(LIMIT))
            async with await near.connect_async(far.metadata(), LIMIT) as peer:
                other = await accepted
                await other.notify(b"hello")
                assert await peer.wait_notification_async(LIMIT) == b"hello"
            await other.close_async()

    asyncio.run(main())


def test_a_long_transfer_is_not_checked_whenever_another_ends(monkeypatch: pytest.MonkeyPatch):
    hubs: list[_aio._Hub] = []
    wait = _aio._Hub.wait

    async def counted(hub, *arguments):
        hubs.append(hub)
        await wait(hub, *arguments)

    monkeypatch.setattr(_aio._Hub, "wait", counted)

    async def main():
        # The listener accepts and sends nothing.
        with socket.create_server(("127.0.0.1", 0)) as silent, fw.Endpoint() as near:
            connecting = asyncio.create_task(near.connect_async("127.0.0.1:%d" % silent.getsockname()[1], LIMIT))
            while not hubs:
                await asyncio.sleep(0)
            for _ in range(1000):
                hubs[0].turn()
                await asyncio.sleep(0)
            assert len(hubs) == 1
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting

    asyncio.run(main())


def test_no_thread_is_taken_while_something_is_awaited(pair: Pair):
    async def main():
        before = threading.active_count()
        waits = [asyncio.create_task(pair.to_near.wait_notification_async(LIMIT)) for _ in range(50)]
        await asyncio.sleep(0.05)
        assert threading.active_count() == before
        for number in range(50):
            pair.to_far.notify(str(number).encode())
        assert sorted(map(int, await asyncio.gather(*waits))) == list(range(50))

    asyncio.run(main())


def test_a_loop_that_is_closed_while_something_waits_leaves_nothing(program: type[Program]):
    with program("""
import asyncio, gc, os, time, weakref
import ferrywire as fw

def one():
    far, near = fw.Endpoint("127.0.0.1:0"), fw.Endpoint()
    to_far = near.connect(far.metadata(), timeout=60)
    far.accept(60).close()
    loop = asyncio.new_event_loop()
    # Closing the loop does not end the operation.
    waiting = loop.create_task(near_waits(far))
    loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False
    loop.close()
    return [weakref.ref(thing) for thing in (loop, far, to_far)]

async def near_waits(far):
    await far.accept_async()

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def settle(gone, most):
    until = time.monotonic() + 60
    while any(each() is not None for each in gone) or descriptors() > most:
        assert time.monotonic() < until, (sum(each() is not None for each in gone), descriptors(), most)
        gc.collect()
        time.sleep(0.01)

one()
gc.collect()
time.sleep(1)
before = descriptors()
gone = [each for _ in range(50) for each in one()]
settle(gone, before)
""") as other:
        # An endpoint that is dropped while its loop is closed prints nothing.
        other.end()


def test_a_timeout_says_what_was_waited_for(pair: Pair):
    async def main():
        with pytest.raises(fw.TimedOut, match="not done within 20ms: recv with .*near"):
            await pair.to_near.recv(1, pair.far.register(bytearray(4))).wait_async(0.02)
        with pytest.raises(fw.TimedOut, match="a notification from .*far"):
            await pair.to_far.wait_notification_async(0.02)
        with pytest.raises(fw.TimedOut, match="a peer to connect"):
            await pair.far.accept_async(0.02)
        with pytest.raises(fw.UsageError, match="does not listen"):
            await pair.near.accept_async()
        with pytest.raises(fw.UsageError, match="timeout: -1 is not a number of seconds"):
            await pair.near.accept_async(-1)

    asyncio.run(main())


def test_a_cancelled_await_leaves_the_transfer(pair: Pair):
    async def main():
        got = bytearray(4)
        transfer = pair.to_near.recv(1, pair.far.register(got))
        waiting = asyncio.create_task(transfer.wait_async())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await transfer
        await pair.to_far.send(1, pair.near.register(b"late"))
        assert await transfer == 4 and got == b"late"

    asyncio.run(main())


# Each of these blocks the loop, so that an arrival and the end of the wait fall into one pass of the loop.


def test_a_timeout_loses_no_notification(pair: Pair):
    async def main():
        waiting = asyncio.create_task(pair.to_near.wait_notification_async(0.02))
        await asyncio.sleep(0)
        for message in (b"one", b"two"):
            pair.to_far.notify(message).wait(LIMIT)
        time.sleep(0.05)
        assert await waiting == b"one"
        assert await pair.to_near.wait_notification_async(LIMIT) == b"two"

    asyncio.run(main())


async def cancelled(waiting: asyncio.Task, after: float) -> None:
    """Cancels a wait before the loop has seen the arrival, or just after it."""
    if after:
        asyncio.get_running_loop().call_later(after, waiting.cancel)
        time.sleep(2 * after)
    else:
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("after", [0, 0.01])
def test_a_cancelled_await_loses_no_notification(pair: Pair, after: float):
    async def main():
        waiting = asyncio.create_task(pair.to_near.wait_notification_async())
        await asyncio.sleep(0)
        for message in (b"one", b"two"):
            pair.to_far.notify(message).wait(LIMIT)
        await cancelled(waiting, after)
        assert await pair.to_near.wait_notification_async(LIMIT) == b"one"
        assert await pair.to_near.wait_notification_async(LIMIT) == b"two"

    asyncio.run(main())


def test_a_notification_goes_to_another_waiter(pair: Pair):
    async def main():
        first = asyncio.create_task(pair.to_near.wait_notification_async())
        second = asyncio.create_task(pair.to_near.wait_notification_async(LIMIT))
        await asyncio.sleep(0)
        pair.to_far.notify(b"one").wait(LIMIT)
        await cancelled(first, 0.01)
        assert await second == b"one"

    asyncio.run(main())


@pytest.mark.parametrize("after", [None, 0, 0.01])
def test_a_timeout_or_cancel_loses_no_peer(after: float | None):
    async def main():
        with fw.Endpoint("127.0.0.1:0") as far, fw.Endpoint() as near, fw.Endpoint() as other:
            waiting = asyncio.create_task(far.accept_async(0.02 if after is None else None))
            await asyncio.sleep(0)
            peers = [each.connect(far.metadata(), LIMIT) for each in (near, other)]
            time.sleep(0.05)
            accepted = []
            if after is None:
                # On a slow machine they arrive later.
                with contextlib.suppress(fw.TimedOut):
                    accepted.append(await waiting)
            else:
                await cancelled(waiting, after)
            while len(accepted) < 2:
                accepted.append(await far.accept_async(LIMIT))
            for peer in accepted:
                peer.notify(b"accepted").wait(LIMIT)
            assert [peer.wait_notification(LIMIT) for peer in peers] == [b"accepted"] * 2

    asyncio.run(main())


def test_a_failed_transfer_raises_where_it_is_awaited(pair: Pair):
    async def main():
        transfer = pair.to_near.recv(1, pair.far.register(bytearray(4)))
        waiting = asyncio.create_task(transfer.wait_async())
        await asyncio.sleep(0)
        transfer.cancel()
        with pytest.raises(fw.Cancelled):
            await waiting

    asyncio.run(main())


BLOCKED = """
import asyncio, ferrywire as fw, os, signal, socket, sys, threading, time
from stopping import stop_process
signal.signal(signal.SIGINT, signal.default_int_handler)
near = fw.Endpoint()
silent = socket.create_server(("127.0.0.1", 0))
async def connects():
    await near.connect_async(silent.getsockname(), timeout=1000)
async def closes():
    # The peer is stopped and has not received the bytes in flight.
    peer = await near.connect_async(bytes.fromhex(sys.argv[1]), timeout=60)
    source = near.allocate(16 << 20)
    peer.send(1, source)
    stop_process(int(sys.argv[2]))
    await peer.close_async(timeout=1000)
"""


@pytest.mark.parametrize("what", ["connects", "closes"])
@pytest.mark.parametrize("how", ["times out", "is cancelled", "is interrupted"])
def test_a_blocking_call_is_abandoned(program: type[Program], what: str, how: str):
    ends = {
        "times out": f"""
async def main():
    try: await asyncio.wait_for({what}(), 0.3)
    except TimeoutError: print("left", flush=True)
asyncio.run(main())""",
        "is cancelled": f"""
async def main():
    task = asyncio.create_task({what}())
    await asyncio.sleep(0.3)
    task.cancel()
    try: await task
    except asyncio.CancelledError: print("left", flush=True)
asyncio.run(main())""",
        "is interrupted": f"""
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try: asyncio.run({what}())
except KeyboardInterrupt: print("left", flush=True)""",
    }
    with program(PEER) as peer:
        metadata = peer.line().split()[0]
        code = BLOCKED + ends[how] + "\nsilent.close()"
        # Without development mode, in which a loop warns on a slow machine.
        with program(code, metadata, str(peer.process.pid), options=()) as other:
            # The interpreter does not wait for their threads.
            assert other.end() == "left\n"


PEER = """
import ferrywire as fw, sys
endpoint = fw.Endpoint("127.0.0.1:0", label="doomed")
region = endpoint.allocate(64 << 20)
print(endpoint.metadata().hex(), region.descriptor().hex(), flush=True)
peer = endpoint.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


def test_a_peer_killed_in_mid_transfer_is_named(program: type[Program]):
    async def main():
        endpoint = fw.Endpoint("127.0.0.1:0", label="survivor")
        for _ in range(2):
            with program(PEER) as other:
                metadata, descriptor = map(bytes.fromhex, other.line().split())
                peer = await endpoint.connect_async(metadata, LIMIT)
                assert other.line() == "accepted"
                source, target = endpoint.allocate(64 << 20), fw.RemoteRegion(descriptor)
                transfers = [peer.write(source, target) for _ in range(200)]
                other.process.kill()
                began = time.monotonic()
                with pytest.raises(fw.PeerLost, match="lost peer .*doomed"):
                    for transfer in transfers:
                        await transfer.wait_async(LOSS_IS_TOLD)
                with pytest.raises(fw.PeerLost, match="doomed") as lost:
                    await peer.wait_notification_async(LOSS_IS_TOLD)
                assert time.monotonic() - began < LOSS_IS_TOLD
                assert "doomed" in lost.value.peer and isinstance(peer.error, fw.PeerLost)
        # The endpoint serves the next peer.
        with fw.Endpoint() as near:
            peer = await near.connect_async(endpoint.metadata(), LIMIT)
            await (await endpoint.accept_async(LIMIT)).notify(b"still here")
            assert await peer.wait_notification_async(LIMIT) == b"still here"
        await endpoint.close_async()

    asyncio.run(main())
