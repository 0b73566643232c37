"""What a person asks for takes effect between two steps, and leaves the model whole."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import megatrain_nb as mt
from megatrain_nb.runtime.controls import Controls
from megatrain_nb.runtime.export import save_pretrained
from tests.runtime.common import (
    TinyLM,
    batch,
    loss_of,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
    wrapped,
)


def obey(controls: Controls, step: int = 3, export: Any = None) -> None:
    controls.obey(step, export or (lambda _: None), threading.Event())


def test_a_pause_lasts_until_resume() -> None:
    controls = Controls()
    controls.pause()
    threading.Timer(0.3, controls.resume).start()
    start = time.monotonic()
    obey(controls)
    assert time.monotonic() - start >= 0.25
    assert not controls.waiting


@pytest.mark.parametrize("how", ["stop", "interrupt"])
def test_stop_and_interrupt_end_a_pause(how: str) -> None:
    controls, interrupted = Controls(), threading.Event()
    controls.pause()
    end = controls.stop if how == "stop" else interrupted.set
    threading.Timer(0.2, end).start()
    controls.obey(3, lambda _: None, interrupted)
    assert controls.stopping == (how == "stop")


def test_a_paused_training_saves(tmp_path: Path) -> None:
    controls, saved = Controls(), list[Path]()
    controls.save_dir = tmp_path
    controls.pause()
    threading.Timer(0.1, controls.save).start()
    threading.Timer(0.5, controls.resume).start()
    obey(controls, step=12, export=saved.append)
    assert saved == [tmp_path / "step-000012"]
    assert controls.said == f"saved step 12 to {tmp_path / 'step-000012'}"


def test_a_save_that_fails_is_told_and_costs_nothing() -> None:
    def full(_: Path) -> None:
        msg = "the disk is full"
        raise mt.StoreError(msg)

    controls = Controls()
    controls.save("there")
    obey(controls, export=full)
    assert controls.said == "not saved: the disk is full"
    controls.save()
    controls.reset()
    assert controls.said == "not saved: no training runs"


@pytest.mark.parametrize("factor", [-1, float("nan"), "2", True])
def test_a_factor_that_is_none_is_refused(factor: Any) -> None:
    with pytest.raises(mt.ArgumentError, match="lr_factor"):
        Controls().lr_factor = factor


@pytest.mark.parametrize("steps", [0, 1.5])
def test_an_interval_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(mt.ArgumentError, match="logging_steps"):
        Controls().logging_steps = steps


def test_the_factor_is_that_of_the_rate(tmp_path: Path) -> None:
    """Half the rate by the control is half the rate of the optimizer, bit for bit."""
    found = []
    for lr, factor in ((1e-2, 0.5), (5e-3, 1.0)):
        with opened(tmp_path / str(lr)) as session:
            session.controls.lr_factor = factor
            model, optimizer = wrapped(seeded(TinyLM), lr=lr)
            for step in range(3):
                result = window_step(model, optimizer, step)
            assert result.lr == 5e-3
            found.append(snapshot(model))
    assert all(torch.equal(a, found[1][name]) for name, a in found[0].items())


def test_stop_ends_a_plain_loop_after_a_whole_step(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM), lr=1e-2)
        plain_step(model, optimizer, 0)
        session.controls.stop()
        with pytest.raises(KeyboardInterrupt):
            plain_step(model, optimizer, 1)
        assert session.controls.was_stopped
        session.controls.save("not yet")
        session.controls.reset()
        assert session.controls.said == "not saved: no training runs"
        plain_step(model, optimizer, 1)  # as if nothing had been
        streamed = snapshot(model)
    plain = seeded(TinyLM)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        plain_step(plain, other, step)
    for name, values in snapshot(plain).items():
        assert torch.allclose(values, streamed[name], rtol=1e-4, atol=1e-6)


def test_a_save_waits_until_the_step_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for between two micro-batches of one step; and so with a pause."""
    exported: list[Path] = []
    monkeypatch.setattr(
        "megatrain_nb.runtime.steps.save_pretrained",
        lambda _model, directory: exported.append(directory),
    )
    with opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM), lr=1e-2)
        plain_step(model, optimizer, 0)
        loss_of(model, batch(1)).backward()
        session.controls.save(tmp_path / "out")
        session.controls.pause()
        waited = threading.Timer(20, session.controls.resume)
        waited.start()
        loss_of(model, batch(2)).backward()
        assert session.controls.paused  # and yet this did not wait
        assert exported == []
        assert session.controls.said == "saving after this step"
        waited.cancel()
        optimizer.step()
        session.controls.resume()
        loss_of(model, batch(3)).backward()
        assert exported == [tmp_path / "out"]
        assert session.controls.said == f"saved step 2 to {tmp_path / 'out'}"


class Person(transformers.TrainerCallback):
    """Asks for a save after step 2 and for the end after step 3; logs every step from the second on."""

    def __init__(self, controls: Controls) -> None:
        self.controls = controls

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.controls.logging_steps = 1
        if state.global_step == 2:
            self.controls.save()
        if state.global_step == 3:
            self.controls.stop()


def test_trainer_obeys(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
    )  # fmt: skip
    rows = [{"input_ids": [i, i + 1, i + 2], "labels": [1, 2, 3]} for i in range(16)]
    with opened(tmp_path / "offload") as session:
        model = mt.from_config(config, transformers.AutoModelForCausalLM, seed=0)
        args = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=100, per_device_train_batch_size=1, logging_steps=50,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = mt.Trainer(
            model=model,
            args=args,
            train_dataset=rows,
            callbacks=[Person(session.controls)],
        )
        trainer.train()
        assert trainer.state.global_step == session.last_step.step == 3  # type: ignore[union-attr]
        logged = [
            entry["step"] for entry in trainer.state.log_history if "loss" in entry
        ]
        assert logged == [2, 3]
        saved = tmp_path / "out" / "step-000002"
        assert session.controls.said == f"saved step 2 to {saved}"
        assert not session.controls.stopping
        loaded = transformers.AutoModelForCausalLM.from_pretrained(saved)
        same = [
            torch.equal(a, b)
            for a, b in zip(loaded.parameters(), model.parameters(), strict=True)
        ]
        assert not all(same)  # of step 2, and the model went on
        session.controls.save()
        session.controls.obey(3, partial(save_pretrained, model), threading.Event())
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out" / "step-000003"
        )
        for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
