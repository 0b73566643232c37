"""Moments and weights in every form: N steps are k steps, a checkpoint, a new session, and N - k steps, bit for bit."""

from __future__ import annotations

import json
import threading
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch.utils.data import RandomSampler

import megatrain_nb as mt
from megatrain_nb.codec.names import NAMES
from megatrain_nb.runtime import chooser
from megatrain_nb.runtime.piece import What
from megatrain_nb.store.checkpoint import read_checkpoints
from tests.runtime.common import differing, report_of, snapshot, window_step
from tests.runtime.models import covering, make_model
from tests.runtime.plain import late_twin
from tests.runtime.test_checkpoint import opened
from tests.runtime.test_codecs import WideLM
from tests.runtime.test_lossless import LOSSLESS, wide
from tests.runtime.test_resume import Dies, DiesAt, made, random_state
from tests.store.test_checkpoint import make_checksum_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from megatrain_nb.runtime.controls import Controls

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "lossless": LOSSLESS,
    **{name: {"optimizer_compression": name} for name in NAMES},
}
PLACES = {"ram": None, "mixed": 250_000, "disk": 0}
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
STEPS, SAVED = 7, 3
OTHER = "taken with another optimizer_compression"


@pytest.fixture(autouse=True)
def _looks_early() -> Iterator[None]:
    """The chooser looks at updates 2, 3 and 6: before the checkpoint, in the update that it finishes, and after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "FIRST_LOOK", 2)
        patch.setattr(chooser, "LOOK_EVERY", 3)
        yield


class Run:
    """A model in the open session."""

    def __init__(
        self, seed: int, *, dtype: str = "fp32", large: bool = False, lr: float = 1e-2
    ) -> None:
        torch.manual_seed(seed)  # of the rounding as well
        made: Any = wide() if large else WideLM()
        self.model: Any
        self.model, self.optimizer = mt.wrap(
            made, lr=lr, dtype=DTYPES[dtype], max_grad_norm=1.0
        )

    def train(self, first: int, stop: int) -> list[float]:
        steps = range(first, stop)
        return [window_step(self.model, self.optimizer, x, 2).loss for x in steps]

    @property
    def codecs(self) -> dict[str, str]:
        return dict(self.model._megatrain.adam.codecs)

    def everything(self) -> dict[str, Tensor]:
        """Parameters, moments as they are decoded, lower halves, and encoded bytes themselves."""
        self.optimizer.finish()
        found = snapshot(self.model, self.optimizer)
        pager = self.model._megatrain.pager
        for piece in pager.kept_pieces(What.LOW, What.ENCODED):
            with pager.opened(piece.pack.index, piece.what) as (values,):
                found[str(piece)] = torch.from_numpy(values.copy())
        return found


def session_of(directory: Path, place: str, form: str, **options: Any) -> Any:
    large = form == "lossless"  # tiles of some size, or nothing of them packs
    options = {"tile_numel": 2**16 if large else 1024} | FORMS[form] | options
    return opened(directory, place, places=PLACES, **options)


@cache
def whole_run(form: str, dtype: str) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses, the end and the codecs of a run that nothing interrupts; where it lies changes no bit."""
    with (
        TemporaryDirectory() as directory,
        session_of(Path(directory), "ram", form),
    ):
        run = Run(0, dtype=dtype, large=form == "lossless")
        return run.train(0, STEPS), run.everything(), run.codecs


def check_end(run: Run, losses: list[float], form: str, dtype: str = "fp32") -> None:
    whole = whole_run(form, dtype)
    assert losses == whole[0][-len(losses) :]
    assert differing(run.everything(), whole[1]) == []
    assert run.codecs == whole[2]


