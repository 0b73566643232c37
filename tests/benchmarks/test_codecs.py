"""One step on encoded moments over torch's fused AdamW in fp32, run in turns.

pytest tests/benchmarks/test_codecs.py --benchmark-enable -s

CPU time (over all threads, by their number) is what counts where others use the machine
too: a thread that waits for a core is not slow.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from megatrain_nb.codec import base
from megatrain_nb.codec.base import Key
from megatrain_nb.codec.split import Split
from megatrain_nb.optim import encoded
from megatrain_nb.optim.adamw import UpdateThreads
from megatrain_nb.optim.config import AdamWConfig
from megatrain_nb.optim.encoded import EncodedSegment, update_encoded
from tests.benchmarks.test_adamw import (
    NUMEL,
    PLACES,
    REST_S,
    ROUNDS,
    seconds,
    torch_step,
    torch_threads,
    zeros,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CODECS = ("raw", "8bit", "4bit", "3bit", "2bit")


def traffic_bytes(name: str) -> float:
    """Read and written for each parameter: weight, gradient, moments."""
    return 4 + 4 + 4 + 2 * base.get(name).bits_per_param(NUMEL) / 8


def segments_of(name: str, grad: Any) -> list[EncodedSegment]:
    """Return a codec's moments of as many parameters as there are gradients; they are not zero."""
    some, codec = 1024 * 1024, base.get(name)
    exp_avg = grad[:some] * np.float32(0.1)
    # A piece is encoded and repeated: the whole would take numpy minutes.
    size = codec.encoded_bytes(some)
    piece = np.zeros(size, np.uint8)
    codec.encode(exp_avg, np.square(exp_avg), piece, Key(0, 1, 0))
    pieces = zeros(torch.uint8, grad.size // some * size).reshape(-1, size)
    pieces[:] = piece
    return [
        EncodedSegment(a, a + some, codec, data, AdamWConfig(), 2, 0, a)
        for a, data in zip(range(0, grad.size, some), pieces, strict=True)
    ]


def copy_bytes_per_s(threads: UpdateThreads) -> float:
    """What the memory gives to ``num_threads`` that copy, read and written."""
    source, target = np.ones(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
    step = 1024 * 1024
    best = min(
        seconds(
            lambda: threads.run(
                deque(
                    partial(np.copyto, target[a : a + step], source[a : a + step])
                    for a in range(0, NUMEL, step)
                )
            )
        )
        for _ in range(ROUNDS)
    )
    return 2 * source.nbytes / best


class Times(NamedTuple):
    """Seconds of one step, the best of some rounds; CPU time is over all threads, by their number."""

    wall: float
    busy: float


def times_of(run: Callable[[], object], num_threads: int) -> Times:
    """Rest, and run."""
    time.sleep(REST_S)
    busy, start = time.process_time(), time.perf_counter()
    run()
    wall = time.perf_counter() - start
    return Times(wall, (time.process_time() - busy) / num_threads)


def best_of_each(num_threads: int, *, halves: bool) -> dict[str, Times]:
    """Return the times of torch and of each codec, on new arrays, in turns."""
    grad, step = torch_step()
    param = Split(zeros(torch.uint16), zeros(torch.uint16)) if halves else zeros()
    states = {name: segments_of(name, grad) for name in CODECS}
    with UpdateThreads(num_threads) as threads, torch_threads(num_threads):

        def update(name: str) -> None:
            update_encoded(param, grad, states[name], finite=True, threads=threads)

        runs: dict[str, Any] = {"torch": step}
        runs |= {name: partial(update, name) for name in CODECS}
        times: dict[str, list[Times]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(ROUNDS):
            for name, run in runs.items():
                times[name].append(times_of(run, num_threads))
    return {
        name: Times(*map(min, zip(*pairs, strict=True)))
        for name, pairs in times.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("halves", [False, True], ids=["fp32", "split"])
def test_ratio_to_torch(num_threads: int, halves: bool, benchmark: Any) -> None:
    if not benchmark.enabled:
        pytest.skip("give --benchmark-enable")
    for name in CODECS:
        encoded.warm_up(name, split=halves)
    places: list[dict[str, Times]] = []
    benchmark.pedantic(
        lambda: places.append(best_of_each(num_threads, halves=halves)), rounds=PLACES
    )
    with UpdateThreads(num_threads) as threads:
        copy = copy_bytes_per_s(threads)

    def rate(name: str, kind: str) -> float:
        times: list[float] = [getattr(place[name], kind) for place in places]
        return NUMEL / median(times)

    kind = "split bf16 + 16 bit" if halves else "fp32"
    print(
        f"\nAdamW on encoded moments, {num_threads} thread(s), {kind} weights, medians of {PLACES} places in memory"
        f"\n  torch fused, fp32: {rate('torch', 'wall') / 1e6:5.0f} M param/s, "
        f"{rate('torch', 'busy') / 1e6:5.0f} M by CPU time"
    )
    for name in CODECS:
        wall, busy = (
            sorted(getattr(x["torch"], y) / getattr(x[name], y) for x in places)
            for y in Times._fields
        )
        share = traffic_bytes(name) * rate(name, "wall") / copy
        print(
            f"  {name:5}{rate(name, 'wall') / 1e6:8.0f} M param/s, over torch "
            f"{median(wall):.2f} ({wall[0]:.2f} to {wall[-1]:.2f}), {share:.2f} of a copy's bytes/s; by CPU "
            f"time {rate(name, 'busy') / 1e6:.0f} M, {median(busy):.2f}"
        )
        benchmark.extra_info[f"{name} over torch"] = median(wall)
