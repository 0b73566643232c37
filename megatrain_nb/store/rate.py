"""The fastest that a disk has been seen to move bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_WINDOW_S = 0.5


class RateMeter:
    """Finds the highest rate over half a second of work; any thread may use it.

    Time in which nothing is in flight does not count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._total = 0
        self._ends: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._best = 0.0

    @property
    def best(self) -> float:
        """Bytes per second; 0.0 while too little was moved to tell."""
        return self._best

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Note one transfer; one that raises has moved nothing."""
        with self._lock:
            self._count_time()
            self._in_flight += 1
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            with self._lock:
                self._count_time()
                self._in_flight -= 1
                self._note(moved)

    def _count_time(self) -> None:
        now = time.perf_counter()
        if self._in_flight:
            self._busy_s += now - self._since
        self._since = now

    def _note(self, moved: int) -> None:
        self._total += moved
        self._ends.append((self._busy_s, self._total))
        # The last moment that is a whole window ago begins the interval.
        while self._busy_s - self._ends[1][0] >= _WINDOW_S:
            self._ends.popleft()
        begin_s, before = self._ends[0]
        if self._busy_s - begin_s >= _WINDOW_S:
            rate = (self._total - before) / (self._busy_s - begin_s)
            self._best = max(self._best, rate)
