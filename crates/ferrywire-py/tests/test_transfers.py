"""The received data of every operation, for every kind of memory."""

from __future__ import annotations

import array
import pickle
import socket
from typing import Any

import pytest
from conftest import LIMIT, Pair

import ferrywire as fw

np = pytest.importorskip("numpy", reason="needs numpy")


def pattern(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 4096, 65537, 5 << 20])
def test_write_arrives_and_says_so(pair: Pair, nbytes: int):
    sent, got = pattern(nbytes), np.zeros(nbytes, np.uint8)
    target = pair.far.register(got)
    transfer = pair.to_far.write(pair.near.register(sent), target.remote(), message=b"all there")
    assert pair.to_near.wait_notification(LIMIT) == b"all there"
    assert (got == sent).all()
    assert transfer.wait(LIMIT) == nbytes
    assert (transfer.poll(), transfer.done(), transfer.bytes_moved) == (nbytes, True, nbytes)


def test_offsets_and_sizes_choose_what_moves(pair: Pair):
    sent, got = pattern(1000), np.zeros(1000, np.uint8)
    source, target = pair.near.register(sent), pair.target(got)
    pair.to_far.write(source, target, source_offset=100, target_offset=7, nbytes=50).wait(LIMIT)
    assert (got[7:57] == sent[100:150]).all() and got.sum() == sent[100:150].sum(dtype=int)
    back = np.zeros(1000, np.uint8)
    pair.to_far.read(pair.near.register(back), target, target_offset=990, source_offset=7).wait(LIMIT)
    assert (back[990:] == sent[100:110]).all() and not back[:990].any()


def test_read_brings_what_the_peer_has(pair: Pair):
    has, got = pattern(3 << 20), np.zeros(3 << 20, np.uint8)
    assert pair.to_far.read(pair.near.register(got), pair.target(has)).wait(LIMIT) == 3 << 20
    assert (got == has).all()


@pytest.mark.parametrize("nbytes", [0, 100, 1 << 20])
def test_messages_meet_by_tag_in_order(pair: Pair, nbytes: int):
    source = pair.near.register(np.concatenate([pattern(nbytes), pattern(nbytes)[::-1]]))
    first, second = bytearray(nbytes), bytearray(nbytes + 10)
    pair.to_far.send(5, source, nbytes=nbytes)
    pair.to_far.send(5, source, offset=nbytes, nbytes=nbytes)
    one = pair.to_near.recv(5, pair.far.register(first))
    two = pair.to_near.recv(5, pair.far.register(second))
    assert (one.wait(LIMIT), two.wait(LIMIT)) == (nbytes, nbytes)
    assert first == pattern(nbytes).tobytes() and second[:nbytes] == pattern(nbytes)[::-1].tobytes()


def test_one_message_from_pieces_to_pieces(pair: Pair):
    sent, got = pattern(100), np.zeros(100, np.uint8)
    pair.to_far.send_blocks(1, pair.near.register(sent), [90, 0], [10, 20])
    received = pair.to_near.recv_blocks(1, pair.far.register(got), np.array([0, 50]), array.array("q", [15, 15]))
    assert received.wait(LIMIT) == 30
    whole = np.concatenate([sent[90:], sent[:20]])
    assert (np.concatenate([got[:15], got[50:65]]) == whole).all()


def test_block_lists_are_made_once_and_used_by_index(pair: Pair):
    sent, got = pattern(64 * 100), np.zeros(64 * 100, np.uint8)
    source, target = pair.near.register(sent), pair.target(got)
    order = np.random.default_rng(1).permutation(100)
    blocks = fw.BlockList(source, target, np.arange(100) * 64, order * 64, 64)
    assert len(blocks) == 100
    few = np.array([3, 99])
    assert pair.to_far.write_blocks(blocks, few).wait(LIMIT) == 128
    assert (got.reshape(100, 64)[order[few]] == sent.reshape(100, 64)[few]).all()
    pair.to_far.write_blocks(blocks, message=b"done").wait(LIMIT)
    assert (got.reshape(100, 64)[order] == sent.reshape(100, 64)).all()
    sent[:] = 0
    assert pair.to_far.read_blocks(blocks).wait(LIMIT) == 6400
    assert (sent == pattern(6400)).all()


def test_block_sizes_may_differ(pair: Pair):
    sent, got = pattern(100), np.zeros(100, np.uint8)
    blocks = fw.BlockList(
        pair.near.register(sent), pair.target(got), [0, 50], [10, 90], np.array([5, 10])
    )
    pair.to_far.write_blocks(blocks).wait(LIMIT)
    assert (got[10:15] == sent[:5]).all() and (got[90:] == sent[50:60]).all() and not got[15:90].any()


