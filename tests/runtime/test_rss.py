"""The kernel's peak, shared by several who measure."""

from __future__ import annotations

import mmap

from megatrain_nb.runtime import rss

SIZE = 64 << 20


def touch() -> None:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for start in range(0, SIZE, mmap.PAGESIZE):
            pages[start] = 1


def test_one_meter_does_not_hide_a_peak_from_another() -> None:
    base = rss.resident_bytes()
    outer, inner = rss.PeakMeter(), rss.PeakMeter()
    touch()
    assert inner.read() >= base + 0.9 * SIZE
    inner.restart()
    assert inner.read() < base + 0.5 * SIZE
    assert outer.read() >= base + 0.9 * SIZE
    outer.restart()
    assert outer.read() < base + 0.5 * SIZE
