"""How long blocks compute: products by their rows, and what backward computes again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from megatrain_nb.plan import catalogue
from megatrain_nb.plan.activation import Window, block_work, kept_bytes
from megatrain_nb.plan.choices import Choices, spec_of
from megatrain_nb.plan.machine import nominal
from megatrain_nb.plan.memory import plan_residency, working_bytes
from megatrain_nb.plan.traffic import step_traffic
from megatrain_nb.plan.work import ModelWork, total_s

if TYPE_CHECKING:
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.shape import Part, Shape

WINDOW = Window(batch=1, seq_len=1024, accumulation=2)
MACHINE = nominal("box", {"ram_gb": 64})


def layer_of(shape: Shape) -> Part:
    return next(part for part in shape.parts if part.kind == "layer")


@pytest.mark.parametrize("name", ["gpt2", "opt-1.3b"])
def test_dropout_has_the_last_product_computed_again(name: str) -> None:
    shape = catalogue.model(name)
    assert shape.dims.dropout
    without = replace(shape, dims=replace(shape.dims, dropout=False))
    dims = shape.dims
    flops = 2.0 * WINDOW.rows * dims.hidden * dims.intermediate
    assert block_work(shape, layer_of(shape), WINDOW, bf16=False).last[1] == 0
    assert block_work(without, layer_of(without), WINDOW, bf16=False).last == (
        WINDOW.rows,
        flops,
    )
    index = next(
        i for i, (_, part) in enumerate(shape.blocks()) if part.kind == "layer"
    )
    again = [
        ModelWork(each, MACHINE, Choices(window=WINDOW)).times(frozenset())[index]
        for each in (shape, without)
    ]
    rate = MACHINE.flops_per_s(WINDOW.rows, bf16=False)
    saved = WINDOW.accumulation * flops / rate
    assert again[0].again_s - again[1].again_s == pytest.approx(saved)
    assert again[0].forward_s == again[1].forward_s


def test_only_experts_have_few_rows() -> None:
    """Attention of a mixture multiplies all tokens at once; an expert those that are sent to it."""
    shape = catalogue.model("mixtral-8x7b")
    layer, dims = layer_of(shape), shape.dims
    work = block_work(shape, layer, WINDOW, bf16=False)
    (rows, dense), (few, experts) = work.products
    assert (rows, few) == (WINDOW.rows, WINDOW.rows / 4)
    each = 3 * dims.hidden * dims.expert_intermediate
    assert experts == 2.0 * WINDOW.rows * dims.experts_per_token * each
    attention = 2 * dims.hidden * (dims.query + dims.key) + dims.experts * dims.hidden
    scores = 4.0 * WINDOW.rows * WINDOW.seq_len * dims.query
    assert dense == 2.0 * WINDOW.rows * attention + scores


def test_a_full_budget_pays_for_what_the_heap_gives_back() -> None:
    """Each block's gradients and what it kept come again page by page; nothing does where there is room."""
    shape = catalogue.model("smollm2-135m")
    machine = replace(MACHINE, read_bytes_per_s=1e12, write_bytes_per_s=1e12)
    window = Window(batch=1, seq_len=128, accumulation=2)
    choices = Choices(window=window, max_ram_bytes=700_000_000)
    work, spec = ModelWork(shape, machine, choices), spec_of(shape, choices)
    left = 700_000_000 - working_bytes(spec)
    layer = layer_of(shape)
    freed = kept_bytes(shape, layer, window, bf16=False) + 4 * layer.numel
    index = next(i for i, (_, part) in enumerate(shape.blocks()) if part is layer)
    nothing = frozenset[int]()
    more = work.times(nothing, full=True)[index], work.times(nothing)[index]
    assert more[0].backward_s - more[1].backward_s == pytest.approx(freed / 1.7e9)
    assert more[0].forward_s == more[1].forward_s
    seconds = []
    for aside in (left, left - 1):
        residency = plan_residency(
            spec, limit_bytes=700_000_000, activation_bytes=aside
        )
        order = range(len(spec.blocks))
        trained = frozenset(range(len(spec.packs)))
        found = work.simulate(spec, residency, order, kept=nothing, trained=trained)
        seconds.append(found.busy_s["compute"])
    lost = sum(a.total_s for a in work.times(nothing, full=True)) - sum(
        b.total_s for b in work.times(nothing)
    )
    assert seconds[0] - seconds[1] == pytest.approx(lost, rel=0.01)


def test_what_moves_takes_time_from_what_computes() -> None:
    """Each byte what the probe measured, and each block a little; nothing where all is in RAM."""
    shape = catalogue.model("smollm2-135m")
    choices = Choices(window=WINDOW, max_ram_bytes=2_000_000_000)
    spec, nothing = spec_of(shape, choices), frozenset[int]()
    order = range(len(spec.blocks))

    def compute_s(machine: Machine, limit: int) -> tuple[float, int]:
        residency = plan_residency(spec, limit_bytes=limit, activation_bytes=0)
        work = ModelWork(shape, machine, choices)
        moved = step_traffic(spec, residency, order, choices.on_disk).moved_bytes
        return total_s(work.times_beside(spec, residency, order, nothing)), moved

    streams, all_there = 500_000_000, 10 * spec.state_bytes
    free, careful = (replace(MACHINE, io_lost_s_per_byte=lost) for lost in (0.0, 2e-10))
    (without, moved), (with_it, _) = (
        compute_s(free, streams),
        compute_s(careful, streams),
    )
    assert moved > 1e9
    assert with_it - without == pytest.approx(2e-10 * moved)
    in_ram, nothing_moves = compute_s(careful, all_there)
    assert nothing_moves == 0
    assert in_ram == compute_s(free, all_there)[0]
    assert without - in_ram == pytest.approx(3e-3 * len(spec.blocks))
