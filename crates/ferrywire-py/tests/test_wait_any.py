"""Waiting for the first of several transfers that ends."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from conftest import LIMIT, Pair

import ferrywire as fw

np = pytest.importorskip("numpy", reason="needs numpy")

SHORT = 0.1


def test_the_one_that_has_ended_is_named_wherever_it_stands(pair: Pair):
    source, target = pair.near.register(bytes(8)), pair.far.register(bytearray(8 * 8))
    # Each receive waits for its own message; the messages come in another order.
    waiting = deque((tag, pair.to_near.recv(tag, target, offset=tag * 8, nbytes=8)) for tag in range(8))
    for tag in (5, 0, 7, 2, 6, 1, 4, 3):
        for timeout, words in ((0, "^not done yet: "), (SHORT, "^not done within ")):
            with pytest.raises(fw.TimedOut, match=words):
                fw.wait_any((transfer for _, transfer in waiting), timeout)
        # The timer's thread needs the interpreter while this one waits.
        sender = threading.Timer(SHORT, lambda tag=tag: pair.to_far.send(tag, source))
        sender.start()
        at = fw.wait_any([transfer for _, transfer in waiting], timeout=LIMIT)
        ended, transfer = waiting[at]
        assert (ended, transfer.poll()) == (tag, 8)
        del waiting[at]
        sender.join()


def test_a_number_of_transfers_is_kept_in_flight(pair: Pair):
    depth, size = 8, 300_000
    sent = np.random.default_rng(1).integers(0, 256, (depth, size), dtype=np.uint8)
    got = np.zeros_like(sent)
    source, target = pair.near.register(sent), pair.target(got)

    def post(slot: int) -> fw.Transfer:
        return pair.to_far.write(source, target, source_offset=slot * size, target_offset=slot * size, nbytes=size)

    in_flight = [post(slot) for slot in range(depth)]
    for _ in range(300):
        slot = fw.wait_any(in_flight)
        assert in_flight[slot].poll() == size
        in_flight[slot] = post(slot)
    assert [transfer.wait(LIMIT) for transfer in in_flight] == [size] * depth
    assert (got == sent).all()


def test_a_failed_transfer_counts_as_ended_and_has_its_error(pair: Pair):
    target = pair.far.register(bytearray(8))
    receives = [pair.to_near.recv(tag, target) for tag in range(3)]
    receives[1].cancel()
    assert fw.wait_any(receives, LIMIT) == 1
    with pytest.raises(fw.Cancelled):
        receives[1].wait()
    del receives[1]
    closing = threading.Timer(SHORT, pair.to_far.close)
    closing.start()
    at = fw.wait_any(receives, LIMIT)
    closing.join()
    with pytest.raises(fw.PeerClosed):
        receives[at].wait(LIMIT)


def test_progress_does_not_extend_the_timeout(pair: Pair):
    nbytes, count = 1 << 20, 1 << 20
    source, target = pair.near.allocate(nbytes), pair.far.allocate(nbytes)
    # One megabyte again and again: minutes of work.
    nowhere_else = np.zeros(count, np.int64)
    blocks = fw.BlockList(source, target.remote(), nowhere_else, nowhere_else, nbytes)
    write = pair.to_far.write_blocks(blocks)
    while not write.bytes_moved:
        assert write.poll() is None
    with pytest.raises(fw.TimedOut, match="not done within .*write"):
        fw.wait_any([write], 3 * SHORT)
    write.cancel()
    assert fw.wait_any([write], LIMIT) == 0 and write.done()


def test_arguments_that_are_not_transfers_of_one_peer_are_refused(pair: Pair):
    with fw.Endpoint("127.0.0.1:0") as other, pair.near.connect(other.metadata(), timeout=LIMIT) as to_other:
        target = pair.near.register(bytearray(8))
        receives = [peer.recv(1, target) for peer in (pair.to_far, to_other)]
        for wrong, why in (
            ([], "transfers: the list is empty: give at least one"),
            (receives, "transfers: the transfers are of several peers, .*far.* and .*: give transfers of one peer"),
            ([receives[0], None], "transfers: entry 1 is NoneType, not a Transfer"),
            ([pair.to_far], "transfers: entry 0 is Peer, not a Transfer"),
            (receives[0], "transfers: Transfer is not a sequence of transfers: try \\[x\\]"),
        ):
            with pytest.raises(fw.UsageError, match=why):
                fw.wait_any(wrong, LIMIT)
        with pytest.raises(fw.UsageError, match="timeout: -1 is not a number of seconds"):
            fw.wait_any(receives[:1], -1)
        for receive in receives:
            receive.cancel()
            with pytest.raises(fw.Cancelled):
                receive.wait(LIMIT)