def test_lists_over_several_regions_are_one_operation(pair: Pair):
    keys, values, got = pattern(640), pattern(1280), [np.zeros(640, np.uint8), np.zeros(1280, np.uint8)]
    lists = [
        fw.BlockList(pair.near.register(mine), pair.target(theirs), [0, mine.size // 2], [0, mine.size // 2], 64)
        for mine, theirs in zip((keys, values), got, strict=True)
    ]
    both = fw.BlockList.join(lists)
    assert (len(both), both.nbytes) == (4, 256)
    transfer = pair.to_far.write_blocks(both, message=b"keys and values")
    assert pair.to_near.wait_notification(LIMIT) == b"keys and values" and transfer.wait(LIMIT) == 256
    assert (got[0][320:384] == keys[320:384]).all() and (got[1][640:704] == values[640:704]).all()
    assert got[0].sum() + got[1].sum() == sum(int(x[:64].sum()) + int(x[x.size // 2 :][:64].sum()) for x in (keys, values))


def test_a_notification_alone_comes_after_all_before_it(pair: Pair):
    got = np.zeros(1 << 20, np.uint8)
    target = pair.target(got)
    source = pair.near.register(np.ones(1 << 20, np.uint8))
    pair.to_far.write(source, target)
    pair.to_far.notify(b"")
    assert pair.to_near.wait_notification(LIMIT) == b"" and got.all()
    assert pair.to_near.poll_notification() is None


@pytest.mark.parametrize(
    "memory",
    [
        bytearray(80),
        memoryview(bytearray(80)),
        array.array("d", [0.0] * 10),
        np.zeros((2, 5)),
        np.zeros(10, np.complex64),
        np.zeros(80, bool),
        np.zeros(5, "U4"),
        np.zeros(10, np.dtype([("a", "i4"), ("b", "f4")])),
        np.zeros((3, 40), np.uint8)[1:3],
    ],
    ids=lambda memory: type(memory).__name__ + getattr(getattr(memory, "dtype", None), "str", ""),
)
def test_whatever_is_one_run_of_bytes_is_a_region(pair: Pair, memory: object):
    region = pair.far.register(memory)
    assert (region.nbytes, len(region), region.device, region.writable) == (80, 80, "host", True)
    pair.to_far.write(pair.near.register(bytes(range(80))), region.remote()).wait(LIMIT)
    assert region.read_at() == bytes(range(80))


class ThroughDlpack:
    """An array that is only shared by DLPack, in the form of an older library."""

    def __init__(self, held: np.ndarray, versions: bool):
        self.held, self.versions = held, versions

    def __dlpack_device__(self):
        return self.held.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versions:
            if "max_version" in options:
                raise TypeError("unexpected keyword argument 'max_version'")
            return self.held.__dlpack__()
        return self.held.__dlpack__(**options)


@pytest.mark.parametrize("versions", [True, False])
def test_dlpack_shows_memory_with_and_without_a_version(pair: Pair, versions: bool):
    held = np.zeros((4, 5), np.int32)
    region = pair.far.register(ThroughDlpack(held, versions))
    assert (region.nbytes, region.writable) == (80, True)
    pair.to_far.write(pair.near.register(bytes(range(80))), region.remote()).wait(LIMIT)
    assert held.tobytes() == bytes(range(80))
    with pytest.raises(fw.UsageError, match=r"shape \(5, 4\), strides \(1, 5\) in elements"):
        pair.far.register(ThroughDlpack(held.T, versions))


def test_dlpack_says_that_memory_is_read_only(pair: Pair):
    held = np.arange(4)
    held.flags.writeable = False
    assert not pair.near.register(ThroughDlpack(held, True)).writable


class OfJax(ThroughDlpack):
    """An array like those of jax: immutable, which its capsules do not tell, and perhaps still being computed."""

    __module__ = "jaxlib._jax"
    ready = False

    def __init__(self, held: np.ndarray):
        super().__init__(held, versions=False)

    def block_until_ready(self):
        self.held[:] = 7
        self.ready = True
        return self

    def __dlpack__(self, **options):
        assert self.ready
        return super().__dlpack__(**options)


def test_arrays_of_jax_are_waited_for_and_never_written_to(pair: Pair):
    computed, got = OfJax(np.zeros(8, np.uint8)), bytearray(8)
    region = pair.near.register(computed)
    assert computed.ready and not region.writable
    pair.to_far.write(region, pair.target(got)).wait(LIMIT)
    assert got == b"\x07" * 8
    for use in (
        lambda: pair.to_far.recv(1, region),
        region.remote,
        lambda: pair.near.register(computed, writable=True),
    ):
        with pytest.raises(fw.UsageError, match="read-only"):
            use()


@pytest.mark.parametrize("device", ["host", "sim:0"])
def test_memory_of_the_engine(pair: Pair, device: str):
    near, far = pair.near.allocate(1 << 20, device), pair.far.allocate(1 << 20, device)
    assert near.device == device and far.remote().device == device
    near.write_at(0, pattern(1 << 20))
    pair.to_far.write(near, far.remote()).wait(LIMIT)
    assert far.read_at() == pattern(1 << 20).tobytes()
    assert far.read_at(5, 3) == pattern(1 << 20)[5:8].tobytes()


def test_host_memory_of_the_engine_is_a_buffer(pair: Pair):
    region = pair.near.allocate(100)
    shown = np.frombuffer(region, np.uint8)
    shown[:3] = 1, 2, 3
    assert region.read_at(0, 4) == bytes([1, 2, 3, 0])
    region.deregister()
    shown[99] = 7
    assert shown.sum() == 13


def test_regions_pickle_as_the_peer_sees_them(pair: Pair):
    region = pair.far.register(bytearray(10))
    for form in (region, region.remote()):
        remote = pickle.loads(pickle.dumps(form))
        assert type(remote) is fw.RemoteRegion and remote == region.remote()
        for held_in in (bytes, bytearray, memoryview):
            assert fw.RemoteRegion(held_in(remote.descriptor())) == remote
        assert (remote.nbytes, remote.device, remote.owner) == (10, "host", pair.far.identity)
        pair.to_far.write(pair.near.register(bytes(10)), remote).wait(LIMIT)


def test_properties_of_peers_and_endpoints(pair: Pair):
    assert (pair.to_near.label, pair.to_far.label) == ("near", "far")
    assert pair.to_far.address == f"127.0.0.1:{pair.far.port}" and pair.to_far.address in pair.to_far.name
    assert "near" in pair.to_near.name and pair.to_far.identity == pair.far.identity
    assert pair.to_far.same_host and pair.to_far.error is None
    stats = pair.to_far.stats()
    assert stats["transport"] == "tcp" and stats["channels"][0]["alive"] and stats["channels"][0]["rtt_s"] > 0
    assert pair.far.listen_addresses == [f"127.0.0.1:{pair.far.port}"]
    assert pair.near.port is None and pair.near.peer_count == 1
    for thing in (pair.near, pair.far, pair.to_far, pair.far.register(bytearray(1))):
        assert repr(thing).startswith("<ferrywire.")


def test_a_name_is_tried_at_each_of_its_addresses():
    known = {each[4][0] for each in socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)}
    if not {"127.0.0.1", "::1"} <= known:
        pytest.skip("needs a localhost with addresses of both kinds")
    with fw.Endpoint("[::1]:0") as far, fw.Endpoint() as near:
        # Nothing listens on the IPv4 address.
        with near.connect(f"localhost:{far.port}", timeout=LIMIT) as peer:
            assert peer.address == f"[::1]:{far.port}"


def test_addresses_in_every_form():
    with fw.Endpoint(("localhost", 0)) as far, fw.Endpoint() as near:
        for to in (far.metadata(), f"localhost:{far.port}", ("127.0.0.1", far.port)):
            near.connect(to, timeout=LIMIT).close()


@pytest.mark.parametrize(
    ("near", "far", "protection"),
    [
        ({}, {"encryption": "preferred"}, None),
        ({"encryption": "preferred"}, {"encryption": "required"}, "-"),
        ({"keyed_checksum": True}, {}, "-"),
    ],
)
def test_encryption_is_settled_by_both_ends(near: dict[str, Any], far: dict[str, Any], protection: str | None):
    with fw.Endpoint("127.0.0.1:0", **far) as there, fw.Endpoint(**near) as here:
        sent, got = pattern(100_000), np.zeros(100_000, np.uint8)
        with here.connect(("127.0.0.1", there.port), timeout=LIMIT) as peer:
            target = there.register(got)
            peer.write(here.register(sent), target.remote()).wait(LIMIT)
            assert (got == sent).all()
            found = peer.stats()["protection"]
            assert found is None if protection is None else protection in found or found == "poly1305"


def test_a_secret_is_exchanged_while_endpoints_run():
    old, new = b"the first secret", "the second secret"
    with fw.Endpoint("127.0.0.1:0", secret=old) as there, fw.Endpoint(secret=old) as here:
        there.set_secret(new, also_accepted=old)
        here.connect(("127.0.0.1", there.port), timeout=LIMIT).close()
        here.set_secret(new)
        here.connect(("127.0.0.1", there.port), timeout=LIMIT).close()
        with pytest.raises(fw.UsageError, match="secret"):
            here.set_secret(b"short")


def test_encryption_that_one_end_requires_and_the_other_has_off_is_refused():
    with fw.Endpoint("127.0.0.1:0", encryption="required") as there, fw.Endpoint() as here:
        with pytest.raises(fw.Error, match="requires encryption"):
            here.connect(("127.0.0.1", there.port), timeout=LIMIT)
    with pytest.raises(fw.UsageError, match="off, preferred or required"):
        fw.Endpoint(encryption="on")
