"""The kernel's peak, shared by several who measure."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest

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


def test_the_peak_of_both_outlives_every_restart() -> None:
    meter, other = rss.OtherMeter(), rss.PeakMeter()
    pool = HostPool(4 * SIZE, changing=meter.changing)
    slab = pool.take(SIZE, what="x")
    slab.array[:] = 1
    touch()  # both together
    meter.restart(pool.mapped_bytes)
    other.restart()
    pool.give(slab)
    pool.trim()
    counted = meter.together(pool.mapped_bytes)
    assert counted is not None
    assert counted[0] <= 0.2 * SIZE
    assert 1.9 * SIZE <= counted[1] <= 2.2 * SIZE
    assert meter.together(pool.mapped_bytes) == pytest.approx(counted, abs=SIZE // 10)
    meter.forget_together(pool.mapped_bytes)
    counted = meter.together(pool.mapped_bytes)
    assert counted is not None
    assert counted[1] <= 0.2 * SIZE
    pool.close()


def test_what_is_taken_while_a_pool_changes_is_in_the_peak_of_both() -> None:
    meter = rss.OtherMeter()
    with meter.changing(0):
        touch()  # another thread's
    counted = meter.together(0)
    assert counted is not None
    assert counted[1] >= 0.9 * SIZE
    assert meter.restart(0) <= 0.2 * SIZE


def test_a_kernel_that_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rss, "_STATUS", tmp_path / "missing")
    monkeypatch.setattr(rss, "_CLEAR_REFS", tmp_path / "neither" / "missing")
    meter = rss.OtherMeter()
    assert meter.together(5) is None
    meter.forget_together(5)
    assert (meter.now(5), meter.restart(5)) == (0, 0)


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
