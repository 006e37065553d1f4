"""KV cache from a prefill to a decode process: many scattered blocks of keys and values in one call.

    python examples/python/kv_cache.py --blocks 100000 --block-bytes 16384

The decode process owns the cache and sends its descriptors. The prefill process writes the blocks of a request, of all
tensors at once, and one notification follows them: when it has arrived, so have all blocks. A pipe stands for the scheduler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time

import numpy as np

import ferrywire as fw

SECRET = b"the same on both ends"


def cache(blocks: int, block_bytes: int, seed: int | None) -> dict[str, np.ndarray]:
    """Returns arrays of keys and of values, with one block in each row."""
    if seed is None:
        return {name: np.zeros((blocks, block_bytes), np.uint8) for name in ("keys", "values")}
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 256, (blocks, block_bytes), np.uint8) for name in ("keys", "values")}


def decode(scheduler, blocks: int, block_bytes: int) -> None:
    mine = cache(blocks, block_bytes, None)
    with fw.Endpoint("127.0.0.1:0", secret=SECRET, label="decode-0") as endpoint:
        regions = {name: endpoint.register(tensor) for name, tensor in mine.items()}
        # Regions arrive as `RemoteRegion`s. Any other channel for bytes would do as well.
        scheduler.send((endpoint.metadata(), regions))
        peer = endpoint.accept(timeout=60)
        request = json.loads(peer.wait_notification(timeout=60))
        # All blocks of the request have arrived.
        start, count = request["start"], request["count"]
        theirs = cache(blocks, block_bytes, request["seed"])
        order = np.random.default_rng(request["seed"]).permutation(blocks)
        for name, tensor in mine.items():
            assert (tensor[order[start : start + count]] == theirs[name][start : start + count]).all(), name
        scheduler.send("verified")
        peer.close()


def prefill(scheduler, blocks: int, block_bytes: int, rounds: int) -> list[float]:
    metadata, targets = scheduler.recv()
    seed = 1
    mine = cache(blocks, block_bytes, seed)
    # The scheduler has chosen where each block goes.
    order = np.random.default_rng(seed).permutation(blocks)
    with fw.Endpoint(secret=SECRET, label="prefill-0") as endpoint:
        peer = endpoint.connect(metadata, timeout=60)
        here, there = np.arange(blocks) * block_bytes, order * block_bytes
        lists = [
            fw.BlockList(endpoint.register(mine[name]), targets[name], here, there, block_bytes) for name in mine
        ]
        blocks_of_all = fw.BlockList.join(lists)
        times = []
        for turn in range(rounds):
            last = turn == rounds - 1
            note = json.dumps({"start": 0, "count": blocks, "seed": seed}).encode() if last else None
            began = time.perf_counter()
            peer.write_blocks(blocks_of_all, message=note).wait(timeout=60)
            times.append(time.perf_counter() - began)
        assert scheduler.recv() == "verified"
        peer.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000, help="total number of blocks, half of them keys")
    parser.add_argument("--block-bytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    half = options.blocks // 2
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    decoder = spawn.Process(target=decode, args=(far, half, options.block_bytes))
    decoder.start()
    # Close this copy of the child's end: if the child failed, `recv` would wait for ever.
    far.close()
    times = prefill(near, half, options.block_bytes, options.rounds)
    decoder.join(60)
    assert decoder.exitcode == 0
    best = min(times)
    moved = 2 * half * options.block_bytes
    print(f"{2 * half} blocks of {options.block_bytes} bytes: {best * 1e3:.1f} ms, {moved / best / 1e9:.2f} GB/s, verified")


if __name__ == "__main__":
    main()
