"""The kernel's peak, shared by several who measure."""

from __future__ import annotations

import mmap

from megatrain_nb.runtime import rss
from megatrain_nb.store.host import HostPool

SIZE = 64 << 20


def touch(size: int = SIZE) -> None:
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for start in range(0, size, mmap.PAGESIZE):
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


def test_a_peak_while_a_pool_was_small_counts_when_it_has_grown() -> None:
    base, meter = rss.resident_bytes(), rss.OtherMeter()
    pool = HostPool(4 * SIZE, changing=meter.changing)
    touch()
    slab = pool.take(2 * SIZE, what="x")
    slab.array[:] = 1
    most = meter.restart(pool.mapped_bytes) - base
    assert 0.9 * SIZE <= most <= 1.1 * SIZE
    assert meter.restart(pool.mapped_bytes) - base <= 0.2 * SIZE
    pool.give(slab)
    touch(SIZE // 2)
    pool.trim()
    most = meter.restart(pool.mapped_bytes) - base
    assert 0.4 * SIZE <= most <= 0.6 * SIZE
    pool.close()
