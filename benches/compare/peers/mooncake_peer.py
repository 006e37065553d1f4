"""One side of a Mooncake measurement: one-sided writes over its TCP transport."""

import os
import sys

from mooncake.engine import TransferEngine

from common import Control, answer_cpu, buffer, options, timed


def main():
    o = options()
    slots = max(o.depth, o.footprint // o.size) if o.size > 8 else 1
    memory, address = buffer(max(4096, slots * o.size))
    engine = TransferEngine()
    if engine.initialize(o.own, "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("the Mooncake engine could not be started")
    if engine.register_memory(address, len(memory)) != 0:
        sys.exit("the memory could not be registered with the Mooncake engine")
    if o.role == "target":
        control = Control.accept(o)
        control.send(session=f"{o.own}:{engine.get_rpc_port()}", address=address)
        answer_cpu(control)
    else:
        source(o, engine, address, slots)
    sys.stdout.flush()
    os._exit(0)


def source(o, engine, address, slots):
    control = Control.connect(o)
    peer = control.receive()
    at = 0

    def move():
        nonlocal at
        offsets = [((at + i) % slots) * o.size for i in range(o.depth)]
        at = (at + o.depth) % slots
        sizes = [o.size] * o.depth
        status = engine.batch_transfer_sync_write(peer["session"], [address + x for x in offsets],
                                                  [peer["address"] + x for x in offsets], sizes)
        if status != 0:
            sys.exit(f"a Mooncake transfer failed: {status}")
        return o.size * o.depth

    def move_one():
        if engine.transfer_sync_write(peer["session"], address, peer["address"], o.size) != 0:
            sys.exit("a Mooncake transfer failed")
        return o.size

    timed(o, control, move if o.depth > 1 else move_one)


main()
