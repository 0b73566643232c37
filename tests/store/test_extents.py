from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_nb.store.extents import KEEP_BYTES, Extents

UNIT = 4096


def test_best_fit_takes_the_smallest_hole() -> None:
    extents = Extents()
    offsets = [extents.allocate(n * UNIT) for n in (4, 1, 2, 1)]
    assert offsets == [0, 4 * UNIT, 5 * UNIT, 7 * UNIT]
    extents.free(0, 4 * UNIT)
    extents.free(5 * UNIT, 2 * UNIT)
    assert extents.largest_free_bytes == 4 * UNIT
    assert extents.allocate(2 * UNIT) == 5 * UNIT
    assert extents.allocate(3 * UNIT) == 0
    assert extents.allocate(1) == 3 * UNIT


def test_free_coalesces_on_both_sides_and_shrinks_the_end() -> None:
    extents = Extents()
    for _ in range(5):
        extents.allocate(UNIT)
    extents.free(UNIT, UNIT)
    extents.free(3 * UNIT, UNIT)
    extents.free(2 * UNIT, UNIT)
    assert extents.largest_free_bytes == 3 * UNIT
    extents.free(4 * UNIT, UNIT)
    assert (extents.end_bytes, extents.used_bytes) == (UNIT, UNIT)
    extents.free(0, UNIT)
    assert (extents.end_bytes, extents.used_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, UNIT), (UNIT, 2 * UNIT), (5 * UNIT, UNIT), (1, 1), (-UNIT, UNIT)],
)
def test_freeing_what_is_not_allocated_is_an_error(offset: int, nbytes: int) -> None:
    extents = Extents()
    extents.allocate(4 * UNIT)
    extents.free(0, UNIT)
    extents.free(2 * UNIT, UNIT)
    with pytest.raises(ValueError, match="not allocated"):
        extents.free(offset, nbytes)
    assert extents.used_bytes == 2 * UNIT


def test_reserve_makes_holes_of_the_gaps() -> None:
    extents = Extents()
    extents.reserve([(4 * UNIT, 100), (UNIT, UNIT)])
    assert (extents.used_bytes, extents.end_bytes) == (2 * UNIT, 5 * UNIT)
    assert extents.allocate(2 * UNIT) == 2 * UNIT
    assert extents.allocate(UNIT) == 0
    with pytest.raises(ValueError, match="fresh"):
        extents.reserve([])
    with pytest.raises(ValueError, match="overlap"):
        Extents().reserve([(0, 2 * UNIT), (UNIT, UNIT)])


@given(
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 5 * UNIT)), max_size=80),
    max_units=st.one_of(st.none(), st.integers(1, 20)),
)
@settings(max_examples=150, deadline=None)
def test_against_a_set_of_units(
    moves: list[tuple[bool, int]], max_units: int | None
) -> None:
    extents = Extents(None if max_units is None else max_units * UNIT)
    live: list[tuple[int, int]] = []
    taken: set[int] = set()
    for is_free, number in moves:
        if is_free and live:
            offset, nbytes = live.pop(number % len(live))
            extents.free(offset, nbytes)
            taken -= units(offset, nbytes)
        else:
            got = extents.allocate(number)
            if got is None:
                assert not has_room(taken, -(-number // UNIT), max_units)
                continue
            mine = units(got, number)
            assert not mine & taken
            assert max_units is None or max(mine) < max_units
            taken |= mine
            live.append((got, number))
        assert extents.used_bytes == len(taken) * UNIT
        assert extents.end_bytes == (max(taken, default=-1) + 1) * UNIT
    for offset, nbytes in live:
        extents.free(offset, nbytes)
    assert (extents.used_bytes, extents.end_bytes) == (0, 0)


def units(offset: int, nbytes: int) -> set[int]:
    return set(range(offset // UNIT, offset // UNIT + -(-nbytes // UNIT)))


def has_room(taken: set[int], count: int, max_units: int | None) -> bool:
    assert max_units is not None
    starts = range(max_units - count + 1)
    return any(not taken & set(range(s, s + count)) for s in starts)


# ---- ranges in parts ----


@given(
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 5 * UNIT)), max_size=80),
    max_units=st.one_of(st.none(), st.integers(1, 20)),
)
@settings(max_examples=150, deadline=None)
def test_parts_fit_whenever_there_is_room(
    moves: list[tuple[bool, int]], max_units: int | None
) -> None:
    extents = Extents(None if max_units is None else max_units * UNIT)
    live: list[tuple[tuple[int, int], ...]] = []
    taken: set[int] = set()
    for is_free, number in moves:
        if is_free and live:
            for offset, nbytes in live.pop(number % len(live)):
                extents.free(offset, nbytes)
                taken -= units(offset, nbytes)
        else:
            parts = extents.allocate_parts(number)
            count = -(-number // UNIT)
            if parts is None:
                assert max_units is not None
                assert len(taken) + count > max_units
                continue
            mine = [unit for part in parts for unit in units(*part)]
            assert len(mine) == len(set(mine)) == count
            assert not taken & set(mine)
            taken |= set(mine)
            assert max_units is None or max(mine) < max_units
            live.append(parts)
        assert extents.used_bytes == len(taken) * UNIT
        assert extents.end_bytes == (max(taken, default=-1) + 1) * UNIT
    for parts in live:
        for offset, nbytes in parts:
            extents.free(offset, nbytes)
    assert (extents.used_bytes, extents.end_bytes) == (0, 0)


@pytest.mark.parametrize("limited", [False, True])
def test_thousands_of_rewrites_keep_the_file_dense(limited: bool) -> None:
    """Lengths of 60 to 100 % of a tile: few parts, and a file not much longer than its tiles."""
    chance, tile, tiles = random.Random(1), 4096, 100
    limit = (tiles + 1) * tile * UNIT if limited else None
    extents = Extents(limit)
    live: dict[int, tuple[tuple[int, int], ...]] = {}
    most_used = 0
    for turn in range(6000):
        at = turn % tiles if turn % 1000 < 300 else chance.randrange(tiles)
        # As the store does it: room for the whole tile, then what is not needed goes back.
        parts = extents.allocate_parts(tile * UNIT)
        assert parts is not None
        size = chance.randrange(tile * 6 // 10, tile + 1) * UNIT
        kept, left = [], size
        for offset, nbytes in parts:
            some = min(nbytes, left)
            left -= some
            if some:
                kept.append((offset, some))
            if some < nbytes:
                extents.free(offset + some, nbytes - some)
        for offset, nbytes in live.get(at, ()):
            extents.free(offset, nbytes)
        live[at] = tuple(kept)
        used = sum(nbytes for parts in live.values() for _, nbytes in parts)
        assert extents.used_bytes == used
        most_used = max(most_used, used + tile * UNIT)
        assert extents.end_bytes <= 1.25 * most_used + KEEP_BYTES
        assert len(kept) <= 4
