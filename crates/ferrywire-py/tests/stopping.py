"""Stops a process. Programs of tests import it too."""

import os
import signal
import time


def stop_process(number: int) -> None:
    """Returns once all threads of a process stand: the one that has the signal stops the others, and may wait for a core."""
    os.kill(number, signal.SIGSTOP)
    tasks, until = f"/proc/{number}/task", time.monotonic() + 60
    while any(state_of(f"{tasks}/{task}/stat") not in "TtZX" for task in os.listdir(tasks)):
        assert time.monotonic() < until, f"process {number} does not stop"
        time.sleep(0.001)


def state_of(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
