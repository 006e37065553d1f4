"""NIXL between two GPUs of this host: writes of 64 MiB, four in flight, checked at the end. One JSON line.

    nixl_peer.py [--bytes 67108864] [--slots 4] [--seconds 1.5]

Whole rounds of all slots are timed, at least one, which may take longer than --seconds for a large size.
"""

import argparse
import base64
import json
import multiprocessing as mp
import time

BYTES = 64 << 20
SLOTS = 4
SECONDS = 1.5
# Longest time in all: NIXL's start, one warm-up transfer, and the rounds.
LIMIT_SECONDS = 120


def agent_of(name, device):
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    torch.cuda.set_device(device)
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True))
    return torch, agent


def target(pipe, o):
    torch, agent = agent_of("target", 1)
    data = torch.zeros(o.slots * o.bytes // 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    agent.register_memory([(data.data_ptr(), o.slots * o.bytes, 1, "")], "VRAM")
    pipe.send((base64.b64encode(agent.get_agent_metadata()), data.data_ptr()))
    pipe.recv()
    expected = torch.arange(o.bytes // 4, dtype=torch.int32, device="cuda")
    pipe.send(all(torch.equal(slot, expected) for slot in data.split(o.bytes // 4)))
    pipe.recv()


def source(pipe, o):
    torch, agent = agent_of("source", 0)
    one = torch.arange(o.bytes // 4, dtype=torch.int32, device="cuda")
    data = one.repeat(o.slots)
    del one
    torch.cuda.synchronize()
    agent.register_memory([(data.data_ptr(), o.slots * o.bytes, 0, "")], "VRAM")
    metadata, address = pipe.recv()
    name = agent.add_remote_agent(base64.b64decode(metadata))
    name = name.decode() if isinstance(name, bytes) else name
    at = lambda base, device: [(base + k * o.bytes, o.bytes, device) for k in range(o.slots)]
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", at(data.data_ptr(), 0), "VRAM")
    remote = agent.prep_xfer_dlist(name, at(address, 1), "VRAM")
    handles = [agent.make_prepped_xfer("WRITE", local, [k], remote, [k]) for k in range(o.slots)]

    def wait(handle):
        while (state := agent.check_xfer_state(handle)) != "DONE":
            assert state != "ERR"

    def round_of_all():
        for handle in handles:
            assert agent.transfer(handle) != "ERR"
        for handle in handles:
            wait(handle)

    # The first transfer connects. One transfer is enough, because a round of a large size takes seconds.
    assert agent.transfer(handles[0]) != "ERR"
    wait(handles[0])
    moved, start = 0, time.monotonic()
    while not moved or time.monotonic() - start < o.seconds:
        round_of_all()
        moved += o.slots * o.bytes
    elapsed = time.monotonic() - start
    pipe.send("check")
    assert pipe.recv()
    print(json.dumps({"gb_per_s": moved / elapsed / 1e9, "cpu": None, "bytes": o.bytes}), flush=True)
    pipe.send("stop")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=BYTES, help="of each write, a multiple of 4 (default 64 MiB)")
    parser.add_argument("--slots", type=int, default=SLOTS, help="writes in flight, each with memory of its own")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    o = parser.parse_args()
    if o.bytes < 4 or o.bytes % 4 or o.slots < 1:
        parser.error("--bytes must be a multiple of 4, and --slots at least 1")
    mp.set_start_method("spawn")
    here, there = mp.Pipe()
    processes = [mp.Process(target=run, args=(end, o)) for run, end in ((target, there), (source, here))]
    for process in processes:
        process.start()
    # Destructors of the agents may hang once the other side has ended.
    processes[1].join(LIMIT_SECONDS)
    failed = processes[1].exitcode != 0
    for process in processes:
        process.kill()
    raise SystemExit(int(failed))
