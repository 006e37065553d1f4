"""The engine's log in Python's ``logging``, under the name ``ferrywire``.

The engine's threads never wait for the interpreter: they leave records in a bounded queue, and a thread here hands
them on. Which level is wanted is looked at when an endpoint is made, connects or accepts, and with every record.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback

from . import _ferrywire

logger = logging.getLogger("ferrywire")

_starting = threading.Lock()
_thread: threading.Thread | None = None


def look() -> None:
    """Tells the engine which records are wanted, and sees to it that somebody hands them on."""
    global _thread
    _ferrywire.log_level(logger.getEffectiveLevel())
    if _thread is None:
        with _starting:
            if _thread is None:
                _thread = threading.Thread(target=_hand_on, name="ferrywire-log", daemon=True)
                _thread.start()


def _hand_on() -> None:
    while (records := _ferrywire.log_take()) is not None:
        for level, text in records:
            # A handler that fails must not end the log.
            try:
                logger.log(level, "%s", text)
            except Exception:
                traceback.print_exc()
        _ferrywire.log_level(logger.getEffectiveLevel())


def stop() -> None:
    """Hands on what is left, and ends."""
    _ferrywire.log_stop()
    if _thread is not None:
        _thread.join(timeout=5)


def _in_child() -> None:
    global _thread, _starting
    _thread, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)
