from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megatrain_nb.errors import BudgetError, ChecksumError, StoreError
from megatrain_nb.store import disk, space, tilefile
from megatrain_nb.store.base import IoRecord, wait
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool
from megatrain_nb.store.lanes import Lanes
from megatrain_nb.store.manifest import Manifest
from tests.store.conformance import StoreConformance, flip_bits, get, noise, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from megatrain_nb.store.base import Store

    _: type[Store] = DiskStore

PAGE = 4096
MIB = 1 << 20
IO = ("preadv", "pwritev")


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def store(tmp_path: Path, direct: bool) -> Iterator[DiskStore]:
    opened = DiskStore(tmp_path, direct=direct)
    yield opened
    opened.close()


class TestConformance(StoreConformance):
    pass


class Gate:
    """Holds up one os call until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        real = getattr(os, name)

        def call(*args: Any) -> int:
            self.reached.set()
            assert self.go_on.wait(20)
            return int(real(*args))

        monkeypatch.setattr(os, name, call)


def fail(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    def call(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, call)


# ---- the medium misbehaves ----


@pytest.mark.parametrize("step", [5000, 4096, 70_000])
def test_short_transfers_and_interrupts_are_finished(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    counts = dict.fromkeys(IO, 0)

    def shorten(name: str) -> Callable[..., int]:
        real = getattr(os, name)

        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            counts[name] += 1
            if counts[name] % 3 == 0:
                raise InterruptedError
            assert not store._file.direct or offset % PAGE == 0
            return int(real(fd, [buffers[0][:step]], offset))

        return call

    for name in IO:
        # Direct transfers accept whole pages only, so the kernel shortens to those.
        step = step if not store._file.direct else max(PAGE, step - step % PAGE)
        monkeypatch.setattr(os, name, shorten(name))
    put(store, "a", noise(300_001))
    assert np.array_equal(get(store, "a"), noise(300_001))
    assert min(counts.values()) >= 300_001 // 70_000


def test_large_tiles_are_moved_in_several_requests(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tilefile, "_REQUEST_BYTES", 2 * PAGE)
    pool = HostPool(MIB)
    data, out = (pool.take(50_000, what="x").array for _ in range(2))
    data[:] = noise(data.nbytes)
    put(store, "a", data)
    wait(store.get_into("a", out), what="get", timeout_s=20)
    assert np.array_equal(out, data)


def test_a_direct_transfer_cut_inside_a_page_goes_on_at_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: min(real(*args), 5000))
    data = HostPool(MIB).take(50_000, what="x").array
    data[:] = noise(data.nbytes)
    put(store, "a", data)
    assert np.array_equal(get(store, "a"), data)
    store.close()


@pytest.mark.parametrize("name", IO)
def test_a_transfer_that_never_moves_anything_ends(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    put(store, "a", noise(5000))
    monkeypatch.setattr(os, name, lambda *args: 0)
    with pytest.raises(StoreError, match="nothing moved"):
        put(store, "a", noise(5000)) if name == "pwritev" else get(store, "a")


@pytest.mark.parametrize("name", IO)
def test_io_errors_name_everything_and_leave_the_old_version(
    store: DiskStore, name: str
) -> None:
    put(store, "a", noise(5000, 1))
    used = store.used_bytes
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, name, errno.EIO)
        with pytest.raises(StoreError) as caught:
            put(store, "a", noise(5000, 2)) if name == "pwritev" else get(store, "a")
    verb = "write" if name == "pwritev" else "read"
    for part in (f"{verb} of ", " bytes at offset ", str(store.path), "(EIO)"):
        assert part in str(caught.value)
    assert np.array_equal(get(store, "a"), noise(5000, 1))
    assert store.used_bytes == used
    put(store, "a", noise(5000, 3))
    assert np.array_equal(get(store, "a"), noise(5000, 3))


def test_disk_full_at_the_write(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", noise(5000, 1))
    fail(monkeypatch, "pwritev", errno.ENOSPC)
    with pytest.raises(StoreError, match=r"ENOSPC.*the disk has .* free"):
        put(store, "b", noise(5000, 2))
    assert store.keys() == ["a"]


def test_disk_full_at_allocation(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", noise(MIB, 1))
    size = store.path.stat().st_size

    def grant_a_part(fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, offset + nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", grant_a_part)
    for key in ("a", "b"):
        with pytest.raises(StoreError, match=r"cannot grow by 2.10 MB .* free"):
            put(store, key, noise(2 * MIB, 2))
    assert store.path.stat().st_size == size
    assert np.array_equal(get(store, "a"), noise(MIB, 1))
    assert store.used_bytes == MIB


def test_a_file_system_that_cannot_reserve(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP)
    put(store, "a", noise(3 * MIB))
    assert np.array_equal(get(store, "a"), noise(3 * MIB))
    monkeypatch.setattr(tilefile, "free_bytes", lambda fd: 1000)
    with pytest.raises(StoreError, match="No space left"):
        put(store, "b", noise(3 * MIB))


def test_no_direct_io_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "open", errno.EINVAL)
    with pytest.raises(StoreError, match="O_DIRECT; use direct=False"):
        DiskStore(tmp_path)


def test_a_flipped_bit_is_found(store: DiskStore) -> None:
    put(store, "a", noise(PAGE))
    put(store, "layers.3/exp_avg", noise(50_000))
    tile = store.pin().tiles["layers.3/exp_avg"]
    flip_bits(store.path, tile.offset + 49_999, 1)
    with pytest.raises(ChecksumError) as caught:
        get(store, "layers.3/exp_avg")
    for part in ("layers.3/exp_avg", str(store.path), f"offset {tile.offset}"):
        assert part in str(caught.value)
    assert f"stored {tile.checksum:016x}, computed " in str(caught.value)
    assert np.array_equal(get(store, "a"), noise(PAGE))


# ---- budget and space ----


def test_over_budget_leaves_the_old_version(tmp_path: Path, direct: bool) -> None:
    store = DiskStore(tmp_path, direct=direct, max_bytes=3 * MIB)
    put(store, "a", noise(MIB, 1))
    put(store, "b", noise(MIB, 2))
    with pytest.raises(BudgetError) as caught:
        put(store, "a", noise(2 * MIB, 3))
    for part in (
        "tile 'a' needs 2.10 MB",
        "budget of 3.15 MB",
        "2.10 MB are used",
        "1.05 MB are left",
        "max_disk_gb",
    ):
        assert part in str(caught.value)
    assert np.array_equal(get(store, "a"), noise(MIB, 1))
    put(store, "a", noise(MIB, 4))
    assert np.array_equal(get(store, "a"), noise(MIB, 4))
    assert store.path.stat().st_size == store.peak_bytes == 3 * MIB
    store.close()


def test_the_file_grows_in_steps_but_not_beyond_the_budget(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=2 * PAGE)
    put(store, "a", noise(100))
    assert store.path.stat().st_size == store.peak_bytes == 2 * PAGE
    store.close()


def test_one_spare_extent_is_enough_for_many_puts_at_once(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=5 * MIB)
    for turn in range(8):
        futures = [store.put(f"t{i}", noise(MIB, turn + i)) for i in range(4)]
        for future in futures:
            wait(future, what="put", timeout_s=20)
    for i in range(4):
        assert np.array_equal(get(store, f"t{i}"), noise(MIB, 7 + i))
    assert store.peak_bytes == 5 * MIB
    store.close()


def test_space_is_reserved_before_it_is_written(store: DiskStore) -> None:
    put(store, "a", noise(100))
    status = store.path.stat()
    assert status.st_blocks * 512 >= status.st_size == MIB
    assert status.st_mode & 0o777 == 0o600


def test_pinned_tiles_stay_until_unpinned(store: DiskStore) -> None:
    put(store, "a", noise(MIB, 1))
    pinned = store.pin()
    old = pinned.tiles["a"]
    for seed in (2, 3):
        put(store, "a", noise(MIB, seed))
    assert store.used_bytes == 2 * MIB
    on_disk = np.fromfile(store.path, np.uint8, old.nbytes, offset=old.offset)
    assert np.array_equal(on_disk, noise(MIB, 1))
    store.unpin(pinned)
    assert store.used_bytes == MIB
    with pytest.raises(StoreError, match="not pinned"):
        store.unpin(pinned)


def test_a_large_free_end_goes_back_to_the_disk(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "KEEP_BYTES", 0)
    put(store, "a", noise(100))
    put(store, "b", noise(8 * MIB))
    pinned = store.pin()
    store.delete("b")
    store.unpin(pinned)
    assert store.path.stat().st_size == PAGE
    put(store, "b", noise(8 * MIB, 2))
    assert np.array_equal(get(store, "b"), noise(8 * MIB, 2))


# ---- order ----


def test_a_read_keeps_the_version_it_reads(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", noise(MIB, 1))
    gate = Gate(monkeypatch, "preadv")
    out = np.zeros(MIB, np.uint8)
    reading = store.get_into("a", out)
    assert gate.reached.wait(20)
    for seed in (2, 3, 4):
        put(store, "a", noise(MIB, seed))
    assert store.used_bytes == 2 * MIB  # the one being read, and the newest
    gate.go_on.set()
    wait(reading, what="get", timeout_s=20)
    assert np.array_equal(out, noise(MIB, 1))
    wait_until(lambda: store.used_bytes == MIB)


def test_reads_are_not_stuck_behind_writes(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a", noise(MIB))
    gate = Gate(monkeypatch, "pwritev")
    writes = [store.put(f"w{i}", noise(100)) for i in range(10)]
    assert gate.reached.wait(20)
    assert np.array_equal(get(store, "a"), noise(MIB))
    assert not any(future.done() for future in writes)
    gate.go_on.set()
    for future in writes:
        wait(future, what="put", timeout_s=20)


def test_lanes_run_queued_reads_first() -> None:
    lanes, order, gate = Lanes(1, "test"), list[str](), threading.Event()
    lanes.submit(lambda: order.append(f"gate {gate.wait(20)}"), write=False)
    for name in ("w1", "w2", "r1", "r2"):
        lanes.submit(partial(order.append, name), write=name[0] == "w")
    gate.set()
    assert lanes.drain(20) == 0
    lanes.shutdown()
    assert order == ["gate True", "r1", "r2", "w1", "w2"]


def test_lanes_do_what_an_interrupted_submit_left() -> None:
    lanes, order = Lanes(1, "test"), list[str]()
    lanes._writes.append((partial(order.append, "w"), Future()))  # job, but no token
    assert lanes.drain(20) == 0
    lanes.shutdown()
    assert order == ["w"]


def test_records_and_counters(tmp_path: Path) -> None:
    records: list[IoRecord] = []
    store = DiskStore(tmp_path, on_io=records.append)
    before = time.perf_counter()
    put(store, "a", noise(5000))
    get(store, "a")
    assert [(r.op, r.key, r.nbytes) for r in records] == [
        ("WRITE", "a", 5000),
        ("READ", "a", 5000),
    ]
    times = [t for r in records for t in (r.start_s, r.end_s)]
    assert times == sorted(times)
    assert before <= times[0]
    assert times[-1] <= time.perf_counter()
    assert (store.read_bytes, store.written_bytes) == (5000, 5000)
    store.close()


# ---- pinned manifests ----


def test_only_what_is_pinned_outlives_the_store(tmp_path: Path, direct: bool) -> None:
    store = DiskStore(tmp_path, direct=direct)
    for i in range(4):
        put(store, f"t{i}", noise(10_000 + i, i))
    wait(store.put("t1", noise(9, 9), codec="split"), what="put", timeout_s=20)
    pinned = store.pin({"one": "t1", "two": "t2"})
    put(store, "t1", noise(10, 10))
    store.sync()
    store.close()
    again = DiskStore(tmp_path, direct=direct, pinned=[pinned])
    assert again.keys() == []
    assert again.used_bytes == again.pinned_bytes() == PAGE + 3 * PAGE
    again.restore(pinned, {"a": "one", "b": "two"})
    assert again.codec("a") == "split"
    assert np.array_equal(get(again, "a"), noise(9, 9))
    assert np.array_equal(get(again, "b"), noise(10_002, 2))
    put(again, "a", noise(12_000, 4))
    out = np.empty(9, np.uint8)
    wait(again.get_into("one", out, of=pinned), what="get", timeout_s=20)
    assert np.array_equal(out, noise(9, 9))
    again.unpin(pinned)
    assert again.used_bytes == 3 * PAGE + 3 * PAGE
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_the_newest_version_wins_after_a_restart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    put(store, "a", noise(10, 1))
    pinned = store.pin()
    store.close()
    again = DiskStore(tmp_path, pinned=[pinned])
    again.restore(pinned, {"a": "a"})
    put(again, "a", noise(10, 2))
    assert np.array_equal(get(again, "a"), noise(10, 2))
    again.close()


def test_manifests_share_what_did_not_change(store: DiskStore) -> None:
    put(store, "a", noise(MIB, 1))
    put(store, "b", noise(MIB, 2))
    first = store.pin()
    put(store, "a", noise(MIB, 3))
    second = store.pin()
    assert store.used_bytes == store.pinned_bytes() == 3 * MIB
    assert store.pinned_bytes(without={first}) == 2 * MIB
    store.unpin(first)
    assert store.used_bytes == 2 * MIB
    store.restore(second, {"c": "a"})
    store.unpin(second)
    assert np.array_equal(get(store, "c"), noise(MIB, 3))


@pytest.mark.parametrize("use", ["unpin", "restore", "get_into"])
def test_a_manifest_that_is_not_pinned(store: DiskStore, use: str) -> None:
    put(store, "a", noise(10))
    pinned = store.pin()
    store.unpin(pinned)
    calls: dict[str, Any] = {
        "unpin": lambda: store.unpin(pinned),
        "restore": lambda: store.restore(pinned, {"a": "a"}),
        "get_into": lambda: store.get_into("a", np.empty(10, np.uint8), of=pinned),
    }
    with pytest.raises(StoreError, match="not pinned"):
        calls[use]()
    with pytest.raises(StoreError, match="no tile 'b'"):
        store.pin({"x": "b"})


def test_capacity_is_the_budget_or_the_disk(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=3 * MIB)
    assert store.capacity_bytes == 3 * MIB
    store.close()
    store = DiskStore(tmp_path)
    put(store, "a", noise(MIB))
    free = os.statvfs(tmp_path)
    expected = free.f_bavail * free.f_frsize + store.path.stat().st_size
    assert abs(store.capacity_bytes - expected) < expected // 10
    store.close()


def test_pinned_manifests_that_do_not_fit(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    put(store, "a", noise(3 * MIB))
    pinned = store.pin()
    store.close()
    with pytest.raises(StoreError, match="it exists"):
        DiskStore(tmp_path)
    with pytest.raises(BudgetError, match="raise max_disk_gb"):
        DiskStore(tmp_path, pinned=[pinned], max_bytes=MIB)
    tile = pinned.tiles["a"]
    ((offset, length),) = tile.parts
    crossing = Manifest({"b": replace(tile, parts=((offset + PAGE, length),))})
    shorter = Manifest({"b": replace(tile, parts=((offset, PAGE),))})
    for other in (crossing, shorter):
        with pytest.raises(StoreError, match="overlap"):
            DiskStore(tmp_path, pinned=[pinned, other])
    os.truncate(store.path, MIB)
    with pytest.raises(StoreError, match="its checkpoints name"):
        DiskStore(tmp_path, pinned=[pinned])


# ---- the end ----


def test_nothing_is_left_after_close(tmp_path: Path, direct: bool) -> None:
    before = open_fds(), threading.active_count()
    for _ in range(3):
        store = DiskStore(tmp_path, direct=direct)
        futures = [store.put(f"t{i}", noise(100_000, i)) for i in range(8)]
        for future in futures:
            wait(future, what="put", timeout_s=20)
        store.sync()
        assert (open_fds(), threading.active_count()) != before
        names = [thread.name for thread in threading.enumerate()]
        assert any(name.startswith("megatrain-io") for name in names)
        store.close()
        assert (open_fds(), threading.active_count()) == before
        assert list(tmp_path.iterdir()) == []


def test_close_waits_for_what_runs_and_cancels_what_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, num_threads=1)
    gate = Gate(monkeypatch, "pwritev")
    first, second = store.put("a", noise(10)), store.put("b", noise(10))
    assert gate.reached.wait(20)
    monkeypatch.setattr(disk, "_CLOSE_TIMEOUT_S", 0.05)
    with pytest.raises(StoreError, match="1 transfers have not finished"):
        store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.put("c", noise(10))
    with pytest.raises(StoreError, match="cancelled: the store was closed"):
        wait(second, what="put of b")
    gate.go_on.set()
    monkeypatch.setattr(disk, "_CLOSE_TIMEOUT_S", 20.0)
    store.close()
    first.result(0)
    assert list(tmp_path.iterdir()) == []


def test_the_store_lets_go_of_arrays(store: DiskStore) -> None:
    data = noise(10)
    alive = weakref.ref(data)
    put(store, "a", data)
    del data
    wait_until(lambda: alive() is None)


def test_wait_is_never_endless() -> None:
    future: Future[None] = Future()
    with pytest.raises(StoreError, match=r"read of x is still queued after 0.01 s"):
        wait(future, what="read of x", timeout_s=0.01)
    future.set_running_or_notify_cancel()
    with pytest.raises(StoreError, match=r"read of x is running after 0.01 s"):
        wait(future, what="read of x", timeout_s=0.01)
    future.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        wait(future, what="read of x")


def test_buffered_tiles_do_not_stay_in_the_page_cache(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, direct=False)
    put(store, "a", noise(32 * MIB))
    get(store, "a")
    assert cached_bytes(store.path) < 2 * MIB
    store.close()


def fail_now(code: int, text: str) -> None:
    raise OSError(code, text)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def cached_bytes(path: Path) -> int:
    """Pages of `path` in the page cache, by mincore(2)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        number = len(pages) // PAGE
        resident = (ctypes.c_ubyte * number)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), resident
        )
        assert code == 0
        del address
        return PAGE * sum(byte & 1 for byte in resident)
