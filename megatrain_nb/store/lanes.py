"""A few threads that do reads before writes."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Lanes:
    """Run reads before writes, and never writes on every thread.

    Somebody computes as soon as a read is done, while a write only has to be done in
    time. So queued reads overtake queued writes, and one thread is kept free of writes:
    a read waits for other reads only.

    Notes
    -----
    Thread-safe. Each submission puts one token into the pool; whoever takes a token runs
    the most urgent job of that moment.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_writing = max(1, num_threads - 1)
        self._changed = threading.Condition()
        self._reads: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._writes: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._running = 0
        self._writing = 0

    def submit(self, work: Callable[[], None], *, write: bool) -> Future[None]:
        """Queue `work`; what it raises comes out of the future."""
        future: Future[None] = Future()
        with self._changed:
            (self._writes if write else self._reads).append((work, future))
            self._pool.submit(self._run_one)
        return future

    def cancel_queued(self) -> None:
        """Cancel everything that has not started."""
        with self._changed:
            futures = [future for _, future in (*self._reads, *self._writes)]
            self._reads.clear()
            self._writes.clear()
            self._changed.notify_all()
        for future in futures:
            future.cancel()
            # Without this, waiters of concurrent.futures.wait() are not told.
            future.set_running_or_notify_cancel()

    def drain(self, timeout_s: float) -> int:
        """Wait until nothing is queued or running; return how many jobs are left."""
        with self._changed:
            # An interrupt (Ctrl-C) can hit between a job and its token.
            for _ in range(len(self._reads) + len(self._writes)):
                self._pool.submit(self._run_one)
            self._changed.wait_for(lambda: not self._num_jobs(), timeout_s)
            return self._num_jobs()

    def shutdown(self) -> None:
        """Join the threads; call it when `drain` has returned 0."""
        self._pool.shutdown(wait=True)

    def _num_jobs(self) -> int:
        return self._running + len(self._reads) + len(self._writes)

    def _run_one(self) -> None:
        with self._changed:
            write = not self._reads
            if not write:
                work, future = self._reads.popleft()
            elif self._writes and self._writing < self._max_writing:
                work, future = self._writes.popleft()
            else:
                return  # cancelled, or left to the write that finishes next
            self._running += 1
            self._writing += write
        try:
            _run(work, future)
        finally:
            with self._changed:
                self._running -= 1
                self._writing -= write
                if self._reads or self._writes:
                    self._pool.submit(self._run_one)
                self._changed.notify_all()


def _run(work: Callable[[], None], future: Future[None]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        work()
    except BaseException as error:  # who waits for the future gets it
        future.set_exception(error)
    else:
        future.set_result(None)
