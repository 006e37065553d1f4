"""The engine's log records arrive in `logging`, with their level."""

from __future__ import annotations

import logging

import pytest
from conftest import LIMIT, Program, eventually

import ferrywire as fw


def test_records_have_the_levels_of_the_engine(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, "ferrywire"):
        with fw.Endpoint("127.0.0.1:0") as far, fw.Endpoint() as near:
            near.connect(far.metadata(), timeout=LIMIT).close()
        said = lambda: [record for record in caplog.records if "data connection" in record.getMessage()]
        eventually(said, "a record of a connection")
    assert {record.levelname for record in said()} == {"DEBUG"} and said()[0].name == "ferrywire"
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ferrywire"):
        with fw.Endpoint("127.0.0.1:0", secret="one secret") as far, fw.Endpoint(secret="another one") as near:
            with pytest.raises(fw.Refused):
                near.connect(far.metadata(), timeout=LIMIT)
            refused = lambda: [each for each in caplog.records if "refused a connection" in each.getMessage()]
            eventually(refused, "a record of the refusal")
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_handler_that_fails_or_is_slow_delays_no_transfer(program: type[Program]):
    with program("""
import ferrywire as fw, logging, sys, traceback, time
traceback.print_exc = lambda *_: None
class Bad(logging.Handler):
    def handle(self, record):
        time.sleep(0.01)
        raise RuntimeError("no")
logging.getLogger("ferrywire").addHandler(Bad())
logging.getLogger("ferrywire").setLevel(logging.DEBUG)
for _ in range(3):
    with fw.Endpoint("127.0.0.1:0") as far, fw.Endpoint() as near:
        near.connect(far.metadata(), timeout=60).close()
""") as other:
        other.end()


def test_a_forked_child_hands_on_no_record_of_its_parent(program: type[Program]):
    with program("""
import ferrywire as fw, logging, os, sys, time
class Tells(logging.Handler):
    def emit(self, record): os.write(1, f"{os.getpid() == parent} {record.getMessage()}\\n".encode())
parent = os.getpid()
logging.getLogger("ferrywire").addHandler(Tells())
logging.getLogger("ferrywire").setLevel(logging.DEBUG)
far, near = fw.Endpoint("127.0.0.1:0"), fw.Endpoint()
peers = [(near.connect(far.metadata(), timeout=60), far.accept(60)) for _ in range(4)]
# No thread passes on the log records about their end before this thread has forked.
sys.setswitchinterval(1000)
del peers
until = time.monotonic() + 0.3
while time.monotonic() < until: pass
child = os.fork()
if child == 0:
    fw.Endpoint().close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
""") as other:
        said = other.end().splitlines()
    assert any(line.startswith("True session closed (peer=") for line in said), said
    assert not [line for line in said if line.startswith("False") and "peer=" in line]


def test_a_log_thread_that_could_not_start_is_started_later(program: type[Program]):
    with program("""
import ferrywire as fw, threading
start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]
def once(thread):
    if failures: raise failures.pop()
    start(thread)
threading.Thread.start = once
try:
    fw.Endpoint()
except fw.LocalError as error:
    print(error)
with fw.Endpoint():
    print([thread.name for thread in threading.enumerate() if thread.name == "ferrywire-log"])
""") as other:
        first, second = other.end().splitlines()
    assert "cannot start the thread that passes the log on: can't start new thread" in first
    assert second == "['ferrywire-log']"
