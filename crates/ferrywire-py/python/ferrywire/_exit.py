"""Closes open endpoints and drains the log when the interpreter ends."""

from __future__ import annotations

import atexit

from . import _ferrywire, _log


def _leave() -> None:
    _ferrywire.shutdown()
    _log.stop()


def arrange() -> None:
    atexit.register(_leave)
