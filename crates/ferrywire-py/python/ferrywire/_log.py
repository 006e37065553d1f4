"""The engine's log in Python's ``logging``, under the name ``ferrywire``.

The engine's threads never wait for the interpreter: they put records into a bounded queue, and a Python thread passes
them to ``logging``. The wanted level is read when an endpoint is opened, connects or accepts, and after each batch of
records.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback

from . import _ferrywire
from ._errors import LocalError

logger = logging.getLogger("ferrywire")

_starting = threading.Lock()
_thread: threading.Thread | None = None


def refresh_level() -> None:
    """Sets the engine's log level to that of the logger, and starts the thread that passes records on."""
    global _thread
    _ferrywire.log_level(logger.getEffectiveLevel())
    if _thread is None:
        with _starting:
            if _thread is None:
                started = threading.Thread(target=_hand_on, name="ferrywire-log", daemon=True)
                try:
                    started.start()
                except RuntimeError as error:
                    raise LocalError(f"cannot start the thread that passes the log on: {error}") from error
                _thread = started


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
    """Passes on the remaining records and ends the thread."""
    _ferrywire.log_stop()
    if _thread is not None:
        _thread.join(timeout=5)


def _in_child() -> None:
    global _thread, _starting
    _thread, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)
