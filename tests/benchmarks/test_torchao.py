"""One step on encoded moments over torchao's low-bit AdamW on the CPU, run in turns.

torchao is no dependency; it compiles for the CPU with a C++ compiler:

pip install torchao
pytest tests/benchmarks/test_torchao.py --benchmark-enable -s
"""

from __future__ import annotations

import time
import warnings
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from megatrain_nb.optim import encoded
from megatrain_nb.optim.adamw import UpdateThreads
from megatrain_nb.optim.encoded import update_encoded
from tests.benchmarks.test_adamw import seconds, torch_threads, zeros
from tests.benchmarks.test_codecs import segments_of

NUMEL = 16 * 1024 * 1024
ROUNDS = 3
# Against what has the same bits; torchao has nothing below four.
THEIRS = {
    "8bit": "AdamW8bit",
    "4bit": "AdamW4bit",
    "3bit": "AdamW4bit",
    "2bit": "AdamW4bit",
}
LEAST = 20


def torchao_steps(ao: Any, grad: Any) -> dict[str, Any]:
    """Return a compiled step of each of torchao's AdamW, over parameters of its own."""
    steps = {}
    for name in dict.fromkeys(THEIRS.values()):
        param = torch.nn.Parameter(torch.zeros(NUMEL))
        param.grad = torch.from_numpy(grad)
        optimizer = getattr(ao, name)([param])
        optimizer.step()  # compiles
        steps[name] = optimizer.step
    return steps


def our_steps(grad: Any, threads: UpdateThreads) -> dict[str, Any]:
    """Return a step of each codec, over moments that are not zero."""
    steps, param = {}, zeros(numel=NUMEL)
    for name in THEIRS:
        encoded.warm_up(name)
        segments = segments_of(name, grad)

        def step(segments: Any = segments) -> None:
            update_encoded(param, grad, segments, finite=True, threads=threads)

        step()
        steps[name] = step
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_ratio_to_torchao(num_threads: int, benchmark: Any) -> None:
    if not benchmark.enabled:
        pytest.skip("give --benchmark-enable")
    ao = pytest.importorskip("torchao.optim")
    inductor: Any = import_module("torch._inductor.config")
    dynamo: Any = import_module("torch._dynamo")
    dynamo.reset()  # the number of threads is compiled in
    grad = zeros(numel=NUMEL)
    grad[:] = np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)
    with (
        UpdateThreads(num_threads) as threads,
        torch_threads(num_threads),
        inductor.patch(force_disable_caches=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # theirs are not our errors
        runs = torchao_steps(ao, grad) | our_steps(grad, threads)
        best = dict.fromkeys(runs, float("inf"))
        busy = dict.fromkeys(runs, float("inf"))
        for _ in range(ROUNDS):
            for name, run in runs.items():
                before = time.process_time()
                best[name] = min(best[name], seconds(run))
                spent = (time.process_time() - before) / num_threads
                busy[name] = min(busy[name], spent)
        benchmark.pedantic(runs["4bit"], rounds=1)
    print(f"\nAdamW over torchao's on the CPU, {num_threads} thread(s), {NUMEL} params")
    for name in runs:
        print(
            f"  {name:9} {NUMEL / best[name] / 1e6:6.0f} M param/s, "
            f"{NUMEL / busy[name] / 1e6:6.0f} M by CPU time"
        )
    for name, other in THEIRS.items():
        ratio = best[other] / best[name]
        print(
            f"  {name} over {other}: {ratio:.0f} times as fast, "
            f"{busy[other] / busy[name]:.0f} by CPU time"
        )
        benchmark.extra_info[f"{name} over {other}"] = ratio
        assert ratio >= LEAST
