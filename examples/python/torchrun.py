"""Every rank connected to every other, from what torchrun, or any launcher, puts into the environment.

    torchrun --nproc-per-node 4 examples/python/torchrun.py

Needs MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, and no PyTorch: rank 0 listens on the port behind the master's and
sends the metadata of all ranks to each rank, in one notification, which has room for about fifty ranks.
FERRYWIRE_SECRET is the shared secret, needed beyond one host.
"""

from __future__ import annotations

import json
import os

import ferrywire as fw

LIMIT = 60.0


def rendezvous(endpoint: fw.Endpoint, rank: int, world_size: int, master: tuple[str, int]) -> list[bytes]:
    """Returns the metadata of all ranks, by rank. Rank 0 collects it at an extra endpoint, to which the others connect."""
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
    """Connects as soon as a process listens at the address, because ranks start in any order."""
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
    """Returns the peers by rank. Each rank connects to the ranks before it."""
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
        # As an example of work, each rank sends its number to all others.
        mine = endpoint.register(bytes([rank]) * 1024)
        theirs = {other: bytearray(1024) for other in peers}
        transfers = [peer.recv(1, endpoint.register(theirs[other])) for other, peer in peers.items()]
        transfers += [peer.send(1, mine) for peer in peers.values()]
        for transfer in transfers:
            transfer.wait(LIMIT)
        assert all(got == bytes([other]) * 1024 for other, got in theirs.items())
        # Print the line in one piece, because the ranks of torchrun share an unbuffered output.
        print(f"rank {rank} of {world_size} has heard {sorted(theirs)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
