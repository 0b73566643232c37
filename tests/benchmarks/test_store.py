"""The store's sequential rate over fio's, same file system, block size and parallelism, in turns."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megatrain_nb.store.base import wait
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import HostPool

if TYPE_CHECKING:
    from pathlib import Path

TILE_BYTES = 16 << 20
NUM_TILES = 64
NUM_THREADS = 4
ROUNDS = 5
MIN_RATIO = 0.9


def fio(directory: Path, operation: str) -> float:
    """Bytes per second of fio with O_DIRECT: each of four jobs moves its quarter."""
    done = subprocess.run(
        [
            "fio",
            "--name=bench",
            f"--directory={directory}",
            f"--rw={operation}",
            f"--bs={TILE_BYTES}",
            f"--size={TILE_BYTES * NUM_TILES // NUM_THREADS}",
            f"--numjobs={NUM_THREADS}",
            "--ioengine=psync",
            "--direct=1",
            "--group_reporting",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    job = json.loads(done.stdout)["jobs"][0]
    return float(job[operation]["bw_bytes"])


def ours(store: DiskStore, slabs: list[Any], operation: str) -> float:
    """Bytes per second of the store, checksums included."""
    start = time.perf_counter()
    futures = [
        store.put(f"tile{index}", slabs[index % len(slabs)].array)
        if operation == "write"
        else store.get_into(f"tile{index}", slabs[index % len(slabs)].array)
        for index in range(NUM_TILES)
    ]
    for future in futures:
        wait(future, what=operation)
    return NUM_TILES * TILE_BYTES / (time.perf_counter() - start)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.usefixtures("benchmarking")
def test_ratio_to_fio(operation: str, tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    (tmp_path / "fio").mkdir()
    (tmp_path / "ours").mkdir()
    pool = HostPool(NUM_TILES * TILE_BYTES)
    store = DiskStore(tmp_path / "ours", num_threads=NUM_THREADS)
    try:
        # Reads go to memory of their own, as many as there are tiles: none overwrites another.
        slabs = [pool.take(TILE_BYTES, what="bench") for _ in range(NUM_TILES)]
        rng = np.random.default_rng(0)
        for slab in slabs:
            slab.array[:] = rng.integers(0, 256, TILE_BYTES, dtype=np.uint8)
        ours(store, slabs, "write")
        fio(tmp_path / "fio", "write")
        pairs = [
            (ours(store, slabs, operation), fio(tmp_path / "fio", operation))
            for _ in range(ROUNDS)
        ]
    finally:
        store.close()
        pool.close()
    ratio = median(a / b for a, b in pairs)
    mine, theirs = (median(column) / 1e9 for column in zip(*pairs, strict=True))
    print(
        f"\nstore, {operation}: {mine:.2f} GB/s, fio with O_DIRECT {theirs:.2f} GB/s, ratio {ratio:.2f} "
        f"({TILE_BYTES >> 20} MiB, {NUM_THREADS} in flight, medians of {ROUNDS} rounds in turns)"
    )
    assert ratio >= MIN_RATIO
