"""Training runs whose figures a forecast should have told before.

Run as ``python -m tests.benchmarks.foretold DIR``; each line on stdin is a case, as JSON (the fields of `Case`
of ``test_forecast.py``), and answers with one line of JSON; before the first comes a line with the pace at the start.
Each case has a forked process of its own: memory of one does not count for the next, and torch is imported once. The
cores of a shared machine are a third faster in one minute than in another, so each answer has the pace of its own minute.
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
from megatrain_nb.runtime.warmup import load_code

if TYPE_CHECKING:
    from collections.abc import Callable


def pace() -> float:
    """Return how many matrix products a second the cores make now; in a process that is forked, or torch has threads."""
    left, right = torch.ones(128, 2048), torch.ones(2048, 2048)
    taken = []
    for _ in range(60):
        start = time.perf_counter()
        left @ right
        taken.append(time.perf_counter() - start)
    return 1 / median(taken)


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
    seconds, cpu_seconds, reads, writes = [], [], [], []
    for step in range(given["warm_up"] + given["steps"]):
        ids = torch.randint(0, vocabulary, (count, batch, length), generator=generator)
        start, cpu = time.perf_counter(), time.process_time()
        result = mt.train_step(
            wrapped, optimizer, [{"input_ids": x, "labels": x} for x in ids]
        )
        if step >= given["warm_up"]:
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu)
            reads.append(result.read_bytes)
            writes.append(result.written_bytes)
        elif step == given["warm_up"] - 1:
            meter.restart()
    last = offloaded.steps.last
    assert last is not None
    return {
        "seconds": median(seconds),
        "cpu_seconds": median(cpu_seconds),
        "peak_bytes": meter.read() - base,
        "base_bytes": base,
        "pool_bytes": session.pool.peak_bytes,
        # A read ahead, or a write behind, of one step may be counted in the next.
        "read_bytes": mean(reads),
        "written_bytes": mean(writes),
        "all_bytes": [reads, writes],
        "causes": last.seconds,
        "bound": last.bound,
        "share_of_bound": last.share_of_bound,
        "reserved_bytes": offloaded.memory.reserved_bytes,
        "keep_wanted": offloaded.executor.keeping.wanted_bytes,
        "keep_bytes": offloaded.memory.residency.keep_bytes,
        "keep_beside": offloaded.memory._keep_beside,
        "keep_limit": offloaded.executor.keeping.limit_bytes,
        "working_bytes": offloaded.memory.residency.working_bytes,
        "resident_bytes": offloaded.memory.residency.resident_bytes,
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
    before = forked(pace)
    print(json.dumps(before), flush=True)
    for line in sys.stdin:
        answer = forked(partial(run, json.loads(line), directory)) or {}
        after = forked(pace)
        if answer:
            answer["pace"] = mean((before, after))
        print(json.dumps(answer), flush=True)
        before = after


if __name__ == "__main__":
    main(*sys.argv[1:])
