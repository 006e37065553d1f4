"""New weights for 8 receivers: one process shares its tensors, and the others fetch them with their names and shapes.

    python examples/python/weights.py --receivers 8 --mib 16

Each receiver reads on its own, so that a slow receiver delays no other, and the sender need not act meanwhile. With
PyTorch the weights are a `state_dict` (`--torch`).
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import time

import numpy as np

import ferrywire as fw


def weights(mib: int, torch_wanted: bool) -> dict:
    """Returns arrays or tensors by name, with shapes and element types as in a model."""
    random = np.random.default_rng(7)
    rows = max(1, mib * (1 << 20) // (2 * 4 * 1024))
    found = {
        "embedding.weight": random.standard_normal((rows, 1024), np.float32),
        "head.weight": random.standard_normal((rows, 1024), np.float32),
        "head.bias": random.standard_normal(1024, np.float32).astype(np.float16),
        "steps": np.array(12345),
        "empty": np.zeros((0, 4), np.float32),
    }
    if not torch_wanted:
        return found
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in found.items() if array.ndim}
    tensors["head.bias"] = tensors["head.bias"].to(torch.bfloat16)
    return tensors


def digest(tensors: dict) -> str:
    """Returns a digest of names, shapes, element types and bytes."""
    whole = hashlib.sha256()
    for name, tensor in tensors.items():
        if not isinstance(tensor, np.ndarray):
            import torch

            plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        else:
            plain = np.ascontiguousarray(tensor)
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + plain.tobytes())
    return whole.hexdigest()


def receiver(pipe) -> None:
    metadata, shared = pipe.recv()
    with fw.Endpoint() as endpoint, endpoint.connect(metadata, timeout=60) as peer:
        tensors = fw.fetch(endpoint, peer, shared, timeout=60)
        first = digest(tensors)
        # Fetch the next version into the same memory, as a running model needs it.
        fw.fetch(endpoint, peer, shared, into=tensors, timeout=60)
        pipe.send((first, digest(tensors)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    model = weights(options.mib, options.torch)
    spawn = multiprocessing.get_context("spawn")
    with fw.Endpoint("127.0.0.1:0", label="trainer") as endpoint:
        with fw.share(endpoint, model) as shared:
            pipes, processes = [], []
            for _ in range(options.receivers):
                near, far = spawn.Pipe()
                process = spawn.Process(target=receiver, args=(far,))
                process.start()
                # Close this copy of the child's end: if the child failed, `recv` would wait for ever.
                far.close()
                near.send((endpoint.metadata(), shared.describe()))
                pipes.append(near)
                processes.append(process)
            began = time.perf_counter()
            wanted = digest(model)
            for pipe, process in zip(pipes, processes, strict=True):
                assert pipe.recv() == (wanted, wanted)
                process.join(60)
                assert process.exitcode == 0
            seconds = time.perf_counter() - began
    print(f"{options.receivers} receivers have {shared.nbytes} bytes in {len(model)} tensors, verified, {seconds:.1f} s")


if __name__ == "__main__":
    main()
