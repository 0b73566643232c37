"""``mt.Trainer`` saves, rotates, chooses and resumes checkpoints as transformers' arguments say."""

from __future__ import annotations

import copy
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.trainer_utils import SaveStrategy

import megatrain_nb as mt
from megatrain_nb.runtime.runs import folder_of, read_reference, to_remove
from megatrain_nb.store.checkpoint import Checkpoint
from tests.runtime.common import differing, snapshot
from tests.runtime.models import make_batch, make_model
from tests.runtime.plain import assert_same, opened, parameters
from tests.runtime.test_trainer import Rows, arguments, history


class Dies(Exception):  # noqa: N818 - what stops a run
    """Ends a run at a step, as an error of the user's would."""


class DiesAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Dies


# Arguments of the run, of the model, and keywords of the trainer.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "middle of an epoch, warm-up and cosine": (
        {
            "warmup_steps": 2,
            "lr_scheduler_type": "cosine",
            "weight_decay": 0.1,
            "logging_steps": 5,
            "save_steps": 3,
        },
        {},
        {},
    ),
    "dropout, every epoch": (
        {
            "gradient_accumulation_steps": 1,
            "per_device_train_batch_size": 12,
            "save_strategy": "epoch",
        },
        {"dropout": 0.1},
        {},
    ),
    "bf16, dropout and three micro-batches": (
        {"gradient_accumulation_steps": 3, "save_steps": 3},
        {"dropout": 0.1},
        {"dtype": torch.bfloat16},
    ),
    "plateau, evaluation in between": (
        {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 4,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "metric_for_best_model": "loss",
            "include_num_input_tokens_seen": "all",
        },
        {},
        {"eval_dataset": Rows(size=6)},
    ),
}


def made(path: Path, model: Any, seed: int = 0, **kwargs: Any) -> Any:
    args = arguments(
        path, **({"max_steps": 10, "save_strategy": "steps"} | kwargs.pop("args", {}))
    )
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(seed)
    return mt.Trainer(model=model, args=args, train_dataset=Rows(size=36), **kwargs)


def random_state() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(1)]  # noqa: NPY002


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_goes_on_is_the_same_run(case: str, tmp_path: Path) -> None:
    args, model, kwargs = CASES[case]
    places = ("ram", "disk", "mixed")
    place = places[list(CASES).index(case) % 3]
    with opened(tmp_path / "s1", place):
        whole = made(tmp_path / "a", make_model("llama", **model), args=args, **kwargs)
        whole.train()
        state = random_state()
        expected = snapshot(whole.model, whole.streamed_optimizer)
    with opened(tmp_path / "s2", place):
        broken = made(
            tmp_path / "b",
            make_model("llama", **model),
            args=args,
            callbacks=[DiesAt(8)],
            **kwargs,
        )
        with pytest.raises(Dies):
            broken.train()
    with opened(tmp_path / "s2", places[(places.index(place) + 1) % 3]) as session:
        assert f"of {whole.state.max_steps}, saved" in session.notes[-1]
        # Another seed, another model: everything comes from the checkpoint.
        other = made(
            tmp_path / "b",
            make_model("llama", seed=3, **model),
            seed=3,
            args=args,
            **kwargs,
        )
        torch.manual_seed(99)
        other.train(resume_from_checkpoint=True)
        assert random_state() == state
        assert (
            differing(snapshot(other.model, other.streamed_optimizer), expected) == []
        )
        ours, theirs = history(other), history(whole)
        # How long it took and its mean loss is of each call's own steps.
        for entry in (ours[-1], theirs[-1]):
            entry.pop("train_loss")
        assert ours == theirs


def test_what_transformers_would_log_twice_is_right(tmp_path: Path) -> None:
    """The mean loss of the resumed call is that of its own steps."""
    args = {"logging_steps": 4, "save_steps": 3}
    with opened(tmp_path / "s1", "ram"):
        steps = made(tmp_path / "b", make_model("llama"), args={"logging_steps": 1})
        steps.train()
        losses = [entry["loss"] for entry in history(steps) if "loss" in entry]
    with opened(tmp_path / "s2", "ram"):
        trainer = made(tmp_path / "a", make_model("llama"), args=args)
        trainer.train()
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
        mean = history(trainer)[-1]["train_loss"]
        assert mean == pytest.approx(sum(losses[3:]) / 7, rel=1e-5)


