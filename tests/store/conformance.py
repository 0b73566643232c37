"""What every Store must do; subclass and give a `store` fixture."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.store.base import wait
from megatrain_nb.store.host import HostPool

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from megatrain_nb.store.base import Store


def noise(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def flip_bits(path: Path, offset: int, mask: int) -> None:
    """Change some bits of one byte of a file, on the disk as well."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
        file.flush()
        os.fsync(file.fileno())


def put(store: Store, key: str, data: NDArray[np.uint8]) -> None:
    wait(store.put(key, data), what=f"put {key}", timeout_s=20)


def get(store: Store, key: str) -> NDArray[np.uint8]:
    out = np.zeros(store.nbytes(key), np.uint8)
    wait(store.get_into(key, out), what=f"get {key}", timeout_s=20)
    return out


class StoreConformance:
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 100_001, (9 << 20) + 5])
    @pytest.mark.parametrize("shift", [0, 1])
    def test_round_trip_of_any_size_and_alignment(
        self, store: Store, nbytes: int, shift: int
    ) -> None:
        pool = HostPool(32 << 20)
        source = pool.take(nbytes + shift, what="in").array[shift : shift + nbytes]
        target = pool.take(nbytes + shift, what="out").array[shift : shift + nbytes]
        source[:] = noise(nbytes)
        put(store, "a", source)
        wait(store.get_into("a", target), what="get", timeout_s=20)
        assert np.array_equal(source, target)
        assert store.nbytes("a") == nbytes

    def test_neighbours_stay_as_they_are(self, store: Store) -> None:
        tiles = {
            f"t{i}": noise(size, i) for i, size in enumerate((5000, 4096, 1, 8193))
        }
        for _ in range(3):
            for key, data in tiles.items():
                put(store, key, data)
        for key, data in tiles.items():
            assert np.array_equal(get(store, key), data)

    def test_put_replaces_and_may_change_the_length(self, store: Store) -> None:
        put(store, "a", noise(10_000, 1))
        put(store, "a", noise(20_000, 2))
        assert np.array_equal(get(store, "a"), noise(20_000, 2))
        assert store.keys() == ["a"]

    def test_last_put_wins(self, store: Store) -> None:
        for turn in range(20):
            futures = [store.put("a", noise(30_000, i)) for i in range(5)]
            for future in futures:
                wait(future, what="put", timeout_s=20)
            assert np.array_equal(get(store, "a"), noise(30_000, 4)), turn

    def test_keys_contains_delete(self, store: Store) -> None:
        put(store, "b", noise(10))
        put(store, "a", noise(10))
        assert store.keys() == ["a", "b"]
        assert "a" in store
        store.delete("a")
        assert "a" not in store
        assert store.keys() == ["b"]
        with pytest.raises(StoreError, match="no tile 'a'"):
            store.get_into("a", np.zeros(10, np.uint8))
        with pytest.raises(StoreError, match="no tile 'a'"):
            store.delete("a")

    def test_delete_voids_queued_puts(self, store: Store) -> None:
        put(store, "a", noise(10))
        futures = [store.put("a", noise(1 << 20, i)) for i in range(8)]
        store.delete("a")
        for future in futures:
            wait(future, what="put", timeout_s=20)
        assert store.keys() == []
        assert store.used_bytes == 0

    def test_used_and_peak(self, store: Store) -> None:
        assert store.used_bytes == 0
        put(store, "a", noise(4097))
        assert 4097 <= store.used_bytes <= 8192
        put(store, "a", noise(4096))
        put(store, "b", noise(4096))
        assert store.used_bytes == 8192
        store.delete("a")
        store.delete("b")
        assert store.used_bytes == 0
        assert store.peak_bytes >= 8192

    @pytest.mark.parametrize(
        "wrong",
        [
            np.zeros(8, np.float32),
            np.zeros((8, 8), np.uint8)[:, 1],
            np.zeros(8, np.int8),
        ],
    )
    def test_refuses_other_arrays(self, store: Store, wrong: NDArray[np.uint8]) -> None:
        put(store, "a", noise(8))
        with pytest.raises(ArgumentError, match="C-contiguous uint8"):
            store.put("a", wrong)
        with pytest.raises(ArgumentError, match="writeable C-contiguous uint8"):
            store.get_into("a", wrong)

    def test_refuses_outputs_that_do_not_fit(self, store: Store) -> None:
        put(store, "a", noise(8))
        with pytest.raises(StoreError, match="has 8 bytes, the output 9"):
            store.get_into("a", np.zeros(9, np.uint8))
        read_only = np.zeros(8, np.uint8)
        read_only.flags.writeable = False
        with pytest.raises(ArgumentError, match="writeable"):
            store.get_into("a", read_only)

    def test_concurrent_puts_and_gets_never_mix(self, store: Store) -> None:
        size, stop = 1 << 20, threading.Event()
        put(store, "a", np.zeros(size, np.uint8))

        def write() -> None:
            for value in range(1, 60):
                put(store, "a", np.full(size, value, np.uint8))
            stop.set()

        def read() -> list[int]:
            seen = []
            while not stop.is_set():
                got = get(store, "a")
                assert (got == got[0]).all()
                seen.append(int(got[0]))
            return seen

        with ThreadPoolExecutor(3) as threads:
            writing = threads.submit(write)
            readers = [threads.submit(read) for _ in range(2)]
            writing.result(30)
            for reader in readers:
                seen = reader.result(30)
                assert seen == sorted(seen)
        assert get(store, "a")[0] == 59
        assert 0 < store.used_bytes <= size

    def test_everything_raises_after_close(self, store: Store) -> None:
        put(store, "a", noise(8))
        store.close()
        store.close()
        calls = [
            lambda: store.put("a", noise(8)),
            lambda: store.get_into("a", np.zeros(8, np.uint8)),
            lambda: store.delete("a"),
            lambda: "a" in store,
            lambda: store.nbytes("a"),
            store.keys,
        ]
        for call in calls:
            with pytest.raises(StoreError, match="is closed"):
                call()
