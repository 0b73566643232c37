from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from megatrain_nb.codec.choice import parse_compression
from megatrain_nb.plan import advice, catalogue
from megatrain_nb.plan.activation import Window, kept_bytes, logits_bytes
from megatrain_nb.plan.choices import Choices
from megatrain_nb.plan.machine import nominal
from megatrain_nb.plan.memory import disk_need_bytes, plan_residency
from megatrain_nb.plan.own import SPREAD_BYTES
from megatrain_nb.plan.planner import make_plan
from megatrain_nb.plan.reserve import with_margin

if TYPE_CHECKING:
    from megatrain_nb.plan.plan import Plan

WINDOW = Window(batch=1, seq_len=1024, accumulation=4)


def plan_of(
    model: str = "llama-3.2-1b",
    machine: str = "cpu-desktop",
    window: Window = WINDOW,
    **choices: object,
) -> Plan:
    return make_plan(
        catalogue.model(model),
        catalogue.machine(machine),
        Choices(window=window, **choices),  # type: ignore[arg-type]
    )


def test_items_add_up_and_stay_within_the_budget() -> None:
    for size in (8, 9, 12, 20, 40):
        plan = plan_of(max_ram_bytes=size * 10**9)
        assert plan.fits, plan.problems
        assert sum(item.num_bytes for item in plan.ram) == plan.peak_ram_bytes
        assert plan.peak_ram_bytes <= plan.limits["ram"]
        need = disk_need_bytes(plan.shape.spec(), plan.residency)
        assert plan.disk_bytes == need


def test_residency_is_what_the_runtime_would_decide() -> None:
    plan = plan_of(max_ram_bytes=12 * 10**9)
    spec, residency = plan.shape.spec(), plan.residency
    own = sum(
        item.num_bytes
        for item in plan.ram
        if item.name
        in ("inputs of the blocks", "one block's activations", "torch's own")
    )
    again = plan_residency(
        spec,
        limit_bytes=12 * 10**9,
        activation_bytes=with_margin(own + SPREAD_BYTES),
        keep_bytes=residency.keep_bytes,
        keep_share=1.0 if residency.keep_bytes else 0.0,
    )
    assert again.weights == residency.weights
    assert again.states == residency.states


def test_more_ram_never_moves_more_bytes_where_nothing_is_kept() -> None:
    # One row of few tokens: the disk binds, and RAM goes to weights.
    window = Window(batch=1, seq_len=64, accumulation=1)
    moved = [
        sum(plan_of(window=window, max_ram_bytes=gb * 10**9).moved_bytes.values())
        for gb in (6, 8, 10, 14, 18, 30)
    ]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0


def test_a_step_is_never_faster_than_its_bound() -> None:
    for machine in ("cpu-desktop", "rtx-4090", "h100-4nvme", "gh200"):
        for model in ("llama-3.2-1b", "qwen3-30b-a3b", "gpt2-xl"):
            for bf16 in (False, True):
                plan = plan_of(model, machine, bf16=bf16)
                assert plan.step_seconds >= 0.97 * plan.bound_seconds
                assert plan.bound_seconds == plan.least_seconds[plan.bound_by]
                assert plan.tokens_per_second == pytest.approx(
                    WINDOW.tokens / plan.step_seconds
                )


def test_what_fits_without_offload_says_so() -> None:
    plan = plan_of("gpt2", max_ram_bytes=30 * 10**9)
    assert plan.fits
    assert not plan.offloads
    assert plan.disk_bytes == plan.written_bytes_per_step == 0
    assert plan.drive_years == math.inf
    assert "plain PyTorch" in plan.advice[0]
    assert "without offload" in str(plan)


def test_ram_that_is_too_small_is_explained_and_mended() -> None:
    plan = plan_of(max_ram_bytes=3 * 10**9)
    assert not plan.fits
    assert plan.problems[0].startswith("RAM: ")
    assert 1 <= len(plan.advice) <= 2
    assert any("max_ram_gb=" in text for text in plan.advice)
    least = advice._least_budget(plan, "ram")
    assert least is not None
    assert plan.changed(max_ram_bytes=least).fits
    assert not plan.changed(max_ram_bytes=round(0.95 * least)).fits


def test_a_disk_that_is_too_small_is_explained_and_mended() -> None:
    plan = plan_of(max_ram_bytes=8 * 10**9, max_disk_bytes=5 * 10**9)
    assert any(problem.startswith("disk: ") for problem in plan.problems)
    assert any("max_disk_gb=" in text or "bfloat16" in text for text in plan.advice)


def test_a_device_that_is_too_small_is_explained() -> None:
    plan = plan_of("llama-3.1-405b", "rtx-3060")
    assert any(problem.startswith("device memory: ") for problem in plan.problems)
    assert plan.peak_vram_bytes > plan.limits["vram"]