def test_interrupted_then_resumed_in_the_same_session(tmp_path: Path) -> None:
    args = {"save_steps": 2}
    with opened(tmp_path / "s", "disk") as session:
        whole = made(tmp_path / "a", make_model("llama"), args=args)
        whole.train()
        expected = snapshot(whole.model, whole.streamed_optimizer)

        class Interrupts(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
                if state.global_step == 5:
                    session.stop()

        interrupts = Interrupts()
        trainer = made(
            tmp_path / "b", make_model("llama"), args=args, callbacks=[interrupts]
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        session.clear_stop()
        trainer.remove_callback(interrupts)
        trainer.train(resume_from_checkpoint=True)
        assert (
            differing(snapshot(trainer.model, trainer.streamed_optimizer), expected)
            == []
        )


def test_the_files_beside_the_tiles_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "s", "ram"):
        made(tmp_path / "a", make_model("llama"), args={"save_steps": 4}).train()
        read: list[str] = []
        real = Checkpoint.read

        def counted(self: Checkpoint, *, most_bytes: int) -> Any:
            read.append(Path(self.name).name)
            return real(self, most_bytes=most_bytes)

        monkeypatch.setattr(Checkpoint, "read", counted)
        trainer = made(tmp_path / "a", make_model("llama"))
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
        assert read == ["checkpoint-4"]
        assert trainer._resuming is None


@pytest.mark.parametrize("steps", [7, 9])  # within an epoch, and at the end of one
def test_a_finished_run_takes_no_further_step(tmp_path: Path, steps: int) -> None:
    args = {"save_steps": 1, "max_steps": steps, "gradient_accumulation_steps": 2}
    with opened(tmp_path / "s", "ram"):
        trainer = made(tmp_path / "a", make_model("llama"), args=args)
        trainer.train()
        expected = snapshot(trainer.model, trainer.streamed_optimizer)
        state = random_state()
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == steps
        assert random_state() == state
        now = snapshot(trainer.model, trainer.streamed_optimizer)
        assert differing(now, expected) == []


def test_crash_safe_loses_no_step(tmp_path: Path) -> None:
    args = {
        "save_steps": 4,
        "logging_steps": 2,
        "eval_strategy": "epoch",
        "num_train_epochs": 2,
        "max_steps": -1,
    }

    def make(path: Path, *more: Any, seed: int = 0) -> Any:
        return made(
            path,
            make_model("llama", seed=seed, dropout=0.1),
            args=args,
            eval_dataset=Rows(size=4),
            callbacks=[*more],
        )

    with mt.init(tmp_path / "s1", max_ram_gb=2.0):
        whole = make(tmp_path / "a")
        whole.train()
        expected = snapshot(whole.model, whole.streamed_optimizer)
    for dies in (7, 3, 5):  # the end of an epoch is at 5
        with mt.init(tmp_path / "s2", max_ram_gb=2.0, crash_safe="step") as session:
            # Every one goes on where the one before ended, whatever is in the folder.
            with pytest.raises(Dies):
                make(tmp_path / "b", DiesAt(dies)).train()
            assert [each.step for each in session.checkpoints()][-1] == dies
        with mt.init(tmp_path / "s2", max_ram_gb=2.0) as session:
            other = make(tmp_path / "b", seed=3)
            other.train(resume_from_checkpoint=True)
            assert other.state.global_step == 10
            now = snapshot(other.model, other.streamed_optimizer)
            assert differing(now, expected) == []
            ours, theirs = history(other), history(whole)
            assert ours[:-1] == theirs[:-1]
            for each in session.checkpoints():
                session.remove_checkpoint(each.name)
        shutil.rmtree(tmp_path / "b")
        assert list((tmp_path / "s2").iterdir()) == []


def test_crash_safe_tells_a_plain_loop_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(mt.ArgumentError, match="crash_safe='always' is not known"):
        mt.init(tmp_path, crash_safe="always")
    with mt.init(tmp_path, max_ram_gb=1.0, crash_safe="step") as session:
        model: Any
        model, optimizer = mt.wrap(make_model("llama"))
        for _ in range(2):
            model(**make_batch("llama", 0)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        told = [note for note in session.notes if "only you know where" in note]
        assert len(told) == 1


def names(session: mt.Session) -> list[str]:
    return [Path(each.name).name for each in session.checkpoints()]


def folders(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("*"))


def test_as_many_are_kept_as_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path / "s", "disk") as session:
        args = {"save_steps": 2, "save_total_limit": 2}
        trainer = made(tmp_path / "a", make_model("llama"), args=args)
        trainer.train()
        assert names(session) == ["checkpoint-8", "checkpoint-10"]
        assert folders(tmp_path / "a") == ["checkpoint-10", "checkpoint-8"]
        folder = tmp_path / "a" / "checkpoint-8"
        assert sorted(x.name for x in folder.iterdir()) == [
            "megatrain.json",
            "trainer_state.json",
        ]
        # From the beginning into the same folder: step by step the old ones are replaced.
        made(tmp_path / "a", make_model("llama"), args=args).train()
        assert names(session) == ["checkpoint-8", "checkpoint-10"]
        assert folders(tmp_path / "a") == ["checkpoint-10", "checkpoint-8"]
        shutil.rmtree(folder_of(tmp_path / "a", 10))
        trainer = made(tmp_path / "a", make_model("llama"), args=args)
        assert Path(trainer._find_checkpoint(True)).name == "checkpoint-8"


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_model_at_the_end(tmp_path: Path, limit: int) -> None:
    args = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "learning_rate": 0.1,
        "load_best_model_at_end": True,
        "save_total_limit": limit,
        "metric_for_best_model": "worse",
        "greater_is_better": False,
    }
    steps = iter([5.0, 1.0, 3.0, 4.0, 5.0] * 2)
    kwargs: dict[str, Any] = {
        "eval_dataset": Rows(size=4),
        "compute_metrics": lambda _: {"worse": next(steps)},
    }
    plain: Any = transformers.Trainer(
        model=make_model("llama"),
        args=arguments(
            tmp_path / "a", **({"max_steps": 10, "save_strategy": "steps"} | args)
        ),
        train_dataset=Rows(size=36),
        **copy.copy(kwargs),
    )
    plain.train()
    with opened(tmp_path / "s", "mixed") as session:
        trainer = made(tmp_path / "b", make_model("llama"), args=args, **kwargs)
        trainer.train()
        assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-4"
        assert_same(parameters(trainer.model), parameters(plain.model), "parameter")
        assert folders(tmp_path / "a") == folders(tmp_path / "b")
        assert sorted(names(session)) == folders(tmp_path / "b")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"checkpoint": "x"}', b"\xff", b"[" * 9000, bytes(2**17)])  # fmt: skip
