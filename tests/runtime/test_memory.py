"""What a session learns of the memory that the model's own tensors take."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megatrain_nb.runtime import heap
from tests.runtime.common import TinyLM, batch, loss_of, opened, window_step, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from megatrain_nb.runtime.memory import ModelMemory

MB = 10**6


@pytest.fixture
def taught(tmp_path: Path) -> Iterator[tuple[Any, Any, ModelMemory, Any]]:
    """A model after a step, what it has learned, and its session."""
    with opened(tmp_path) as session:
        model, optimizer = wrapped(TinyLM(), lr=0.0)
        window_step(model, optimizer, 0)
        yield model, optimizer, model._megatrain.memory, session


def touched(num_bytes: int) -> np.ndarray[Any, Any]:
    return np.ones(num_bytes, np.uint8)


@pytest.mark.parametrize("forward_only", [False, True])
def test_what_was_there_between_two_steps_is_not_the_models(
    taught: Any, forward_only: bool
) -> None:
    model, optimizer, memory, session = taught
    size = memory.reserved_bytes + session.max_ram_bytes
    before = memory.reserved_bytes
    del (held := [touched(size)])[0]
    assert not held
    if forward_only:
        model(batch(0))
        memory.learn()
    else:
        window_step(model, optimizer, 1)
    assert memory.reserved_bytes <= before + size // 4


def test_a_model_in_a_cycle_is_freed_before_it_counts(taught: Any) -> None:
    model, optimizer, memory, _ = taught
    before = memory.reserved_bytes
    size = before + memory._room + 64 * MB
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [touched(size)]
        cycle.append(cycle)
        del cycle
        window_step(model, optimizer, 1)
    finally:
        gc.enable()
    assert memory.reserved_bytes <= before + size // 4


def test_the_heap_is_trimmed_early_only_where_the_room_is_short(
    taught: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, memory, session = taught
    trimmed: list[int] = []
    monkeypatch.setattr(heap, "trim", lambda: trimmed.append(1))
    monkeypatch.setattr(memory, "learn", lambda: None)
    room = memory._room
    aside = memory._taken() - session.other_bytes()  # less what is kept

    def borders(taken: float, reserved: float) -> int:
        trimmed.clear()
        monkeypatch.setattr(session, "other_bytes", lambda: round(taken) - aside)
        memory.reserved_bytes = round(reserved)
        memory.relieve()
        return len(trimmed)

    assert borders(0.97 * room, 0.99 * room) == 0
    assert borders(0.97 * room, 1.01 * room) == 1
    assert borders(0.93 * room, 1.01 * room) == 0
    assert borders(0.6 * room, 0.5 * room) == 1


def test_a_shortage_is_said_once_and_again_where_it_has_grown(
    taught: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, memory, session = taught
    room, budget = memory._room, session.max_ram_bytes
    for over, said in ((0.04, 0), (0.06, 1), (0.08, 1), (0.2, 1), (0.4, 2), (0.0, 2)):
        memory._peak, peak = 0, round(room + over * budget)
        monkeypatch.setattr(session, "other_peak_bytes", lambda peak=peak: peak)
        memory.learn()
        lines = [r for r in caplog.messages if "max_ram_gb leaves" in r]
        assert len(lines) == said, (peak, lines)
    assert type(model).__name__ in lines[0]
    loss_of(model, batch(0)).backward()  # and it goes on
