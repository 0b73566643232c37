"""One step on encoded moments over torch's fused AdamW in fp32, run in turns.

pytest tests/benchmarks/test_codecs.py --benchmark-enable -s

CPU time (over all threads, by their number) is what counts where others use the machine
too: a thread that waits for a core is not slow.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any

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
from tests.benchmarks.test_adamw import seconds, torch_threads, zeros

NUMEL = 64 * 1024 * 1024
ROUNDS = 5
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


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("halves", [False, True], ids=["fp32", "split"])
def test_ratio_to_torch(num_threads: int, halves: bool, benchmark: Any) -> None:
    if not benchmark.enabled:
        pytest.skip("give --benchmark-enable")
    grad = zeros()
    grad[:] = np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)
    theirs = torch.nn.Parameter(torch.zeros(NUMEL))
    theirs.grad = torch.from_numpy(grad)
    optimizer = torch.optim.AdamW([theirs], fused=True)
    param = Split(zeros(torch.uint16), zeros(torch.uint16)) if halves else zeros()
    states = {}
    for name in CODECS:
        encoded.warm_up(name, split=halves)
        states[name] = segments_of(name, grad)
    with UpdateThreads(num_threads) as threads, torch_threads(num_threads):

        def update(name: str) -> None:
            update_encoded(param, grad, states[name], finite=True, threads=threads)

        runs: dict[str, Any] = {"torch": optimizer.step}
        runs |= {name: lambda name=name: update(name) for name in CODECS}
        for run in runs.values():
            run()
        times: dict[str, list[float]] = {name: [] for name in runs}
        work: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                before = time.process_time()
                times[name].append(seconds(run))
                work[name].append((time.process_time() - before) / num_threads)
        copy = copy_bytes_per_s(threads)
        benchmark.pedantic(lambda: update("4bit"), rounds=1)
    best = {name: min(values) for name, values in times.items()}
    busy = {name: min(values) for name, values in work.items()}
    kind = "split bf16 + 16 bit" if halves else "fp32"
    print(f"\nAdamW on encoded moments, {num_threads} thread(s), {kind} weights")
    print(
        f"  torch fused, fp32: {NUMEL / best['torch'] / 1e6:5.0f} M param/s, "
        f"{NUMEL / busy['torch'] / 1e6:5.0f} M by CPU time"
    )
    for name in CODECS:
        share = traffic_bytes(name) * NUMEL / best[name] / copy
        print(
            f"  {name:5}{NUMEL / best[name] / 1e6:8.0f} M param/s, over torch "
            f"{best['torch'] / best[name]:.2f}, {share:.2f} of a copy's bytes/s; by CPU "
            f"time {NUMEL / busy[name] / 1e6:.0f} M, {busy['torch'] / busy[name]:.2f}"
        )
        benchmark.extra_info[f"{name} over torch"] = best["torch"] / best[name]
