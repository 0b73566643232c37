"""CUDA: streams and events as lanes, page-locked host memory, and a limit for what torch allocates.

Nothing here runs without a CUDA device; the rest of the runtime meets it as `Lanes`, and as three hooks.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from megatrain_nb.errors import BudgetError
from megatrain_nb.runtime.lanes import tensor_over
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain_nb.runtime.lanes import Work
    from megatrain_nb.runtime.piece import Values

logger = logging.getLogger("megatrain_nb")

# cudaHostRegisterPortable: page-locked for every CUDA context of the process.
_PORTABLE = 1


class _Base:
    """An event whose time on the host's clock is known."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))
        self.event.synchronize()
        self.at_s = time.perf_counter()

    def seconds_at(self, event: torch.cuda.Event) -> float:
        return float(self.at_s + 1e-3 * self.event.elapsed_time(event))


class CudaWork:
    """What a stream does between two events."""

    def __init__(
        self, begin: torch.cuda.Event, end: torch.cuda.Event, base: _Base
    ) -> None:
        self.begin, self.end = begin, end
        self._base = base

    def done(self) -> bool:
        """Whether the second event has come."""
        return bool(self.end.query())

    def wait(self) -> None:
        """Let this thread sleep until the second event."""
        self.end.synchronize()

    def times(self) -> tuple[float, float]:
        """Return the times of the events on the host's clock, in seconds."""
        return self._base.seconds_at(self.begin), self._base.seconds_at(self.end)


class CudaLanes:
    """A stream for copies in, one for copies out; computing is on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._base = _Base(device)

    def copy_in(self, to: Tensor, host: Values, after: Work | None) -> CudaWork:
        """Copy on the first stream."""
        return self._copy(self._in, to, tensor_over(host), after)

    def copy_out(self, host: Values, values: Tensor, after: Work | None) -> CudaWork:
        """Copy on the second stream."""
        return self._copy(self._out, tensor_over(host), values, after)

    def compute_waits(self, work: Work) -> None:
        """Let the current stream wait for an event."""
        assert isinstance(work, CudaWork)
        self._current().wait_event(work.end)

    def computed(self, *written: Tensor) -> CudaWork:
        """Record an event on the current stream."""
        return self.begin()

    def poison(self, values: Tensor, after: Work | None) -> CudaWork:
        """Fill on the current stream."""
        if after is not None:
            self.compute_waits(after)
        values.fill_(torch.nan)
        return self.begin()

    def begin(self) -> CudaWork:
        """Record an event on the current stream."""
        event = self._record(self._current())
        return CudaWork(event, event, self._base)

    def since(self, begin: Work) -> CudaWork:
        """Record the second event."""
        assert isinstance(begin, CudaWork)
        return CudaWork(begin.begin, self._record(self._current()), begin._base)

    def end_step(self) -> None:
        """Set the clock anew: an event's time is a float32, exact for a while only."""
        self._base = _Base(self._device)

    def close(self) -> None:
        """Wait for both streams."""
        self._in.synchronize()
        self._out.synchronize()

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        to: Tensor,
        values: Tensor,
        after: Work | None,
    ) -> CudaWork:
        if after is not None:
            assert isinstance(after, CudaWork)
            stream.wait_event(after.end)
        with torch.no_grad(), torch.cuda.stream(stream):
            begin = self._record(stream)
            to.copy_(values, non_blocking=True)
            return CudaWork(begin, self._record(stream), self._base)

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # blocking: a host that waits sleeps instead of taking a core from the update.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event


class PinnedPages:
    """Page-locks host memory at its exact size: torch's own allocator would round up to a power of two.

    Attributes
    ----------
    problem
        Why some memory is not page-locked; empty while all is.
    """

    def __init__(self, device: torch.device) -> None:
        self.problem = ""
        self._device = device

    def register(self, address: int, nbytes: int) -> bool:
        """Page-lock a mapping; False where the system refuses, once and for all."""
        if self.problem:
            return False
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            error = cudart.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(error) == 0:
            return True
        self.problem = (
            f"{format_bytes(nbytes)} of RAM could not be page-locked (CUDA error {int(error)}), so copies to the GPU "
            "are slower and do not overlap with computing; free some RAM, or lower max_ram_gb"
        )
        logger.warning(self.problem)
        self._forget_error()
        return False

    def unregister(self, address: int) -> None:
        """Undo it, before the mapping goes."""
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            error = cudart.cudaHostUnregister(address)
        if int(error) != 0:
            logger.warning(
                "page-locked memory was not released (CUDA error %d)", int(error)
            )
            self._forget_error()

    def _forget_error(self) -> None:
        """Take the error from CUDA's memory: the next kernel would report it as its own."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)


class Vram:
    """A limit for all that torch allocates on a device; what was in force before comes back at the end.

    Parameters
    ----------
    device
        A CUDA device.
    max_bytes
        ``max_vram_gb`` in bytes; None for what the device has left.

    Raises
    ------
    BudgetError
        Torch has allocated more already.
    """

    def __init__(self, device: torch.device, max_bytes: int | None) -> None:
        self._device = device
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        # Of what is free CUDA itself takes some for its libraries.
        self.limit_bytes = max_bytes or round(0.95 * free) + reserved
        self._before: float | None = None
        self._peak = 0
        if max_bytes is None:
            return
        if torch.cuda.memory_allocated(device) > max_bytes:
            msg = (
                f"max_vram_gb={max_bytes / 1e9:.3g}: this process has "
                f"{format_bytes(torch.cuda.memory_allocated(device))} in use on {device} already; raise it, or free some"
            )
            raise BudgetError(msg)
        torch.cuda.empty_cache()
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        self._before = 1.0 if read is None else float(read(device))
        share = min(1.0, max_bytes / total)
        torch.cuda.set_per_process_memory_fraction(share, device)

    def allocated_bytes(self) -> int:
        """Return what torch's tensors take now, in bytes."""
        return int(torch.cuda.memory_allocated(self._device))

    def restart_peak(self) -> int:
        """Return the most that torch's tensors took since the last call, in bytes."""
        peak = int(torch.cuda.max_memory_allocated(self._device))
        self._peak = max(self._peak, peak)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def peak_bytes(self) -> int:
        """Return the most that torch's tensors took so far, in bytes."""
        return max(self._peak, int(torch.cuda.max_memory_allocated(self._device)))

    def trim(self) -> None:
        """Give what torch keeps for later back to the device."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Lift the limit, and give back what is not in use."""
        if self._before is not None:
            torch.cuda.set_per_process_memory_fraction(self._before, self._device)
            self._before = None
        torch.cuda.empty_cache()
