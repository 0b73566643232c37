"""A model that is loaded whole in RAM is told of in time."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime import ramwatch, rss
from tests.runtime.models import auto_class, make_model
from tests.runtime.plain import opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 10_000


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(ramwatch, "_LEAST_BYTES", 1)
    found: list[str] = []
    watch = ramwatch.RamWatch(LIMIT, found.append)
    yield found
    watch.close()
    make_model("llama")
    assert len(found) <= 1, "a closed watch is silent"


def test_weights_that_stay_in_their_file_are_not_counted(
    notes: list[str], tmp_path: Path
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    notes.clear()
    gc.collect()
    model = auto_class("llama").from_pretrained(tmp_path, dtype=torch.float32)
    assert sum(param.nbytes for param in model.parameters()) > LIMIT
    assert notes == []


def test_weights_that_are_converted_are_told_of_once(
    notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ramwatch.RamWatch, "_check", lambda _: None)
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(ramwatch, "_LEAST_BYTES", 1)
    for _ in range(2):
        auto_class("llama").from_pretrained(tmp_path, dtype=torch.float32)
    [note] = notes
    assert "mt.from_pretrained" in note
    monkeypatch.setattr(rss, "available_bytes", lambda: 0)
    with pytest.raises(mt.BudgetError, match=r"mt\.from_pretrained"):
        auto_class("llama").from_pretrained(tmp_path, dtype=torch.float32)


def test_models_that_went_are_not_counted(notes: list[str]) -> None:
    small = torch.nn.Linear(30, 30)
    for _ in range(20):
        small = torch.nn.Linear(30, 30)
    del small
    assert notes == []


def test_a_session_watches_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ramwatch, "_LEAST_BYTES", 1)
    with opened(tmp_path, "disk") as session:
        monkeypatch.setattr(session._watch, "_limit_bytes", LIMIT)
        make_model("llama")
        assert any("whole in RAM" in note for note in session.notes)
        before = session.notes
    make_model("llama")
    assert session.notes == before
