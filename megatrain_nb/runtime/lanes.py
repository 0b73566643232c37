"""Who moves bytes between host and device, and what waits for what.

[Note: lanes] A device with its own memory has three lanes: work on one runs in the order in which it was given,
work on different ones at the same time. The *compute lane* is where the model computes; *copy-in* brings weights
to slots, *copy-out* takes gradients away. Whatever orders two lanes is said with a `Work`: a copy starts after
some work, the compute lane waits for some work, the host waits for some work. On CUDA lanes are streams and
works are events. The training thread runs ahead of them, and never waits but where host memory is needed again.

[Note: the twin] `ThreadLanes` does the same on a machine without an accelerator: each copy lane is a thread.
The compute lane is the training thread itself, plus a third thread for what ends it: the moment at which
computing is over comes late, and so do its results. With delays a wait that was forgotten gives wrong numbers.
"""

from __future__ import annotations

import ctypes
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain_nb.runtime.piece import Values

# A thread's job takes milliseconds; one that takes this long waits for something that will not come.
_PATIENCE_S = 60.0


def tensor_over(host: Values) -> Tensor:
    """Return a tensor over a piece's memory: float32, or bfloat16 over the halves of a split pack."""
    tensor = torch.from_numpy(host)
    return tensor if tensor.dtype == torch.float32 else tensor.view(torch.bfloat16)


class Work(Protocol):
    """Something that a lane was given to do."""

    def done(self) -> bool:
        """Whether it is over; never waits."""

    def wait(self) -> None:
        """Let the host wait until it is over."""

    def times(self) -> tuple[float, float]:
        """Return when it began and ended, in ``time.perf_counter()`` seconds; it must be over."""


class Lanes(Protocol):
    """Two copy lanes beside the compute lane."""

    def copy_in(self, to: Tensor, host: Values, after: Work | None) -> Work:
        """Copy a piece to device memory, not before ``after`` is over."""

    def copy_out(self, host: Values, values: Tensor, after: Work | None) -> Work:
        """Copy device memory to a piece, not before ``after`` is over."""

    def compute_waits(self, work: Work) -> None:
        """Let what computes from now on wait for some work."""

    def computed(self, *written: Tensor) -> Work:
        """Return what is over when all computing until now is; ``written`` is what it wrote last."""

    def poison(self, values: Tensor, after: Work | None) -> Work:
        """Fill memory with NaN when all computing until now is over, and ``after`` is."""

    def begin(self) -> Work:
        """Return the moment at which the compute lane gets here."""

    def since(self, begin: Work) -> Work:
        """Return the compute lane's work from a moment until now."""

    def end_step(self) -> None:
        """Note that the compute lane has nothing to do at this moment."""

    def close(self) -> None:
        """Give threads or streams back; all work is over."""


class Over:
    """Work that was over when it was given: what a blocking copy is, or the time between two moments."""

    def __init__(self, begin_s: float | None = None, end_s: float = 0.0) -> None:
        now = time.perf_counter()
        self._times = (now, now) if begin_s is None else (begin_s, end_s)

    def done(self) -> bool:
        """Say yes."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def times(self) -> tuple[float, float]:
        """Return when it began and ended."""
        return self._times


class _HostClock:
    """The compute lane's time where the host alone can tell it."""

    def begin(self) -> Work:
        """Return this moment."""
        return Over()

    def since(self, begin: Work) -> Work:
        """Return the time from a moment until now, as the host sees it."""
        return Over(begin.times()[0], time.perf_counter())

    def end_step(self) -> None:
        """Nothing to note: there is one clock."""


