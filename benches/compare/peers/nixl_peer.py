"""One side of a NIXL measurement: one-sided writes from a registered region to a registered region."""

import base64
import os
import sys

from nixl_cu12._api import nixl_agent, nixl_agent_config

from common import Control, Ring, answer_cpu, buffer, options, timed

HANDLES_MAX = 1 << 16
BATCHED_BELOW = 1 << 20


def main():
    o = options(no_progress_thread={"action": "store_true"}, batched={"action": "store_true"})
    slots = min(HANDLES_MAX, max(o.depth + 1, o.footprint // o.size)) if o.size > 8 else 2
    memory, address = buffer(max(4096, slots * o.size))
    threaded = o.role == "target" or not o.no_progress_thread
    agent = nixl_agent(o.role, nixl_agent_config(enable_prog_thread=threaded))
    agent.register_memory([(address, len(memory), 0, "")], "DRAM")
    if o.role == "target":
        control = Control.accept(o)
        control.send(metadata=base64.b64encode(agent.get_agent_metadata()).decode(), address=address)
        answer_cpu(control)
    else:
        source(o, agent, address, slots)
    # NIXL's destructors can hang once the other side has ended, so print the results before.
    sys.stdout.flush()
    os._exit(0)


def source(o, agent, address, slots):
    control = Control.connect(o)
    peer = control.receive()
    name = agent.add_remote_agent(base64.b64decode(peer["metadata"]))
    name = name.decode() if isinstance(name, bytes) else name

    def blocks(base):
        return [(base + i * o.size, o.size, 0) for i in range(slots)]

    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", blocks(address), "DRAM")
    remote = agent.prep_xfer_dlist(name, blocks(peer["address"]), "DRAM")
    # Batched: two requests in flight, each with half of the depth's messages, which NIXL may join.
    batch = o.depth // 2 if o.batched and o.depth > 1 and o.size < BATCHED_BELOW else 1
    groups = [list(range(i, i + batch)) for i in range(0, slots - batch + 1, batch)]
    handles = [agent.make_prepped_xfer("WRITE", local, g, remote, g) for g in groups]

    def post(slot):
        state = agent.transfer(handles[slot])
        if state == "ERR":
            sys.exit("a NIXL transfer could not be posted")
        return None if state == "DONE" else handles[slot]

    def wait(handle):
        while handle is not None:
            state = agent.check_xfer_state(handle)
            if state == "DONE":
                return
            if state == "ERR":
                sys.exit("a NIXL transfer failed")

    ring = Ring(max(1, o.depth // batch), len(handles), o.size * batch, post, wait)
    timed(o, control, ring.step)


main()
