"""What a plan advises is tried: applied word for word, it does what it says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import megatrain_nb as mt
from megatrain_nb.plan import advice

if TYPE_CHECKING:
    from megatrain_nb.plan.plan import Plan

ARGUMENT = re.compile(r'(\w+)=("[^"]*"|[\d.]+)')


def apply(plan: Plan, text: str) -> Plan:
    """Return the plan with the arguments that a piece of advice names."""
    choices, window = plan.choices, plan.choices.window
    given: dict[str, Any] = {
        "seq_len": window.seq_len,
        "batch": window.batch,
        "accumulation": window.accumulation,
        "dtype": "bfloat16" if choices.bf16 else "float32",
        "optimizer_compression": choices.moments or False,
    }
    for tier in ("ram", "vram", "disk"):
        size = getattr(choices, f"max_{tier}_bytes")
        given[f"max_{tier}_gb"] = None if size is None else size / 1e9
    found = ARGUMENT.findall(text.split(":", maxsplit=1)[0])
    assert found, text
    for name, value in found:
        # A size is told in three digits: what it is rounded to must do as well.
        given[name] = value.strip('"') if value.startswith('"') else float(value)
        if name in ("seq_len", "batch", "accumulation"):
            given[name] = int(given[name])
        if name.endswith("_gb"):
            given[name] *= 1.005
    return mt.estimate(plan.shape.name, plan.machine, **given)


TOO_SMALL: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-3.2-1b", "cpu-desktop", {"max_ram_gb": 3}),
    ("llama-3.2-1b", "cpu-desktop", {"max_ram_gb": 8, "max_disk_gb": 5}),
    ("llama-3.2-1b", "rtx-3060", {"batch": 16, "seq_len": 4096, "dtype": "bf16"}),
    ("qwen3-8b", "rtx-4090", {"seq_len": 131072, "dtype": "bf16"}),
    ("qwen3-8b", "rtx-4090", {"max_vram_gb": 4}),
    ("llama-3.1-8b", "rtx-3060", {}),
    ("mixtral-8x7b", "cpu-server", {"max_ram_gb": 12, "seq_len": 512}),
]


@pytest.mark.parametrize(("model", "machine", "options"), TOO_SMALL)
def test_what_is_advised_fits(
    model: str, machine: str, options: dict[str, Any]
) -> None:
    plan = mt.estimate(model, machine, **options)
    assert not plan.fits
    assert 1 <= len(plan.advice) <= 2
    for text in plan.advice:
        if text.startswith(("a machine", "a device")) or "of disk space" in text:
            continue  # to be bought
        assert apply(plan, text).fits, text


def test_what_costs_nothing_comes_before_what_changes_numbers() -> None:
    free = ("batch=", "max_")
    for model, machine, options in TOO_SMALL:
        told = mt.estimate(model, machine, **options).advice
        order = [not text.startswith(free) for text in told]
        assert order == sorted(order), told
    # Nothing cheaper than the first one would have done.
    plan = mt.estimate("llama-3.2-1b", "cpu-desktop", max_ram_gb=3)
    fitting = [text for text, other in advice._smaller(plan) if other.fits]
    assert plan.advice == tuple(fitting[:2])


@pytest.mark.parametrize(
    ("model", "machine", "options"),
    [
        ("llama-3.1-8b", "rtx-4090", {"seq_len": 512, "accumulation": 1}),
        ("llama-3.1-8b", "rtx-4090", {"seq_len": 2048, "dtype": "bf16"}),
        (
            "llama-3.2-1b",
            "cpu-desktop",
            {"seq_len": 64, "max_ram_gb": 8, "accumulation": 1},
        ),
        ("qwen3-30b-a3b", "h100-4nvme", {"seq_len": 1024, "accumulation": 16}),
    ],
)
def test_what_is_advised_is_as_much_faster_as_told(
    model: str, machine: str, options: dict[str, Any]
) -> None:
    plan = mt.estimate(model, machine, **options)
    assert plan.fits
    assert len(plan.advice) <= 2
    for text in plan.advice:
        other = apply(plan, text)
        assert other.fits
        assert other.tokens_per_second > 1.09 * plan.tokens_per_second, text


def test_what_fits_in_ram_adds_nothing_to_the_computing() -> None:
    """No wait, no byte, nothing computed twice: what plain PyTorch does as well."""
    plan = mt.estimate("gpt2", "cpu-desktop", seq_len=256)
    assert plan.fits
    assert plan.fits_plainly
    assert "plain PyTorch" in plan.advice[0]
    assert {span.kind for span in plan.spans} == {"FORWARD", "BACKWARD", "STEP"}
    times = plan.work.times(frozenset(range(len(plan.spec.blocks))))
    computing = sum(each.forward_s + each.backward_s for each in times)
    update = sum(map(plan.machine.update_seconds, plan.spec.packs))
    assert plan.step_seconds == pytest.approx(computing + update, rel=1e-3)


def test_what_fits_on_the_device_says_so() -> None:
    plan = mt.estimate("gpt2", "rtx-4090", seq_len=256)
    assert plan.fits_plainly
    assert "plain PyTorch" in plan.advice[0]
    assert "plain PyTorch" in str(plan).splitlines()[1]
    large = mt.estimate("llama-3.1-8b", "rtx-4090", seq_len=256)
    assert not large.fits_plainly


def test_answers_are_the_largest_and_the_least() -> None:
    options: dict[str, Any] = {"seq_len": 512, "accumulation": 1, "dtype": "bf16"}
    length = mt.longest_sequence("qwen3-8b", "rtx-4090", accumulation=1, dtype="bf16")
    assert length % 64 == 0
    for more, fits in ((0, True), (64, False)):
        again = options | {"seq_len": length + more}
        assert mt.estimate("qwen3-8b", "rtx-4090", **again).fits == fits
    least = mt.least_ram_gb(
        "llama-3.2-1b", "cpu-desktop", tokens_per_second=20, seq_len=128
    )
    assert least is not None
    for ram_gb, is_fast in ((least, True), (0.9 * least, False)):
        plan = mt.estimate(
            "llama-3.2-1b", "cpu-desktop", seq_len=128, max_ram_gb=ram_gb
        )
        assert (plan.fits and plan.tokens_per_second >= 20) == is_fast
