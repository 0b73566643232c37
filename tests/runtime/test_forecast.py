from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan import catalogue
from megatrain_nb.runtime import forecast, init, probe
from megatrain_nb.runtime.offload import offloaded_model
from megatrain_nb.runtime.shape import shape_of
from megatrain_nb.runtime.share import DeviceShare
from tests.runtime.models import make_config
from tests.runtime.plain import late_twin

if TYPE_CHECKING:
    from megatrain_nb.plan.plan import Plan


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
        # A read ahead, or a write behind, of one step may be counted in the next.
        results = [
            mt.train_step(
                model, optimizer, [{"input_ids": x, "labels": x} for x in ids]
            )
            for _ in range(18)
        ][2:]
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
        read = sum(result.read_bytes for result in results) / len(results)
        written = sum(result.written_bytes for result in results) / len(results)
        assert read == pytest.approx(done.read_bytes, rel=0.02)
        assert written == pytest.approx(done.written_bytes, rel=0.02)


# On the device: slots, and all of the last four of seven packs; of no other pack the weights alone.
ROOM = {"float32": 221_000, "bfloat16": 303_000}


def on_the_twin(directory: Path, config: Any, dtype: str, most: int | None) -> Any:
    """Train on the device's twin, nothing in RAM; return what then lives there, and what a step moved."""
    device = late_twin(ROOM[dtype])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "open_device", lambda *_, **__: device)
        # The disk binds: the tail comes first.
        decided = property(lambda _: True, lambda *_: None)
        patch.setattr(DeviceShare, "_tail_first", decided, raising=False)
        with mt.init(directory, max_ram_gb=1) as session:
            session.max_resident_bytes = 0
            session.max_tail_bytes = most
            model, optimizer = mt.wrap(mt.from_config(config, seed=0, dtype=dtype))
            offloaded = offloaded_model(model)
            assert offloaded is not None
            ids = torch.randint(0, 61, (2, 1, 16))
            given = [{"input_ids": x, "labels": x} for x in ids]
            results = [mt.train_step(model, optimizer, given) for _ in range(24)][4:]
            executor = offloaded.executor
            found = SimpleNamespace(
                stay=executor.stay,
                tail=set(executor.tail),
                tail_bytes=executor.tail.num_bytes
                + sum(executor.slot(pack).flat.nbytes for pack in executor.tail),
                residency=offloaded.memory.residency,
                onloaded=results[-1].onloaded_bytes,
                offloaded=results[-1].offloaded_bytes,
                read=sum(result.read_bytes for result in results) / len(results),
                written=sum(result.written_bytes for result in results) / len(results),
            )
    device.close()
    return found


def plan_for_the_twin(config: Any, dtype: str) -> Plan:
    """Return the forecast of `on_the_twin`, which counts slots alone."""
    slow = catalogue.machine("rtx-4090").changed(
        read_bytes_per_s=1e6, write_bytes_per_s=1e6, mixed_bytes_per_s=1e6
    )
    base = mt.estimate(config, slow, seq_len=16, accumulation=2, dtype=dtype)
    ours = ("slots", "weights", "gradients", "activations that")
    beside = sum(x.num_bytes for x in base.vram if not x.name.startswith(ours))
    return base.changed(max_vram_bytes=ROOM[dtype] + beside)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lives_on_a_device_is_what_the_forecast_says(
    tmp_path: Path, dtype: str
) -> None:
    config = make_config("llama", num_hidden_layers=4)
    plan = plan_for_the_twin(config, dtype)
    moved = {}
    for most in (None, 0):
        told = plan.changed(max_tail_bytes=most)
        done = on_the_twin(tmp_path / "o", config, dtype, most)
        assert (done.stay, done.tail) == (told.stay, told.tail)
        assert done.tail_bytes == told.tail_bytes
        # That nothing stays in RAM is asked for there, and not by a forecast.
        bytes_of = replace(told, residency=done.residency).moved_bytes
        moved[most] = done.onloaded, done.offloaded
        assert moved[most] == (bytes_of["ram to device"], bytes_of["device to ram"])
        # Where weights alone stay, it is a matter of timing whether the first blocks' pieces are in RAM still.
        rel = 0.02 if done.stay == done.tail else 0.1
        assert done.read == pytest.approx(bytes_of["disk to ram"], rel=rel)
        assert done.written == pytest.approx(bytes_of["ram to disk"], rel=rel)
    assert plan.stay == plan.tail == {3, 4, 5, 6}
    saves = plan.tail_saves
    assert saves["ram to device"] == moved[0][0] - moved[None][0]
    assert saves["device to ram"] == moved[0][1] - moved[None][1] > 0
    assert "AdamW runs there" in str(plan)


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [("float32", False), ("bfloat16", "4bit"), ("float32", "lossless")],
)
@pytest.mark.parametrize("window", [True, False], ids=["window", "loop"])
def test_a_session_s_plan_is_the_one_that_it_obeys(
    tmp_path: Path, dtype: str, moments: bool | str, window: bool
) -> None:
    config = make_config(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=8
    )
    batch = {name: torch.randint(0, 61, (1, 16)) for name in ("input_ids", "labels")}
    with mt.init(
        tmp_path / "o", max_ram_gb=4, optimizer_compression=moments
    ) as session:
        session.max_resident_bytes = 5_000_000
        model, optimizer = mt.wrap(mt.from_config(config, seed=0, dtype=dtype))
        before = session.plan
        assert before is None
        for _ in range(4):
            if window:
                mt.train_step(model, optimizer, [batch] * 2)
            else:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        offloaded = offloaded_model(model)
        assert offloaded is not None
        plan = session.plan
        assert isinstance(plan, mt.Plan)
        assert plan.spec == offloaded.layers.spec
        assert plan.residency == offloaded.memory.residency
        assert plan.kept == offloaded.executor.keeping.chosen
        assert plan.choices.window.accumulation == (2 if window else 1)
        assert plan.choices.moments == (moments or "")
        assert plan.moved_bytes["disk to ram"] > 0
        assert plan.limits["ram"] > 4 * 10**9
        assert "a step" in str(plan)


def test_what_is_frozen_is_so_in_a_session_s_plan(tmp_path: Path) -> None:
    with mt.init(tmp_path / "o", max_ram_gb=4) as session:
        session.max_resident_bytes = 0
        made: Any = mt.from_config(make_config("llama"), seed=0)
        made.model.embed_tokens.requires_grad_(False)
        model, optimizer = mt.wrap(made)
        ids = torch.randint(0, 61, (1, 16))
        mt.train_step(model, optimizer, [{"input_ids": ids, "labels": ids}])
        plan = session.plan
        assert plan is not None
        assert plan.trained == set(range(1, len(plan.spec.packs)))


def test_answers_come_by_name() -> None:
    options: dict[str, Any] = {"seq_len": 512, "accumulation": 1}
    largest = mt.largest_model("rtx-4090", **options)
    assert largest is not None
    assert largest.shape.num_params > 5e9
    assert mt.longest_sequence("gpt2", "rtx-4090", **options) > 1024
    assert mt.least_ram_gb("gpt2", "cpu-laptop", tokens_per_second=1, **options)
