"""The work of the benchmarks: a Llama of 120 M parameters, stepped on command.

Run as ``python -m tests.benchmarks.work plain [--no-checkpointing]`` or ``... offload DIR MAX_RAM_GB [disk] [fuse]
[CODEC]`` (of Adam's moments: 8bit, 4bit, 3bit, 2bit, dynamic), each with ``--bf16`` where it is not fp32 and ``--window BATCHxLENGTHxCOUNT`` where it is not 2x256x2; every
line on stdin takes one optimizer step and answers with one line of JSON. A process of its own for each side
keeps allocators, threads and
memory apart.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_nb.codec.names import NAMES
from megatrain_nb.runtime import rss
from megatrain_nb.runtime.warmup import load_code

Step = Callable[[list[dict[str, torch.Tensor]]], dict[str, Any]]


def config() -> LlamaConfig:
    """119.6 M parameters: 1.9 GB of fp32 weights, gradients and moments."""
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        tie_word_embeddings=False,
    )


def windows(
    batch: int = 2, length: int = 256, count: int = 2
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Random tokens, the same on every side."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(0, 8192, (count, batch, length), generator=generator)
        yield [{"input_ids": x, "labels": x} for x in ids]


def plain(*flags: str) -> Step:
    """Plain PyTorch: all in RAM, fused AdamW, clipping; gradient checkpointing unless a flag says no.

    In bf16 without a master: weights and moments are bf16 as well.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).train()
    if "--bf16" in flags:
        model.to(torch.bfloat16)
    if "--no-checkpointing" not in flags:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(window: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        tokens = sum(batch["labels"][:, 1:].numel() for batch in window)
        loss = 0.0
        for batch in window:
            part = model(
                **batch, use_cache=False, num_items_in_batch=torch.tensor(tokens)
            ).loss
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}

    return step


def offload(directory: str, max_ram_gb: str, *flags: str) -> Step:
    """The same through the session; in bf16 with an fp32 master."""
    import megatrain_nb as mt  # noqa: PLC0415

    codec = next((flag for flag in flags if flag in NAMES), False)
    session = mt.init(
        directory, max_ram_gb=float(max_ram_gb), optimizer_compression=codec
    )
    if "disk" in flags:
        session.max_resident_bytes = 0
    dtype = torch.bfloat16 if "--bf16" in flags else torch.float32
    model = mt.from_config(config(), seed=0, dtype=dtype)
    model.train()
    model, optimizer = mt.wrap(
        model, lr=1e-4, max_grad_norm=1.0, fuse_micro_batches="fuse" in flags
    )

    def step(window: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        result = mt.train_step(model, optimizer, window)
        return {
            "loss": result.loss,
            "causes": result.seconds,
            "read_bytes": result.read_bytes,
            "written_bytes": result.written_bytes,
            "bound": result.bound,
            "least_seconds": result.least_seconds,
            "share_of_bound": result.share_of_bound,
        }

    return step


def main(kind: str, *arguments: str) -> None:
    """Answer each line of stdin with one step."""
    load_code()
    base = rss.resident_bytes()
    meter = rss.PeakMeter()
    given = [*arguments]
    shape = [2, 256, 2]
    if "--window" in given:
        at = given.index("--window")
        shape = [int(number) for number in given[at + 1].split("x")]
        del given[at : at + 2]
    step = plain(*given) if kind == "plain" else offload(*given)
    print(json.dumps({"ready": True}), flush=True)
    for window, _ in zip(windows(*shape), sys.stdin, strict=False):
        meter.restart()
        start, cpu_start = time.perf_counter(), time.process_time()
        answer = step(window)
        answer["seconds"] = time.perf_counter() - start
        answer["cpu_seconds"] = time.process_time() - cpu_start
        answer["peak_bytes"] = meter.read() - base
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
