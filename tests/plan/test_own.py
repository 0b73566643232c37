"""What is set aside for activations, and how much of it they may take themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.plan import catalogue
from megatrain_nb.plan.activation import Window, logits_bytes
from megatrain_nb.plan.choices import Choices
from megatrain_nb.plan.own import (
    ONE_BLOCK,
    SPREAD_BYTES,
    backward_bytes,
    holes_bytes,
    keepable_bytes,
    own_tensors,
    set_aside,
    spread_bytes,
)

if TYPE_CHECKING:
    from megatrain_nb.plan.shape import Shape

sizes = st.integers(0, 10**12)


@given(aside=sizes, kept=sizes)
def test_all_is_kept_only_where_the_holes_have_room_too(aside: int, kept: int) -> None:
    keepable = keepable_bytes(aside, kept)
    if aside >= kept + holes_bytes(kept):
        assert keepable == aside - holes_bytes(kept)
    else:
        assert keepable <= aside
        assert keepable < kept or kept == 0


@given(aside=sizes, more=sizes, kept=sizes)
def test_more_room_keeps_no_less(aside: int, more: int, kept: int) -> None:
    assert keepable_bytes(aside, kept) <= keepable_bytes(aside + more, kept)


def block_of(shape: Shape, window: Window) -> int:
    """Return what is set aside for one block's activations."""
    choices = Choices(window=window)
    own = own_tensors(shape, choices, room_bytes=10**12, in_place=True)
    return own.items[ONE_BLOCK]


def test_experts_one_by_one_have_three_gradients_of_all() -> None:
    shape = catalogue.model("mixtral-8x7b")
    looped = replace(shape, dims=replace(shape.dims, looped=True))
    window = Window(batch=1, seq_len=16, accumulation=1)
    experts = 8 * 2 * 14336 * 4096 * 4
    assert block_of(looped, window) - block_of(shape, window) == 2 * experts


@pytest.mark.parametrize(("tokens", "waits"), [(64, True), (256, False)])
def test_small_logits_wait_in_the_heap(tokens: int, *, waits: bool) -> None:
    shape = catalogue.model("llama-2-7b")
    window = Window(batch=1, seq_len=tokens, accumulation=1)
    block = backward_bytes(shape, window, bf16=False)
    logits, _ = logits_bytes(shape, window, room_bytes=10**12)
    gradient = 32000 * 4096 * 4
    found = block + logits if waits else max(block, logits)
    assert block_of(shape, window) == found + gradient


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99, 1.0, 2.0])
def test_less_waits_in_the_heap_where_it_is_given_back(share: float) -> None:
    shape = catalogue.model("gpt2")
    choices = Choices(window=Window(batch=1, seq_len=64, accumulation=1))
    own = own_tensors(shape, choices, room_bytes=10**12, in_place=True)
    room = round(share * set_aside(own))
    found = spread_bytes(own, room_bytes=room)
    assert 0 < found <= max(SPREAD_BYTES, own.torn_bytes)
    if share >= 1:
        assert found == max(SPREAD_BYTES, own.torn_bytes)
    elif 0.9 * room + own.items[ONE_BLOCK] <= own.num_bytes:
        assert found < SPREAD_BYTES / 2


def test_logits_in_the_heap_tear_it() -> None:
    shape = catalogue.model("llama-2-7b")

    def torn(tokens: int) -> int:
        choices = Choices(window=Window(batch=1, seq_len=tokens, accumulation=1))
        own = own_tensors(shape, choices, room_bytes=10**12, in_place=True)
        assert own.torn_bytes <= spread_bytes(own, room_bytes=10**12)
        return own.torn_bytes

    assert 0 < torn(32) < torn(128)
    assert torn(256) == 0  # each of them is mapped by itself, and goes back at once
