"""Ours over torch's fused AdamW, the same arrays' sizes, run in turns.

pytest tests/benchmarks/test_adamw.py --benchmark-enable -s
"""

from __future__ import annotations

import time
from contextlib import contextmanager
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
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_ratio_to_torch(num_threads: int, benchmark: Any) -> None:
    if not benchmark.enabled:
        pytest.skip("give --benchmark-enable")
    adamw.warm_up()
    grad = zeros()
    grad[:] = np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)
    ours = [zeros() for _ in range(3)]
    theirs = torch.nn.Parameter(torch.zeros(NUMEL))
    theirs.grad = torch.from_numpy(grad)
    optimizer = torch.optim.AdamW([theirs], fused=True)
    segments = [Segment(0, NUMEL, AdamWConfig(), 1)]
    with UpdateThreads(num_threads) as threads, torch_threads(num_threads):

        def update() -> None:
            adamw.update(ours[0], ours[1], ours[2], grad, segments, threads=threads)

        update()
        optimizer.step()
        pairs = [(seconds(update), seconds(optimizer.step)) for _ in range(ROUNDS)]
        benchmark.pedantic(update, rounds=1)
    best, best_torch = (min(column) for column in zip(*pairs, strict=True))
    print(
        f"\nAdamW, {num_threads} thread(s): {NUMEL / best / 1e6:.0f} M param/s, "
        f"torch fused {NUMEL / best_torch / 1e6:.0f} M, "
        f"ratio {best_torch / best:.2f} (above 1 is faster)"
    )
    benchmark.extra_info["speed over torch"] = best_torch / best
