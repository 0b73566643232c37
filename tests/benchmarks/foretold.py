"""Training runs whose figures a forecast should have told before.

Run as ``python -m tests.benchmarks.foretold DIR``; each line on stdin is a case, as JSON (the fields of `Case`
of ``test_forecast.py``), and answers with one line of JSON. Each case has a forked process of its own: memory of one does
not count for the next, and torch is imported once. The cores of a shared machine are a third faster in one second than in
another, so the pace is taken before and after every few steps of which the seconds count.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
import transformers

import megatrain_nb as mt
from megatrain_nb.runtime import rss
from megatrain_nb.runtime.offload import offloaded_model
from megatrain_nb.runtime.probe import product_rate
from megatrain_nb.runtime.warmup import load_code

if TYPE_CHECKING:
    from collections.abc import Callable

_GROUPS, _STEPS, _PACE_S = 5, 2, 0.075


def make_config(family: str, **values: Any) -> Any:
    """Return a transformers configuration."""
    return transformers.AutoConfig.for_model(family, **values)


def run(given: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train for some steps on random tokens, and return what was measured once the plan has settled."""
    batch, length, count = given["window"]
    session = mt.init(
        directory,
        max_ram_gb=given["ram_gb"],
        optimizer_compression=given["moments"],
        weight_compression=given["weights"],
    )
    base = session._other.base_bytes
    config = make_config(given["family"], **given["config"])
    model = mt.from_config(config, dtype=given["dtype"], seed=0)
    model.train()
    wrapped, optimizer = mt.wrap(model, lr=1e-4, max_grad_norm=given["clip"])
    offloaded = offloaded_model(wrapped)
    assert offloaded is not None
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    meter = rss.PeakMeter()

    def step() -> Any:
        ids = torch.randint(0, vocabulary, (count, batch, length), generator=generator)
        window = [{"input_ids": x, "labels": x} for x in ids]
        return mt.train_step(wrapped, optimizer, window)

    for _ in range(given["warm_up"]):
        step()
    meter.restart()
    results = [step() for _ in range(given["steps"])]
    peak_bytes = meter.read() - base  # the pace has tensors of its own
    seconds, paces = list[float](), list[float]()
    dtype, cpu = getattr(torch, given["dtype"]), torch.device("cpu")
    pace = partial(product_rate, batch * length, dtype, cpu, most_s=_PACE_S)
    for _ in range(_GROUPS):
        before = pace()
        step()  # the disk has rested while the pace was taken
        for _ in range(_STEPS):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        paces.append(mean((before, pace())))
    last = offloaded.steps.last
    assert last is not None
    return {
        "seconds": median(seconds),
        "pace": median(paces),
        "peak_bytes": peak_bytes,
        "base_bytes": base,
        # A read ahead, or a write behind, of one step may be counted in the next.
        "read_bytes": mean(result.read_bytes for result in results),
        "written_bytes": mean(result.written_bytes for result in results),
        "causes": last.seconds,
    }


def forked(call: Callable[[], Any]) -> Any:
    """Return what a call returns, by way of JSON, in a process of its own; None where that fails."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(into, json.dumps(call()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def main(directory: str) -> None:
    """Answer each line."""
    load_code()
    for line in sys.stdin:
        answer = forked(partial(run, json.loads(line), directory)) or {}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
