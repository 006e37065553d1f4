"""The end of the interpreter: endpoints that are still open are closed, and the log is read to its end."""

from __future__ import annotations

import atexit

from . import _ferrywire, _log


def _leave() -> None:
    _ferrywire.shutdown()
    _log.stop()


def arrange() -> None:
    atexit.register(_leave)
