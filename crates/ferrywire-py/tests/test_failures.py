"""Lost peers: an exception that names them, and an endpoint that continues to work."""

from __future__ import annotations

import time

import pytest
from conftest import LIMIT, LOSS_IS_TOLD, Program

import ferrywire as fw

SERVER = """
import ferrywire as fw, sys
endpoint = fw.Endpoint("127.0.0.1:0", label="doomed")
region = endpoint.allocate(64 << 20)
print(endpoint.metadata().hex(), region.descriptor().hex(), flush=True)
peer = endpoint.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


def test_a_peer_killed_in_mid_transfer_is_named_and_the_next_is_served(program: type[Program]):
    with fw.Endpoint("127.0.0.1:0", label="survivor") as endpoint:
        source = endpoint.allocate(64 << 20)
        for _ in range(2):
            with program(SERVER) as other:
                metadata, descriptor = map(bytes.fromhex, other.line().split())
                peer = endpoint.connect(metadata, timeout=LIMIT)
                assert other.line() == "accepted"
                transfers = [peer.write(source, fw.RemoteRegion(descriptor)) for _ in range(200)]
                other.process.kill()
                began = time.monotonic()
                with pytest.raises(fw.PeerLost, match="lost peer .*doomed") as lost:
                    for transfer in transfers:
                        transfer.wait(LOSS_IS_TOLD)
                assert time.monotonic() - began < LOSS_IS_TOLD
                assert lost.value.kind == "peer" and "doomed" in lost.value.peer
                assert isinstance(peer.error, fw.PeerLost) and "doomed" in repr(peer)
                with pytest.raises(fw.PeerLost, match="doomed"):
                    peer.wait_notification(LOSS_IS_TOLD)
        with fw.Endpoint() as near, near.connect(endpoint.metadata(), timeout=LIMIT) as peer:
            endpoint.accept(LIMIT).notify(b"still here")
            assert peer.wait_notification(LIMIT) == b"still here"


def test_a_restarted_peer_is_refused(program: type[Program]):
    with fw.Endpoint("127.0.0.1:0") as before:
        port, metadata = before.port, before.metadata()
    with fw.Endpoint(f"127.0.0.1:{port}"), fw.Endpoint() as near:
        with pytest.raises(fw.Refused, match="it restarted since the metadata were made") as refused:
            near.connect(metadata, timeout=LIMIT)
        assert refused.value.reason == "restarted"
