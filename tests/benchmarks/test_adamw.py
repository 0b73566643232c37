"""Ours over torch's fused AdamW, the same arrays' sizes, run in turns.

pytest tests/benchmarks/test_adamw.py --benchmark-enable -s
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from megatrain_nb.optim import adamw
from megatrain_nb.optim.adamw import Segment, UpdateThreads
from megatrain_nb.optim.config import AdamWConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUMEL = 64 * 1024 * 1024
ROUNDS = 5
# Where arrays lie in the machine's memory decides more than the code does: up to 1.7 times the speed.
PLACES = 9
# torch's threads spin for a while after their work, on the cores of what comes next.
REST_S = 0.02


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def zeros(dtype: torch.dtype = torch.float32, numel: int = NUMEL) -> Any:
    """Zeros that start a cache line, in huge pages, as the runtime's tiles do; numpy's start 16 bytes later."""
    return torch.zeros(numel, dtype=dtype).numpy()


def seconds(function: Callable[[], object]) -> float:
    time.sleep(REST_S)
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def torch_step() -> tuple[Any, Callable[[], object]]:
    """Return gradients on new memory, and a step of torch's fused AdamW with them."""
    grad = zeros()
    grad[:] = np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)
    theirs = torch.nn.Parameter(torch.zeros(NUMEL))
    theirs.grad = torch.from_numpy(grad)
    return grad, torch.optim.AdamW([theirs], fused=True).step


def best_of_each(num_threads: int) -> tuple[float, float]:
    """Return seconds of ours and torch's on new arrays, the best of some rounds in turns."""
    # Both in huge pages, as the runtime's tiles are.
    grad, step = torch_step()
    ours = [zeros() for _ in range(3)]
    segments = [Segment(0, NUMEL, AdamWConfig(), 1)]
    with UpdateThreads(num_threads) as threads, torch_threads(num_threads):

        def update() -> None:
            adamw.update(ours[0], ours[1], ours[2], grad, segments, threads=threads)

        update()
        step()
        pairs = [(seconds(update), seconds(step)) for _ in range(ROUNDS)]
    best, best_torch = (min(column) for column in zip(*pairs, strict=True))
    return best, best_torch


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_ratio_to_torch(num_threads: int, benchmark: Any) -> None:
    if not benchmark.enabled:
        pytest.skip("give --benchmark-enable")
    adamw.warm_up()
    pairs: list[tuple[float, float]] = []
    benchmark.pedantic(lambda: pairs.append(best_of_each(num_threads)), rounds=PLACES)
    ratios = [best_torch / best for best, best_torch in pairs]
    rate, rate_torch = (
        NUMEL / median(column) / 1e6 for column in zip(*pairs, strict=True)
    )
    print(
        f"\nAdamW, {num_threads} thread(s): {rate:.0f} M param/s, torch fused {rate_torch:.0f} M, "
        f"ratio {median(ratios):.2f} (above 1 is faster; {min(ratios):.2f} to {max(ratios):.2f} "
        f"in {PLACES} places in memory)"
    )
    benchmark.extra_info["speed over torch"] = median(ratios)
