"""Load a checkpoint and write it again, in a process of its own; the last line of stdout is a report in JSON.

``python -m tests.benchmarks.load make FOLDER HIDDEN LAYERS DTYPE`` makes a checkpoint;
``python -m tests.benchmarks.load move WAY FOLDER DIR MAX_RAM_GB`` loads it (``ours``: mt.from_pretrained; ``plain``:
transformers and mt.wrap), and saves it to ``DIR/saved``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import megatrain_nb as mt
from megatrain_nb.runtime import rss
from megatrain_nb.runtime.warmup import load_code

VOCABULARY = 16384


def make(folder: Path, hidden: int, layers: int, dtype: torch.dtype) -> None:
    """Write a checkpoint layer by layer, a shard for each."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    config.save_pretrained(folder)
    groups: dict[str, list[str]] = {}
    for key in state:
        groups.setdefault(".".join(key.split(".")[:3]), []).append(key)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for index, keys in enumerate(groups.values()):
        name = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            key: torch.randn(state[key].shape, generator=generator).mul_(0.02).to(dtype)
            for key in keys
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, name)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    print(json.dumps({"num_params": sum(x.numel() for x in state.values())}))


def forget(folder: Path) -> None:
    """Let the page cache forget a folder's files, so that they come from the disk."""
    for path in folder.glob("*.safetensors"):
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def move(way: str, folder: Path, directory: Path, max_ram_gb: float) -> None:
    """Load, save, report seconds and peaks."""
    load_code()
    report: dict[str, Any] = {}
    base = rss.resident_bytes()
    with mt.init(directory / "store", max_ram_gb=max_ram_gb) as session:
        forget(folder)
        meter, start = rss.PeakMeter(), time.perf_counter()
        if way == "ours":
            model = mt.from_pretrained(AutoModelForCausalLM, folder)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            report["transformers_seconds"] = time.perf_counter() - start
            model, _ = mt.wrap(model)
        report["load_seconds"] = time.perf_counter() - start
        report["load_peak_bytes"] = meter.read() - base
        report["block_bytes"] = max(
            sum(pack.weight_bytes for pack in each.layers.spec.packs_of(block.index))
            for each in session.models
            for block in each.layers.spec.blocks
        )
        report["loaded_bytes"] = session.store.written_bytes
        before = session.store.read_bytes
        meter, start = rss.PeakMeter(), time.perf_counter()
        mt.save_pretrained(model, directory / "saved")
        report["save_seconds"] = time.perf_counter() - start
        report["save_peak_bytes"] = meter.read() - base
        report["save_read_bytes"] = session.store.read_bytes - before
    print(json.dumps(report))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "make":
        hidden, layers = map(int, arguments[1:3])
        make(Path(arguments[0]), hidden, layers, getattr(torch, arguments[3]))
    else:
        move(arguments[0], Path(arguments[1]), Path(arguments[2]), float(arguments[3]))
