"""Packs: nothing overlaps, everything is aligned, tiles cover it all."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.codec.base import BLOCK, get, names
from megatrain_nb.codec.dynamic import SMALL_NUMEL
from megatrain_nb.plan.model import UNIT, BlockSpec, ModelSpec, pack_params

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


rows = st.lists(
    st.tuples(st.integers(1, 200), st.sampled_from([1, 3, 64, 100])),
    min_size=1,
    max_size=6,
)


@given(
    rows,
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.sampled_from(names()), min_size=6),
)
def test_encoded_moments(
    shapes: list[tuple[int, int]], units: int, split: bool, codecs: list[str]
) -> None:
    """Parts lie side by side without overlap, in whole blocks, however the pack is cut into tiles."""
    named = [(str(i), shape) for i, shape in enumerate(shapes)]
    large = {
        name: codecs[i]
        for i, (name, shape) in enumerate(named)
        if math.prod(shape) >= SMALL_NUMEL
    }
    pack = pack_params(0, "p", named, split=split, codecs=large)
    assert pack.with_codecs(dict.fromkeys(large, "raw")) == pack_params(
        0, "p", named, split=split
    )
    assert pack.encoded == any(codec != "raw" for codec in large.values())
    if not pack.encoded:
        assert pack.moments_bytes == 8 * pack.numel
        return
    assert pack.moments_bytes % 4096 == 0
    tiles = pack.tiles(units * UNIT)
    spans = [pack.encoded_span(*tile) for tile in tiles]
    assert [first for first, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == pack.moments_bytes
    found = dict.fromkeys((param.name for param in pack.params), 0)
    for (start, stop), (first, end) in zip(tiles, spans, strict=True):
        before = 0
        for part in pack.moment_parts(start, stop):
            codec = get(part.param.codec)
            assert start <= part.start < part.stop <= stop
            assert part.first_byte >= before
            assert part.first_byte % 4 == 0
            assert part.num_bytes == codec.encoded_bytes(part.stop - part.start)
            place = part.start - part.param.offset
            assert place == found[part.param.name]
            assert place % BLOCK == 0 or codec.name == "raw"
            before = part.first_byte + part.num_bytes
            found[part.param.name] += part.stop - part.start
        assert before <= end - first
    assert found == {param.name: param.numel for param in pack.params}
    exact = sum(get(p.codec).encoded_bytes(p.numel) for p in pack.params)
    spare = len(shapes) * 8 * UNIT + 8 * 2048 + 4096
    assert exact <= pack.moments_bytes <= exact + spare
    whole = pack.weight_bytes + pack.grad_bytes + pack.moments_bytes
    assert pack.weight_bytes + pack.grad_bytes + pack.states_bytes == whole + (
        2 * pack.numel if split else 0
    )
