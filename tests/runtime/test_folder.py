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
from megatrain_nb.runtime import exchange, folder
from tests.runtime.models import auto_class, make_model
from tests.runtime.plain import assert_same, opened, parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHERS = {"notes.txt": b"mine", "model_ema.safetensors": b"also mine"}
FOLDERS = {"runs/log": b"x"}
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
        (Path, "replace"), (Path, "unlink"), (Path, "touch"), (Path, "rename"), (os, "link"), (shutil, "rmtree"),
        (exchange, "_exchange"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    yield left
    left[0] = 10**9


def model_of(scale: float, config: str = "same") -> Any:
    model = make_model("llama")
    if config == "other":
        model.config.scaled_by = scale
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    return model


def with_others(directory: Path, others: dict[str, bytes]) -> None:
    for name, content in others.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


@pytest.mark.parametrize("before", ["none", "one", "shards"])
@pytest.mark.parametrize("after", ["one", "shards"])
@pytest.mark.parametrize("config", ["same", "other"])
@pytest.mark.parametrize("others", [OTHERS, OTHERS | FOLDERS], ids=["files", "folders"])
def test_a_crash_at_each_change(
    before: str, after: str, config: str, others: dict[str, bytes], tmp_path: Path, crash_at: list[int]
) -> None:  # fmt: skip
    """Plain transformers reads one of the two.

    Where the config changes as well there are several renames beside other people's folders: in between transformers
    finds no weights, until the next save or load of ours puts the earlier ones back.
    """
    steps = config == "other" and others != OTHERS and before != "none"
    old, new = model_of(1.0, config), model_of(2.0, config)
    states = {"old": state_in(old), "new": state_in(new)}
    seen = set()
    for moment in range(200):
        directory = tmp_path / str(moment)
        with_others(directory, others)
        if before != "none":
            mt.save_pretrained(old, directory, max_shard_size=SIZES[before])
        crash_at[0] = moment
        try:
            mt.save_pretrained(new, directory, max_shard_size=SIZES[after])
        except Crash:
            done = False
        else:
            done = True
        crash_at[0] = 10**9
        which = which_of(directory, states)
        seen.update(which)
        if which == {"none"} and steps:
            assert folder.recover(directory)
            which = which_of(directory, states)
            assert which == {"old"}
        assert which, f"neither save is whole after change {moment}"
        assert before == "none" or which != {"none"}
        for name, content in others.items():
            assert (directory / name).read_bytes() == content
        if done:
            assert which == {"new"}
            break
        # The next save is an ordinary one.
        mt.save_pretrained(new, directory, max_shard_size=SIZES[after])
        assert which_of(directory, states) == {"new"}
        left = {path.name for path in directory.iterdir()} - {"notes.txt", "runs"}
        assert not any(name.startswith(".") for name in left)
        shutil.rmtree(directory)
        assert not any(tmp_path.iterdir()), "a folder beside it is left"
    else:
        pytest.fail("200 changes of names for one save")
    assert seen >= {"none" if before == "none" else "old", "new"}
    assert ("none" in seen) == (before == "none" or steps)


def which_of(directory: Path, states: dict[str, Any]) -> set[str]:
    """Which of some states plain transformers loads from a folder; ``none`` if it refuses."""
    try:
        found = state_in(auto_class("llama").from_pretrained(directory))
    except (OSError, ValueError):
        return {"none"}
    return {name for name, state in states.items() if same(found, state)}


def state_in(model: Any) -> Any:
    return getattr(model.config, "scaled_by", None), parameters(model)


def same(one: Any, other: Any) -> bool:
    values = all(torch.equal(one[1][name], other[1][name]) for name in other[1])
    return values and one[0] == other[0]


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


def changed_config(directory: Path) -> None:
    """Save two models whose configs differ, one after the other."""
    old, new = model_of(1.0, "other"), model_of(2.0, "other")
    mt.save_pretrained(old, directory, max_shard_size="9KB")
    mt.save_pretrained(new, directory)
    assert which_of(directory, {"old": state_in(old), "new": state_in(new)}) == {"new"}
    weights = sorted(path.name for path in directory.glob("model*.safetensors"))
    assert weights == ["model.safetensors", "model_ema.safetensors"]


def test_another_config_takes_the_place_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder keeps its mode, and what others put there, also at the last moment."""
    directory, told = tmp_path / "m", []
    with_others(directory, OTHERS)
    (directory / "link").symlink_to("notes.txt")
    directory.chmod(0o750)
    original = exchange._exchange

    def last_moment(one: Path, other: Path) -> None:
        told.append(other)
        (other / "late.txt").write_bytes(b"late")
        original(one, other)

    monkeypatch.setattr(exchange, "_exchange", last_moment)
    (tmp_path / "way").symlink_to(directory)
    number = directory.stat().st_ino
    changed_config(tmp_path / "way")
    assert told == [directory]
    assert directory.stat().st_ino != number
    assert directory.stat().st_mode & 0o777 == 0o750
    for name, content in (OTHERS | {"late.txt": b"late", "link": b"mine"}).items():
        assert (directory / name).read_bytes() == content
    assert (directory / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"m", "way"}


@pytest.mark.parametrize("why", ["working directory", "no such call", "other disk"])
def test_a_folder_that_cannot_be_exchanged(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "m"
    with_others(directory, OTHERS)
    calls = []

    def refuses(*_: object, **__: object) -> None:
        calls.append(why)
        raise OSError

    if why == "working directory":
        monkeypatch.chdir(directory)
    if why == "other disk":
        monkeypatch.setattr(os, "link", refuses)
    else:
        monkeypatch.setattr(exchange, "_exchange", refuses)
    number = directory.stat().st_ino
    changed_config(directory)
    assert directory.stat().st_ino == number
    assert bool(calls) == (why != "working directory")
    for name, content in OTHERS.items():
        assert (directory / name).read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"m"}
    assert not any(path.name.startswith(".") for path in directory.iterdir())


def test_the_files_of_a_dead_save_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    dead = directory / ".megatrain-saving-999999999"
    beside = tmp_path / ".m.megatrain-saving-999999999"
    alive = tmp_path / f".m.megatrain-saving-{os.getppid()}"
    others = tmp_path / ".mine.megatrain-saving-999999999"
    for each in (dead, beside, alive, others):
        each.mkdir(parents=True)
        (each / "model.safetensors").touch()
    mt.save_pretrained(make_model("llama"), directory)
    assert [each.exists() for each in (dead, beside, alive, others)] == [False, False, True, True]  # fmt: skip


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


@pytest.mark.parametrize("where", ["the earlier save", "a folder", "a file"])
def test_a_folder_from_elsewhere_leads_nowhere(tmp_path: Path, where: str) -> None:
    """It may claim that a crash left an earlier save to be put back, through links."""
    outside, directory = tmp_path / "outside", tmp_path / "model"
    kept = directory / ".megatrain-earlier"
    outside.mkdir()
    for name in ("keys", "whole"):
        (outside / name).write_text("mine")
    directory.mkdir()
    if where == "the earlier save":
        kept.symlink_to(outside)
    else:
        (kept / "sub").mkdir(parents=True)
        (kept / "whole").touch()
        if where == "a folder":
            (kept / "sub" / "keys").write_text("theirs")
            (directory / "sub").symlink_to(outside)
        else:
            (kept / "config.json").symlink_to(outside / "keys")
    with opened(tmp_path / "s", "ram"), pytest.raises(mt.StoreError, match="is a link"):
        mt.from_pretrained(auto_class("llama"), directory)
    assert {x.name: x.read_text() for x in outside.iterdir()} == dict.fromkeys(("keys", "whole"), "mine")  # fmt: skip
    assert not (directory / "config.json").exists()
