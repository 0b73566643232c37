"""What was forecast against what was measured: memory, bytes, and seconds, over many small runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.plan import Plan

ROOT = Path(__file__).parents[2]
MAX_OVER = 1.10  # the plan of the peak over the measured peak
MAX_BYTES_OFF = 0.02
MAX_SECONDS_OFF = 0.15
SHARE_IN_TIME = 0.9
LEAST_OF_BOUND = 0.85  # where one resource needs twice the time of any other

_LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """One run: a family with these values in its config, a budget, and a window."""

    ram_gb: float
    window: tuple[int, int, int] = (1, 128, 1)
    family: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    clip: float | None = 1.0
    moments: bool | str = False
    weights: bool | str = False
    warm_up: int = 5
    steps: int = 9


def _case(
    ram_gb: float,
    batch: int,
    length: int,
    count: int,
    family: str = "llama",
    **config: Any,
) -> Case:
    dtype = config.pop("dtype", "float32")
    clip = config.pop("clip", 1.0)
    moments, weights = config.pop("moments", False), config.pop("weights", False)
    return Case(
        ram_gb,
        (batch, length, count),
        family,
        _LLAMA | config,
        dtype=dtype,
        clip=clip,
        moments=moments,
        weights=weights,
    )


CASES = {
    "all in RAM": _case(4, 1, 128, 1),
    "all in RAM, 2 x 128 x 2": _case(4, 2, 128, 2),
    "all in RAM, bf16": _case(4, 1, 128, 2, dtype="bfloat16"),
    "all in RAM, tied": _case(4, 1, 128, 1, tie_word_embeddings=True),
    "0.3 GB": _case(0.3, 1, 128, 1),
    "0.3 GB, accumulation 4": _case(0.3, 1, 64, 4),
    "0.3 GB, no clipping": _case(0.3, 1, 128, 1, clip=None),
    "0.4 GB": _case(0.4, 1, 128, 1),
    "0.4 GB, 1 x 256": _case(0.4, 1, 256, 1),
    "0.4 GB, 2 x 128 x 2": _case(0.4, 2, 128, 2),
    "0.4 GB, tied": _case(0.4, 1, 128, 1, tie_word_embeddings=True),
    "0.3 GB, bf16": _case(0.3, 1, 128, 1, dtype="bfloat16"),
    "0.4 GB, bf16, accumulation 2": _case(0.4, 1, 128, 2, dtype="bfloat16"),
    "0.4 GB, 4bit": _case(0.4, 1, 128, 1, moments="4bit"),
    "0.4 GB, bf16, 8bit": _case(0.4, 1, 128, 1, dtype="bfloat16", moments="8bit"),
    "0.4 GB, lossless": _case(0.4, 1, 128, 1, moments="lossless", weights="lossless"),
    "0.55 GB": _case(0.55, 1, 128, 1),
    "0.55 GB, grouped queries": _case(0.55, 1, 128, 1, num_key_value_heads=2),
    "wide, 0.5 GB": _case(
        0.5, 1, 128, 1, hidden_size=1024, intermediate_size=2816, num_hidden_layers=3
    ),
    "deep, 0.4 GB": _case(
        0.4, 1, 64, 1, hidden_size=384, intermediate_size=1024, num_hidden_layers=20
    ),
    "vocabulary 32000, 0.9 GB": _case(
        0.9, 1, 64, 1, vocab_size=32000, num_hidden_layers=4
    ),
    "vocabulary 32000, all in RAM": _case(
        4, 1, 128, 1, vocab_size=32000, num_hidden_layers=4
    ),
    "qwen3, 0.4 GB": _case(0.4, 1, 128, 1, family="qwen3", head_dim=64),
    "qwen3, all in RAM": _case(4, 1, 128, 1, family="qwen3", head_dim=64),
    "gemma2, 0.4 GB": _case(0.4, 1, 128, 1, family="gemma2", head_dim=64),
    "gpt2, 0.4 GB": Case(
        0.4,
        (1, 128, 1),
        "gpt2",
        {"vocab_size": 8192, "n_embd": 512, "n_layer": 8, "n_head": 8,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "mixtral, 0.8 GB": _case(
        0.8, 1, 128, 1, family="mixtral", num_local_experts=4, num_experts_per_tok=2,
        num_hidden_layers=4,
    ),
    "olmo2, all in RAM": _case(4, 1, 128, 1, family="olmo2"),
}  # fmt: skip


def forecast(case: Case, machine: Machine) -> Plan:
    """Return the plan of a case on a machine, made before it runs."""
    from megatrain_nb.runtime.forecast import estimate  # noqa: PLC0415
    from tests.benchmarks.foretold import make_config  # noqa: PLC0415

    batch, seq_len, accumulation = case.window
    return estimate(
        make_config(case.family, **case.config),
        machine,
        batch=batch,
        seq_len=seq_len,
        accumulation=accumulation,
        dtype=case.dtype,
        optimizer_compression=case.moments,
        weight_compression=case.weights,
        max_ram_gb=case.ram_gb,
    )


def at_pace(machine: Machine, case: Case, rate: float) -> Machine:
    """Return what a machine makes in seconds in which it computes the rows of a case's micro-batch at this rate."""
    batch, length, _ = case.window
    pace = rate / machine.flops_per_s(batch * length, bf16=case.dtype == "bfloat16")
    return machine.changed(
        fp32_rates=tuple((rows, pace * rate) for rows, rate in machine.fp32_rates),
        bf16_rates=tuple((rows, pace * rate) for rows, rate in machine.bf16_rates),
        memory_bytes_per_s=pace * machine.memory_bytes_per_s,
        fresh_bytes_per_s=pace * machine.fresh_bytes_per_s,
        update_params_per_s=pace * machine.update_params_per_s,
        split_update_params_per_s=pace * machine.split_update_params_per_s,
        codec_params_per_s=tuple(
            (codec, pace * rate) for codec, rate in machine.codec_params_per_s
        ),
    )


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("benchmarking")
def test_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Print every case; fail where memory is above the plan, or bytes or seconds are off too often."""
    from megatrain_nb.runtime.probe import probe  # noqa: PLC0415

    # The sessions find it as well.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = probe(tmp_path / "offload")
    lines = [json.dumps(asdict(case)) for case in CASES.values()]
    found = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.foretold", str(tmp_path / "offload")],
        cwd=ROOT,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = dict(zip(CASES, map(json.loads, found.stdout.splitlines()), strict=True))
    plans = {
        name: forecast(CASES[name], at_pace(machine, CASES[name], answer["pace"]))
        for name, answer in answers.items()
        if answer
    }
    table = Table(plans, answers)
    print(f"\n{machine}\n{table}")
    assert not table.failed
    assert not table.above
    assert not table.wasteful
    assert not table.bytes_off
    assert not table.idle
    assert len(table.late) <= (1 - SHARE_IN_TIME) * len(CASES)


class Table:
    """Forecast beside measurement, and the names of the cases that are off."""

    def __init__(
        self, plans: dict[str, Plan], answers: dict[str, dict[str, Any]]
    ) -> None:
        self.failed = [name for name, answer in answers.items() if not answer]
        self.above: list[str] = []
        self.wasteful: list[str] = []
        self.bytes_off: list[str] = []
        self.late: list[str] = []
        self.idle: list[str] = []
        self._lines = [
            f"{'case':<32} {'peak, GB':>15} {'ratio':>6} {'moved, GB':>15} {'off':>7} "
            f"{'seconds':>15} {'ratio':>6} {'of bound':>8} {'waiting':>13} {'pace':>6}"
        ]
        for name, answer in answers.items():
            if answer:
                self._add(name, plans[name], answer)

    def _add(self, name: str, plan: Plan, answer: dict[str, Any]) -> None:
        # The process that measures has its own base; the plan's is that of the probe.
        planned = (
            plan.peak_ram_bytes - plan.machine.framework_bytes + answer["base_bytes"]
        )
        peak = answer["peak_bytes"] + answer["base_bytes"]
        moved = answer["read_bytes"] + answer["written_bytes"]
        foretold = sum(plan.moved_bytes.values())
        off = foretold / moved - 1 if moved else float(bool(foretold))
        ratio = plan.step_seconds / answer["seconds"]
        share = plan.bound_seconds / answer["seconds"]
        for misses, is_off in (
            (self.above, peak > planned),
            (self.wasteful, planned > MAX_OVER * peak),
            (self.bytes_off, abs(off) > MAX_BYTES_OFF),
            (self.late, abs(ratio - 1) > MAX_SECONDS_OFF),
            (self.idle, share < LEAST_OF_BOUND and _binds_by_two(plan)),
        ):
            if is_off:
                misses.append(name)
        self._lines.append(
            f"{name:<32} {planned / 1e9:7.3f} {peak / 1e9:7.3f} {planned / peak:6.2f} "
            f"{foretold / 1e9:7.3f} {moved / 1e9:7.3f} {off:7.1%} "
            f"{plan.step_seconds:7.3f} {answer['seconds']:7.3f} {ratio:6.2f} {share:8.0%} "
            f"{plan.seconds['wait']:6.3f} {answer['causes']['wait']:6.3f} {answer['pace'] / 1e9:6.0f}"
        )

    def __str__(self) -> str:
        told = [
            f"measured peak above the plan: {', '.join(self.above) or 'none'}",
            f"plan more than 10 % above: {', '.join(self.wasteful) or 'none'}",
            f"bytes off by more than 2 %: {', '.join(self.bytes_off) or 'none'}",
            f"seconds off by more than 15 %: {', '.join(self.late) or 'none'}",
            f"one resource binds by a factor of two, and it idles: {', '.join(self.idle) or 'none'}",
            f"failed: {', '.join(self.failed) or 'none'}",
        ]
        return "\n".join([*self._lines, *told])


def _binds_by_two(plan: Plan) -> bool:
    """Whether the processor or the disk needs twice the time of anything else."""
    first, *rest = sorted(plan.least_seconds.values(), reverse=True)
    return plan.bound_by in ("compute", "disk") and all(first >= 2 * x for x in rest)
