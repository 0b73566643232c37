from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan import catalogue
from megatrain_nb.runtime import forecast, probe
from megatrain_nb.runtime.offload import offloaded_model
from megatrain_nb.runtime.shape import shape_of
from tests.runtime.models import make_config


def test_names_need_no_torch() -> None:
    code = (
        "import sys, megatrain_nb as mt\n"
        "plan = mt.estimate('llama-3.1-8b', 'rtx-4090'); str(plan); plan.advice\n"
        "found = {'torch', 'transformers', 'IPython'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2]
    )


def test_an_estimate_takes_milliseconds() -> None:
    """CPU time, the least of three, since other work on the machine would count otherwise."""

    def seconds(name: str, seq_len: int) -> float:
        start = time.process_time()
        mt.estimate(name, "h100", seq_len=seq_len).step_seconds  # noqa: B018
        return time.process_time() - start

    slow = {
        name: least
        for name in catalogue.models()
        if (least := min(seconds(name, length) for length in (512, 1024, 2048))) > 0.05
    }
    assert not slow


@pytest.mark.parametrize(
    ("what", "options", "match"),
    [
        ("llama-9", {}, "catalogue of models"),
        ("gpt2", {"machine": "rtx-9999"}, "catalogue of machines"),
        ("gpt2", {"seq_len": 0}, "seq_len=0"),
        ("gpt2", {"batch": 1.5}, "batch=1.5"),
        ("gpt2", {"accumulation": True}, "accumulation=True"),
        ("gpt2", {"dtype": "float16"}, "dtype='float16'"),
        ("gpt2", {"max_ram_gb": "much"}, "max_ram_gb='much'"),
        ("gpt2", {"optimizer_compression": "5bit"}, "optimizer_compression"),
        ("gpt2", {"machine": {"ram": 3}}, "has no ram"),
    ],
)
def test_what_is_not_known_is_refused(
    what: str, options: dict[str, Any], match: str
) -> None:
    options = {"machine": "cpu-laptop"} | options
    with pytest.raises(ArgumentError, match=match):
        mt.estimate(what, **options)


def test_torch_types_and_names_are_one() -> None:
    plans = [
        mt.estimate("gpt2", "cpu-laptop", dtype=dtype)
        for dtype in ("bfloat16", "bf16", torch.bfloat16)
    ]
    assert {plan.peak_ram_bytes for plan in plans} == {plans[0].peak_ram_bytes}


def test_this_machine_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def measure(directory: Path | None) -> mt.Machine:
        calls.append(directory)
        return catalogue.machine("cpu-laptop").changed(name="measured")

    monkeypatch.setattr(probe, "measure", measure)
    assert mt.estimate("gpt2").machine.name == "measured"
    assert mt.estimate("gpt2").machine.name == "measured"
    assert mt.probe().name == "measured"
    assert calls == [None]
    mt.probe(refresh=True)
    mt.probe(tmp_path / "other")
    assert len(calls) == 3
    forecast.cache_path(None).write_text("{}")  # of another version, say
    mt.probe()
    assert len(calls) == 4


def test_residency_and_bytes_are_those_of_a_real_run(tmp_path: Path) -> None:
    """The plan of a session that was told what its model takes, against what the session does."""
    config = make_config(
        "llama", hidden_size=64, intermediate_size=256, num_hidden_layers=12
    )
    spec = shape_of(config).spec()
    with mt.init(tmp_path / "o", max_ram_gb=4) as session:
        session.max_resident_bytes = 0
        model, optimizer = mt.wrap(mt.from_config(config, seed=0), lr=1e-3)
        offloaded = offloaded_model(model)
        assert offloaded is not None
        ids = torch.randint(0, 61, (1, 1, 16))
        for _ in range(3):
            result = mt.train_step(
                model, optimizer, [{"input_ids": x, "labels": x} for x in ids]
            )
        plan = mt.estimate(config, "cpu-desktop", seq_len=16, accumulation=1)
        from megatrain_nb.plan.simulate import Simulation  # noqa: PLC0415

        times = plan.work.times(frozenset())
        done = Simulation(
            spec,
            offloaded.memory.residency,
            range(len(spec.blocks)),
            times,
            plan.machine,
            frozenset(range(len(spec.packs))),
        ).run()
        assert result.read_bytes == pytest.approx(done.read_bytes, rel=0.02)
        assert result.written_bytes == pytest.approx(done.written_bytes, rel=0.02)


def test_answers_come_by_name() -> None:
    options: dict[str, Any] = {"seq_len": 512, "accumulation": 1}
    largest = mt.largest_model("rtx-4090", **options)
    assert largest is not None
    assert largest.shape.num_params > 5e9
    assert mt.longest_sequence("gpt2", "rtx-4090", **options) > 1024
    assert mt.least_ram_gb("gpt2", "cpu-laptop", tokens_per_second=1, **options)
