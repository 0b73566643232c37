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

    def restart(self) -> int:
        """Forget the peak, and return it in bytes; it starts again from now."""
        with _lock:
            peak = _field("VmHWM:")
            for meter in _meters:
                meter._seen = max(meter._seen, peak)
            with suppress(OSError):
                _CLEAR_REFS.write_text("5")
            peak, self._seen = self._seen, 0
        return peak

    def read(self, status: str | None = None) -> int:
        """Return the peak in bytes; 0 where the kernel does not say. ``status`` is what it has just said."""
        return max(self._seen, _field("VmHWM:", status))


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
        self._most = self._most_together = 0
        self.base_bytes, self._base_files = resident_bytes(), file_bytes()
        self._least_files = self._base_files

    @contextmanager
    def changing(self, counted_bytes: int) -> Iterator[None]:
        """Let that other memory, which had this size until now, change inside."""
        status = _status()
        peak = self._above(self._meter.read(status), _field("RssFile:", status))
        self._most = max(self._most, peak - counted_bytes)
        try:
            yield
        finally:
            peak, files = self._meter.restart(), file_bytes()
            # Also what was taken meanwhile, by whomever.
            self._most_together = max(self._most_together, self._above(peak, files))
            self._least_files = files

    def now(self, counted_bytes: int) -> int:
        """Return what is taken now, in bytes; the other memory has this size."""
        return self._beside(counted_bytes, _status())

    def restart(self, counted_bytes: int) -> int:
        """Return the most since the last call, in bytes, and forget it; the other memory has this size now."""
        with self.changing(counted_bytes):
            most, self._most = self._most, 0
        return most

    def together(self, counted_bytes: int) -> tuple[int, int] | None:
        """Return what is taken beside the other memory now, and the most of both since `forget_together`, in bytes.

        None where the kernel does not say. It costs one look at what the kernel says, and forgets nothing.
        """
        status = _status()
        if not _field("VmRSS:", status):
            return None
        now = self._beside(counted_bytes, status)
        peak = self._above(self._meter.read(status), _field("RssFile:", status))
        return now, max(self._most_together, peak, counted_bytes + now)

    def forget_together(self, counted_bytes: int) -> None:
        """Let the most of both, which are so much now, begin again from now."""
        with self.changing(counted_bytes):
            pass
        self._most_together = 0

    def _beside(self, counted_bytes: int, status: str) -> int:
        files = self._data_bytes(_field("RssFile:", status))
        resident = _field("VmRSS:", status)
        return max(0, resident - files - self.base_bytes - counted_bytes)

    def _above(self, peak: int, files: int) -> int:
        # The kernel has no peak of files alone: those that were there before the peak as well as after it.
        files = self._data_bytes(min(self._least_files, files))
        return peak - files - self.base_bytes

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


def _status() -> str:
    try:
        return _STATUS.read_text()
    except OSError:
        return ""


def _field(name: str, status: str | None = None) -> int:
    text = _status() if status is None else status
    start = text.find(name)
    return (
        int(text[start + len(name) :].split(maxsplit=1)[0]) * 1024 if start >= 0 else 0
    )
