"""Ctrl-C takes effect where everything is consistent: at a block's border, or after an update."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_depth = 0
_protected = 0


@contextmanager
def interrupts_wait(stop: threading.Event, *, breakable: bool = True) -> Iterator[None]:
    """Let SIGINT set ``stop`` instead of raising in the middle of something.

    Whoever checks ``stop`` inside raises KeyboardInterrupt at a good moment; if nobody did, it is raised
    at the end of the outermost such block. A second SIGINT does what it always does, unless a block that
    is not ``breakable`` is open. On other threads than the main one no signal arrives, and this does nothing.
    """
    global _depth, _protected  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _protected += not breakable
    _depth += 1
    try:
        if _depth > 1:
            yield
        else:
            with _handled(stop):
                yield
    finally:
        _depth -= 1
        _protected -= not breakable


@contextmanager
def _handled(stop: threading.Event) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    came = False

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal came
        if came and not _protected and callable(before):
            before(number, frame)
        came = True
        stop.set()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        pending = came and stop.is_set()
        if came:
            stop.clear()
    if pending:
        raise KeyboardInterrupt
