"""The schedule's promises, for any model and any order of its blocks."""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.plan.model import BlockSpec, ModelSpec, pack_params
from megatrain_nb.plan.schedule import (
    Action,
    Kind,
    each_action,
    from_text,
    make_schedule,
    to_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def make_spec(packs_of_blocks: Sequence[Sequence[int]]) -> ModelSpec:
    count = 1 + max((pack for packs in packs_of_blocks for pack in packs), default=0)
    return ModelSpec(
        blocks=tuple(
            BlockSpec(index=index, name=str(index), packs=tuple(packs))
            for index, packs in enumerate(packs_of_blocks)
        ),
        packs=tuple(pack_params(i, str(i), [("w", (10,))]) for i in range(count)),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[ModelSpec, list[int], int]:
    blocks = draw(
        st.lists(
            st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True),
            min_size=1,
            max_size=6,
        )
    )
    order = draw(st.lists(st.integers(0, len(blocks) - 1), max_size=12))
    return make_spec(blocks), order, draw(st.integers(1, 3))


actions = st.builds(Action, st.integers(0, 999), st.sampled_from(Kind))


@given(st.lists(actions))
def test_text_goes_there_and_back(schedule: list[Action]) -> None:
    assert from_text(to_text(schedule)) == schedule


@pytest.mark.parametrize("text", ["3", "x:READ", "3:read", "3:READ:4"])
def test_text_that_is_no_schedule(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        from_text(text)


@given(plans(), st.sampled_from([Kind.FORWARD, Kind.BACKWARD]))
def test_blocks_compute_in_order_after_they_are_read(
    plan: tuple[ModelSpec, list[int], int], kind: Kind
) -> None:
    spec, order, depth = plan
    loaded: set[int] = set()
    ahead: list[int] = []  # read, and not yet computed
    computed = []
    for action in make_schedule(spec, order, kind, depth=depth):
        packs = set(spec.blocks[action.block].packs)
        if action.kind is Kind.READ:
            loaded |= packs
            ahead.append(action.block)
        elif action.kind is Kind.FREE:
            loaded -= packs - {p for block in ahead for p in spec.blocks[block].packs}
        else:
            assert action.kind is kind
            assert packs <= loaded
            ahead.remove(action.block)
            computed.append(action.block)
    assert computed == order


@given(plans())
def test_what_is_read_ahead_is_as_much_as_depth_of_the_largest(
    plan: tuple[ModelSpec, list[int], int],
) -> None:
    spec, order, depth = plan
    largest = max(map(spec.block_bytes, order), default=0)
    ahead: list[int] = []
    left = len(order)
    for action in make_schedule(spec, order, Kind.FORWARD, depth=depth):
        if action.kind is Kind.READ:
            ahead.append(action.block)
            last = sum(map(spec.block_bytes, ahead[1:-1]))
            assert len(ahead) <= depth + 1 or last < depth * largest
        elif action.kind is Kind.FORWARD:
            waiting = sum(map(spec.block_bytes, ahead[1:]))
            assert len(ahead) == left or waiting >= depth * largest
            assert len(ahead) > depth or len(ahead) == left
            ahead.pop(0)
            left -= 1


@given(plans())
def test_everything_is_freed_in_the_end(
    plan: tuple[ModelSpec, list[int], int],
) -> None:
    spec, order, depth = plan
    loaded: set[int] = set()
    for action in make_schedule(spec, order, Kind.FORWARD, depth=depth):
        packs = set(spec.blocks[action.block].packs)
        if action.kind is Kind.READ:
            loaded |= packs
        elif action.kind is Kind.FREE:
            loaded -= packs
    assert loaded == set()


def test_tied_and_repeated_blocks() -> None:
    tied = make_spec([[0], [1], [0]])
    assert to_text(make_schedule(tied, [0, 1, 2], Kind.FORWARD)) == (
        "0:READ 1:READ 0:FORWARD 0:FREE 2:READ 1:FORWARD 1:FREE 2:FORWARD 2:FREE"
    )
    twice = make_spec([[0], [1]])
    assert to_text(make_schedule(twice, [0, 0, 1], Kind.BACKWARD)) == (
        "0:READ 0:READ 0:BACKWARD 1:READ 0:BACKWARD 0:FREE 1:BACKWARD 1:FREE"
    )
    assert make_schedule(tied, [], Kind.FORWARD) == []


def test_an_order_without_end() -> None:
    """What is read ahead is asked for only when it is read."""
    spec = make_spec([[0], [1], [2]])
    asked: list[int] = []

    def order() -> Iterator[int]:
        for block in cycle(range(3)):
            asked.append(block)
            yield block

    largest = spec.block_bytes(0)
    found = each_action(spec, order(), Kind.FORWARD, largest_bytes=largest)
    assert to_text(islice(found, 9)) == (
        "0:READ 1:READ 0:FORWARD 0:FREE 2:READ 1:FORWARD 1:FREE 0:READ 2:FORWARD"
    )
    assert asked == [0, 1, 2, 0]
