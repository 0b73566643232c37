"""What is kept fits the limit, and the last blocks come first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.plan.keep import choose_kept, prefers_kept

sizes = st.dictionaries(st.integers(0, 9), st.integers(0, 1000), max_size=10)
orders = st.lists(st.integers(0, 9), max_size=20)


@given(sizes, orders, st.integers(-100, 5000))
def test_what_is_kept_fits(
    num_bytes: dict[int, int], order: list[int], limit: int
) -> None:
    chosen = choose_kept(num_bytes, order, limit_bytes=limit)
    assert chosen <= num_bytes.keys() & set(order)
    assert sum(num_bytes[block] for block in chosen) <= max(limit, 0)
    free = {block for block in order if num_bytes.get(block) == 0}
    assert free <= chosen
    # Nothing that would fit is left out.
    left = limit - sum(num_bytes[block] for block in chosen)
    for block in set(order) & num_bytes.keys() - chosen:
        assert num_bytes[block] > left


@given(st.integers(1, 50), st.integers(1, 12), st.integers(0, 700))
def test_of_equal_blocks_the_last_ones_keep(size: int, count: int, limit: int) -> None:
    chosen = choose_kept(
        dict.fromkeys(range(count), size), range(count), limit_bytes=limit
    )
    fit = min(count, limit // size)
    assert chosen == set(range(count - fit, count))


def test_what_binds_decides_what_stays() -> None:
    hidden, between, binds = (
        {"compute": 4.0, "disk": disk} for disk in (2.0, 3.2, 3.9)
    )
    assert prefers_kept(hidden, now=False)
    assert not prefers_kept(binds, now=True)
    for now in (False, True):  # no see-saw
        assert prefers_kept(between, now=now) == now
        assert prefers_kept({}, now=now) == now
        assert prefers_kept({"compute": 4.0}, now=now) == now
