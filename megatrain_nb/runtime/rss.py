"""What the kernel counts: resident memory of this process, now and at its peak."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return resident bytes now; 0 where the kernel does not say (not Linux)."""
    return _field("VmRSS:")


class PeakMeter:
    """The most resident bytes since its start, as the kernel counts them; several do not disturb each other.

    The kernel has one peak (VmHWM), which can start again from now (Linux 4.0, proc(5), clear_refs): so
    each meter hears what the peak was before another one lets it start again.
    """

    def __init__(self) -> None:
        self._seen = 0
        _meters.add(self)
        self.restart()

    def restart(self) -> None:
        """Forget the peak; it starts again from now."""
        with _lock:
            peak = _field("VmHWM:")
            for meter in _meters:
                meter._seen = max(meter._seen, peak)
            with suppress(OSError):
                _CLEAR_REFS.write_text("5")
            self._seen = 0

    def read(self) -> int:
        """Return the peak in bytes; 0 where the kernel does not say."""
        return max(self._seen, _field("VmHWM:"))


class OtherMeter:
    """The most resident bytes beside memory that comes and goes and is counted elsewhere, such as a pool's."""

    def __init__(self) -> None:
        self._meter = PeakMeter()
        self._most = 0

    @contextmanager
    def changing(self, counted_bytes: int) -> Iterator[None]:
        """Let that other memory, which had this size until now, change inside."""
        self._most = max(self._most, self._meter.read() - counted_bytes)
        try:
            yield
        finally:
            self._meter.restart()

    def restart(self, counted_bytes: int) -> int:
        """Return the most since the last call, in bytes, and forget it; the other memory has this size now."""
        with self.changing(counted_bytes):
            most, self._most = self._most, 0
        return most


_meters: weakref.WeakSet[PeakMeter] = weakref.WeakSet()
_lock = threading.Lock()


def available_bytes() -> int:
    """Return what the machine can still give without swapping, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 8 * 10**9
    return (
        next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        * 1024
    )


def _field(name: str) -> int:
    try:
        text = _STATUS.read_text()
    except OSError:
        return 0
    start = text.find(name)
    return (
        int(text[start + len(name) :].split(maxsplit=1)[0]) * 1024 if start >= 0 else 0
    )
