"""Who may use the models: one thread at a time.

[Note: the claim] What runs for long (a training, a ``%%megatrain`` cell) holds the claim; whoever comes from another
thread meanwhile is refused with a sentence, before anything of the run has changed. What may come from any
thread does not ask: `Session.stop`, `Session.status`, `Session.controls`. Neither does autograd, whose backward
for a GPU runs on threads of its own while the one that holds the claim waits.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatrain_nb.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Claim:
    """Held by one thread, as often as it likes, or by none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: threading.Thread | None = None
        self._depth = 0
        self._what = ""

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Hold the claim; ``what`` says for what, in an error that another thread gets.

        Raises
        ------
        SessionError
            Another thread holds it.
        """
        with self._lock:
            self._refuse_others()
            if self._depth == 0:
                self._holder, self._what = threading.current_thread(), what
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._holder = None

    def check(self) -> None:
        """Raise SessionError if another thread holds the claim."""
        if self._holder is None or self._holder is threading.current_thread():
            return
        with self._lock:
            self._refuse_others()

    def _refuse_others(self) -> None:
        holder = self._holder
        if holder is None or holder is threading.current_thread() or _in_backward():
            return
        if not holder.is_alive():  # it was never given back: a fork, for one
            self._holder, self._depth = None, 0
            return
        msg = f"{self._what} uses the models now, in another thread; stop it or wait for its end first"
        raise SessionError(msg)


def _in_backward() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1


CLAIM = Claim()
"""The process's: it has one session at a time."""
