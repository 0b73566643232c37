"""Sizes and times as people write and read them; no dependencies."""

from __future__ import annotations

import math
import re

from megatrain_nb.errors import ArgumentError

_SI = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_IEC = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_SIZE = re.compile(
    r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([kmgtp]i?|)b?\s*", re.IGNORECASE
)


def parse_size(value: float | str, *, name: str = "size") -> int:
    """Return a size in bytes; a bare number counts gigabytes (10^9 bytes).

    Parameters
    ----------
    value
        ``2``, ``0.8`` (GB), or text with a unit: ``"24GiB"``, ``"800 MB"``.
    name
        What the size is called in the error message.

    Raises
    ------
    ArgumentError
        Not a size, not finite, or not positive.

    Examples
    --------
    >>> parse_size(0.8)
    800000000
    >>> parse_size("24GiB")
    25769803776
    >>> parse_size("512 MB")
    512000000
    """
    allowed = "a positive number of GB (10^9 bytes) or text such as '24GiB' or '800MB'"
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            msg = f"{name}={value!r} is not a size; give {allowed}"
            raise ArgumentError(msg)
        unit = match[2].lower()
        scale = 10**9 if value.strip()[-1].isdigit() else (_SI | _IEC)[unit]
        number = float(match[1])
    elif isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"{name}={value!r} is not a size; give {allowed}"
        raise ArgumentError(msg)
    else:
        number, scale = float(value), 10**9
    if not math.isfinite(number) or number <= 0:
        msg = f"{name}={value!r} is not usable; give {allowed}"
        raise ArgumentError(msg)
    return round(number * scale)


def format_bytes(count: float) -> str:
    """Return a byte count with three significant digits and an SI unit.

    Examples
    --------
    >>> format_bytes(1_913_600_000)
    '1.91 GB'
    >>> format_bytes(0)
    '0 B'
    """
    sign, count = ("-", -count) if count < 0 else ("", count)
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{sign}{_three_digits(count / scale)} {unit}"
    return f"{sign}{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as a person would say it.

    Examples
    --------
    >>> format_seconds(0.0042), format_seconds(7.25), format_seconds(3725)
    ('4.20 ms', '7.25 s', '1 h 02 min')
    """
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 100:
        return f"{_three_digits(seconds)} s"
    minutes = round(seconds / 60)
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(count: float) -> str:
    """Return a plain count with an SI prefix.

    Examples
    --------
    >>> format_count(119_600_000), format_count(42)
    ('120 M', '42')
    """
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def _three_digits(value: float) -> str:
    return (
        f"{value:.0f}"
        if value >= 99.95
        else f"{value:.1f}"
        if value >= 9.995
        else f"{value:.2f}"
    )
