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


# Libraries map so much at most while they run (measured: 30 MB); a mapped data set is larger, or small enough.
_MOST_CODE_BYTES = 64 << 20


def resident_bytes() -> int:
    """Return resident bytes now; 0 where the kernel does not say (not Linux)."""
    return _field("VmRSS:")


def file_bytes() -> int:
    """Return how many of them are of files that are mapped, code's and others'; 0 where the kernel does not say."""
    return _field("RssFile:")


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
    """Resident bytes above those at its start, beside memory that is counted elsewhere, such as a pool's.

    Files that are mapped count only as far as they may be code that was loaded meanwhile. What is more is a data set
    (Arrow's are mapped): the kernel drops its pages when it needs the room, and reads them again.

    Attributes
    ----------
    base_bytes
        Resident bytes at its start.
    """

    def __init__(self) -> None:
        self._meter = PeakMeter()
        self._most = 0
        self.base_bytes, self._base_files = resident_bytes(), file_bytes()
        self._least_files = self._base_files

    @contextmanager
    def changing(self, counted_bytes: int) -> Iterator[None]:
        """Let that other memory, which had this size until now, change inside."""
        self._most = max(self._most, self._peak(counted_bytes))
        try:
            yield
        finally:
            self._meter.restart()
            self._least_files = file_bytes()

    def now(self, counted_bytes: int) -> int:
        """Return what is taken now, in bytes; the other memory has this size."""
        files = self._data_bytes(file_bytes())
        return max(0, resident_bytes() - files - self.base_bytes - counted_bytes)

    def restart(self, counted_bytes: int) -> int:
        """Return the most since the last call, in bytes, and forget it; the other memory has this size now."""
        with self.changing(counted_bytes):
            most, self._most = self._most, 0
        return most

    def _peak(self, counted_bytes: int) -> int:
        # The kernel has no peak of files alone: those that were there before the peak as well as after it.
        files = self._data_bytes(min(self._least_files, file_bytes()))
        return self._meter.read() - files - self.base_bytes - counted_bytes

    def _data_bytes(self, files: int) -> int:
        return max(0, files - self._base_files - _MOST_CODE_BYTES)


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
