"""NCCL between two GPUs of this host, by torch: 64 MiB messages one way, checked at the end. One JSON line."""

import json
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BYTES = 64 << 20
MESSAGES = 16


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    expected = torch.arange(BYTES // 4, dtype=torch.int32, device="cuda")
    data = expected.clone() if rank == 0 else torch.zeros_like(expected)

    def move(count):
        for _ in range(count):
            dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
        torch.cuda.synchronize()

    move(4)
    dist.barrier()
    torch.cuda.synchronize()
    start = time.monotonic()
    move(MESSAGES)
    elapsed = time.monotonic() - start
    if rank == 1:
        assert torch.equal(data, expected)
        print(json.dumps({"gb_per_s": BYTES * MESSAGES / elapsed / 1e9, "cpu": None,
                          "version": ".".join(map(str, torch.cuda.nccl.version()))}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (free_port(),), nprocs=2)
