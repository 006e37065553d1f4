"""Every rank connected to every other, from what torchrun, or any launcher, puts into the environment.

    torchrun --nproc-per-node 4 examples/python/torchrun.py

Needs MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, and no PyTorch: rank 0 listens on the port behind the master's and
hands everybody's metadata round, in one notification: enough for some fifty ranks. FERRYWIRE_SECRET is the shared secret,
needed beyond one host.
"""

from __future__ import annotations

import json
import os

import ferrywire as fw

LIMIT = 60.0


def rendezvous(endpoint: fw.Endpoint, rank: int, world_size: int, master: tuple[str, int]) -> list[bytes]:
    """Everybody's metadata, by rank. Rank 0 makes an endpoint for it, the others ask there."""
    secret = os.environ.get("FERRYWIRE_SECRET")
    if rank == 0:
        everybody = {0: endpoint.metadata().hex()}
        listen = "127.0.0.1" if secret is None else "0.0.0.0"
        with fw.Endpoint((listen, master[1]), secret=secret, label="rendezvous", threads=1) as meeting:
            peers = []
            while len(everybody) < world_size:
                peers.append(meeting.accept(LIMIT))
                theirs = json.loads(peers[-1].wait_notification(LIMIT))
                everybody[theirs["rank"]] = theirs["metadata"]
            answer = json.dumps([everybody[each] for each in range(world_size)]).encode()
            for peer in peers:
                peer.notify(answer).wait(LIMIT)
        return [bytes.fromhex(each) for each in json.loads(answer)]
    with fw.Endpoint(secret=secret, threads=1) as asking:
        peer = patiently(asking, master)
        peer.notify(json.dumps({"rank": rank, "metadata": endpoint.metadata().hex()}).encode())
        return [bytes.fromhex(each) for each in json.loads(peer.wait_notification(LIMIT))]


def patiently(endpoint: fw.Endpoint, to: tuple[str, int]) -> fw.Peer:
    """Connects as soon as a process listens there: ranks start in any order."""
    import time

    until = time.monotonic() + LIMIT
    while True:
        try:
            return endpoint.connect(to, timeout=LIMIT)
        except fw.Unreachable:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def mesh(endpoint: fw.Endpoint, rank: int, everybody: list[bytes]) -> dict[int, fw.Peer]:
    """Peers by rank: each connects to those before it."""
    peers = {}
    for other in range(rank):
        peers[other] = endpoint.connect(everybody[other], timeout=LIMIT)
        peers[other].notify(str(rank).encode())
    while len(peers) < len(everybody) - 1:
        peer = endpoint.accept(LIMIT)
        peers[int(peer.wait_notification(LIMIT))] = peer
    return peers


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
    secret = os.environ.get("FERRYWIRE_SECRET")
    listen = "127.0.0.1:0" if secret is None else "0.0.0.0:0"
    with fw.Endpoint(listen, secret=secret, label=f"rank-{rank}") as endpoint:
        peers = mesh(endpoint, rank, rendezvous(endpoint, rank, world_size, master))
        # Something to do: everybody sends its rank to everybody.
        mine = endpoint.register(bytes([rank]) * 1024)
        theirs = {other: bytearray(1024) for other in peers}
        transfers = [peer.recv(1, endpoint.register(theirs[other])) for other, peer in peers.items()]
        transfers += [peer.send(1, mine) for peer in peers.values()]
        for transfer in transfers:
            transfer.wait(LIMIT)
        assert all(got == bytes([other]) * 1024 for other, got in theirs.items())
        # In one piece: torchrun's ranks share an output, which is not buffered.
        print(f"rank {rank} of {world_size} has heard {sorted(theirs)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
