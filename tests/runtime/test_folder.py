"""A crash at any moment of a save leaves the earlier save or the new one, and other people's files alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import megatrain_nb as mt
from megatrain_nb.runtime import folder
from tests.runtime.models import auto_class, make_model
from tests.runtime.plain import assert_same, parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHERS = {"notes.txt": b"mine", "model_ema.safetensors": b"also mine", "runs/log": b"x"}
SIZES = {"one": "1GB", "shards": "9KB"}


class Crash(BaseException):
    """The process is gone."""


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The process dies before the change of names of this number."""
    left = [10**9]

    def counted(original: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return original(*args, **kwargs)

        return change

    for owner, name in (
        (Path, "replace"), (Path, "unlink"), (Path, "touch"), (os, "link"), (shutil, "rmtree"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    yield left
    left[0] = 10**9


def model_of(scale: float) -> Any:
    model = make_model("llama")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    return model


def with_others(directory: Path) -> None:
    for name, content in OTHERS.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


@pytest.mark.parametrize("before", ["none", "one", "shards"])
@pytest.mark.parametrize("after", ["one", "shards"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_crash_at_each_change(
    before: str, after: str, dtype: str, tmp_path: Path, crash_at: list[int]
) -> None:
    """With bfloat16 the config changes as well: then there are several renames."""
    old, new = model_of(1.0), model_of(2.0)
    given = getattr(torch, dtype)
    states = {"old": parameters(old), "new": parameters(new.to(given).float())}
    new = model_of(2.0)
    seen = set()
    for moment in range(200):
        directory = tmp_path / str(moment)
        with_others(directory)
        if before != "none":
            mt.save_pretrained(old, directory, max_shard_size=SIZES[before])
        crash_at[0] = moment
        try:
            mt.save_pretrained(new, directory, max_shard_size=SIZES[after], dtype=given)
        except Crash:
            done = False
        else:
            done = True
        crash_at[0] = 10**9
        found = state_of(directory, recovered=dtype == "bfloat16")
        which = [
            name for name, state in states.items() if found is not None and same(found, state)
        ]  # fmt: skip
        if found is None:
            assert before == "none"
            which = ["none"]
        assert which, f"neither save is whole after change {moment}"
        seen.update(which)
        for name, content in OTHERS.items():
            assert (directory / name).read_bytes() == content
        if done:
            assert which == ["new"]
            break
        # The next save is an ordinary one.
        mt.save_pretrained(new, directory, max_shard_size=SIZES[after], dtype=given)
        found = state_of(directory)
        assert found is not None
        assert same(found, states["new"])
        left = {path.name for path in directory.iterdir()} - {"notes.txt", "runs"}
        assert not any(name.startswith(".") for name in left)
        shutil.rmtree(directory)
    else:
        pytest.fail("200 changes of names for one save")
    assert seen >= {"none" if before == "none" else "old", "new"}


def state_of(directory: Path, *, recovered: bool = False) -> Any:
    """What plain transformers loads from a folder, or None."""
    if recovered:
        folder.recover(directory)
    try:
        return parameters(auto_class("llama").from_pretrained(directory))
    except (OSError, ValueError):
        return None


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name].float(), other[name]) for name in other)


def test_saves_take_turns_with_names(tmp_path: Path) -> None:
    """What an index names is never written over, and no old shard stays."""
    model = make_model("llama")
    kinds = []
    for _ in range(4):
        mt.save_pretrained(model, tmp_path, max_shard_size="9KB")
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        names = set(index["weight_map"].values())
        assert names == {path.name for path in tmp_path.glob("*.safetensors")}
        kinds.append(next(iter(names)).startswith("model-b-"))
    assert kinds == [False, True, False, True]


def test_the_files_of_a_dead_save_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / ".megatrain-saving-999999999"
    dead.mkdir()
    (dead / "model.safetensors").touch()
    mt.save_pretrained(make_model("llama"), tmp_path)
    assert not dead.exists()


def test_a_tokenizer_and_the_architecture_are_written(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "tokenizer.json").write_text("{}")
            (directory / "templates").mkdir()
            (directory / "templates" / "one.jinja").write_text("x")

    model = make_model("llama")
    mt.save_pretrained(model, tmp_path, tokenizer=Tokenizer())
    assert (tmp_path / "templates" / "one.jinja").read_text() == "x"
    assert (tmp_path / "tokenizer.json").exists()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "generation_config.json").exists()
    assert_same(
        load_file(tmp_path / "model.safetensors"), parameters(model), "saved weight"
    )
