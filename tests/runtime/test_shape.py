from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import megatrain_nb as mt
from megatrain_nb.codec.choice import parse_compression
from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan import catalogue
from megatrain_nb.runtime.layers import cut
from megatrain_nb.runtime.outline import shape_from
from megatrain_nb.runtime.shape import config_of, draft, shape_of
from tests.runtime.models import ARCHITECTURES, make_config

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.models())
def test_the_catalogue_is_what_transformers_makes(name: str) -> None:
    """Parameter counts, blocks, packs, shapes, and order: all of what `cut` finds on the model itself."""
    shape = catalogue.model(name)
    model = draft(config_of(shape), shape.architecture)
    layers = cut(model)
    assert shape.num_params == sum(param.numel() for param in model.parameters())
    assert shape.spec() == layers.spec
    assert shape.spec(split=True) == cut(model, torch.bfloat16).spec
    few = parse_compression("4bit")
    assert shape.spec(compression=few) == cut(model, compression=few).spec
    made = shape_from(model, layers).dims
    assert (shape.dims.dropout, shape.dims.looped) == (made.dropout, made.looped)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "granite", "cohere"])
def test_a_config_has_the_shape_of_its_model(name: str, tied: bool) -> None:
    config = make_config(name, tied=tied)
    model = draft(config)
    shape = shape_of(config)
    assert shape.spec() == cut(model).spec
    assert shape.num_params == sum(param.numel() for param in model.parameters())
    assert shape.dims.hidden == 16
    kinds = {part.kind for part in shape.parts}
    assert {"embedding", "layer"} <= kinds


def test_a_file_of_a_config_has_the_same_shape(tmp_path: Path) -> None:
    config = make_config("llama")
    config.save_pretrained(tmp_path)
    assert shape_of(tmp_path / "config.json") == shape_of(config)
    assert shape_of(str(tmp_path)) == shape_of(config)


def test_dropout_and_how_experts_are_taken_are_known() -> None:
    assert not shape_of(make_config("gpt2")).dims.dropout
    assert shape_of(make_config("gpt2", dropout=0.1)).dims.dropout
    config = make_config("mixtral")
    assert not shape_of(config).dims.looped
    config._experts_implementation = "eager"
    assert shape_of(config).dims.looped


def test_any_module_has_a_shape() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    shape = shape_of(model)
    assert shape.num_params == 8 * 16 * 2 + 24
    assert shape.spec() == cut(model).spec


def test_a_model_in_a_session_keeps_its_shape(tmp_path: Path) -> None:
    config = make_config("llama")
    before = shape_of(config)
    with mt.init(tmp_path / "o", max_ram_gb=1):
        model = mt.from_config(config)
        assert shape_of(model).spec() == before.spec()
        assert mt.estimate(model, "cpu-desktop", seq_len=8).fits


@pytest.mark.parametrize("what", [3, "no/such/config.json", object()])
def test_what_has_no_shape_is_refused(what: object) -> None:
    with pytest.raises(ArgumentError):
        shape_of(what)


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ArgumentError, match="not a config"):
        shape_of(path)
