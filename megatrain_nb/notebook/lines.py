"""The lines that reproduce a plan: ``%megatrain init ...`` and Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from megatrain_nb.codec.names import LOSSLESS, RAW, WEIGHTS

if TYPE_CHECKING:
    from megatrain_nb.plan.plan import Plan


def magic_line(plan: Plan, offload_dir: str = "/nvme/scratch") -> str:
    """Return the ``%megatrain init`` line of a plan."""
    words = [f"%megatrain init --offload-dir {offload_dir}"]
    words += [f"--max-{tier} {size}" for tier, size in _budgets(plan).items()]
    choices = plan.choices
    if choices.moments and not choices.compression.by_pattern:
        words.append(f"--compress {choices.moments}")
    if WEIGHTS in choices.packed:
        words.append(f"--compress-weights {LOSSLESS}")
    line = " ".join(words)
    if choices.compression.by_pattern:
        line += "\n# the codecs of moments go by name of the parameter here: that only the Python lines can say"
    return line


def python_lines(plan: Plan, offload_dir: str = "/nvme/scratch") -> str:
    """Return the Python lines of a plan: session, model, trainer."""
    choices, window = plan.choices, plan.choices.window
    budgets = "".join(
        f', max_{tier}_gb="{size}"' for tier, size in _budgets(plan).items()
    )
    if choices.compression.by_pattern:
        rules = {
            name: codec != RAW and codec for name, codec in choices.compression.rules
        }
        budgets += f", optimizer_compression={rules!r}"
    elif choices.moments:
        budgets += f', optimizer_compression="{choices.moments}"'
    if WEIGHTS in choices.packed:
        budgets += f', weight_compression="{LOSSLESS}"'
    dtype = ", dtype=torch.bfloat16" if choices.bf16 else ""
    config = plan.shape.config
    make = (
        f'config = AutoConfig.for_model("{plan.shape.family}", **{json.loads(config)!r})\n'
        f"model = mt.from_config(config{dtype})\n"
        if plan.shape.family and config
        else f"model = mt.wrap(model{dtype})[0]\n"
    )
    return (
        ("import torch\n" if dtype else "")
        + "import megatrain_nb as mt\n"
        + "from transformers import AutoConfig, TrainingArguments\n\n"
        + f'mt.init("{offload_dir}"{budgets})\n'
        + make
        + "args = TrainingArguments(\n"
        + '    output_dir="out",\n    save_strategy="no",\n'
        + f"    per_device_train_batch_size={window.batch},\n"
        + f"    gradient_accumulation_steps={window.accumulation},\n)\n"
        + f"# train_dataset: rows of {window.seq_len} tokens\n"
        + "mt.Trainer(model=model, args=args, train_dataset=train_dataset).train()"
    )


def _budgets(plan: Plan) -> dict[str, str]:
    choices = plan.choices
    sizes = {
        "ram": choices.max_ram_bytes or plan.machine.ram_bytes,
        "vram": None if plan.machine.in_place else choices.max_vram_bytes,
        "disk": choices.max_disk_bytes,
    }
    return {tier: _text(size) for tier, size in sizes.items() if size}


def _text(size: int) -> str:
    """Return a size that is parsed back to the very bytes."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if size >= scale and size % (scale // 1000) == 0:
            return f"{size / scale:.10g}{unit}"
    return f"{size}B"
