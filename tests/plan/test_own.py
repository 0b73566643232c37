"""What is set aside for activations, and how much of it they may take themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.plan.own import holes_bytes, keepable_bytes

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