def interrupted(directory: Path, place: str, form: str, dtype: str = "fp32") -> None:
    """Train, take a checkpoint, and train on: what comes after it is lost."""
    losses = whole_run(form, dtype)[0]  # in a session of its own, so first
    with session_of(directory, place, form) as session:
        run = Run(0, dtype=dtype, large=form == "lossless")
        assert run.train(0, SAVED) == losses[:SAVED]
        session.save_checkpoint()
        run.train(SAVED, SAVED + 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_goes_on_is_the_same_run(
    tmp_path: Path, form: str, dtype: str, place: str
) -> None:
    interrupted(tmp_path, place, form, dtype)
    after = [*PLACES][([*PLACES].index(place) + 1) % 3]
    with session_of(tmp_path, after, form) as session:
        # Another seed of weights and of rounding, and moments in what codecs training begins with.
        run = Run(1, dtype=dtype, large=form == "lossless")
        run.train(20, 21)
        session.resume()
        check_end(run, run.train(SAVED, STEPS), form, dtype)
        assert not any(OTHER in note for note in session.notes)
        session.remove_checkpoint(f"step-{SAVED}")
    assert list(tmp_path.iterdir()) == []


def test_the_cases_are_what_they_should_be() -> None:
    """Dynamic codecs change before the checkpoint, in it or after it; packed tiles are packed."""
    for form in NAMES:
        found = set(whole_run(form, "fp32")[2].values())
        assert found > {"raw", "8bit"} if form != "8bit" else found == {"raw", "8bit"}
    assert "4bit" not in set(whole_run("dynamic", "fp32")[2].values())


@pytest.mark.parametrize("place", PLACES)
def test_a_chooser_that_decides_after_the_checkpoint(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look is at the update before the checkpoint, or only after it; both runs choose the same."""
    for look in (SAVED, SAVED + 1):
        monkeypatch.setattr(chooser, "FIRST_LOOK", look)
        monkeypatch.setattr(chooser, "LOOK_EVERY", 1000)
        directory = tmp_path / str(look)
        with session_of(directory / "a", place, "dynamic"):
            run = Run(0)
            run.train(0, STEPS)
            expected, codecs = run.everything(), run.codecs
        with session_of(directory / "b", place, "dynamic") as session:
            run = Run(0)
            run.train(0, SAVED)
            session.save_checkpoint()
            changed = "4bit" not in run.codecs.values()
            assert changed == (look == SAVED)
        with session_of(directory / "b", "disk", "dynamic") as session:
            run = Run(1)
            session.resume()
            run.train(SAVED, STEPS)
            assert differing(run.everything(), expected) == []
            assert run.codecs == codecs


# -- in sessions with other settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "other"),
    [
        ("fp32", "4bit"),
        ("4bit", "fp32"),
        ("4bit", "8bit"),
        ("dynamic", "4bit"),
        ("dynamic", "fp32"),
        ("3bit", "dynamic"),
        ("fp32", "dynamic"),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_codecs_are_those_of_the_checkpoint(
    tmp_path: Path, form: str, other: str, place: str
) -> None:
    interrupted(tmp_path, place, form)
    with session_of(tmp_path, place, other) as session:
        run = Run(1)
        run.train(20, 22)
        session.resume()
        assert sum(OTHER in note for note in session.notes) == 1
        check_end(run, run.train(SAVED, STEPS), form)
        mt.recompress(run.model, FORMS[other].get("optimizer_compression", False))
        assert run.codecs != whole_run(form, "fp32")[2]
        run.train(STEPS, STEPS + 1)


@pytest.mark.parametrize(
    ("before", "after"), [("lossless", "fp32"), ("fp32", "lossless")]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_packing_is_the_sessions_own(
    tmp_path: Path, before: str, after: str, dtype: str, place: str
) -> None:
    """A session reads what another one packed, or did not, and writes as it is told."""
    whole_run("lossless", dtype)
    with session_of(tmp_path, place, before, tile_numel=2**16) as session:
        run = Run(0, dtype=dtype, large=True)
        run.train(0, SAVED)
        taken = session.save_checkpoint()
        assert taken.manifest.packed == (before == "lossless")
    with session_of(tmp_path, place, after, tile_numel=2**16) as session:
        run = Run(1, dtype=dtype, large=True)
        session.resume()
        losses = run.train(SAVED, STEPS)
        check_end(run, losses, "lossless", dtype)
        session.remove_checkpoint(f"step-{SAVED}")
        taken = session.save_checkpoint()
        assert taken.manifest.packed == (after == "lossless")


@pytest.mark.parametrize("into", ["fp32", "lossless", "2bit"])
@pytest.mark.parametrize("form", ["lossless", "4bit", "dynamic"])
def test_out_and_in_again(tmp_path: Path, form: str, into: str) -> None:
    interrupted(tmp_path / "a", "mixed", form)
    tile_numel = 2**16 if form == "lossless" else 1024
    with session_of(tmp_path / "a", "disk", form) as session:
        folder = session.export_checkpoint(None, tmp_path / "moved")
        (taken,) = session.checkpoints()
    for number, place in enumerate(("disk", "ram")):
        options: dict[str, Any] = {"tile_numel": tile_numel}
        with session_of(tmp_path / f"b{number}", place, into, **options) as session:
            found = session.import_checkpoint(folder)
            packed = form == into == "lossless"
            assert found.manifest.packed == packed
            assert taken.manifest.packed == (form == "lossless")
            assert packed <= (found.num_bytes == taken.num_bytes)
            run = Run(1, large=form == "lossless")
            session.resume()
            check_end(run, run.train(SAVED, STEPS), form)


def test_a_portable_folder_is_a_directory_for_a_session(tmp_path: Path) -> None:
    interrupted(tmp_path / "a", "mixed", "lossless")
    with session_of(tmp_path / "a", "disk", "fp32", tile_numel=2**16) as session:
        folder = session.export_checkpoint(None, tmp_path / "moved")
    with session_of(folder, "disk", "fp32", tile_numel=2**16) as session:
        run = Run(1, large=True)
        session.resume()
        check_end(run, run.train(SAVED, STEPS), "lossless")


def test_weights_alone_leave_the_moments(tmp_path: Path) -> None:
    interrupted(tmp_path, "mixed", "4bit")
    with session_of(tmp_path, "mixed", "2bit") as session:
        run = Run(1)
        run.train(20, 22)
        before, codecs = run.everything(), run.codecs
        session.resume(weights_only=True)
        after = run.everything()
        assert run.codecs == codecs
        assert not any(OTHER in note for note in session.notes)
        changed = set(differing(before, after))
        assert changed == {name for name, _ in run.model.named_parameters()}
        run.train(22, 23)


# -- on a device with memory of its own ------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", ["fp32", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_on_a_device(tmp_path: Path, form: str, dtype: str, place: str) -> None:
    """What a device still copies out of is neither given back nor taken for the checkpoint's."""
    losses = whole_run(form, dtype)[0]
    with session_of(tmp_path, place, form) as session:
        session.device = late_twin()
        run = Run(0, dtype=dtype)
        assert run.train(0, SAVED) == losses[:SAVED]
        session.save_checkpoint()
        run.train(SAVED, STEPS)
        session.resume()
        check_end(run, run.train(SAVED, STEPS), form, dtype)
    with session_of(tmp_path, place, form) as session:
        session.device = late_twin(seed=1)
        run = Run(1, dtype=dtype)
        run.train(20, 22)
        session.resume()
        check_end(run, run.train(SAVED, STEPS), form, dtype)


# -- another process, mt.Trainer, damage ------------------------------------------------------------------

DIES = """
import json, os, sys
from pathlib import Path
import torch
from megatrain_nb.runtime import chooser
from tests.runtime import test_resume_codecs as tests

torch.set_num_threads(1)
chooser.FIRST_LOOK, chooser.LOOK_EVERY = 2, 3
directory, form, what = sys.argv[1:]
with tests.session_of(Path(directory), "mixed", form) as session:
    run = tests.Run(0 if what != "resume" else 1, dtype="bf16")
    first = 0
    if what == "resume":
        first = session.resume().step
    losses = run.train(first, tests.STEPS if what != "die" else tests.SAVED)
    if what == "die":
        session.save_checkpoint()
        run.train(tests.SAVED, tests.SAVED + 2)
        print(json.dumps(losses), flush=True)
        os.kill(os.getpid(), 9)
    codes = {name: hash(value.numpy().tobytes()) for name, value in run.everything().items() if "encoded" in name}
    print(json.dumps([losses, run.codecs, codes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["4bit", "dynamic"])
def test_after_kill_9_another_process_goes_on(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    losses, codecs, codes = report_of(DIES, tmp_path / "a", form, "whole")
    assert codes
    with pytest.raises(AssertionError):
        report_of(DIES, tmp_path / "b", form, "die")
    assert report_of(DIES, tmp_path / "b", form, "resume") == [
        losses[SAVED:],
        codecs,
        codes,
    ]


def trainer_of(path: Path, seed: int = 0, *callbacks: Any, **args: Any) -> Any:
    model = make_model("llama", seed=seed, hidden_size=64, intermediate_size=128)
    args = {"max_steps": 8, "gradient_accumulation_steps": 2} | args
    return made(path, model, seed, args=args, callbacks=[*callbacks])


# What a run is, and where its bytes lie before and after the resume. Data are shuffled and the checkpoint is in the middle
# of an epoch throughout; the rate warms up, then is constant or falls. In the suite every two values of two factors meet;
# with ``--strength 8`` all do.
KINDS: dict[str, tuple[Any, ...]] = {
    "form": tuple(FORMS),
    "dtype": tuple(DTYPES),
    "accumulation": (1, 3),
    "dropout": (0.0, 0.1),
    "groups": (1, 2),
    "schedule": ("constant_with_warmup", "cosine"),
}
MATRIX = KINDS | {"before": tuple(PLACES), "after": tuple(PLACES)}


def trainer_for(path: Path, case: dict[str, Any], seed: int, *callbacks: Any) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 128, "dropout": case["dropout"]}
    model = make_model("llama", seed=seed, **shape)
    given = {}
    if case["groups"] == 1:  # transformers makes two, with and without weight decay
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        given = {"optimizers": (optimizer, None)}
    args = {
        "max_steps": 8,
        "save_steps": 3,
        "logging_steps": 2,
        "gradient_accumulation_steps": case["accumulation"],
        "lr_scheduler_type": case["schedule"],
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
    }
    dtype = DTYPES[case["dtype"]]
    return made(
        path, model, seed, args=args, callbacks=[*callbacks], dtype=dtype, **given
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = covering(metafunc.config.getoption("--strength"), 7, MATRIX)
        metafunc.parametrize("case", cases, ids=str)


@lru_cache(maxsize=2)
def whole_trainer_run(*kind: Any) -> tuple[Any, ...]:
    """Parameters and moments, random states, codecs and the log of a run that nothing interrupts."""
    case = dict(zip(KINDS, kind, strict=True))
    with TemporaryDirectory() as folder:
        path = Path(folder)
        with session_of(path / "s", "ram", case["form"]):
            whole = trainer_for(path / "a", case, 0)
            whole.train()
            state = random_state()
            assert len(whole.optimizer.param_groups) == case["groups"]
            assert isinstance(whole._get_train_sampler(), RandomSampler)
            log = [{**each} for each in whole.state.log_history[:-1]]
            end = snapshot(whole.model, whole.streamed_optimizer)
            return end, state, whole.offloaded.adam.codecs, log


def test_matrix(tmp_path: Path, case: dict[str, Any]) -> None:
    expected, state, codecs, log = whole_trainer_run(*(case[name] for name in KINDS))
    with session_of(tmp_path / "s2", case["before"], case["form"]) as session:
        with pytest.raises(Dies):
            trainer_for(tmp_path / "b", case, 0, DiesAt(5)).train()
        assert [each.step for each in session.checkpoints()] == [3]
        saved = tmp_path / "b" / "checkpoint-3" / "trainer_state.json"
        assert json.loads(saved.read_text())["epoch"] % 1
    after = session_of(tmp_path / "s2", case["after"], case["form"], max_ram_gb=0.7)
    with after:
        other = trainer_for(tmp_path / "b", case, 3)
        other.train(resume_from_checkpoint=True)
        assert random_state() == state
        now = snapshot(other.model, other.streamed_optimizer)
        assert differing(now, expected) == []
        assert other.offloaded.adam.codecs == codecs
        assert other.state.log_history[:-1] == log


@pytest.mark.parametrize("form", ["dynamic", "8bit"])
def test_crash_safe_loses_no_step(tmp_path: Path, form: str) -> None:
    with session_of(tmp_path / "s1", "mixed", form):
        whole = trainer_of(tmp_path / "a", save_strategy="no")
        whole.train()
        expected = snapshot(whole.model, whole.streamed_optimizer)
        codecs = whole.offloaded.adam.codecs
    with session_of(tmp_path / "s2", "mixed", form, crash_safe="step") as session:
        with pytest.raises(Dies):
            trainer_of(tmp_path / "b", 0, DiesAt(5), save_strategy="no").train()
        assert [each.step for each in session.checkpoints()] == [5]
    with session_of(tmp_path / "s2", "disk", "fp32") as session:
        other = trainer_of(tmp_path / "b", 3, save_strategy="no")
        other.train(resume_from_checkpoint=True)
        assert (
            differing(snapshot(other.model, other.streamed_optimizer), expected) == []
        )
        assert other.offloaded.adam.codecs == codecs


class Person(transformers.TrainerCallback):
    """Halves the rate and saves after step 2; pauses for a moment and stops after step 5."""

    def __init__(self, controls: Controls) -> None:
        self.controls = controls
        self.stops_at = 5

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.controls.lr_factor = 0.5
            self.controls.save()
        if state.global_step == self.stops_at:
            self.controls.pause()
            threading.Timer(0.2, self.controls.stop).start()


@pytest.mark.parametrize("save_steps", [3, 5])
def test_buttons_and_checkpoints(tmp_path: Path, save_steps: int) -> None:
    """A run that a person stopped goes on where it stopped, in a session whose buttons nobody pressed."""
    args = {"save_steps": save_steps}
    with session_of(tmp_path / "s1", "mixed", "4bit") as session:
        person = Person(session.controls)
        person.stops_at = 99
        whole = trainer_of(tmp_path / "a", 0, person, save_strategy="no")
        whole.train()
        expected = snapshot(whole.model, whole.streamed_optimizer)
    with session_of(tmp_path / "s2", "mixed", "4bit") as session:
        person = Person(session.controls)
        stopped = trainer_of(tmp_path / "b", 0, person, **args)
        stopped.train()
        assert stopped.state.global_step == 5
        assert session.checkpoints()[-1].step == 5
        saved = tmp_path / "b" / "step-000002"
        assert session.controls.said == f"saved step 2 to {saved}"
        assert (saved / "config.json").exists()
    with session_of(tmp_path / "s2", "ram", "4bit") as session:
        other = trainer_of(tmp_path / "b", 3, **args)
        other.train(resume_from_checkpoint=True)
        assert other.state.global_step == 8
        assert session.controls.lr_factor == 0.5
        assert (
            differing(snapshot(other.model, other.streamed_optimizer), expected) == []
        )


def test_larger_moments_that_do_not_fit(tmp_path: Path) -> None:
    interrupted(tmp_path, "disk", "fp32")
    with session_of(tmp_path, "disk", "2bit") as session:
        run = Run(1)
        run.train(20, 22)
        before, codecs = run.everything(), run.codecs
        model = run.model._megatrain
        spec = model.layers.with_codecs(dict.fromkeys(codecs, "raw")).spec
        there = model.memory.residency.disk_bytes + session.store.pinned_bytes()
        more = spec.moments_bytes - model.layers.spec.moments_bytes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session.store, "_max_bytes", there + more)
            with pytest.raises(mt.BudgetError, match="max_disk_gb"):
                session.resume()
        assert run.codecs == codecs
        assert differing(run.everything(), before) == []
        session.resume()
        check_end(run, run.train(SAVED, STEPS), "fp32")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("codecs"), "does not say which codec"),
        (lambda state: state["codecs"].popitem(), "does not say which codec"),
        (lambda state: state.update(asked=["4bit"]), "does not say which codec"),
        (lambda state: put_all(state["codecs"], "5bit"), "as '5bit'"),
        (lambda state: put_all(state["codecs"], "dynamic"), "as 'dynamic'"),
        (lambda state: put_all(state["codecs"], "2bit"), "as '2bit'"),
        (lambda state: put_all(state["codecs"], ["2bit"]), "as a list"),
        (lambda state: put_all(state["asked"], "lossless"), "does not know"),
        (lambda state: put_all(state["codecs"], "raw"), "a tile '0/encoded-"),
        (lambda state: state.update(rounding_seed="0"), "rounding"),
    ],
)
def test_a_state_from_elsewhere_is_data(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], told: str
) -> None:
    interrupted(tmp_path, "disk", "4bit")
    (taken,) = read_checkpoints(tmp_path)
    path = taken.folder / "state.json"
    content = json.loads(path.read_text())
    change(content["models"][0])
    path.write_text(json.dumps(content))
    make_checksum_fit(path)
    with session_of(tmp_path, "disk", "4bit") as session:
        run = Run(1)
        run.train(20, 21)
        before = run.everything()
        with pytest.raises(mt.StoreError, match=told):
            session.resume()
        assert differing(run.everything(), before) == []
        run.train(21, 22)


def put_all(codecs: dict[str, Any], codec: Any) -> None:
    codecs.update(dict.fromkeys(codecs, codec))
