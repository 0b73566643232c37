from __future__ import annotations

import json
from importlib.resources import files

import pytest

from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan import catalogue
from megatrain_nb.plan.shape import Shape


def test_there_are_enough_models_of_all_kinds() -> None:
    names = catalogue.models()
    assert len(names) >= 50
    families = {catalogue.model(name).family for name in names}
    assert {
        *("llama", "llama4_text", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral"),
        *("gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_oss", "deepseek_v2"),
        *("deepseek_v3", "glm", "glm4_moe", "olmo2", "falcon", "smollm3", "granite"),
        "bert",
    } <= families


@pytest.mark.parametrize("name", catalogue.models())
def test_counts_are_those_that_the_makers_publish(name: str) -> None:
    """What the makers round to three or more digits (embeddings included, heads that are only drafts not)."""
    found = json.loads(
        files("megatrain_nb.plan").joinpath("models", f"{name}.json").read_text()
    )
    shape = catalogue.model(name)
    assert shape.name == name
    assert shape.num_params == pytest.approx(found["published"], rel=2e-3)
    assert shape.spec().num_params + shape.resident_numel == shape.num_params
    assert 0 < shape.active_params <= shape.num_params
    assert Shape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 3.3),
        ("mixtral-8x7b", 12.9),
        ("deepseek-v3", 37.0),
        ("gpt-oss-120b", 5.1),
        ("llama-4-scout", 17.0),
    ],
)
def test_a_mixture_is_as_active_as_its_makers_say(name: str, billions: float) -> None:
    active = catalogue.model(name).active_params
    assert active / 1e9 == pytest.approx(billions, rel=0.15)


def test_a_split_pack_has_halves() -> None:
    shape = catalogue.model("gpt2")
    assert all(pack.split for pack in shape.spec(split=True).packs)
    assert shape.spec(split=True).num_params == shape.spec().num_params


def test_a_name_may_be_written_as_on_the_hub() -> None:
    assert catalogue.model("Qwen/Qwen3-8B") is not None
    with pytest.raises(ArgumentError, match="llama-3"):
        catalogue.model("llama-3.5-8b")
