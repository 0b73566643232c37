"""What a view shows as planned is what the forecast says of the plan in force, and nothing where it cannot be said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import megatrain_nb as mt
from megatrain_nb.plan import catalogue
from megatrain_nb.plan.layout import Layout
from megatrain_nb.runtime import inforce, memory
from megatrain_nb.runtime.inforce import expected_seconds
from megatrain_nb.runtime.offload import offloaded_model
from megatrain_nb.runtime.recorder import Recorder
from megatrain_nb.runtime.recording import follow, unfollow
from tests.runtime.models import make_config
from tests.runtime.test_foresee import RAM_GB, batches

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from megatrain_nb.plan.machine import Machine

# With so slow a disk nothing is preferred to what saves traffic: so does a session in its first step.
SLOW = catalogue.machine("cpu-desktop").changed(
    read_bytes_per_s=1e6,
    write_bytes_per_s=1e6,
    mixed_bytes_per_s=1e6,
    update_params_per_s=1e9,
    fp32_rates=((128, 1e10), (1024, 2e10)),
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine | None], None]:
    """Says what a probe has found."""

    def use(machine: Machine | None) -> None:
        monkeypatch.setattr(inforce, "read_cache", lambda _: machine)

    return use


def make_model() -> Any:
    config = make_config(
        "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=8
    )
    return config, mt.from_config(config, seed=0)


def test_the_plan_beside_what_is_measured_is_the_forecasts(
    tmp_path: Path, measured: Callable[[Machine | None], None]
) -> None:
    measured(SLOW)
    with mt.init(tmp_path / "o", max_ram_gb=RAM_GB) as session:
        config, made = make_model()
        model, optimizer = mt.wrap(made, lr=1e-3)
        recorder, planned = Recorder(), []
        follow(session, recorder)
        recorder_layout = recorder.on_layout

        def told(layout: Any) -> None:
            recorder_layout(layout)
            planned.append(layout.planned_seconds)

        recorder.on_layout = told  # type: ignore[method-assign]
        mt.train_step(model, optimizer, batches(2, 16, 2))
        first = next(each for each in planned if each)
    plan = mt.estimate(
        config, SLOW, seq_len=16, batch=2, accumulation=2, max_ram_gb=RAM_GB
    )
    # In its first step a session keeps no activations: it has not counted yet what they take.
    alike = plan.work.simulate(
        plan.spec,
        plan.residency,
        range(len(plan.spec.blocks)),
        kept=frozenset(),
        trained=plan.trained,
    )
    assert sum(first.values()) == pytest.approx(alike.seconds)
    assert first["compute"] == pytest.approx(alike.busy_s["compute"])
    assert first["wait"] > 0.5 * sum(first.values())


def test_it_is_simulated_again_only_when_something_changed(
    tmp_path: Path,
    measured: Callable[[Machine | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured(SLOW)
    calls: list[Any] = []

    def counted(*given: Any) -> dict[str, float]:
        calls.append(given)
        return expected_seconds(*given)

    monkeypatch.setattr(memory, "expected_seconds", counted)
    with mt.init(tmp_path / "o", max_ram_gb=2) as session:
        session.max_resident_bytes = 2_000_000  # nothing is learned: the plan rests
        session.max_kept_bytes = 0
        _, made = make_model()
        model, optimizer = mt.wrap(made, lr=1e-3)
        recorder = Recorder()
        follow(session, recorder)
        for _ in range(3):
            mt.train_step(model, optimizer, batches(1, 16, 2))
        assert recorder.layout is not None
        small, before = recorder.layout.planned_seconds, len(calls)
        offloaded = offloaded_model(model)
        assert offloaded is not None
        layouts = [offloaded.memory.layout() for _ in range(2)]
        assert layouts[0].planned_seconds == layouts[1].planned_seconds == small
        offloaded.memory.tell()
        assert len(calls) == before
        assert small["other"] == pytest.approx(0.0, abs=1e-6)
        mt.train_step(model, optimizer, batches(8, 64, 2))
        large = recorder.layout.planned_seconds
        assert large["compute"] > 1.5 * small["compute"] > 0
        unfollow(session, recorder)
        assert offloaded.memory.layout().planned_seconds == large


def test_without_measured_figures_there_is_no_plan(
    tmp_path: Path, measured: Callable[[Machine | None], None]
) -> None:
    on_a_device = catalogue.machine("rtx-4090").changed(
        fp32_rates=((1, 1e12),), read_bytes_per_s=1e9, update_params_per_s=1e9
    )
    for turn, machine in enumerate(
        (None, catalogue.machine("cpu-desktop"), on_a_device)
    ):
        measured(machine)
        with mt.init(tmp_path / str(turn), max_ram_gb=1, device="cpu") as session:
            _, made = make_model()
            model, optimizer = mt.wrap(made, lr=1e-3)
            recorder = Recorder()
            follow(session, recorder)
            mt.train_step(model, optimizer, batches(1, 16, 1))
            assert recorder.layout is not None
            assert recorder.layout.planned_seconds == {}


@pytest.mark.parametrize("max_ram_gb", [0.1, 2.0])
def test_planned_peaks_are_those_of_the_plan(tmp_path: Path, max_ram_gb: float) -> None:
    with mt.init(tmp_path / "o", max_ram_gb=max_ram_gb) as session:
        session.max_resident_bytes = 0 if max_ram_gb < 1 else None
        model, optimizer = mt.wrap(make_model()[1], lr=1e-3)
        recorder = Recorder()
        follow(session, recorder)
        offloaded = offloaded_model(model)
        assert offloaded is not None
        assert offloaded.memory.layout().planned_peaks == {}  # it was not called yet
        mt.train_step(model, optimizer, batches(1, 16, 1))
        assert recorder.layout is not None
        assert recorder.layout.planned_peaks["ram"] > 80e6  # torch's own, and more
        now, plan = offloaded.memory.layout(), session.plan
        assert plan is not None
        ram = plan.peak_ram_bytes - plan.machine.framework_bytes
        expected = {"ram": 10**8, "disk": plan.disk_bytes} if max_ram_gb < 1 else {"ram": ram}  # fmt: skip
        for layout in (now, Layout.from_json(now.to_json())):
            assert layout.planned_peaks == expected
        other, _ = mt.wrap(make_model()[1], lr=1e-3)
        assert offloaded.memory.layout().planned_peaks == {}  # it takes its share
        mt.unwrap(other)


def test_nobody_listens_nothing_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(memory, "expected_seconds", never)
    with mt.init(tmp_path / "o", max_ram_gb=1, device="cpu"):
        _, made = make_model()
        model, optimizer = mt.wrap(made, lr=1e-3)
        mt.train_step(model, optimizer, batches(1, 16, 1))


def test_frozen_packs_have_no_update(
    tmp_path: Path, measured: Callable[[Machine | None], None]
) -> None:
    measured(SLOW)
    seconds = []
    for turn in range(2):
        with mt.init(tmp_path / str(turn), max_ram_gb=2, device="cpu") as session:
            _, made = make_model()
            for name, param in made.named_parameters():
                if turn and "layers." in name:
                    param.requires_grad_(False)
            model, optimizer = mt.wrap(made, lr=1e-3)
            recorder = Recorder()
            follow(session, recorder)
            mt.train_step(model, optimizer, batches(1, 16, 1))
            assert recorder.layout is not None
            seconds.append(recorder.layout.planned_seconds["update"])
    assert 0 < seconds[1] < 0.2 * seconds[0]
