"""One side of a Gloo measurement: two-sided messages through torch.distributed.

The source announces rounds of messages on the control connection, because both sides must post the same number; a
round ends when the target has received all of it.
"""

import torch
import torch.distributed as dist

from common import Control, Ring, buffer, cpu_seconds, options, timed

ROUND_BYTES = 256 << 20
ROUND_MESSAGES = 4096


def main():
    o = options(groups={"type": int, "default": 1})
    rank = 0 if o.role == "source" else 1
    store = dist.TCPStore(o.address, o.port + 1, 2, is_master=rank == 1, wait_for_workers=False) if rank else None
    control = Control.accept(o) if rank else Control.connect(o)
    store = store or dist.TCPStore(o.address, o.port + 1, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    groups = [dist.new_group([0, 1], backend="gloo") for _ in range(o.groups)]
    slots = max(o.depth, o.footprint // o.size) if o.size > 8 else 1
    memory, _ = buffer(max(4096, slots * o.size))
    tensor = torch.from_numpy(memory)
    parts = [tensor[i * o.size:(i + 1) * o.size] for i in range(slots)]
    messages = max(o.depth, min(ROUND_MESSAGES, ROUND_BYTES // o.size)) if o.size > 8 else 1

    def exchange():
        """Runs one round: a large message is cut over all groups, a small one goes to the next group."""
        ring = Ring(o.depth, slots, o.size, lambda slot: start(parts[slot]), finish)
        for _ in range(messages):
            ring.step()
        for works in ring.flight:
            finish(works)
        return messages * o.size

    turn = 0

    def start(part):
        nonlocal turn
        move = dist.isend if rank == 0 else dist.irecv
        if part.numel() >= 1 << 20:
            pieces = zip(groups, part.chunk(o.groups))
        else:
            turn += 1
            pieces = [(groups[turn % o.groups], part)]
        return [move(piece, 1 - rank, group=group) for group, piece in pieces]

    def finish(works):
        for work in works:
            work.wait()

    def ping():
        if rank == 0:
            dist.send(parts[0], 1, group=groups[0])
            dist.recv(parts[0], 1, group=groups[0])
        else:
            dist.recv(parts[0], 0, group=groups[0])
            dist.send(parts[0], 0, group=groups[0])
        return o.size

    one = exchange if o.size > 8 else lambda: [ping() for _ in range(200)] and 200 * o.size
    if rank == 0:
        source(o, control, one)
    else:
        target(control, one)


def source(o, control, one):
    def move():
        control.send(do="round")
        moved = one()
        control.receive()
        return moved

    if o.size > 8:
        timed(o, control, move)
        return
    # 200 round trips per measurement, so that the time of the control message does not matter.
    import contextlib
    import io
    import json
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        timed(o, control, move)
    result = json.loads(out.getvalue())
    result["p50_us"] /= 200
    print(json.dumps(result), flush=True)


def target(control, one):
    while True:
        wanted = control.receive()["do"]
        if wanted == "stop":
            return
        if wanted == "cpu":
            control.send(cpu=cpu_seconds())
        else:
            one()
            control.send(done=True)


main()
