"""The kernel's peak, shared by several who measure."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from megatrain_nb.runtime import rss
from megatrain_nb.store.host import HostPool

if TYPE_CHECKING:
    from pathlib import Path

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
    meter = rss.OtherMeter()
    pool = HostPool(4 * SIZE, changing=meter.changing)
    touch()
    slab = pool.take(2 * SIZE, what="x")
    slab.array[:] = 1
    most = meter.restart(pool.mapped_bytes)
    assert 0.9 * SIZE <= most <= 1.1 * SIZE
    assert meter.restart(pool.mapped_bytes) <= 0.2 * SIZE
    pool.give(slab)
    touch(SIZE // 2)
    pool.trim()
    most = meter.restart(pool.mapped_bytes)
    assert 0.4 * SIZE <= most <= 0.6 * SIZE
    pool.close()


def test_a_mapped_data_set_is_nobodys_tensors(tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    path.write_bytes(bytes(4 * SIZE))
    meter = rss.OtherMeter()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
    ):
        pages = range(0, len(data), mmap.PAGESIZE)
        assert sum(data[start] for start in pages) == 0
        # Code that is loaded looks the same, so that some of it counts.
        assert 0.9 * SIZE <= meter.now(0) <= 1.2 * SIZE
        meter.restart(0)
        assert meter.restart(0) <= 1.2 * SIZE
        touch()
        assert meter.now(0) <= 1.2 * SIZE
        assert 1.9 * SIZE <= meter.restart(0) <= 2.2 * SIZE
