"""Ctrl-C, the user's errors and listeners that fail, at any moment: the state is that of a whole step."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime import interrupts
from tests.runtime.common import (
    TinyLM,
    batch,
    differing,
    loss_of,
    micro_batches,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
    wrapped,
)
from tests.runtime.test_faults import left_over, mixed_step, record_steps, states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def evaluate(model: Any, _: Any, __: int) -> None:
    with torch.no_grad():
        loss_of(model, batch(0))


def finish(_: Any, optimizer: Any, __: int) -> None:
    optimizer.finish()


def read(model: Any, optimizer: Any, _: int) -> None:
    snapshot(model, optimizer)


def zero(model: Any, optimizer: Any, _: int) -> None:
    loss_of(model, batch(3)).backward()
    optimizer.zero_grad()


WORK: list[Callable[[Any, Any, int], Any]] = [
    window_step,
    plain_step,
    evaluate,
    finish,
    read,
    zero,
]


class Signals:
    """Sends Ctrl-C after a random time, and waits for it at the end of ``with``."""

    def __init__(self, seconds: float, send: Callable[[], None]) -> None:
        self.timer = threading.Timer(seconds, send)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        for _again in range(2):
            with suppress(KeyboardInterrupt):
                self.timer.join()
                time.sleep(0.002)


@pytest.mark.parametrize("how", ["signal", "stop"])
@pytest.mark.parametrize(
    "count", [20, pytest.param(100, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_interrupts_at_random_moments_of_everything(
    tmp_path: Path, how: str, count: int
) -> None:
    draw = random.Random(count)
    expected = states(count + 8)
    before = signal.getsignal(signal.SIGINT)
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        stopped = 0
        for index in range(count):
            work = WORK[draw.randrange(len(WORK))]

            def send() -> None:
                if how == "signal":
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    session.stop()

            try:
                with Signals(draw.random() * 0.04, send):
                    for _ in range(3):
                        work(model, optimizer, record_steps(model))
            except KeyboardInterrupt:
                stopped += 1
            session.clear_stop()
            assert (interrupts._depth, interrupts._protected) == (0, 0)
            assert signal.getsignal(signal.SIGINT) is before
            done = record_steps(model)
            optimizer.zero_grad()
            assert differing(expected[done], snapshot(model, optimizer)) == [], (
                index,
                work,
            )
            assert left_over(model) == [], (index, work)
            if done > count:
                break
        assert stopped > count // 4
        mixed_step(model, optimizer, record_steps(model))
        assert (
            differing(expected[record_steps(model)], snapshot(model, optimizer)) == []
        )
    assert list(tmp_path.iterdir()) == []


class FailsAt(mt.Callback):
    """Raises in the n-th span of a kind."""

    def __init__(self, kind: str, n: int) -> None:
        self.kind, self.left = kind, n

    def on_span(self, span: Any) -> None:
        if (
            span.kind == self.kind
            and threading.current_thread() is threading.main_thread()
        ):
            self.left -= 1
            if self.left < 0:
                msg = "mine"
                raise ZeroDivisionError(msg)


@pytest.mark.parametrize("kind", ["FORWARD", "BACKWARD", "STEP", "OFFLOAD", "WAIT"])
def test_a_listener_that_raises(tmp_path: Path, kind: str) -> None:
    expected, raised = states(60), 0
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        for n in range(0, 14, 2):
            for step_of in (window_step, plain_step):
                optimizer.finish()
                session.callbacks.append(FailsAt(kind, n))
                try:
                    for _ in range(2):
                        step_of(model, optimizer, record_steps(model))
                except ZeroDivisionError:
                    raised += 1
                session.callbacks.clear()
                optimizer.zero_grad()
                done = record_steps(model)
                assert differing(expected[done], snapshot(model, optimizer)) == [], (
                    n,
                    step_of,
                )
                assert left_over(model) == []
        assert raised


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    "where", ["loss", "hook", "pre_hook", "after", "step_end", "nan"]
)
def test_the_users_error(  # noqa: C901, PLR0915 - one story, told for six places
    tmp_path: Path, index: int, where: str
) -> None:
    expected = states(3)
    armed = False
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if armed and calls > index:
            msg = "mine"
            raise ZeroDivisionError(msg)

    def loss_fn(model: Any, each: Any) -> Any:
        if where == "loss":
            count()
        loss = loss_of(model, each["ids"]) / 3
        if where == "after":
            count()
        if where == "nan" and armed and each is window[index]:
            return loss * float("nan")
        return loss

    class Ends(mt.Callback):
        def on_step_end(self, result: Any) -> None:
            if armed and where == "step_end":
                count()

    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM))
        if where == "hook":
            model.layers[1].register_forward_hook(count)
        if where == "pre_hook":
            model.layers[1].register_forward_pre_hook(count)
        window = micro_batches(0)
        mt.train_step(model, optimizer, window, loss_fn=loss_fn)
        session.callbacks.append(Ends())
        armed, calls = True, 0
        window = micro_batches(1)
        if where == "step_end":
            index = 0
        error = mt.ModelError if where == "nan" else ZeroDivisionError
        with pytest.raises(error, match=r"mine|norm is nan"):
            mt.train_step(model, optimizer, window, loss_fn=loss_fn)
        armed = False
        done = record_steps(model)
        assert done == (2 if where == "step_end" else 1)
        assert differing(expected[done], snapshot(model, optimizer)) == []
        assert left_over(model) == []
        for step in range(done, 3):
            window = micro_batches(step)
            mt.train_step(model, optimizer, window, loss_fn=loss_fn)
        assert differing(expected[3], snapshot(model, optimizer)) == []


def test_a_step_with_nan_is_skipped(tmp_path: Path) -> None:
    expected = states(2)
    with opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM), nonfinite="skip")
        window_step(model, optimizer, 0)
        for step_of in ("window", "loop"):
            if step_of == "window":
                mt.train_step(
                    model,
                    optimizer,
                    micro_batches(5),
                    loss_fn=lambda model, each: (
                        loss_of(model, each["ids"]) * float("inf")
                    ),
                )
            else:
                (loss_of(model, batch(0)) * float("nan")).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert differing(expected[1], snapshot(model, optimizer)) == []
            assert left_over(model) == []
        window_step(model, optimizer, 1)
        assert differing(expected[2], snapshot(model, optimizer)) == []


def test_closing_is_not_interrupted(tmp_path: Path) -> None:
    draw = random.Random(0)
    interrupted = 0
    for _ in range(40):
        with opened(tmp_path) as session:
            model, optimizer = wrapped(seeded(TinyLM))
            window_step(model, optimizer, 0)
            try:
                with Signals(
                    draw.random() * 0.003, lambda: os.kill(os.getpid(), signal.SIGINT)
                ):
                    session.close()
            except KeyboardInterrupt:
                interrupted += 1
            session.close()  # it came before, or all is closed already
            assert list(tmp_path.iterdir()) == []
            assert session.pool.mapped_bytes == 0
            assert not [
                x for x in threading.enumerate() if x.name.startswith("megatrain-io")
            ]
            del model, optimizer
    assert interrupted