class BlockingLanes(_HostClock):
    """No lanes of their own: every copy is over when it returns.

    For devices that torch can copy to, and of which nothing else is known here (Apple's MPS).
    """

    def copy_in(self, to: Tensor, host: Values, after: Work | None) -> Work:
        """Copy at once."""
        begin_s = time.perf_counter()
        to.copy_(tensor_over(host))
        return Over(begin_s, time.perf_counter())

    def copy_out(self, host: Values, values: Tensor, after: Work | None) -> Work:
        """Copy at once."""
        begin_s = time.perf_counter()
        tensor_over(host).copy_(values)
        return Over(begin_s, time.perf_counter())

    def compute_waits(self, work: Work) -> None:
        """Do nothing: it is over."""

    def computed(self, *written: Tensor) -> Work:
        """Return what is over: a copy waits for computing by itself."""
        return Over()

    def poison(self, values: Tensor, after: Work | None) -> Work:
        """Fill memory with NaN."""
        values.fill_(torch.nan)
        return Over()

    def close(self) -> None:
        """Nothing to give back."""


class _Job:
    """Work of a thread."""

    def __init__(self) -> None:
        self.future: Future[None]
        self.begin_s = self.end_s = 0.0

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result(timeout=_PATIENCE_S)

    def times(self) -> tuple[float, float]:
        return self.begin_s, self.end_s


class _Thread:
    """A lane: one thread that does jobs in order, each after a random delay."""

    def __init__(self, name: str, most_delay_s: float, seed: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"lane-{name}")
        self._most_delay_s = most_delay_s
        self._random = random.Random(seed)

    def give(self, do: Callable[[], object], after: Work | None = None) -> _Job:
        job = _Job()

        def run() -> None:
            if self._most_delay_s:
                time.sleep(self._random.random() * self._most_delay_s)
            if after is not None:
                after.wait()
            job.begin_s = time.perf_counter()
            do()
            job.end_s = time.perf_counter()

        job.future = self._pool.submit(run)
        return job

    def close(self) -> None:
        self._pool.shutdown()


class ThreadLanes(_HostClock):
    """The twin of CUDA's streams, in a machine's own memory.

    Parameters
    ----------
    most_delay_s
        Each job starts up to this much late, in seconds.
    late
        What computing has written arrives late as well: until then there is NaN.
    seed
        Of the delays.
    """

    def __init__(
        self, *, most_delay_s: float = 0.0, late: bool = False, seed: int = 0
    ) -> None:
        self._in, self._out, self._end = (
            _Thread(name, most_delay_s, seed + index)
            for index, name in enumerate(("in", "out", "end"))
        )
        self._late = late

    def copy_in(self, to: Tensor, host: Values, after: Work | None) -> Work:
        """Copy on the first thread."""
        return self._in.give(lambda: _copy(to, host, inwards=True), after)

    def copy_out(self, host: Values, values: Tensor, after: Work | None) -> Work:
        """Copy on the second thread."""
        return self._out.give(lambda: _copy(values, host, inwards=False), after)

    def compute_waits(self, work: Work) -> None:
        """Wait: the compute lane is this thread."""
        work.wait()

    def computed(self, *written: Tensor) -> Work:
        """Return what is over a little later, as computing on a device would be."""
        if not self._late:
            return self._end.give(lambda: None)
        values = [each.clone() for each in written]
        for each in written:
            each.fill_(torch.nan)

        def arrive() -> None:
            for each, value in zip(written, values, strict=True):
                each.copy_(value)

        return self._end.give(arrive)

    def poison(self, values: Tensor, after: Work | None) -> Work:
        """Fill memory with NaN on the third thread."""
        return self._end.give(lambda: values.fill_(torch.nan), after)

    def close(self) -> None:
        """End the threads."""
        for lane in (self._in, self._out, self._end):
            lane.close()


def _copy(device: Tensor, host: Values, *, inwards: bool) -> None:
    # Without torch: its copy would start a pool of threads here. And without a view of the tensor, which
    # would count as somebody who holds a weight (see kept.py). The call releases the GIL.
    there, here = device.data_ptr(), host.ctypes.data
    to, values = (there, here) if inwards else (here, there)
    ctypes.memmove(to, values, host.nbytes)
