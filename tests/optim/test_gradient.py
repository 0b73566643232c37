"""bf16 gradients add up in fp32 with torch's own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatrain_nb.errors import ArgumentError
from megatrain_nb.optim.gradient import accumulate

EVERY_BF16 = np.arange(2**16, dtype=np.uint32).astype(np.uint16)


@pytest.mark.parametrize("first", [True, False])
def test_every_number_is_torchs(*, first: bool) -> None:
    before = np.random.default_rng(0).standard_normal(2**16, dtype=np.float32)
    total = before.copy()
    with np.errstate(invalid="ignore"):  # without a compiler numpy speaks of the NaNs
        accumulate(total, EVERY_BF16, first=first)
    grad = torch.from_numpy(EVERY_BF16.copy()).view(torch.bfloat16)
    expected = torch.from_numpy(before.copy())
    expected = expected.copy_(grad) if first else expected.add_(grad)
    np.testing.assert_array_equal(total, expected.numpy())
    assert np.isnan(total).any()
    assert (total != before).any()


@pytest.mark.parametrize(
    ("total", "grad"),
    [
        (np.zeros(4, np.float64), np.zeros(4, np.uint16)),
        (np.zeros(4, np.float32), np.zeros(4, np.float32)),
        (np.zeros(4, np.float32), np.zeros(3, np.uint16)),
        (np.zeros(4, np.float32), np.zeros(8, np.uint16)[::2]),
    ],
    ids=["float64", "fp32 gradient", "shorter", "strides"],
)
def test_another_array_is_refused(total: Any, grad: Any) -> None:
    before = total.copy()
    with pytest.raises(ArgumentError):
        accumulate(total, grad, first=False)
    np.testing.assert_array_equal(total, before)
