"""The rate meter counts working time only."""

from __future__ import annotations

import threading

import pytest

from megatrain_nb.store import rate


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr("time.perf_counter", lambda: self.now)


def test_idle_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = Clock(monkeypatch), rate.RateMeter()
    for _ in range(10):
        with meter.moving(100):
            clock.now += 0.1
        clock.now += 5.0
    assert meter.best == pytest.approx(1000)


def test_transfers_side_by_side_share_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, meter = Clock(monkeypatch), rate.RateMeter()
    for _ in range(10):
        with meter.moving(100), meter.moving(300):
            clock.now += 0.1
    assert meter.best == pytest.approx(4000)


def test_the_best_is_kept_and_failures_move_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, meter = Clock(monkeypatch), rate.RateMeter()
    assert meter.best == 0.0
    for seconds in (0.1, 0.05, 0.2):
        for _ in range(20):
            with meter.moving(100):
                clock.now += seconds
    assert meter.best == pytest.approx(2000)
    for _ in range(20):
        with pytest.raises(OSError), meter.moving(10**9):  # noqa: PT011
            raise OSError
    assert meter.best == pytest.approx(2000)


def test_many_threads() -> None:
    meter = rate.RateMeter()

    def move() -> None:
        for _ in range(500):
            with meter.moving(1):
                pass

    threads = [threading.Thread(target=move) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter._total == 4000
    assert meter._in_flight == 0
