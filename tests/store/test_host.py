from __future__ import annotations

import ctypes
import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatrain_nb.errors import ArgumentError, BudgetError, SessionError
from megatrain_nb.store.host import HostPool

PAGE = 4096
MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_slabs_are_aligned_zero_and_whole_pages() -> None:
    pool = HostPool(MIB)
    slab = pool.take(5000, what="states")
    assert (slab.nbytes, slab.what) == (2 * PAGE, "states")
    assert slab.array.ctypes.data % PAGE == 0
    assert slab.array.dtype == np.uint8
    assert not slab.array.any()
    assert slab.array.flags.writeable


def test_slabs_are_huge_pages_that_no_fork_inherits() -> None:
    slab = HostPool(8 * MIB).take(4 * MIB, what="x")
    flags = mapping_flags(slab.array.ctypes.data)
    assert "dc" in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def test_view_is_a_window_on_the_bytes() -> None:
    slab = HostPool(MIB).take(PAGE, what="x")
    view = slab.view(np.float32, 8, 2)
    view[:] = [1.0, -2.0]
    assert slab.array[8:16].tobytes() == np.array([1, -2], np.float32).tobytes()
    for offset, count in ((-4, 1), (PAGE, 1), (0, PAGE)):
        with pytest.raises(ArgumentError, match="outside"):
            slab.view(np.float32, offset, count)


def test_same_size_is_reused() -> None:
    pool = HostPool(MIB)
    slab = pool.take(PAGE, what="a")
    slab.array[:] = 7
    pool.give(slab)
    again = pool.take(PAGE - 1, what="b")
    assert again is slab
    assert (again.what, again.array[0]) == ("b", 7)
    assert pool.mapped_bytes == pool.peak_bytes == PAGE


def test_budget_is_hard_and_the_error_says_it_all() -> None:
    pool = HostPool(10 * PAGE)
    pool.take(6 * PAGE, what="weights")
    pool.take(2 * PAGE, what="states")
    with pytest.raises(BudgetError) as caught:
        pool.take(3 * PAGE, what="gradient of layers.3")
    text = str(caught.value)
    for part in (
        "gradient of layers.3 needs 12.3 kB",
        "8.19 kB are left",
        "weights 24.6 kB, states 8.19 kB",
        "limit 41.0 kB",
        "max_ram_gb",
    ):
        assert part in text
    assert pool.try_take(3 * PAGE, what="x") is None
    assert pool.in_use_by_what() == {"weights": 6 * PAGE, "states": 2 * PAGE}
    assert pool.peak_bytes == 8 * PAGE


def test_free_slabs_make_way_as_few_as_possible() -> None:
    pool = HostPool(10 * PAGE)
    slabs = [pool.take(n * PAGE, what="x") for n in (1, 2, 3, 4)]
    for slab in slabs:
        pool.give(slab)
    pool.take(2 * PAGE + 1, what="y")  # reuses the slab of three pages
    assert pool.mapped_bytes == 10 * PAGE
    pool.take(5 * PAGE, what="z")  # four pages go, and the smallest that is enough: one
    assert pool.mapped_bytes == pool.peak_bytes == 10 * PAGE
    assert pool.take(2 * PAGE, what="w") is slabs[1]


def test_lowering_the_limit() -> None:
    pool = HostPool(10 * PAGE)
    used, free = pool.take(4 * PAGE, what="weights"), pool.take(5 * PAGE, what="y")
    pool.give(free)
    pool.limit_bytes = 8 * PAGE
    assert (pool.mapped_bytes, pool.limit_bytes) == (4 * PAGE, 8 * PAGE)
    with pytest.raises(BudgetError, match=r"weights 16.4 kB"):
        pool.limit_bytes = 3 * PAGE
    assert pool.limit_bytes == 8 * PAGE
    assert used.array.size


def test_giving_twice_and_use_after_give_are_errors() -> None:
    pool = HostPool(MIB)
    slab = pool.take(PAGE, what="x")
    pool.give(slab)
    with pytest.raises(RuntimeError, match="given back twice"):
        pool.give(slab)
    with pytest.raises(RuntimeError, match="only a slab that is taken"):
        _ = slab.array
    other = HostPool(MIB).take(PAGE, what="x")
    with pytest.raises(RuntimeError, match="not one this pool"):
        pool.give(other)


def test_poison_shows_use_after_give() -> None:
    pool = HostPool(MIB, poison=True)
    slab = pool.take(PAGE, what="x")
    view = slab.view(np.float32, 0, 4)
    view[:] = 1
    pool.give(slab)
    assert np.isnan(view).all()


def test_trim_returns_memory_to_the_kernel() -> None:
    pool = HostPool(64 * MIB)
    slabs = [pool.take(8 * MIB, what="x") for _ in range(4)]
    for slab in slabs:
        slab.array.fill(1)
    full = resident_bytes()
    for slab in slabs:
        pool.give(slab)
    assert resident_bytes() > full - 4 * MIB
    pool.trim()
    assert resident_bytes() < full - 28 * MIB
    assert (pool.mapped_bytes, pool.peak_bytes) == (0, 32 * MIB)


