"""Packs: nothing overlaps, everything is aligned, tiles cover it all."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.plan.model import BlockSpec, ModelSpec, pack_params

shapes = st.lists(
    st.lists(st.integers(0, 50), max_size=3).map(tuple), min_size=1, max_size=6
)


@given(shapes, st.integers(1, 5), st.booleans())
def test_layout(shapes: list[tuple[int, ...]], pages: int, split: bool) -> None:
    named = [(str(i), shape) for i, shape in enumerate(shapes)]
    pack = pack_params(0, "p", named, split=split)
    size = 2 if split else 4
    tile = pages * 4096 // size
    end = 0
    for param, shape in zip(pack.params, shapes, strict=True):
        assert param.offset * size % 64 == 0
        assert param.offset >= end
        assert param.numel == math.prod(shape)
        end = param.offset + param.numel
    assert pack.numel >= end
    assert pack.weight_bytes % 4096 == 0
    assert pack.weight_bytes == pack.numel * size
    whole = pack.weight_bytes + pack.grad_bytes + pack.states_bytes
    assert whole == 16 * pack.numel
    covered = [index for start, stop in pack.tiles(tile) for index in (start, stop)]
    assert covered == sorted(covered)
    assert sum(stop - start for start, stop in pack.tiles(tile)) == pack.numel
    assert all(start * size % 4096 == 0 for start, _ in pack.tiles(tile))


def test_sizes_of_a_tied_model() -> None:
    packs = tuple(pack_params(i, str(i), [("w", (1024,))]) for i in range(2))
    blocks = (
        BlockSpec(index=0, name="embed", packs=(0,)),
        BlockSpec(index=1, name="head", packs=(0, 1)),
    )
    spec = ModelSpec(blocks=blocks, packs=packs)
    assert spec.num_params == 2048
    assert spec.weight_bytes == 8192
    assert spec.state_bytes == 4 * 8192
    assert [spec.block_bytes(index) for index in (0, 1)] == [4096, 8192]
