"""AdamW over flat arrays: segments, chunks and threads around the kernel."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from megatrain_nb.codec.arrays import check_array
from megatrain_nb.codec.base import BLOCK
from megatrain_nb.codec.split import Split, check_split
from megatrain_nb.errors import ArgumentError, SessionError
from megatrain_nb.optim.config import AdamWConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from megatrain_nb.codec.kernels import U16, Floats
    from megatrain_nb.optim.kernels import Array

CHUNK = 4 * 1024 * 1024
"""Elements per kernel call at most: some 2 ms. Of 1 Mi, two threads lose 3 % to calls and to the last one."""
SHARES = 4
"""Calls for each of several threads at least, so that they end together ..."""
SHORTEST = 64 * 1024
"""... unless a call gets shorter than this."""


Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place in the flat arrays, and how it is updated.

    Attributes
    ----------
    start, stop
        In elements. A parameter that is split over several segments must be cut at
        multiples of 8 elements from its own start, else the numbers differ from
        torch's in the last bit.
    config
        Hyper-parameters.
    step
        Which update this is; the first is 1.
    seed
        Of the rounding of encoded moments.
    """

    start: int
    stop: int
    config: AdamWConfig
    step: int
    seed: int = 0


class UpdateThreads:
    """Threads that share an update; a context manager.

    Parameters
    ----------
    num_threads
        How many work at once, the caller included: 1 starts none. None takes the
        physical cores this process may run on.

    Notes
    -----
    Any thread may call `update` with these, several at a time. Close once.

    Raises
    ------
    ArgumentError
        Fewer than one thread.
    """

    num_threads: int

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None and num_threads < 1:
            msg = f"num_threads={num_threads!r} is not usable; give 1 or more, or None"
            raise ArgumentError(msg)
        self.num_threads = num_threads or physical_cores()
        self._closed = False
        self._pool = (
            ThreadPoolExecutor(self.num_threads - 1, "megatrain-update")
            if self.num_threads > 1
            else None
        )

    def run(self, work: deque[Work]) -> None:
        """Call every piece of work, in any order; the first exception is raised."""
        if self._closed:
            msg = "these UpdateThreads are closed; make new ones"
            raise SessionError(msg)
        helpers = min(self.num_threads, len(work)) - 1
        futures = []
        if self._pool is not None and helpers > 0:
            futures = [self._pool.submit(_drain, work) for _ in range(helpers)]
        try:
            _drain(work)
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for the running work and end the threads; again is no error."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def update(
    param: Array | Split,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Array | U16,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
    threads: UpdateThreads,
) -> None:
    """Apply AdamW to every segment, in place; elements in no segment stay untouched.

    The bits do not depend on the number of threads.

    Parameters
    ----------
    param : float32, shape (N,), C-contiguous, or `Split` of N
        Overwritten; a `Split` by the halves of what float32 would hold.
    exp_avg, exp_avg_sq : float32, shape (N,), C-contiguous
        Overwritten.
    grad : float32 or uint16 (the bits of bf16), shape (N,), C-contiguous
        Only read.
    segments
        Disjoint, in any order.
    grad_scale
        Factor on every gradient: the clip coefficient, 1.0 for none.
    threads
        Who does it.

    Raises
    ------
    ArgumentError
        An array of another kind or length, segments that overlap or run over; then
        nothing has been changed.
    SessionError
        The threads are closed.
    """
    size = _check_state(param, exp_avg, exp_avg_sq, grad)
    check_segments(segments, size)
    from megatrain_nb.optim import kernels  # noqa: PLC0415

    work: deque[Work] = deque()
    chunk = chunk_of(segments, threads.num_threads)
    for segment in segments:
        scalars = segment.config.scalars(segment.step, grad_scale)
        # A multiple of kernels.LANES, so that only the last part has a tail.
        for part in cut(segment.start, segment.stop, chunk):
            master, moments = part_of(param, part), (exp_avg[part], exp_avg_sq[part])
            work.append(partial(kernels.adamw, master, *moments, grad[part], scalars))
    threads.run(work)


def warm_up(*, split: bool = False) -> None:
    """Compile the kernel or load it from the cache, so that no step waits for it.

    Parameters
    ----------
    split
        For parameters that are a `Split`; else for float32.
    """
    from megatrain_nb.optim import kernels  # noqa: PLC0415

    zeros = np.zeros((4, 2 * kernels.LANES), np.float32)
    halves = np.zeros((2, 2 * kernels.LANES), np.uint16)
    param = Split(halves[0], halves[1]) if split else zeros[3]
    kernels.adamw(param, zeros[0], zeros[1], zeros[2], AdamWConfig().scalars(1))


def physical_cores() -> int:
    """Return the number of physical cores that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    usable = os.sched_getaffinity(0)
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(siblings.format(cpu)).read_text() for cpu in usable})
    except OSError:
        return len(usable)


def _drain(work: deque[Work]) -> None:
    while True:
        try:
            call = work.popleft()
        except IndexError:
            return
        try:
            call()
        except BaseException:
            work.clear()
            raise


def chunk_of(segments: Iterable[Place], num_threads: int) -> int:
    """Return the most elements for one kernel call, a multiple of `BLOCK`."""
    if num_threads == 1:
        return CHUNK
    share = sum(s.stop - s.start for s in segments) // (SHARES * num_threads)
    return min(CHUNK, max(SHORTEST, -(-share // BLOCK) * BLOCK))


def cut(start: int, stop: int, chunk: int) -> Iterator[slice]:
    """Yield what one kernel call takes; a tail is in the last."""
    for first in range(start, stop, chunk):
        yield slice(first, min(first + chunk, stop))


def _check_state(
    master: Array | Split, exp_avg: Array, exp_avg_sq: Array, grad: Floats
) -> int:
    """Raise ArgumentError for unusable arrays; return their common length."""
    size = check_master(master)
    check_array("exp_avg", exp_avg, np.float32, size, writeable=True)
    check_array("exp_avg_sq", exp_avg_sq, np.float32, size, writeable=True)
    check_grad(grad, size)
    return size


def check_master(master: Array | Split) -> int:
    """Raise ArgumentError for unusable parameters; return their number."""
    size: int = getattr(master, "size", 0)
    if isinstance(master, Split):
        check_split(master, size)
    else:
        check_array("param", master, np.float32, size, writeable=True)
    return size


def check_grad(grad: Floats, size: int) -> None:
    """Raise ArgumentError unless these are gradients of ``size`` elements."""
    bf16 = getattr(grad, "dtype", None) == np.uint16
    check_array("grad", grad, np.uint16 if bf16 else np.float32, size)


def part_of(array: Array | Split, part: slice) -> Array | Split:
    """Return a view of a part."""
    return array.part(part) if isinstance(array, Split) else array[part]


class Place(Protocol):
    """Anything from `start` up to `stop`."""

    @property
    def start(self) -> int: ...  # noqa: D102

    @property
    def stop(self) -> int: ...  # noqa: D102


def check_segments(segments: Iterable[Place], size: int) -> None:
    """Raise ArgumentError for segments that overlap or run over."""
    end = 0
    for segment in sorted(segments, key=lambda s: (s.start, s.stop)):
        if not 0 <= segment.start <= segment.stop <= size:
            msg = (
                f"segment {segment.start}:{segment.stop} is not within the arrays; "
                f"give 0 <= start <= stop <= {size}"
            )
            raise ArgumentError(msg)
        if segment.start < end:
            msg = (
                f"segment {segment.start}:{segment.stop} overlaps the one before it, "
                f"which ends at {end}; give each element to one segment"
            )
            raise ArgumentError(msg)
        end = segment.stop