def test_rows_at_once_give_way_to_more_micro_batches() -> None:
    window = Window(batch=16, seq_len=4096, accumulation=1)
    plan = plan_of("llama-3.2-1b", "rtx-3060", window, bf16=True)
    assert not plan.fits
    assert plan.advice[0].startswith("batch=")


def test_100_billion_parameters_need_terabytes_conventionally_and_a_card_here() -> None:
    window = Window(batch=1, seq_len=1024, accumulation=8)
    plan = plan_of("command-r-plus-104b", "h100-4nvme", window, bf16=True)
    assert plan.fits, plan.problems
    conventional = sum(item.num_bytes for item in plan.conventional)
    assert conventional > 16 * 103e9
    assert plan.peak_vram_bytes < 80e9


def test_frozen_parameters_are_neither_written_nor_updated() -> None:
    full = plan_of(max_ram_bytes=8 * 10**9)
    some = plan_of(max_ram_bytes=8 * 10**9, trainable=("layers.15.",))
    assert some.written_bytes_per_step < full.written_bytes_per_step
    assert some.simulated.busy_s["update"] < full.simulated.busy_s["update"]


def test_the_questions_answer_with_the_largest_that_fits() -> None:
    plan = plan_of("llama-3.2-1b", "rtx-3060")
    length = advice.longest_sequence(plan)
    assert plan.changed(window=replace(WINDOW, seq_len=length)).fits
    assert not plan.changed(window=replace(WINDOW, seq_len=length + 64)).fits
    largest = advice.largest_model(catalogue.machine("rtx-4090"), plan.choices)
    assert largest is not None
    bigger = [
        catalogue.model(name)
        for name in catalogue.models()
        if catalogue.model(name).num_params > largest.shape.num_params
    ]
    assert not any(
        make_plan(shape, largest.machine, largest.choices).fits for shape in bigger
    )


def test_the_least_ram_for_a_speed_is_enough_and_hardly_more() -> None:
    window = Window(batch=1, seq_len=128, accumulation=1)
    plan = plan_of(window=window, max_ram_bytes=8 * 10**9)
    wanted = 1.5 * plan.tokens_per_second
    least = advice.least_ram(plan, wanted)
    assert least is not None
    assert plan.changed(max_ram_bytes=least).tokens_per_second >= wanted
    assert plan.changed(max_ram_bytes=round(0.9 * least)).tokens_per_second < wanted
    assert advice.least_ram(plan, 1e9) is None


def test_logits_of_a_large_vocabulary_are_cut() -> None:
    shape = catalogue.model("gemma-3-27b")
    window = Window(batch=1, seq_len=8192, accumulation=1)
    whole, none = logits_bytes(shape, window, room_bytes=10**12)
    cut, chunking = logits_bytes(shape, window, room_bytes=10**10)
    assert none is None
    assert chunking is not None
    assert cut < whole / 10


def test_what_is_kept_grows_with_the_tokens() -> None:
    shape = catalogue.model("llama-2-7b")
    layer = next(part for part in shape.parts if part.kind == "layer")
    one = kept_bytes(shape, layer, WINDOW, bf16=False)
    two = kept_bytes(shape, layer, replace(WINDOW, batch=2), bf16=False)
    assert two == 2 * one
    assert kept_bytes(shape, layer, WINDOW, bf16=True) < one


def test_a_plan_shows_itself() -> None:
    plan = plan_of(max_ram_bytes=8 * 10**9)
    bundle = plan._repr_mimebundle_()
    assert bundle["text/plain"] == str(plan) == repr(plan)
    for word in ("fits", "RAM", "disk", "tokens/s", "Adam&#x27;s moments"):
        assert word in bundle["text/html"]
    assert "<script" not in bundle["text/html"]
    assert "<svg" not in bundle["text/html"]


def test_a_machine_that_is_given_by_figures() -> None:
    machine = nominal("mine", {"ram_gb": 32, "disk_gb": 500})
    plan = make_plan(catalogue.model("gpt2"), machine, Choices(window=WINDOW))
    assert "mine" in str(plan)
    assert plan.limits["disk"] == 500 * 10**9


def test_encoded_moments_move_fewer_bytes_and_leave_room() -> None:
    full = plan_of(max_ram_bytes=8 * 10**9)
    few = plan_of(max_ram_bytes=8 * 10**9, compression=parse_compression("4bit"))
    assert few.disk_bytes < full.disk_bytes
    assert few.written_bytes_per_step < full.written_bytes_per_step
    assert "4bit" in str(few)


def test_a_device_with_room_keeps_weights_and_activations() -> None:
    small = plan_of("qwen3-8b", "rtx-4090", bf16=True, max_vram_bytes=12 * 10**9)
    large = plan_of("qwen3-8b", "h100", bf16=True)
    assert len(small.stay) < len(large.stay)
    assert len(small.kept) < len(large.kept)
    assert large.moved_bytes["ram to device"] < small.moved_bytes["ram to device"]
    assert large.peak_vram_bytes <= large.limits["vram"]
