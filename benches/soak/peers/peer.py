#!/usr/bin/env python3
"""A client of the soak that uses the Python package. It speaks as `soak client` does: with its driver as in src/driver.rs,
with the server as in src/server.rs.
"""

import argparse
import math
import queue
import random
import sys
import threading
import time

import ferrywire as fw

OPERATION_LIMIT, CLOSE_LIMIT, ATTEMPT_LIMIT, CONNECT_LIMIT = 60, 20, 20, 60
REGION_BYTES, LIST_BYTES, BLOCKS_MAX = 64 << 20, 8 << 20, 32
POISON = b"\xa5" * REGION_BYTES
STEPS_OF_A_SESSION = 200


class Wrong(Exception):
    """A byte differs, or an answer is not what it should be."""


class End(Exception):
    """The driver has ordered the end."""


def say(kind, text=""):
    print(kind, str(text).replace("\n", " "), flush=True)


class Client:
    def __init__(self, o):
        self.o, self.dice = o, random.Random(o.seed)
        with open(o.pool, "rb") as f:
            self.pool = f.read()
        self.orders = queue.SimpleQueue()
        threading.Thread(target=self.listen, daemon=True).start()
        _, *secrets = self.orders.get()
        self.endpoint = fw.Endpoint(secret=secrets[0], label=o.label, nics=o.nics, channels=o.channels, encryption=o.encryption)
        self.source = self.endpoint.register(bytearray(self.pool))
        self.operations = self.bytes = self.cancelled = 0
        self.reported = time.monotonic()

    def listen(self):
        for line in sys.stdin:
            self.orders.put(line.split())
        self.orders.put(["end"])

    def obey(self):
        while not self.orders.empty():
            order, *words = self.orders.get()
            if order == "end":
                raise End
            if order == "secret":
                self.endpoint.set_secret(words[0], also_accepted=words[1] if len(words) > 1 else None)
                say("ok", "secret")

    def add(self, nbytes):
        self.operations += 1
        self.bytes += nbytes

    def report(self):
        say("moved", f"{self.operations} {self.bytes} {self.cancelled}")
        self.operations = self.bytes = self.cancelled = 0
        self.reported = time.monotonic()

    def connect(self):
        until = time.monotonic() + CONNECT_LIMIT
        while True:
            self.obey()
            try:
                with open(self.o.metadata, "rb") as f:
                    return self.endpoint.connect(f.read(), timeout=ATTEMPT_LIMIT)
            except fw.Error as error:
                if time.monotonic() > until:
                    raise fw.TimedOut(f"connect: {error}") from error
                say("retried", error)
            time.sleep(0.1)

    def session(self):
        self.peer = self.connect()
        self.landing = self.endpoint.register(bytearray(POISON))
        self.notify(f"hello {self.o.memory} {REGION_BYTES} {self.source.descriptor().hex()}")
        self.target = self.region()
        say("up")
        for _ in range(self.dice.randrange(STEPS_OF_A_SESSION // 2, STEPS_OF_A_SESSION * 3 // 2)):
            self.obey()
            steps, weights = zip(*self.STEPS)
            self.dice.choices(steps, weights)[0](self)
            if time.monotonic() > self.reported + 0.5:
                self.report()
        self.peer.close(CLOSE_LIMIT)
        self.landing.deregister()

    def notify(self, message):
        self.peer.notify(message if isinstance(message, bytes) else message.encode()).wait(OPERATION_LIMIT)

    def answer(self):
        return self.peer.wait_notification(OPERATION_LIMIT)

    def region(self):
        answer = self.answer()
        if not answer.startswith(b"region "):
            raise Wrong(f"no descriptor, but {answer!r}")
        return fw.RemoteRegion(bytes.fromhex(answer[7:].decode()))

    def good(self):
        answer = self.answer()
        if answer != b"good":
            raise Wrong(f"the server answers {answer!r}")

    def spans(self, count, total):
        """Spans (from, at, nbytes) that do not overlap in the region."""
        room, spans = total // count, []
        for i in range(count):
            nbytes = min(room, int(math.exp(self.dice.uniform(math.log(8), math.log(room)))))
            at = i * room + self.dice.randrange(room - nbytes + 1)
            spans.append((self.dice.randrange(len(self.pool) - nbytes + 1), at, nbytes))
        return spans

    def poison(self, at, nbytes):
        self.landing.write_at(at, memoryview(POISON)[:nbytes])

    def verify(self, span, what):
        start, at, nbytes = span
        found, expected = self.landing.read_at(at, nbytes), self.pool[start:start + nbytes]
        if found != expected:
            first = next(i for i in range(nbytes) if found[i] != expected[i])
            raise Wrong(f"{what} by {self.o.label}: span {span}: byte {first} is {found[first]:#x}, expected {expected[first]:#x}")

    def write(self, span, **more):
        start, at, nbytes = span
        return self.peer.write(self.source, self.target, source_offset=start, target_offset=at, nbytes=nbytes, **more)

    def read(self, span):
        _, at, nbytes = span
        return self.peer.read(self.landing, self.target, target_offset=at, source_offset=at, nbytes=nbytes)

    def write_and_read_back(self):
        spans = self.spans(self.dice.randint(1, 6), REGION_BYTES)
        for transfer in [self.write(span) for span in spans]:
            self.add(transfer.wait(OPERATION_LIMIT))
        for _, at, nbytes in spans:
            self.poison(at, nbytes)
        for transfer, span in [(self.read(span), span) for span in spans]:
            self.add(transfer.wait(OPERATION_LIMIT))
            self.verify(span, "written and read back")

    def write_and_let_check(self):
        (span,) = self.spans(1, REGION_BYTES)
        moved = self.write(span, message=("check " + ",".join(map(str, span))).encode()).wait(OPERATION_LIMIT)
        self.good()
        self.add(moved)

    def move_blocks(self):
        spans = self.spans(self.dice.randint(2, BLOCKS_MAX), LIST_BYTES)
        self.dice.shuffle(spans)
        starts, ats, sizes = map(list, zip(*spans))
        message = "check " + " ".join(",".join(map(str, span)) for span in spans)
        blocks = fw.BlockList(self.source, self.target, starts, ats, sizes)
        self.add(self.peer.write_blocks(blocks, message=message.encode()).wait(OPERATION_LIMIT))
        self.good()
        for _, at, nbytes in spans:
            self.poison(at, nbytes)
        blocks = fw.BlockList(self.landing, self.target, ats, ats, sizes)
        self.add(self.peer.read_blocks(blocks).wait(OPERATION_LIMIT))
        for span in spans:
            self.verify(span, "blocks read back")

    def echo(self):
        ((start, at, nbytes),) = self.spans(1, REGION_BYTES)
        self.poison(at, nbytes)
        back = self.peer.recv(7, self.landing, offset=at, nbytes=nbytes)
        self.notify(f"echo 7 {nbytes}")
        self.peer.send(7, self.source, offset=start, nbytes=nbytes).wait(OPERATION_LIMIT)
        if back.wait(OPERATION_LIMIT) != nbytes:
            raise Wrong("an echo of another length")
        self.verify((start, at, nbytes), "sent and sent back")
        self.add(2 * nbytes)

    def ping(self):
        payload = self.dice.randbytes(self.dice.randint(1, 8000))
        self.notify(b"ping " + payload)
        if self.answer() != b"pong " + payload:
            raise Wrong("a notification came back changed")
        self.add(2 * len(payload))

    def pull_or_push(self):
        (span,) = self.spans(1, REGION_BYTES)
        text = ",".join(map(str, span))
        if self.dice.random() < 0.5:
            self.notify(f"pull {text}")
            self.good()
        else:
            self.poison(span[1], span[2])
            self.notify(f"push {text} {self.landing.descriptor().hex()}")
            self.good()
            self.verify(span, "written by the server and read")
        self.add(span[2])

    def cancel(self):
        (span,) = self.spans(1, REGION_BYTES)
        transfer = self.dice.choice((self.write, self.read))(span)
        time.sleep(self.dice.random() * 0.003)
        transfer.cancel()
        try:
            self.add(transfer.wait(OPERATION_LIMIT))
        except fw.Cancelled:
            self.cancelled += 1
        again = (self.dice.randrange(len(self.pool) - span[2] + 1), span[1], span[2])
        self.add(self.write(again).wait(OPERATION_LIMIT))
        self.poison(again[1], again[2])
        self.add(self.read(again).wait(OPERATION_LIMIT))
        self.verify(again, "written after a cancel and read back")

    def register_anew(self):
        self.landing.deregister()
        self.landing = self.endpoint.register(bytearray(POISON))
        gone, (span,) = self.target, self.spans(1, REGION_BYTES)
        self.notify("again")
        self.target = self.region()
        try:
            self.peer.write(self.source, gone, source_offset=span[0], target_offset=span[1], nbytes=span[2]).wait(OPERATION_LIMIT)
            raise Wrong("a write to a deregistered region succeeded")
        except fw.AccessRefused:
            pass
        self.write_and_read_back()

    STEPS = ((write_and_read_back, 45), (write_and_let_check, 15), (move_blocks, 10), (echo, 10), (ping, 5),
             (pull_or_push, 6), (cancel, 7), (register_anew, 2))

    def run(self):
        """Moves bytes until the driver orders the end."""
        while True:
            try:
                self.session()
                say("closed", "for a new connection")
            except End:
                break
            except Wrong as error:
                say("wrong", error)
            except (fw.PeerClosed, fw.Closed) as error:
                say("closed", error)
            except fw.PeerLost as error:
                say("lost", error)
        self.report()
        self.endpoint.close(CLOSE_LIMIT)


def main():
    p = argparse.ArgumentParser()
    for name in ("pool", "metadata", "label"):
        p.add_argument("--" + name, required=True)
    p.add_argument("--nics", type=lambda text: text.split(","))
    p.add_argument("--channels", type=int)
    p.add_argument("--encryption", default="off")
    p.add_argument("--memory", default="host")
    p.add_argument("--seed", type=int, default=1)
    try:
        Client(p.parse_args()).run()
    except fw.TimedOut as error:
        say("unended", error)
        sys.exit(1)
    except Exception as error:
        say("failed", f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