def test_a_folder_that_lost_its_reference(tmp_path: Path, content: bytes) -> None:
    """No save fails for it, the user is told, and it is still the checkpoint that it is called after."""
    run = tmp_path / "a"

    class Damages(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                (folder_of(run, 1) / "megatrain.json").write_bytes(content)

    args = {"max_steps": 4, "save_steps": 1, "save_total_limit": 2}
    with opened(tmp_path / "s", "mixed") as session:
        trainer = made(run, make_model("llama"), args=args, callbacks=[Damages()])
        trainer.train()
        assert names(session) == folders(run) == ["checkpoint-3", "checkpoint-4"]
        told = [note for note in session.notes if "megatrain.json is damaged" in note]
        assert len(told) == 1
        assert f"{folder_of(run, 1)} does not say" in told[0]
        expected = snapshot(trainer.model, trainer.streamed_optimizer)
        (folder_of(run, 4) / "megatrain.json").write_bytes(content)
        trainer = made(run, make_model("llama"), seed=1, args=args)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 4
        assert differing(snapshot(trainer.model, trainer.streamed_optimizer), expected) == []  # fmt: skip


def test_the_best_folder_that_lost_its_reference(tmp_path: Path) -> None:
    run = tmp_path / "a"
    args = {
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "worse",
        "greater_is_better": False,
    }
    values = iter([1.0, 2.0, 3.0])

    class Damages(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                (folder_of(run, 1) / "megatrain.json").write_bytes(b"{")

    with opened(tmp_path / "s", "ram") as session:
        trainer = made(
            run,
            make_model("llama"),
            args=args,
            eval_dataset=Rows(size=4),
            compute_metrics=lambda _: {"worse": next(values)},
            callbacks=[Damages()],
        )
        trainer.train()
        best = snapshot(trainer.model)
        session.resume(str(folder_of(run, 1)), weights_only=True)
        assert differing(snapshot(trainer.model), best) == []
        session.resume(str(folder_of(run, 3)), weights_only=True)
        assert differing(snapshot(trainer.model), best) != []


def test_early_stopping_goes_on_counting(tmp_path: Path) -> None:
    metrics = iter([1.0, 2.0, 3.0, 4.0])
    args = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "metric_for_best_model": "worse",
        "greater_is_better": False,
        "load_best_model_at_end": True,
        "restore_callback_states_from_checkpoint": True,
    }

    def make(*more: Any) -> Any:
        return made(
            tmp_path / "a",
            make_model("llama"),
            args=args,
            eval_dataset=Rows(size=4),
            compute_metrics=lambda _: {"worse": next(metrics)},
            callbacks=[transformers.EarlyStoppingCallback(3), *more],
        )

    with opened(tmp_path / "s", "ram"):
        with pytest.raises(Dies):
            make(DiesAt(2)).train()
        trainer = make()
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 4


@pytest.mark.parametrize("why", ["save_strategy", "crash_safe"])
def test_a_disk_that_could_not_hold_a_checkpoint(tmp_path: Path, why: str) -> None:
    """That is said before the first step, not at the first save hours later."""
    with opened(tmp_path / "s", "disk") as session:
        trainer = made(tmp_path / "a", make_model("llama"), args={"max_steps": 2})
        trainer.train()
        whole, most = session.checkpoints()[-1].num_bytes, session.store.peak_bytes

    def on_disk(path: Path, max_disk_bytes: float, crash_safe: str | None) -> Any:
        session = mt.init(path, max_ram_gb=2.0, max_disk_gb=max_disk_bytes / 1e9, crash_safe=crash_safe)  # fmt: skip
        session.max_resident_bytes = 0
        return session

    args = {"max_steps": 2}
    without = args | {"save_strategy": "no"}
    crash_safe = "step" if why == "crash_safe" else None
    with on_disk(tmp_path / "t", 1.9 * whole, crash_safe) as session:
        asking = without if crash_safe else args
        trainer = made(tmp_path / "b", make_model("llama"), args=asking)
        with pytest.raises(mt.BudgetError, match="would end at its first save"):
            trainer.train()
        assert session.last_step is None
        session.crash_safe = None
        trainer.args.save_strategy = SaveStrategy.NO
        trainer.train()
    with on_disk(tmp_path / "u", 1.02 * most, crash_safe) as session:
        made(tmp_path / "c", make_model("llama"), args=args).train()
        assert "checkpoint-2" in names(session)


@pytest.mark.parametrize("how", ["opened", "imported", "named anew", "as an object"])
def test_one_portable_folder_is_all_that_a_run_needs(tmp_path: Path, how: str) -> None:
    """On another machine there is neither the offload directory nor ``output_dir`` of before."""
    args = {"save_steps": 4}
    with opened(tmp_path / "s", "ram"):
        whole = made(tmp_path / "a", make_model("llama", dropout=0.1), args=args)
        whole.train()
        expected = snapshot(whole.model, whole.streamed_optimizer)
    with opened(tmp_path / "t", "mixed") as session:
        trainer = made(
            tmp_path / "b",
            make_model("llama", dropout=0.1),
            args=args,
            callbacks=[DiesAt(6)],
        )
        with pytest.raises(Dies):
            trainer.train()
        folder = session.export_checkpoint(None, tmp_path / "moved")
    for before in ("t", "b"):
        shutil.rmtree(tmp_path / before)
    there = folder if how == "opened" else tmp_path / "u"
    with opened(there, "disk") as session:
        if how != "opened":
            name = "mine" if how == "named anew" else None
            session.import_checkpoint(folder, name)
        (held,) = session.checkpoints()
        model = make_model("llama", seed=1, dropout=0.1)
        trainer = made(tmp_path / "c", model, seed=1, args=args)
        with pytest.raises(mt.ArgumentError, match=r"r name one .*='.*(mine|int-4)'"):
            trainer.train(resume_from_checkpoint=True)
        trainer.train(
            resume_from_checkpoint=held if how == "as an object" else held.name
        )
        now = snapshot(trainer.model, trainer.streamed_optimizer)
        assert differing(now, expected) == []
        assert history(trainer)[:-1] == history(whole)[:-1]
        assert names(session)[-2:] == ["checkpoint-8", "checkpoint-10"]
        session.remove_checkpoint(held.name)
        with pytest.raises(mt.ArgumentError, match=r"no checkpoint .*; there: "):
            trainer.train(resume_from_checkpoint=held)


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    with opened(tmp_path / "s", "ram") as session:
        trainer = made(tmp_path / "a", make_model("llama"), args={"max_steps": 2})
        with pytest.raises(mt.ArgumentError, match="refers to no checkpoint"):
            trainer.train(resume_from_checkpoint=True)
        (tmp_path / "pipe").mkdir()
        os.mkfifo(tmp_path / "pipe" / "megatrain.json")  # whoever opens it waits
        for wanted in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(
                mt.ArgumentError, match=r"not a checkpoint of mt\.Train"
            ):
                trainer.train(resume_from_checkpoint=wanted)
        with pytest.raises(
            mt.ArgumentError, match=r"missing' is neither .*there: none"
        ):
            trainer.train(resume_from_checkpoint=tmp_path / "missing")
        with pytest.raises(mt.ArgumentError, match=r"neither True, nor .*checkpoints"):
            trainer.train(resume_from_checkpoint=3)
        args = {"max_steps": 2, "save_steps": 1}
        trainer = made(tmp_path / "a", make_model("llama"), args=args)
        trainer.train()
        folder = folder_of(tmp_path / "a", 1)
        assert read_reference(folder)["offload_dir"] == str(tmp_path / "s")
        session.save_checkpoint("by hand")
        with pytest.raises(
            mt.ArgumentError, match=r"was taken by mt\.Trainer; .*from_che"
        ):
            session.resume(str(folder))
        session.resume(str(folder), weights_only=True)
    with opened(tmp_path / "s", "ram") as session:
        made(tmp_path / "a", make_model("llama"), args=args)  # not trained yet
        with pytest.raises(
            mt.ArgumentError, match=r"was taken by mt\.Trainer; .*from_che"
        ):
            session.resume(str(folder))
    with opened(tmp_path / "other", "ram"):
        trainer = made(tmp_path / "a", make_model("llama"), args=args)
        with pytest.raises(mt.ArgumentError, match=r"refers to a checkpoint in .*/s,"):
            trainer.train(resume_from_checkpoint=folder)
    with opened(tmp_path / "s", "ram"):
        trainer = made(
            tmp_path / "a", make_model("llama", tied=True), args={"max_steps": 2}
        )
        with pytest.raises(mt.ModelError, match="is of another model"):
            trainer.train(resume_from_checkpoint=folder)


@pytest.mark.parametrize(
    ("limit", "best", "gone"),
    [
        (None, None, []),
        (0, None, []),
        (3, None, ["checkpoint-1"]),
        (1, None, ["checkpoint-1", "checkpoint-2", "checkpoint-3"]),
        (1, "checkpoint-2", ["checkpoint-1", "checkpoint-3"]),
        (2, "checkpoint-4", ["checkpoint-1", "checkpoint-2"]),
        (9, None, []),
    ],
)
def test_which_give_way(
    tmp_path: Path, limit: int | None, best: str | None, gone: list[str]
) -> None:
    paths = [folder_of(tmp_path, step) for step in (1, 2, 3)]
    new = folder_of(tmp_path, 4)
    found = to_remove(paths, new, limit=limit, best=best and str(tmp_path / best))
    assert [path.name for path in found] == gone
    # transformers chooses the same ones.
    for index, path in enumerate([*paths, new]):
        path.mkdir()
        os.utime(path, (index * 10, index * 10))
    transformers.trainer_utils.rotate_checkpoints(
        str(tmp_path), limit, best and str(tmp_path / best), use_mtime=True
    )
    assert [path.name for path in [*paths, new] if not path.exists()] == gone
