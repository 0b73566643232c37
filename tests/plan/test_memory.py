"""Residency: within the budget, by value, and more with more."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.codec.dynamic import SMALL_NUMEL
from megatrain_nb.errors import BudgetError
from megatrain_nb.plan.memory import (
    Residency,
    plan_residency,
    streaming_bytes,
    turning_bytes,
    working_bytes,
)
from megatrain_nb.plan.model import BlockSpec, ModelSpec, pack_params
from megatrain_nb.units import parse_size

TILE = 4096


def make_spec(
    sizes: list[int], *, split: bool = False, codec: str = "raw"
) -> ModelSpec:
    return ModelSpec(
        blocks=tuple(
            BlockSpec(index=i, name=f"b{i}", packs=(i,)) for i in range(len(sizes))
        ),
        packs=tuple(
            pack_params(
                i,
                f"b{i}",
                [("w", (size,))],
                split=split,
                codecs={"w": codec} if size >= SMALL_NUMEL else None,
            )
            for i, size in enumerate(sizes)
        ),
    )


specs = st.builds(
    make_spec,
    st.lists(st.integers(1, 40_000), min_size=1, max_size=8),
    split=st.booleans(),
    codec=st.sampled_from(["raw", "8bit", "2bit"]),
)


# Of weights, gradients and states, per parameter of an fp32 and of a split pack.
BYTES = {False: (4, 4, 8), True: (2, 4, 10)}


def kept_bytes(spec: ModelSpec, plan: Residency) -> int:
    total = 0
    for pack in spec.packs:
        sizes = [pack.numel * size for size in BYTES[pack.split]]
        if pack.encoded:
            sizes[2] += pack.moments_bytes - 8 * pack.numel
        kept = plan.weights, plan.grads, plan.states
        total += sum(
            size
            for indices, size in zip(kept, sizes, strict=True)
            if pack.index in indices
        )
    return total


def plan_for(spec: ModelSpec, limit: int, activations: int = 0) -> Residency | None:
    try:
        return plan_residency(
            spec, limit_bytes=limit, activation_bytes=activations, tile_numel=TILE
        )
    except BudgetError:
        return None


@given(specs, st.integers(1, 3_000_000), st.integers(0, 500_000))
def test_the_plan_keeps_to_the_budget(
    spec: ModelSpec, limit: int, activations: int
) -> None:
    plan = plan_for(spec, limit, activations)
    if plan is None:
        needed = working_bytes(spec, tile_numel=TILE) + activations
        assert limit < needed
        assert limit < spec.state_bytes + activations
        return
    assert plan.resident_bytes == kept_bytes(spec, plan)
    assert plan.resident_bytes + plan.working_bytes + plan.activation_bytes <= limit
    assert plan.disk_bytes == spec.state_bytes - plan.resident_bytes


@given(specs, st.integers(1, 2_000_000), st.integers(0, 500_000))
def test_more_memory_never_keeps_less(spec: ModelSpec, limit: int, more: int) -> None:
    small, large = plan_for(spec, limit), plan_for(spec, limit + more)
    if small is not None:
        assert large is not None
        assert large.resident_bytes >= small.resident_bytes


@given(specs, st.integers(0, 1_000_000))
def test_the_ceiling_is_kept(spec: ModelSpec, ceiling: int) -> None:
    plan = plan_residency(
        spec,
        limit_bytes=10**9,
        activation_bytes=0,
        resident_bytes=ceiling,
        tile_numel=TILE,
    )
    assert kept_bytes(spec, plan) <= ceiling


@given(
    specs,
    st.integers(1, 3_000_000),
    st.integers(0, 200_000),
    st.integers(0, 500_000),
    st.floats(0, 1),
)
def test_kept_activations_are_part_of_the_budget(
    spec: ModelSpec, limit: int, activations: int, wanted: int, share: float
) -> None:
    try:
        plan = plan_residency(
            spec,
            limit_bytes=limit,
            activation_bytes=activations,
            keep_bytes=wanted,
            keep_share=share,
            tile_numel=TILE,
        )
    except BudgetError:
        return
    used = plan.resident_bytes + plan.working_bytes + plan.aside_bytes
    assert used <= limit
    turning = max(turning_bytes(spec), working_bytes(spec, tile_numel=TILE))
    assert plan.lent_bytes <= max(0, plan.working_bytes - turning)
    assert 0 <= plan.keep_bytes <= wanted
    without = plan_for(spec, limit, activations)
    assert without is not None
    if without.disk_bytes == 0:  # what is left over is given to activations
        assert plan.resident_bytes == spec.state_bytes
        assert plan.keep_bytes == min(wanted, limit - spec.state_bytes - activations)
    elif share == 0:
        assert plan == without
    elif share == 1:
        left = limit - min(plan.working_bytes, turning) - activations
        assert plan.keep_bytes == min(wanted, left)


def test_activations_borrow_from_what_streams_before_they_take_from_packs() -> None:
    spec = make_spec([40_000] * 4)
    turning, streaming = turning_bytes(spec), streaming_bytes(spec)
    lendable = streaming - turning
    one = spec.packs[0].weight_bytes

    def plan(limit: int, wanted: int, share: float = 1.0) -> Residency:
        return plan_residency(
            spec,
            limit_bytes=limit,
            activation_bytes=0,
            keep_bytes=wanted,
            keep_share=share,
            tile_numel=TILE,
        )

    assert lendable > 0
    lent = plan(streaming + one, lendable)
    assert (lent.keep_bytes, lent.lent_bytes) == (lendable, lendable)
    assert lent.weights == {3}
    assert lent.aside_bytes == 0
    more = plan(streaming + one, 2 * lendable)
    assert (more.keep_bytes, more.lent_bytes) == (lendable + one, lendable)
    assert not more.weights
    assert more.aside_bytes == one
    assert plan(streaming + one, lendable, share=0.0).keep_bytes == 0
    scarce = plan(turning + 100, lendable)
    assert (scarce.working_bytes, scarce.keep_bytes) == (turning + 100, 100)


def test_weights_come_first_and_the_last_blocks_before() -> None:
    spec = make_spec([4096] * 4)
    one = spec.packs[0].weight_bytes
    limit = working_bytes(spec, tile_numel=TILE) + 3 * one
    plan = plan_for(make_spec([4096] * 4), limit)
    assert plan is not None
    assert plan.weights == {1, 2, 3}
    assert not plan.grads
    assert not plan.states


@given(specs)
def test_the_minimum_in_the_message_is_enough(spec: ModelSpec) -> None:
    with pytest.raises(BudgetError) as error:
        plan_residency(spec, limit_bytes=1, activation_bytes=0, tile_numel=TILE)
    named = re.search(r"at least ([\d.]+ \w+)", str(error.value))
    assert named is not None
    assert plan_for(spec, parse_size(named[1])) is not None


def test_the_minimum_in_the_message_is_the_minimum() -> None:
    spec = make_spec([4096])
    assert plan_for(spec, spec.state_bytes) is not None
    with pytest.raises(BudgetError) as error:
        plan_residency(spec, limit_bytes=1, activation_bytes=0, tile_numel=TILE)
    named = re.search(r"at least ([\d.]+ \w+)", str(error.value))
    assert named is not None
    assert parse_size(named[1]) <= 1.01 * spec.state_bytes


@given(specs, st.integers(0, 2_000_000), st.integers(0, 100_000))
def test_packing_is_a_part_of_the_budget(
    spec: ModelSpec, limit: int, packing: int
) -> None:
    """A budget with packing is one that is smaller by it."""
    without, message = plan_for(spec, limit - packing), ""
    plan: Residency | None = None
    try:
        plan = plan_residency(
            spec,
            limit_bytes=limit,
            activation_bytes=0,
            packing_bytes=packing,
            tile_numel=TILE,
        )
    except BudgetError as error:
        message = str(error)
    if plan is None:
        assert without is None
        assert ("packing" in message) == (packing > 0)
        named = re.search(r"at least ([\d.]+ \w+)", message)
        assert named is not None
        assert plan_for(spec, parse_size(named[1]) - packing) is not None
        return
    assert plan.packing_bytes == packing
    assert without is not None
    assert replace(plan, packing_bytes=0) == without


def test_halves_let_twice_as_many_weights_stay() -> None:
    whole, halves = (make_spec([4096] * 8, split=split) for split in (False, True))
    assert whole.state_bytes == halves.state_bytes == 8 * 16 * 4096
    limit = working_bytes(whole, tile_numel=TILE) + 4 * 4 * 4096
    plans = plan_for(whole, limit), plan_for(halves, limit)
    assert [len(plan.weights) for plan in plans if plan] == [4, 8]
