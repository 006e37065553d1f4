"""The passive end: an agent with memory, driven by lines of JSON on standard input.

Every request is answered by one line. Memory and metadata stay until the process ends.
"""

import base64
import ctypes
import json
import mmap
import sys
import time

from nixl._api import nixl_agent, nixl_agent_config


class Host:
    """Host memory."""

    def __init__(self, size):
        self.pages, self.size, self.device = mmap.mmap(-1, size), size, 0
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))

    def write(self, data):
        self.pages[: len(data)] = data

    def read(self, at, size):
        return self.pages[at : at + size]


def memory(kind, size):
    if kind == "VRAM":
        import cuda

        return cuda.Memory(size)
    return Host(size)


def main():
    name, backend = sys.argv[1:3]
    agent = nixl_agent(name, nixl_agent_config(backends=[backend]))
    regions = []

    def answer(value):
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    def register(sizes, kind):
        made = [memory(kind, size) for size in sizes]
        regions.extend(made)
        agent.register_memory([(each.address, each.size, each.device, "") for each in made], kind)
        return {"addresses": [each.address for each in made], "metadata": metadata()}

    def metadata():
        return base64.b64encode(agent.get_agent_metadata()).decode()

    def notifications(count, seconds):
        got, until = [], time.monotonic() + seconds
        while len(got) < count and time.monotonic() < until:
            for sender, messages in agent.get_new_notifs().items():
                got += [[sender, base64.b64encode(message).decode()] for message in messages]
        return got

    def fill(index, value):
        regions[index].write(bytes([value]) * regions[index].size)

    def read(index, at, size):
        return base64.b64encode(regions[index].read(at, size)).decode()

    calls = {"register": register, "metadata": metadata, "notifications": notifications, "fill": fill, "read": read}
    answer("ready")
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        answer(calls[call](*arguments))


main()
