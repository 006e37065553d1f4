"""NIXL between two GPUs of this host: 64 MiB writes, four in flight, checked at the end. One JSON line."""

import base64
import json
import multiprocessing as mp
import time

BYTES = 64 << 20
SLOTS = 4
SECONDS = 1.5


def agent_of(name, device):
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    torch.cuda.set_device(device)
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True))
    return torch, agent


def target(pipe):
    torch, agent = agent_of("target", 1)
    data = torch.zeros(SLOTS * BYTES // 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    agent.register_memory([(data.data_ptr(), SLOTS * BYTES, 1, "")], "VRAM")
    pipe.send((base64.b64encode(agent.get_agent_metadata()), data.data_ptr()))
    pipe.recv()
    expected = torch.arange(BYTES // 4, dtype=torch.int32, device="cuda")
    pipe.send(all(torch.equal(data[k * BYTES // 4:(k + 1) * BYTES // 4], expected) for k in range(SLOTS)))
    pipe.recv()


def source(pipe):
    torch, agent = agent_of("source", 0)
    one = torch.arange(BYTES // 4, dtype=torch.int32, device="cuda")
    data = one.repeat(SLOTS)
    torch.cuda.synchronize()
    agent.register_memory([(data.data_ptr(), SLOTS * BYTES, 0, "")], "VRAM")
    metadata, address = pipe.recv()
    name = agent.add_remote_agent(base64.b64decode(metadata))
    name = name.decode() if isinstance(name, bytes) else name
    at = lambda base, device: [(base + k * BYTES, BYTES, device) for k in range(SLOTS)]
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", at(data.data_ptr(), 0), "VRAM")
    remote = agent.prep_xfer_dlist(name, at(address, 1), "VRAM")
    handles = [agent.make_prepped_xfer("WRITE", local, [k], remote, [k]) for k in range(SLOTS)]

    def wait(handle):
        while (state := agent.check_xfer_state(handle)) != "DONE":
            assert state != "ERR"

    def round_of_all():
        for handle in handles:
            assert agent.transfer(handle) != "ERR"
        for handle in handles:
            wait(handle)

    round_of_all()
    moved, start = 0, time.monotonic()
    while time.monotonic() - start < SECONDS:
        round_of_all()
        moved += SLOTS * BYTES
    elapsed = time.monotonic() - start
    pipe.send("check")
    assert pipe.recv()
    print(json.dumps({"gb_per_s": moved / elapsed / 1e9, "cpu": None}), flush=True)
    pipe.send("stop")


if __name__ == "__main__":
    mp.set_start_method("spawn")
    here, there = mp.Pipe()
    processes = [mp.Process(target=run, args=(end,)) for run, end in ((target, there), (source, here))]
    for process in processes:
        process.start()
    # Destructors of the agents may hang once the other side is gone.
    processes[1].join(60)
    failed = processes[1].exitcode != 0
    for process in processes:
        process.kill()
    raise SystemExit(int(failed))