def test_trim_returns_memory_even_while_a_view_lives() -> None:
    pool = HostPool(64 * MIB)
    slab = pool.take(32 * MIB, what="x")
    view = slab.array
    view.fill(1)
    full = resident_bytes()
    pool.give(slab)
    pool.trim()
    assert resident_bytes() < full - 28 * MIB
    assert view[0] == view[-1] == 0  # still mapped, no crash
    del view, slab
    gc.collect()


def test_close_takes_all_but_leaves_living_views_their_content() -> None:
    pool = HostPool(MIB)
    kept, dropped = pool.take(PAGE, what="x"), pool.take(PAGE, what="y")
    view = kept.array
    view.fill(3)
    pool.close()
    pool.close()
    assert (pool.mapped_bytes, pool.in_use_by_what()) == (0, {})
    assert (view == 3).all()
    pool.give(dropped)  # in whatever order things are torn down
    with pytest.raises(SessionError, match="closed"):
        pool.take(1, what="x")


def test_a_refused_mapping_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("megatrain_nb.store.host.map_pages", refuse)
    pool = HostPool(MIB)
    with pytest.raises(BudgetError, match="Cannot allocate memory"):
        pool.take(PAGE, what="x")
    assert pool.mapped_bytes == 0


def test_threads_never_exceed_the_limit_or_share_a_slab() -> None:
    pool = HostPool(24 * PAGE)
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(300):
            slab = pool.try_take(int(rng.integers(1, 8 * PAGE)), what="x")
            if slab is not None:
                slab.array[:] = seed
                assert pool.mapped_bytes <= 24 * PAGE
                assert (slab.array == seed).all()
                pool.give(slab)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, i) for i in range(4)]:
            done.result()
    assert pool.in_use_bytes == 0
    assert pool.peak_bytes <= 24 * PAGE


def mapping_flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that holds `address` (proc(5), smaps)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


class Locks:
    """A page-lock that notes what it locks; it can refuse."""

    def __init__(self, most: int = 10) -> None:
        self.locked: dict[int, int] = {}
        self.most = most

    def register(self, address: int, nbytes: int) -> bool:
        if len(self.locked) >= self.most:
            return False
        self.locked[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        # The mapping is still there: a byte of it can be read.
        assert ctypes.string_at(address, 1)
        del self.locked[address]


def test_what_a_device_copies_is_page_locked_at_its_exact_size() -> None:
    locks = Locks()
    pool = HostPool(10 * 4096, page_lock=locks, locked=frozenset({"weights"}))
    weights = pool.take(3 * 4096, what="weights")
    other = pool.take(3 * 4096, what="moments")
    assert (weights.pinned, other.pinned) == (True, False)
    assert list(locks.locked.values()) == [3 * 4096]
    assert list(locks.locked) == [weights.array.ctypes.data]
    assert pool.pinned_bytes == 3 * 4096
    pool.give(weights)
    pool.give(other)
    # Each comes back for what it is fit for.
    assert pool.take(3 * 4096, what="moments") is other
    assert pool.take(3 * 4096, what="weights") is weights
    pool.give(other)
    again = pool.take(3 * 4096, what="weights")
    assert (again is other, again.pinned, pool.pinned_bytes) == (True, True, 6 * 4096)
    pool.give(weights)
    pool.trim()
    assert (len(locks.locked), pool.pinned_bytes) == (1, 3 * 4096)
    view = again.array
    pool.close()
    assert (locks.locked, pool.pinned_bytes) == ({}, 0)
    assert view[0] == 0  # a view keeps its bytes, not the lock


def test_memory_that_cannot_be_page_locked_is_used_as_it_is() -> None:
    pool = HostPool(10 * 4096, page_lock=Locks(most=0), locked=frozenset({"weights"}))
    slab = pool.take(4096, what="weights")
    slab.array[:] = 1
    assert (slab.pinned, pool.pinned_bytes) == (False, 0)
    pool.give(slab)
    pool.close()


def test_what_is_set_aside_is_room_that_slabs_cannot_have() -> None:
    pool = HostPool(10 * PAGE)
    slab = pool.take(4 * PAGE, what="weights")
    pool.give(pool.take(5 * PAGE, what="states"))
    assert not pool.set_aside(7 * PAGE)
    assert pool.aside_bytes == 0
    assert pool.set_aside(3 * PAGE)
    assert pool.mapped_bytes == 4 * PAGE  # what was free made way
    assert pool.try_take(4 * PAGE, what="states") is None
    with pytest.raises(BudgetError, match="for kept activations"):
        pool.take(4 * PAGE, what="states")
    with pytest.raises(BudgetError):
        pool.limit_bytes = 6 * PAGE
    pool.take(3 * PAGE, what="states")
    pool.take_back(3 * PAGE)
    pool.give(slab)
    pool.limit_bytes = 6 * PAGE
    assert pool.take(3 * PAGE, what="states").nbytes == 3 * PAGE
