"""What the kernel counts: resident memory of this process, now and at its peak."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return resident bytes now; 0 where the kernel does not say (not Linux)."""
    return _field("VmRSS:")


def peak_bytes() -> int:
    """Return the most resident bytes since the last `reset_peak`; 0 where the kernel does not say."""
    return _field("VmHWM:")


def reset_peak() -> None:
    """Let the kernel's peak start again from now (Linux 4.0, proc(5), clear_refs)."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


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
