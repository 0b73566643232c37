"""While one thread trains, another one is refused with a sentence, and the run goes on as if nobody had asked."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime.claim import CLAIM, Claim
from tests.runtime.common import (
    TinyLM,
    batch,
    differing,
    opened,
    seeded,
    snapshot,
    window_step,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECONDS = 60


class Gate(mt.Callback):
    """Lets a step end only when the test says so."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def on_step_end(self, result: mt.StepResult) -> None:
        if result.step == 2:
            self.reached.set()
            assert self.open.wait(SECONDS)


def attempts(
    session: Any, model: Any, optimizer: Any, path: Path
) -> dict[str, Callable[[], object]]:
    return {
        "forward": lambda: model(batch(0)),
        "step": lambda: window_step(model, optimizer, 9),
        "optimizer.step": optimizer.step,
        "a look at a weight": lambda: float(model.head.weight.sum()),
        "a checkpoint": session.save_checkpoint,
        "resume": lambda: session.resume("first"),
        "remove": lambda: session.remove_checkpoint("first"),
        "recompress": lambda: mt.recompress(model, "8bit"),
        "unwrap": lambda: mt.unwrap(model),
        "another model": lambda: mt.wrap(TinyLM()),
        "init": lambda: mt.init(path / "other", device="cpu"),
        "close": session.close,
    }


def test_others_are_refused_while_a_step_runs(tmp_path: Path) -> None:
    plain = seeded(TinyLM)
    with opened(tmp_path / "a"):
        model, optimizer = wrapped(copy.deepcopy(plain))
        for step in range(4):
            window_step(model, optimizer, step)
        expected = snapshot(model, optimizer)
    with opened(tmp_path / "b") as session:
        model, optimizer = wrapped(copy.deepcopy(plain))
        window_step(model, optimizer, 0)
        session.save_checkpoint("first")
        gate = Gate()
        session.callbacks.append(gate)
        errors: list[BaseException] = []

        def train() -> None:
            try:
                for step in range(1, 4):
                    window_step(model, optimizer, step)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        assert gate.reached.wait(SECONDS)
        for name, attempt in attempts(session, model, optimizer, tmp_path).items():
            assert "mt.train_step uses the models" in refusal(attempt), name
        assert session.status().last_step is not None  # whoever only looks may
        gate.open.set()
        thread.join(SECONDS)
        assert errors == []
        assert differing(snapshot(model, optimizer), expected) == []
        assert not (tmp_path / "other").exists()


def test_it_is_held_as_often_as_a_thread_likes_and_free_afterwards() -> None:
    claim = Claim()
    with claim.held("one"), claim.held("two"):
        claim.check()
        found = refused_elsewhere(claim)
    assert "one uses the models now" in found
    assert refused_elsewhere(claim) == ""


def test_a_thread_that_is_gone_holds_nothing() -> None:
    claim = Claim()
    thread = threading.Thread(target=claim.held("a dead one").__enter__)
    thread.start()
    thread.join()
    claim.check()
    with claim.held("another"):
        assert "another uses" in refused_elsewhere(claim)


def test_backward_on_a_thread_of_autograds_own_is_the_holders() -> None:
    found = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
            CLAIM.check()  # another thread's, as this one is for the holder's
            found.append(True)
            return grad

    x = torch.ones(1, requires_grad=True)
    y: Any = Node.apply(x)  # type: ignore[no-untyped-call]
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with CLAIM.held("a step"):
            held.set()
            release.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(SECONDS)
    try:
        y.backward()
        with pytest.raises(mt.SessionError, match="a step uses"):
            CLAIM.check()
    finally:
        release.set()
        thread.join(SECONDS)
    assert found == [True]


def refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except mt.SessionError as error:
        return str(error)
    return ""


def refused_elsewhere(claim: Claim) -> str:
    """Return what a check says in another thread."""
    found = []

    def check() -> None:
        try:
            claim.check()
            found.append("")
        except mt.SessionError as error:
            found.append(str(error))

    thread = threading.Thread(target=check)
    thread.start()
    thread.join(SECONDS)
    return found[0]
