"""What is said of a run's speed and end comes from its steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatrain_nb.notebook.snapshot import Snapshot, fill
from megatrain_nb.runtime.recorder import Recorder
from tests.notebook.fakes import step_result


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
    assert len(snap.losses) == 4


def test_losses_that_are_not_numbers_are_not_drawn() -> None:
    recorder = Recorder(clock=Clock())
    recorder.on_step_end(replace(step_result(1), loss=math.nan))
    snap = snapshot_of(recorder)
    assert snap.losses == []
    assert math.isnan(snap.loss)
