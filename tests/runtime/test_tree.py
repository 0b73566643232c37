"""State goes to JSON and tensors, and comes back as it was."""

from __future__ import annotations

import enum
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from megatrain_nb.errors import ArgumentError
from megatrain_nb.runtime.tree import from_json, to_json


def there_and_back(tree: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_json(tree, tensors))
    data = safetensors.torch.save(tensors)
    return from_json(json.loads(text), safetensors.torch.load(data))


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        0,
        -(2**80),
        0.1 + 0.2,
        5e-324,
        -0.0,
        math.inf,
        "text \u00fc",
        [],
        (),
        {},
        (1, [2, (3, None)]),
        {"a": {"b": [1.5]}},
        {3: "three", "4": 4, (1, 2): "pair"},
        {"__tensor__": "not one", "__x": 1},
        random.Random(5).getstate(),
    ],
    ids=lambda tree: repr(tree)[:40],
)
def test_data_is_what_it_was(tree: Any) -> None:
    found = there_and_back(tree)
    assert found == tree
    assert repr(found) == repr(tree)


def test_nan() -> None:
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
)
def test_tensors(dtype: torch.dtype) -> None:
    values = torch.arange(12).view(3, 4).t().to(dtype)
    found = there_and_back({"a": [values, values], "b": torch.tensor(7.0)})
    assert found["a"][0].dtype == dtype
    assert torch.equal(found["a"][0], values)
    assert torch.equal(found["a"][1], values)
    assert found["b"].shape == ()


def test_arrays_and_numbers_of_numpy() -> None:
    state = np.random.default_rng(0).bit_generator.state
    assert there_and_back(state) == state
    legacy: Any = np.random.RandomState(3).get_state()
    found = there_and_back(legacy)
    assert found[1].dtype == np.uint32
    assert np.array_equal(found[1], legacy[1])
    assert there_and_back(np.float64(0.1)) == 0.1
    empty = there_and_back(np.zeros((2, 0), "<i2"))
    assert (empty.shape, empty.dtype) == ((2, 0), np.int16)


def test_enums_become_what_they_are() -> None:
    class Word(str, enum.Enum):  # noqa: UP042 - as transformers has them
        A = "a"

    class Number(enum.IntEnum):
        B = 3

    found = there_and_back([Word.A, Number.B])
    assert found == ["a", 3]
    assert [type(x) for x in found] == [str, int]


@pytest.mark.parametrize("thing", [object(), {1, 2}, lambda: 0, np.array([object()])])
def test_anything_else_is_refused_by_name(thing: Any) -> None:
    with pytest.raises(ArgumentError, match=r"state\['x'\]\[0\] is a "):
        to_json({"x": [thing]}, {})
