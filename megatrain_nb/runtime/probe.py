"""Measure this machine: how fast it computes, and how fast bytes move between its tiers."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import platform
import resource
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatrain_nb.codec.base import get
from megatrain_nb.codec.names import DYNAMIC, NAMES
from megatrain_nb.codec.split import Split
from megatrain_nb.errors import MegatrainError
from megatrain_nb.optim import encoded
from megatrain_nb.optim.adamw import (
    Segment,
    UpdateThreads,
    physical_cores,
    update,
    warm_up,
)
from megatrain_nb.optim.config import AdamWConfig
from megatrain_nb.plan.machine import Machine, nominal
from megatrain_nb.plan.model import TILE_NUMEL
from megatrain_nb.runtime import rss
from megatrain_nb.runtime.forecast import cache_path, read_cache, session_directory
from megatrain_nb.store.disk import DiskStore
from megatrain_nb.store.host import map_pages
from megatrain_nb.store.owner import OwnerLock
from megatrain_nb.store.preflight import check_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

logger = logging.getLogger("megatrain_nb")

_TILE_BYTES = 4 * TILE_NUMEL
_IN_FLIGHT = 6
_ROWS = (32, 128, 512, 2048)
_MOST_S = 0.3  # that one figure is measured
_WIDTHS = (1024, 2816)  # of the matrix in a product: a small model's MLP

# While memory is in pieces, the kernel joins huge pages for whoever asks, at 1 GB/s; then they come and go at twenty.
_UNTIL_HUGE = 8


def probe(offload_dir: str | Path | None = None, *, refresh: bool = False) -> Machine:
    """Measure this machine, at most 20 s; the second time the result is read from a file.

    Parameters
    ----------
    offload_dir
        Where the disk is measured: 0.5 GB are written and read there, and removed. Left out: the open session's
        directory, else the disk's figures are assumed.
    refresh
        Measure again.

    Notes
    -----
    What cannot be measured is assumed, and the result says so. The file is in ``$XDG_CACHE_HOME/megatrain_nb``
    (``~/.cache`` if that is not set), one for each machine and directory.
    """
    directory = (
        session_directory()
        if offload_dir is None
        else Path(offload_dir).expanduser().absolute()
    )
    if not refresh and (found := read_cache(directory)) is not None:
        return found
    machine = measure(directory)
    path = cache_path(directory)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(machine.to_json())
    return machine


def measure(directory: Path | None) -> Machine:
    """Measure, whatever was measured before."""
    figures: dict[str, object] = {
        "ram_bytes": round(0.8 * rss.available_bytes()),
        "cores": physical_cores(),
        "pin_bytes": _pin_bytes(),
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures["framework_bytes"] = _framework_bytes()
    parts: list[Callable[[], dict[str, object]]] = [
        lambda: _compute(device),
        _memory,
        _updates,
    ]
    if device.type == "cuda":
        parts.append(lambda: _link(device))
    if directory is not None:
        parts.append(lambda: _disk(directory))
    for part in parts:
        try:
            figures |= part()
        except (MegatrainError, RuntimeError, OSError, MemoryError) as error:
            logger.warning("the probe assumes what it could not measure: %s", error)
    base = nominal(platform.node() or "this machine", _floor(device))
    made = base.changed(**figures)
    return made.changed(assumed=made.assumed - {"device"})


def _floor(device: torch.device) -> dict[str, object]:
    """Return figures for what cannot be measured."""
    if device.type == "cpu":
        return {"cores": physical_cores(), "fp32_tflops": 0.1, "bf16_tflops": 0.1}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "vram_gb": properties.total_memory / 1e9,
        "link_gb_per_s": 12.0,
        "fp32_tflops": 10.0,
        "bf16_tflops": 40.0,
    }


def _compute(device: torch.device) -> dict[str, object]:
    """Measure matrix products with few and many rows, as a decoder layer makes them."""
    rows = _ROWS if device.type == "cpu" else (128, 1024, 8192)
    return {
        f"{name}_rates": tuple(
            (count, product_rate(count, dtype, device)) for count in rows
        )
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }


def product_rate(
    rows: int, dtype: torch.dtype, device: torch.device, *, most_s: float = _MOST_S
) -> float:
    """Return the operations per second of a layer's matrix products with so many rows, tried for ``most_s`` seconds.

    Those of a forward and a backward: what comes out, and the gradients of what went in and of the weights.
    """
    width, height = _WIDTHS if device.type == "cpu" else (8192, 8192)
    taken = torch.randn(rows, width, device=device).to(dtype)
    weights = torch.randn(height, width, device=device).to(dtype)
    gradient = torch.randn(rows, height, device=device).to(dtype)

    def work() -> tuple[torch.Tensor, ...]:
        return taken @ weights.t(), gradient @ weights, gradient.t() @ taken

    with torch.no_grad():
        seconds = _median_s(work, device, most_s=most_s)
    return 6.0 * rows * width * height / seconds


def _memory() -> dict[str, object]:
    source = torch.zeros(32 << 20)
    target = torch.empty_like(source).fill_(1.0)
    seconds = _median_s(lambda: target.copy_(source), torch.device("cpu"))
    cpu = torch.device("cpu")
    again = _median_s(lambda: target.fill_(1.0), cpu)

    def fill() -> None:
        torch.empty_like(source).fill_(1.0)

    for _ in range(_UNTIL_HUGE):
        fill()
    fresh = _median_s(fill, cpu)
    return {
        "memory_bytes_per_s": 2 * source.nbytes / seconds,
        "fresh_bytes_per_s": source.nbytes / max(fresh - again, 1e-6),
    }


def _updates() -> dict[str, object]:
    warm_up()
    warm_up(split=True)
    numel = 2 * TILE_NUMEL
    exp_avg, exp_avg_sq, grad, param = np.full((4, numel), 0.01, np.float32)
    halves = np.full((2, numel), 0x3C00, np.uint16)
    segments = [Segment(0, numel, AdamWConfig(), 1)]
    found: dict[str, object] = {}
    with UpdateThreads() as threads:
        for name, master in (
            ("update_params_per_s", param),
            ("split_update_params_per_s", Split(halves[0], halves[1])),
        ):

            def work(master: object = master) -> None:
                update(master, exp_avg, exp_avg_sq, grad, segments, threads=threads)  # type: ignore[arg-type]

            found[name] = numel / _median_s(work, torch.device("cpu"))
        found["codec_params_per_s"] = tuple(
            (
                name,
                numel / _median_s(partial(run, threads=threads), torch.device("cpu")),
            )
            for name, run in _encoded_updates(param, grad).items()
        )
    return found


def _encoded_updates(
    param: NDArray[np.float32], grad: NDArray[np.float32]
) -> dict[str, Callable[..., None]]:
    """Return what updates a tile with moments in each codec."""
    found: dict[str, Callable[..., None]] = {}
    config, numel = AdamWConfig(), param.size
    for name in NAMES:
        if name == DYNAMIC:
            continue
        encoded.warm_up(name)
        codec = get(name)
        moments = np.zeros(codec.encoded_bytes(numel), np.uint8)
        segments = [encoded.EncodedSegment(0, numel, codec, moments, config, 1)]
        found[name] = partial(
            encoded.update_encoded, param, grad, segments, finite=True
        )
    return found


def _link(device: torch.device) -> dict[str, object]:
    on_device = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    pageable = torch.zeros(64 << 20, dtype=torch.uint8)
    pinned = pageable.pin_memory()

    def rate(source: torch.Tensor, target: torch.Tensor) -> float:
        return source.nbytes / _median_s(lambda: target.copy_(source), device)

    # Large enough not to fit into the device's cache.
    large = torch.zeros(512 << 20, dtype=torch.uint8, device=device)
    return {
        "vram_bytes_per_s": 2 * rate(large, torch.empty_like(large)),
        "vram_bytes": torch.cuda.get_device_properties(device).total_memory,
        "onload_bytes_per_s": rate(pinned, on_device),
        "offload_bytes_per_s": rate(on_device, pinned),
        "pageable_bytes_per_s": rate(pageable, on_device),
    }


def _disk(directory: Path) -> dict[str, object]:
    """Measure the store itself, checksums included, with tiles of the size that training moves."""
    found = check_directory(directory)
    room = 2 * found.free_bytes // 3
    count = max(2, min(24, room // _TILE_BYTES))
    with contextlib.ExitStack() as undo:
        place = found.path / f".megatrain-probe-{os.getpid()}"
        place.mkdir(mode=0o700)
        undo.callback(place.rmdir)
        lock = OwnerLock(place)
        undo.callback(lock.release)
        store = DiskStore(place, direct=found.direct)
        undo.callback(store.close)
        tiles = [
            np.frombuffer(map_pages(_TILE_BYTES), np.uint8) for _ in range(_IN_FLIGHT)
        ]
        for seed, tile in enumerate(tiles):
            tile[:] = np.random.default_rng(seed).integers(
                0, 256, _TILE_BYTES, np.uint8
            )

        def put(index: int) -> object:
            return store.put(str(index), tiles[index % _IN_FLIGHT])

        def get(index: int) -> object:
            return store.get_into(str(index), tiles[index % _IN_FLIGHT])

        def mixed(index: int) -> object:
            return get(index) if index % 2 else put(index)

        _stream(
            put, count
        )  # the file grows; space that is used again is written faster
        cpu = time.process_time()
        rates = [
            count * _TILE_BYTES / _stream(move, count) for move in (put, get, mixed)
        ]
        cpu = time.process_time() - cpu
        few = min(count, 2 * _IN_FLIGHT)  # a slow disk is not waited for
        lost = _lost_s_per_byte(lambda: _stream(mixed, few), few * _TILE_BYTES)
    least = cpu / (3 * count * _TILE_BYTES) / physical_cores()
    return {
        "write_bytes_per_s": rates[0],
        "read_bytes_per_s": rates[1],
        "mixed_bytes_per_s": rates[2],
        "io_lost_s_per_byte": max(lost, least),
        "disk_bytes": found.free_bytes,
    }


def _lost_s_per_byte(move: Callable[[], object], num_bytes: int) -> float:
    """Return the seconds that products on all cores lose for a byte that moves meanwhile.

    That is more than the processor time of the transfers: what a thread of a product waits for, all of them wait for.
    """
    rate = partial(product_rate, 128, torch.float32, torch.device("cpu"))
    before, stop = rate(), threading.Event()

    def keep_moving() -> int:
        count = 0
        while True:
            move()
            count += 1
            if stop.is_set():
                return count

    with ThreadPoolExecutor(1) as thread:
        start = time.perf_counter()
        counted = thread.submit(keep_moving)
        try:
            beside = rate(most_s=2 * _MOST_S)
        finally:
            stop.set()
        moved = counted.result(timeout=60) * num_bytes
        seconds = time.perf_counter() - start
    return (1 - beside * 2 / (before + rate())) * seconds / moved


def _stream(move: Callable[[int], object], count: int) -> float:
    """Return the seconds that so many tiles take, a few in flight; a buffer is used by one at a time."""
    start = time.perf_counter()
    flying: deque[object] = deque()
    for index in range(count):
        if len(flying) == _IN_FLIGHT:
            flying.popleft().result(timeout=60)  # type: ignore[attr-defined]
        flying.append(move(index))
    for future in flying:
        future.result(timeout=60)  # type: ignore[attr-defined]
    return time.perf_counter() - start


def _median_s(
    work: Callable[[], object], device: torch.device, *, most_s: float = _MOST_S
) -> float:
    """Return the median seconds of at least three runs, for hardly more than ``most_s`` seconds."""

    def run() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    run()
    end = time.perf_counter() + most_s
    times: list[float] = []
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        times.append(run())
    return sorted(times)[len(times) // 2]


def _framework_bytes() -> int:
    """Return what a process takes that has imported all that trains; more if there is a model in it."""
    for name in ("transformers", "torch._dynamo"):
        importlib.import_module(name)
    return rss.resident_bytes()


def _pin_bytes() -> int:
    """Return what may be page-locked: CUDA is not bound by the process's limit, the system's RAM is."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    half = rss.available_bytes() // 2
    if torch.cuda.is_available() or limit == resource.RLIM_INFINITY:
        return half
    return min(limit, half)
