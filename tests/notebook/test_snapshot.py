"""What is said of a run's speed and end comes from its steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatrain_nb.notebook.render import page
from megatrain_nb.notebook.snapshot import Snapshot, fill
from megatrain_nb.plan.timeline import Span
from megatrain_nb.runtime.recorder import Recorder
from tests.notebook.fakes import step_result
from tests.notebook.test_pictures import make_layout


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def snapshot_of(recorder: Recorder) -> Snapshot:
    return fill(Snapshot(state="training"), recorder)


def test_steps_speed_and_time_left() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    recorder.on_train_begin(10)
    assert recorder.trains
    assert snapshot_of(recorder).left_s is None
    for step in range(1, 5):
        clock.now_s += 3.0  # 2 s in the step, 1 s outside of it
        recorder.on_step_end(step_result(step, seconds=2.0))
    snap = snapshot_of(recorder)
    assert (snap.step, snap.num_done, snap.total_steps) == (4, 4, 10)
    assert snap.tokens_per_s == pytest.approx(512 / 2.0)
    assert snap.left_s == pytest.approx(6 * 3.0)
    assert snap.seconds["wait"] == pytest.approx(0.4)
    assert [step for step, _ in snap.losses] == [1, 2, 3, 4]
    snap.state = "stopped"
    assert snap.left_s is None


def test_time_left_of_a_long_run() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    recorder.on_train_begin(10_000)
    for step in range(1, 1001):
        clock.now_s += 2.0
        recorder.on_step_end(step_result(step, seconds=2.0))
    snap = snapshot_of(recorder)
    assert snap.left_s == pytest.approx(9000 * 2.0)
    assert (snap.num_done, len(snap.losses)) == (1000, len(snap.rows))


def test_one_step_is_enough_for_an_estimate() -> None:
    recorder = Recorder(clock=Clock())
    recorder.on_train_begin(3)
    recorder.on_step_end(step_result(1, seconds=2.0))
    assert snapshot_of(recorder).left_s == pytest.approx(4.0)


def test_a_plain_loop_has_no_end_in_sight() -> None:
    recorder = Recorder(clock=Clock())
    began = [recorder.trains]
    recorder.on_step_end(step_result(7))
    assert [*began, recorder.trains] == [False, True]
    snap = snapshot_of(recorder)
    seen = (snap.step, snap.num_done, snap.total_steps, snap.left_s)
    assert seen == (7, 1, None, None)


def test_a_second_training_counts_anew() -> None:
    recorder = Recorder(clock=Clock())
    for step in (1, 2, 3):
        recorder.on_step_end(step_result(step))
    recorder.on_train_begin(2)
    assert snapshot_of(recorder).seconds == {}
    recorder.on_step_end(step_result(4, seconds=7.0))
    snap = snapshot_of(recorder)
    assert (snap.step, snap.num_done, snap.total_steps) == (4, 1, 2)
    assert sum(snap.seconds.values()) == pytest.approx(7.0)
    assert [step for step, _ in snap.losses] == [4]
    assert snap.earlier == [(3, step_result(3).loss)]


def test_nothing_of_an_earlier_training_is_drawn() -> None:
    """Another model with as many layers, in the same cell: what it waited for, and its bound, are the first one's."""
    recorder = Recorder()
    recorder.on_layout(make_layout())
    recorder.on_train_begin(2)
    slow = replace(step_result(1), least_seconds={"disk": 9.0}, read_bytes=77)
    need = Span(kind="NEED", name="0/weights/2", start_s=0, end_s=5, outcome="late")
    for step in (1, 2):
        recorder.on_span(need)
        recorder.on_step_end(replace(slow, step=step))
    recorder.on_evaluate(2, {"eval_loss": 6.5})
    before = page(snapshot_of(recorder))
    assert "of what disk allows" in before
    assert "late <b>2</b>" in before
    recorder.on_train_end()
    recorder.on_train_begin(2)
    recorder.on_step_end(replace(step_result(1), least_seconds={"compute": 1.0}))
    snap = snapshot_of(recorder)
    after = page(snap)
    for drawn in ("of what disk allows", "late <b>", "model.layers.2 5.00 s", "6.5"):
        assert drawn not in after
    assert "of what compute allows" in after
    assert "Trained before this: 2 steps, last loss" in after
    assert [row.read_bytes for row in snap.rows] == [0]
    assert snap.totals["late"] == 0


def test_a_loop_after_a_training_is_another_one() -> None:
    recorder = Recorder()
    recorder.on_train_begin(3)
    for step in (1, 2, 3):
        recorder.on_step_end(step_result(step))
    recorder.on_train_end()
    ended = snapshot_of(recorder)
    assert (ended.num_done, ended.total_steps) == (3, 3)
    recorder.on_step_end(step_result(4))
    snap = snapshot_of(recorder)
    assert (snap.num_done, snap.total_steps) == (1, None)


def test_losses_that_are_not_numbers_are_not_drawn() -> None:
    recorder = Recorder(clock=Clock())
    recorder.on_step_end(replace(step_result(1), loss=math.nan))
    snap = snapshot_of(recorder)
    assert snap.losses == []
    assert math.isnan(snap.loss)
