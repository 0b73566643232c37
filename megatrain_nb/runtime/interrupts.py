"""Ctrl-C takes effect where everything is consistent: at a block's border, or after an update."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_depth = 0


@contextmanager
def interrupts_wait(stop: threading.Event, *, breakable: bool = True) -> Iterator[None]:
    """Let SIGINT set ``stop`` instead of raising in the middle of something.

    Whoever checks ``stop`` inside raises KeyboardInterrupt at a good moment; if nobody did, it is
    raised at the end. A second SIGINT does what it always does, unless the block is not ``breakable``. On
    other threads than the main one, where no signal arrives, and inside another such block, this does
    nothing.
    """
    global _depth  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread() or _depth:
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    came = False

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal came
        if came and breakable and callable(before):
            before(number, frame)
        came = True
        stop.set()

    _depth = 1
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _depth = 0
        pending = came and stop.is_set()
        if came:
            stop.clear()
    if pending:
        raise KeyboardInterrupt
