from __future__ import annotations

import errno
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megatrain_nb.codec.lossless import chunks
from megatrain_nb.errors import (
    ArgumentError,
    BudgetError,
    ChecksumError,
    StoreError,
)
from megatrain_nb.store import packing
from megatrain_nb.store.base import IoRecord, round_up, wait
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool
from megatrain_nb.store.packing import STAGING_BYTES, Packing
from tests.codec.floats import smooth
from tests.store.conformance import StoreConformance, flip_bits, get, noise

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]

MIB = 1 << 20
PAGE = 4096
THREADS = 4
POOL = THREADS * STAGING_BYTES + 32 * MIB


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """As a session does it: no transfer waits for a compilation."""
    chunks.warm_up()


def open_store(directory: Path, **options: Any) -> DiskStore:
    return DiskStore(directory, num_threads=THREADS, staging=HostPool(POOL), **options)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DiskStore]:
    opened = open_store(tmp_path, direct=request.param)
    yield opened
    opened.close()


def floats(num_bytes: int, seed: int = 0, item_bytes: int = 4) -> U8:
    """Bytes that pack; another seed, other bytes and another packed length."""
    count = -(-num_bytes // item_bytes)
    bits = smooth(count + seed, item_bytes)[seed:]
    share = count * (seed % 7) // 10
    bits[:share] = noise(share * item_bytes, seed).view(bits.dtype)
    return np.roll(bits, count // 3).view(np.uint8)[:num_bytes].copy()


def pack(store: DiskStore, key: str, data: U8, codec: str = "lossless32") -> None:
    wait(store.put(key, data, codec=codec), what=f"put {key}", timeout_s=20)


class _PackingStore(DiskStore):
    """Packs whatever is put."""

    def put(self, key: str, data: U8, *, codec: str = "raw") -> Any:
        return super().put(key, data, codec="lossless32")


class TestConformance(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[DiskStore]:
        opened = _PackingStore(tmp_path, num_threads=THREADS, staging=HostPool(POOL))
        yield opened
        opened.close()


# ------------------------------------------------------------------ there and back


@pytest.mark.parametrize("item_bytes", [4, 2])
@pytest.mark.parametrize(
    "num_bytes",
    [4, 4096, 65_536, MIB, MIB + 4, 3 * MIB + 12, 4 * MIB, 9 * MIB + 8, 16 * MIB],
)
def test_tiles_come_back_in_fewer_bytes(
    store: DiskStore, num_bytes: int, item_bytes: int
) -> None:
    data = floats(num_bytes, item_bytes=item_bytes)
    before = data.copy()
    pack(store, "a", data, f"lossless{8 * item_bytes}")
    assert np.array_equal(data, before)  # only read
    assert np.array_equal(get(store, "a"), data)
    assert store.nbytes("a") == num_bytes
    unpacked, packed = store.packed_sizes()
    assert unpacked == num_bytes
    assert store.written_bytes == store.read_bytes == packed
    assert store.used_bytes == round_up(packed)
    if num_bytes >= 65_536:
        assert packed < num_bytes * (0.9 if item_bytes == 4 else 0.75)
    if num_bytes == 4:
        assert packed == num_bytes


def test_what_does_not_pack_is_stored_as_it_is(store: DiskStore) -> None:
    for size in (1, 5000, PAGE, 3 * MIB, 5 * MIB + 1):
        pack(store, "a", noise(size))
        assert store.packed_sizes() == (size, size)
        assert store.used_bytes == round_up(size)
        assert np.array_equal(get(store, "a"), noise(size))


def test_a_tile_of_which_only_the_first_chunk_packs(store: DiskStore) -> None:
    """No tile takes more than its length, which is what the plan counts on."""
    data = np.concatenate([floats(MIB), noise(8 * MIB)])
    pack(store, "a", data)
    assert store.used_bytes < 9 * MIB
    assert np.array_equal(get(store, "a"), data)


def test_tiles_move_through_a_small_window(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = packing._CARRY_BYTES + PAGE
    monkeypatch.setattr(packing, "_WINDOW_BYTES", window)
    memory = HostPool(POOL).take(STAGING_BYTES, what="staging").array
    small = Packing(memory)
    data, out = floats(9 * MIB), np.zeros(9 * MIB, np.uint8)
    disk: dict[int, bytes] = {}

    def write(at: int, pages: U8) -> None:
        assert at % PAGE == pages.nbytes % PAGE == 0
        assert pages.nbytes <= window
        assert pages.ctypes.data % PAGE == 0
        for start in range(0, pages.nbytes, PAGE):
            assert at + start not in disk
            disk[at + start] = pages[start : start + PAGE].tobytes()

    def read(at: int, pages: U8) -> None:
        assert pages.ctypes.data % PAGE == 0
        for start in range(0, pages.nbytes, PAGE):
            page = np.frombuffer(disk[at + start], np.uint8)
            pages[start : start + PAGE] = page

    written = small.write(data, 4, write)
    assert written is not None
    assert len(disk) == round_up(written[0]) // PAGE
    assert small.read(written[0], 4, out, read) == written[1]
    assert np.array_equal(out, data)


def test_many_threads_at_once(store: DiskStore) -> None:
    tiles = {f"t{i}": floats(2 * MIB + 4 * i, i) for i in range(8)}
    for _ in range(3):
        puts = [store.put(k, v, codec="lossless32") for k, v in tiles.items()]
        outs = {key: np.zeros(data.nbytes, np.uint8) for key, data in tiles.items()}
        for future in puts:
            wait(future, what="put", timeout_s=30)
        gets = [store.get_into(key, out) for key, out in outs.items()]
        for future in gets:
            wait(future, what="get", timeout_s=30)
        assert all(np.array_equal(outs[key], tiles[key]) for key in tiles)


def test_resume_reads_what_was_packed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    pack(store, "a", floats(3 * MIB))
    pack(store, "b", noise(MIB))
    sizes = store.packed_sizes()
    pinned = store.pin()
    assert pinned.packed
    store.close()
    assert pinned.extent_bytes < 3.9 * MIB
    again = open_store(tmp_path, pinned=[pinned])
    again.restore(pinned, {"a": "a", "b": "b"})
    assert again.packed_sizes() == sizes
    assert again.used_bytes == pinned.extent_bytes
    assert np.array_equal(get(again, "a"), floats(3 * MIB))
    again.close()
    plain = DiskStore(tmp_path, pinned=[pinned])
    plain.restore(pinned, {"a": "a", "b": "b"})
    assert np.array_equal(get(plain, "b"), noise(MIB))
    with pytest.raises(ArgumentError, match=r"lossless32.*staging"):
        get(plain, "a")
    plain.unpin(pinned)
    plain.close()


def test_records_are_of_what_the_disk_moved(tmp_path: Path) -> None:
    records: list[IoRecord] = []
    store = open_store(tmp_path, on_io=records.append)
    pack(store, "a", floats(3 * MIB))
    get(store, "a")
    size = store.packed_sizes()[1]
    assert [record.nbytes for record in records] == [size, size]
    assert size < 3 * MIB * 0.9
    store.close()


# ---------------------------------------------------------------------- memory


def test_memory_is_taken_at_once_and_given_back(tmp_path: Path) -> None:
    pool = HostPool(POOL)
    store = DiskStore(tmp_path, num_threads=THREADS, staging=pool)
    assert pool.in_use_bytes == store.staging_bytes == THREADS * STAGING_BYTES
    pack(store, "a", floats(16 * MIB))
    get(store, "a")
    assert pool.peak_bytes == THREADS * STAGING_BYTES
    store.close()
    assert pool.in_use_bytes == 0


def test_too_little_memory_leaves_nothing(tmp_path: Path) -> None:
    pool = HostPool(2 * STAGING_BYTES)
    with pytest.raises(BudgetError, match="packing"):
        DiskStore(tmp_path, num_threads=THREADS, staging=pool)
    assert pool.in_use_bytes == 0


def test_a_store_that_cannot_pack_says_so(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with pytest.raises(ArgumentError, match="staging="):
        store.put("a", floats(MIB), codec="lossless32")
    assert store.keys() == []
    store.close()


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("at", [0, 5, 12, 16, 70_000, -20, -1])
def test_a_flipped_bit_is_found(store: DiskStore, at: int) -> None:
    pack(store, "layers.3/exp_avg", floats(3 * MIB))
    size = store.packed_sizes()[1]
    tile = store.pin().tiles["layers.3/exp_avg"]
    assert tile.packed
    flip_bits(store.path, tile.offset + at % size, 1)
    with pytest.raises(ChecksumError, match=r"layers.3/exp_avg.*is damaged"):
        get(store, "layers.3/exp_avg")
    assert store.used_bytes == round_up(size)
    pack(store, "layers.3/exp_avg", floats(MIB))
    assert np.array_equal(get(store, "layers.3/exp_avg"), floats(MIB))


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("turn", [0, 1])
def test_io_errors_leave_the_old_version(
    store: DiskStore, name: str, turn: int
) -> None:
    old = floats(8 * MIB, 1)
    pack(store, "a", old)
    used = store.used_bytes
    real, calls = getattr(os, name), [0]

    def call(*args: Any) -> int:
        calls[0] += 1
        if calls[0] > turn:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(real(*args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        with pytest.raises(StoreError, match="EIO"):
            pack(store, "a", floats(8 * MIB, 2)) if name == "pwritev" else get(
                store, "a"
            )
    assert calls[0] == turn + 1
    assert store.used_bytes == used
    for _ in range(THREADS + 1):  # every thread's buffers are back
        assert np.array_equal(get(store, "a"), old)


@pytest.mark.parametrize("step", [4096, 70_000])
def test_short_transfers_are_finished(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    step = max(PAGE, step - step % PAGE)
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda fd, buffers, offset, real=real: real(
                fd, [buffers[0][:step]], offset
            ),
        )
    data = floats(600_000)
    pack(store, "a", data)
    assert np.array_equal(get(store, "a"), data)


# ----------------------------------------------------------------------- space


def test_what_was_promised_is_enough(tmp_path: Path) -> None:
    """Unpacked bytes and one spare tile: enough whatever packs, in any order."""
    tiles, size = 12, MIB // 2
    store = open_store(tmp_path, max_bytes=(tiles + 1) * size)
    chance = random.Random(0)
    seeds = {}
    for _ in range(400):
        key = f"t{chance.randrange(tiles)}"
        seeds[key] = chance.randrange(50)
        if seeds[key] % 5 == 0:
            pack(store, key, noise(size, seeds[key]))
        else:
            pack(store, key, floats(size, seeds[key]))
    for key, seed in seeds.items():
        data = noise(size, seed) if seed % 5 == 0 else floats(size, seed)
        assert np.array_equal(get(store, key), data)
    assert store.peak_bytes <= (tiles + 1) * size
    parts = [len(tile.parts) for tile in store.pin().tiles.values()]
    assert max(parts) <= 12
    store.close()


def test_puts_at_once_share_the_spare_tile(tmp_path: Path) -> None:
    size = MIB
    store = open_store(tmp_path, max_bytes=5 * size)
    for turn in range(6):
        datas = [
            (noise if (turn + i) % 3 else floats)(size, turn + i) for i in range(4)
        ]
        puts = [
            store.put(f"t{i}", data, codec="lossless32") for i, data in enumerate(datas)
        ]
        for future in puts:
            wait(future, what="put", timeout_s=20)
        for i, data in enumerate(datas):
            assert np.array_equal(get(store, f"t{i}"), data)
    store.close()


def test_a_put_and_gets_of_its_old_version(store: DiskStore) -> None:
    """Whole versions only, packed or not."""
    versions = [floats(2 * MIB, seed) for seed in (1, 2)]
    pack(store, "a", versions[0])
    stop, wrong = threading.Event(), list[int]()

    def look() -> None:
        while not stop.is_set():
            found = get(store, "a")
            if not any(np.array_equal(found, version) for version in versions):
                wrong.append(1)

    thread = threading.Thread(target=look)
    thread.start()
    for turn in range(10):
        pack(store, "a", versions[turn % 2])
    stop.set()
    thread.join(20)
    assert not wrong
