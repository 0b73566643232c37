"""When logits are cut, and into what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_nb.plan.logits import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    Chunking,
    cut_logits,
    room_for_logits,
)

GB = 10**9


def test_what_fits_is_not_cut() -> None:
    """4 copies in training, 2 without a backward, one more for each operation of the model."""
    shape = {"tokens": 1000, "vocabulary": 50_000}
    one = 1000 * 50_000 * 4
    for training, operations, copies in (
        (True, 0, 4),
        (True, 3, 7),
        (False, 0, 2),
        (False, 3, 5),
    ):
        asked = shape | {"operations": operations}
        assert cut_logits(**asked, training=training, room_bytes=copies * one) is None
        cut = cut_logits(**asked, training=training, room_bytes=copies * one - 1)
        assert cut is not None
        assert cut.whole_bytes == copies * one


@pytest.mark.parametrize(
    ("room_bytes", "operations", "tokens"),
    [
        (4 * GB, 0, CHUNK_TOKENS),  # as many as are fast
        (4 * GB, 3, CHUNK_BYTES // (128_000 * 4 * 7)),  # soft-capping: 7 copies
        (20 * 128_000 * 4, 0, 10),  # half of what is there
        (0, 0, 1),  # never less than a token
    ],
)
def test_size_of_a_chunk(room_bytes: int, operations: int, tokens: int) -> None:
    cut = cut_logits(
        tokens=8192,
        vocabulary=128_000,
        room_bytes=room_bytes,
        training=True,
        operations=operations,
    )
    assert cut == Chunking(tokens, 8192 * 128_000 * 4 * (4 + operations))


@given(
    tokens=st.integers(1, 10**5),
    vocabulary=st.integers(2, 3 * 10**5),
    room_bytes=st.integers(0, 10**11),
    training=st.booleans(),
    operations=st.integers(0, 5),
)
def test_a_chunk_is_smaller_than_what_did_not_fit(
    tokens: int, vocabulary: int, room_bytes: int, training: bool, operations: int
) -> None:
    cut = cut_logits(
        tokens=tokens,
        vocabulary=vocabulary,
        room_bytes=room_bytes,
        training=training,
        operations=operations,
    )
    if cut is None:
        return
    assert cut.whole_bytes > room_bytes
    assert 1 <= cut.tokens <= min(tokens, CHUNK_TOKENS)
    copies = operations + 4 if operations else 1
    chunk_bytes = cut.tokens * vocabulary * 4 * copies
    assert cut.tokens == 1 or chunk_bytes <= min(room_bytes // 2, CHUNK_BYTES)


def test_room_is_what_the_waiting_inputs_leave() -> None:
    asked = {"micro_batches": 4, "blocks": 34, "tokens": 2048, "width": 4096}
    inputs = 4 * 34 * 2048 * 4096 * 4
    assert room_for_logits(10 * GB, **asked) == 10 * GB - inputs
    assert room_for_logits(inputs - 1, **asked) == 0
