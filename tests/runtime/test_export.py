"""Saved folders, their failures included."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import megatrain_nb as mt
from megatrain_nb.runtime import export
from tests.runtime.common import (
    TinyLM,
    differing,
    opened,
    seeded,
    snapshot,
    window_step,
)

if TYPE_CHECKING:
    from pathlib import Path


def read_folder(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", ["5GB", "5kB", "1B"])
def test_saved_weights_are_the_weights(tmp_path: Path, tied: bool, size: str) -> None:
    model = seeded(lambda: TinyLM(tied=tied))
    model.register_buffer("kept", torch.arange(3))
    model.register_buffer("scalar", torch.tensor(2.5, dtype=torch.bfloat16))
    model.register_buffer("not_kept", torch.ones(3), persistent=False)
    with opened(tmp_path / "s"):
        _, optimizer = mt.wrap(model)
        window_step(model, optimizer, 0)
        for max_shard_size in ("7kB", size):  # the second save replaces the first
            mt.save_pretrained(model, tmp_path / "m", max_shard_size=max_shard_size)
        expected = snapshot(model) | {"kept": model.kept, "scalar": model.scalar}
    assert differing(expected, read_folder(tmp_path / "m")) == []
    files = {path.name for path in (tmp_path / "m").iterdir()}
    index = tmp_path / "m" / "model.safetensors.index.json"
    if size == "5GB":
        assert files == {"model.safetensors"}
    else:
        mapping = json.loads(index.read_text())["weight_map"]
        assert set(mapping) == set(expected)
        assert files == {*mapping.values(), index.name}


def test_a_failed_save_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        original(*args)

    original = export._write_tensor
    model = seeded(TinyLM)
    with opened(tmp_path / "s"):
        _, optimizer = mt.wrap(model)
        mt.save_pretrained(model, tmp_path / "m")
        before = read_folder(tmp_path / "m")
        window_step(model, optimizer, 0)
        monkeypatch.setattr(export, "_write_tensor", fails)
        with pytest.raises(mt.StoreError, match=r"No space left.*is whole"):
            mt.save_pretrained(model, tmp_path / "m")
    assert differing(before, read_folder(tmp_path / "m")) == []
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["model.safetensors"]


def test_closing_warns_of_steps_that_were_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(TinyLM)
    with opened(tmp_path / "s"):
        _, optimizer = mt.wrap(model)
        window_step(model, optimizer, 0)
        mt.save_pretrained(model, tmp_path / "m")
        with torch.no_grad():
            model.head.weight.mul_(2)  # changed by hand after the save
    assert "not saved" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"state_dict": {}}, "state_dict"),
        ({"max_shard_size": "big"}, "max_shard_size='big'"),
        ({"push_to_hub": True}, "push_to_hub"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: Any, match: str) -> None:
    model = seeded(TinyLM)
    with opened(tmp_path / "s"):
        mt.wrap(model)
        with pytest.raises(mt.ArgumentError, match=match):
            mt.save_pretrained(model, tmp_path / "m", **arguments)
        (tmp_path / "file").touch()
        with pytest.raises(mt.ArgumentError, match="is a file"):
            mt.save_pretrained(model, tmp_path / "file")
