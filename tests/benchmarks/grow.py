"""Train a Llama of a given size on one repeated batch; the last line of stdout is a report in JSON.

``python -m tests.benchmarks.grow DIR HIDDEN LAYERS MAX_RAM_GB TOKENS STEPS``
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_nb as mt
from megatrain_nb.runtime import rss
from megatrain_nb.runtime.warmup import load_code

VOCABULARY = 8192


def config_of(hidden: int, layers: int) -> LlamaConfig:
    """Return the config of a Llama of this width and depth."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=False,
    )


def main(directory: str, *numbers: str) -> None:
    """Make, train, report."""
    hidden, layers = map(int, numbers[:2])
    tokens, steps = map(int, numbers[3:5])
    config = config_of(hidden, layers)
    with torch.device("meta"):
        num_params = LlamaForCausalLM(config).num_parameters()
    load_code()
    base, meter = rss.resident_bytes(), rss.PeakMeter()
    with mt.init(directory, max_ram_gb=float(numbers[2])) as session:
        start = time.perf_counter()
        model, optimizer = mt.wrap(
            mt.from_config(config, seed=0).train(), lr=1e-4, max_grad_norm=1.0
        )
        making_seconds = time.perf_counter() - start
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
        report: list[dict[str, Any]] = []
        for _ in range(steps):
            result = mt.train_step(
                model, optimizer, [{"input_ids": ids, "labels": ids}]
            )
            report.append(
                {
                    "seconds": result.total_seconds,
                    "loss": result.loss,
                    "bound": result.bound,
                    "share_of_bound": result.share_of_bound,
                    "read_bytes": result.read_bytes,
                    "written_bytes": result.written_bytes,
                }
            )
            print(json.dumps(report[-1]), flush=True)
        optimizer.finish()
        status = session.status()
        print(
            json.dumps(
                {
                    "num_params": num_params,
                    "state_bytes": status.models[0].state_bytes,
                    "making_seconds": making_seconds,
                    "peak_bytes": meter.read() - base,
                    "disk_bytes": status.tiers["disk"].peak_bytes,
                    "steps": report,
                }
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
