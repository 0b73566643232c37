"""``mt.Trainer`` does what ``transformers.Trainer`` does, to the last bit."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

import megatrain_nb as mt
from megatrain_nb.runtime.trainer import _refusals
from tests.runtime.models import make_batch, make_config, make_model
from tests.runtime.plain import assert_same, opened, parameters, ulps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


from_config: Any = transformers.AutoModelForCausalLM.from_config


class Rows(Dataset[dict[str, Any]]):
    """Rows of unequal length, so that micro-batches have unequal numbers of valid tokens."""

    def __init__(self, name: str = "llama", size: int = 48, width: int = 9) -> None:
        self.name, self.size, self.width = name, size, width

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.size:  # ends an iteration
            raise IndexError(index)
        batch = make_batch(self.name, index, width=self.width)
        row = index % 2
        return {key: value[row] for key, value in batch.items()}


class Ragged(Rows):
    """Rows without padding: a collator pads them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.size:
            raise IndexError(index)
        width = 4 + (index * 5) % 7
        batch = make_batch(self.name, index, width=width)
        return {"input_ids": batch["input_ids"][0], "labels": batch["labels"][0]}


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def fill(key: str, value: int) -> Tensor:
        return torch.stack(
            [
                nn.functional.pad(row[key], (0, width - len(row[key])), value=value)
                for row in rows
            ]
        )

    return {
        "input_ids": fill("input_ids", 1),
        "labels": fill("labels", -100),
        "attention_mask": fill("input_ids", 0).ne(0).long(),
    }


class StopsEarly(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 7


class StopsInAWindow(transformers.TrainerCallback):
    """Stops between two micro-batches of a window."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 3


class StopsAtEpoch(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step in (2, 4)


def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(
        logits, labels[:, 1:].flatten(), reduction="sum"
    )
    loss: Tensor = total / num_items_in_batch
    return loss


def with_own_loss(base: Any) -> Any:
    class OwnLoss(base):  # type: ignore[misc]
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            outputs = model(**inputs)
            loss = outputs.loss + 0.01 * outputs.logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def with_own_step(base: Any) -> Any:
    class OwnStep(base):  # type: ignore[misc]
        seen = 0

        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            inputs = dict(inputs)
            labels = inputs["labels"].clone()
            labels[:, : self.seen % 3] = -100
            self.seen += 1
            loss: Tensor = super().training_step(
                model, inputs | {"labels": labels}, *args
            )
            return loss

    return OwnStep


def with_own_optimizer(base: Any) -> Any:
    class OwnOptimizer(base):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            made: Any = torch.optim.AdamW(
                self.model.parameters(), lr=3e-3, betas=(0.8, 0.9), fused=True
            )
            if base is mt.Trainer:
                _, made = mt.wrap(self.model, made)
            self.optimizer = made
            return self.optimizer

    return OwnOptimizer


def metrics(prediction: Any) -> dict[str, float]:
    return {"first": float(prediction.predictions[0, 0, 0])}


@dataclass
class Variant:
    """Arguments of both trainers, and what else is special."""

    args: dict[str, Any] = field(default_factory=dict)
    kwargs: Callable[[], dict[str, Any]] = dict
    subclass: Callable[[Any], Any] = lambda base: base
    data: Callable[[], Dataset[Any]] = Rows
    name: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)


VARIANTS: dict[str, Variant] = {
    "one micro-batch": Variant({"gradient_accumulation_steps": 1}),
    "four micro-batches": Variant(),
    "no clipping": Variant({"max_grad_norm": 0.0}),
    "tight clipping": Variant({"max_grad_norm": 0.05}),
    "decay and warmup": Variant(
        {"weight_decay": 0.1, "warmup_steps": 5, "lr_scheduler_type": "cosine"}
    ),
    "logs every 5 steps": Variant({"logging_steps": 5, "logging_first_step": True}),
    "logs every epoch": Variant({"logging_strategy": "epoch"}),
    "evaluation in between": Variant(
        {
            "eval_strategy": "steps",
            "eval_steps": 4,
            "eval_on_start": True,
            "per_device_eval_batch_size": 5,
        },
        kwargs=lambda: {
            "eval_dataset": Rows(size=13),
            "compute_metrics": metrics,
        },
    ),
    "plateau": Variant(
        {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "metric_for_best_model": "loss",
        },
        kwargs=lambda: {"eval_dataset": Rows(size=6)},
    ),
    "label smoothing": Variant({"label_smoothing_factor": 0.1}),
    "own loss": Variant(subclass=with_own_loss),
    "loss function": Variant(kwargs=lambda: {"compute_loss_func": loss_func}),
    "own training_step": Variant(subclass=with_own_step),
    "own optimizer": Variant(subclass=with_own_optimizer),
    "dropout": Variant({"gradient_accumulation_steps": 1}, model={"dropout": 0.1}),
    "incomplete last window": Variant(
        {"num_train_epochs": 5, "max_steps": -1}, data=lambda: Rows(size=22)
    ),
    "incomplete last batch": Variant(
        {"num_train_epochs": 5, "max_steps": -1}, data=lambda: Rows(size=27)
    ),
    "last batch dropped": Variant(
        {"num_train_epochs": 5, "max_steps": -1, "dataloader_drop_last": True},
        data=lambda: Rows(size=27),
    ),
    "grouped by length": Variant(
        {"train_sampling_strategy": "group_by_length"},
        kwargs=lambda: {"data_collator": pad},
        data=Ragged,
    ),
    "stopped early": Variant(kwargs=lambda: {"callbacks": [StopsEarly()]}),
    "stopped in a window": Variant(kwargs=lambda: {"callbacks": [StopsInAWindow()]}),
    "epochs stopped": Variant(
        {"num_train_epochs": 3, "max_steps": -1},
        kwargs=lambda: {"callbacks": [StopsAtEpoch()]},
    ),
    "counts tokens": Variant({"include_num_input_tokens_seen": "non_padding"}),
    "noise on the embedding": Variant(
        {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 1}
    ),
    "checkpointing": Variant({"activation_checkpointing": True}),
    "gpt2": Variant(name="gpt2", data=lambda: Rows("gpt2")),
    "bert": Variant(name="bert", data=lambda: Rows("bert")),
    "mixtral": Variant(name="mixtral", data=lambda: Rows("mixtral")),
    "tied": Variant({"gradient_accumulation_steps": 1}, model={"tied": True}),
}


def arguments(path: Path, **changes: Any) -> TrainingArguments:
    common: dict[str, Any] = {
        "output_dir": str(path),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 20,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(common | changes))


def run(base: Any, model: Any, variant: Variant, path: Path) -> Any:
    trainer = variant.subclass(base)(
        model=model,
        args=arguments(path, **variant.args),
        train_dataset=variant.data(),
        **variant.kwargs(),
    )
    trainer.train()
    return trainer


def history(trainer: Any) -> list[dict[str, Any]]:
    """What was logged, without what a clock says."""
    return [
        {
            key: value
            for key, value in entry.items()
            if not key.endswith(("runtime", "_per_second"))
        }
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_that_of_transformers(variant: str, tmp_path: Path) -> None:
    chosen = VARIANTS[variant]
    model = make_model(chosen.name, **chosen.model)
    theirs = run(transformers.Trainer, copy.deepcopy(model), chosen, tmp_path / "a")
    place = ("ram", "disk", "mixed")[list(VARIANTS).index(variant) % 3]
    with opened(tmp_path / "store", place):
        ours = run(mt.Trainer, model, chosen, tmp_path / "b")
        if variant == "stopped in a window":
            # transformers counts the losses of the micro-batches that no step followed; here they are not run.
            for trainer in (ours, theirs):
                del trainer.state.log_history[-1]["train_loss"]
        assert history(ours) == history(theirs)
        assert_same(parameters(ours.model), parameters(theirs.model), "parameter")
        assert ours.state.global_step == theirs.state.global_step
        assert ours.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_twenty_steps_from_a_config(place: str, tmp_path: Path) -> None:
    """The public example: a model from its config, trained, evaluated, saved, loaded by transformers."""
    config = make_config("llama")
    args = {"eval_strategy": "steps", "eval_steps": 10, "weight_decay": 0.01}
    torch.manual_seed(0)
    model = from_config(copy.deepcopy(config))
    variant = Variant(args, kwargs=lambda: {"eval_dataset": Rows(size=10)})
    theirs = run(transformers.Trainer, model, variant, tmp_path / "a")
    with opened(tmp_path / "store", place):
        model = mt.from_config(config, seed=0)
        ours = run(mt.Trainer, model, variant, tmp_path / "b")
        assert history(ours) == history(theirs)
        assert len([entry for entry in history(ours) if "loss" in entry]) == 20
        assert_same(parameters(ours.model), parameters(theirs.model), "parameter")
        ours.save_model(str(tmp_path / "saved"))
        mine, other = (trainer.predict(Rows(size=7)) for trainer in (ours, theirs))
        assert ulps(*map(torch.from_numpy, (mine.predictions, other.predictions))) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(parameters(loaded), parameters(theirs.model), "parameter")


def test_what_is_pushed_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary folder with a card; checkpoints stay here."""

    class Hub:
        def create_repo(self, name: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=f"somebody/{name}")

        def upload_folder(self, *, folder_path: str, ignore_patterns: Any, **_: Any) -> str:  # fmt: skip
            assert "checkpoint-*" in ignore_patterns
            ignore = shutil.ignore_patterns(*ignore_patterns)
            shutil.copytree(folder_path, tmp_path / "hub", ignore=ignore)
            return "pushed"

    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    args = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with opened(tmp_path / "store", "disk"):
        trainer: Any = run(mt.Trainer, make_model("llama"), Variant(args), tmp_path / "out")  # fmt: skip
        assert trainer.push_to_hub() == "pushed"
        expected = parameters(trainer.model)
    found = sorted(path.name for path in (tmp_path / "hub").iterdir())
    assert found == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "training_args.bin"
    ]  # fmt: skip
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert_same(parameters(loaded), expected, "parameter")


def test_evaluation_and_prediction_before_training(tmp_path: Path) -> None:
    model = make_model("llama")
    theirs = transformers.Trainer(
        model=copy.deepcopy(model), args=arguments(tmp_path / "a"), train_dataset=Rows()
    )
    with opened(tmp_path / "store", "disk"):
        ours = mt.Trainer(
            model=model, args=arguments(tmp_path / "b"), train_dataset=Rows()
        )
        results = [trainer.evaluate(Rows(size=9)) for trainer in (ours, theirs)]
        assert results[0]["eval_loss"] == results[1]["eval_loss"]
        predictions: list[Any] = [
            trainer.predict(Rows(size=9)) for trainer in (ours, theirs)
        ]
        assert (predictions[0].predictions == predictions[1].predictions).all()
        assert (predictions[0].label_ids == predictions[1].label_ids).all()
        assert (
            predictions[0].metrics["test_loss"] == predictions[1].metrics["test_loss"]
        )
        for trainer in (ours, theirs):
            trainer.train()
        assert history(ours) == history(theirs)


def test_training_twice_goes_on(tmp_path: Path) -> None:
    model = make_model("llama")
    theirs = run(transformers.Trainer, copy.deepcopy(model), Variant(), tmp_path / "a")
    with opened(tmp_path / "store", "disk"):
        ours = run(mt.Trainer, model, Variant(), tmp_path / "b")
        for trainer in (ours, theirs):
            trainer.train()
        assert history(ours) == history(theirs)
        assert_same(parameters(ours.model), parameters(theirs.model), "parameter")


def test_a_second_trainer_on_the_same_model(tmp_path: Path) -> None:
    model = make_model("llama")
    variant = Variant({"max_steps": 3})
    theirs = run(transformers.Trainer, copy.deepcopy(model), variant, tmp_path / "a")
    theirs = run(transformers.Trainer, theirs.model, variant, tmp_path / "a")
    with opened(tmp_path / "store", "disk"):
        ours = run(mt.Trainer, model, variant, tmp_path / "b")
        ours = run(mt.Trainer, ours.model, variant, tmp_path / "b")
        assert history(ours) == history(theirs)
        assert_same(parameters(ours.model), parameters(theirs.model), "parameter")


def test_an_optimizer_and_a_scheduler_of_ones_own(tmp_path: Path) -> None:
    model = make_model("llama")
    trainers = []

    def make(base: Any, model: Any, path: Path) -> Any:
        optimizer = torch.optim.AdamW(
            [{"params": [param]} for param in model.parameters()], lr=1e-2, fused=True
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trainer = base(
            model=model,
            args=arguments(path),
            train_dataset=Rows(),
            optimizers=(optimizer, scheduler),
        )
        trainer.train()
        return trainer

    trainers.append(make(transformers.Trainer, copy.deepcopy(model), tmp_path / "a"))
    with opened(tmp_path / "store", "ram"):
        trainers.append(make(mt.Trainer, model, tmp_path / "b"))
        assert history(trainers[1]) == history(trainers[0])
        assert_same(
            parameters(trainers[1].model), parameters(trainers[0].model), "parameter"
        )


def test_a_model_made_by_a_function(tmp_path: Path) -> None:
    """transformers seeds the function, so that it gives the same weights every time."""

    def model_init() -> Any:
        return from_config(make_config("llama"))

    def make(base: Any, path: Path) -> Any:
        trainer = base(
            model_init=model_init, args=arguments(path), train_dataset=Rows()
        )
        trainer.train()
        return trainer

    theirs = make(transformers.Trainer, tmp_path / "a")
    with opened(tmp_path / "store", "ram"):
        torch.rand(5)
        ours = make(mt.Trainer, tmp_path / "b")
        assert history(ours) == history(theirs)


# -- what is refused --------------------------------------------------------------------------------------

# How to ask for it: arguments, attributes set afterwards, keywords of the trainer.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "save_only_model": ({"save_strategy": "steps"}, {"save_only_model": True}, {}),
    "push_to_hub": ({"save_strategy": "steps"}, {"push_to_hub": True}, {}),
    "optim": ({"optim": "adafactor"}, {}, {}),
    "fp16": ({}, {"fp16": True}, {}),
    "bf16": ({}, {"bf16": True}, {}),
    "fp16_full_eval": ({}, {"fp16_full_eval": True}, {}),
    "bf16_full_eval": ({}, {"bf16_full_eval": True}, {}),
    "fsdp": ({}, {"fsdp": "full_shard"}, {}),
    "deepspeed": ({}, {"deepspeed": {"stage": 3}}, {}),
    "torch_compile": ({}, {"torch_compile": True}, {}),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {}, {}),
    "processes": ({}, {}, {}),
    "optimizer_cls_and_kwargs": (
        {},
        {},
        {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {})},
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, later, kwargs = REFUSED[what]
    args = arguments(tmp_path / "out", **given)
    for name, value in later.items():
        object.__setattr__(args, name, value)
    if what == "processes":
        monkeypatch.setattr(TrainingArguments, "world_size", 2)
    model = make_model("llama")
    before = parameters(model)
    with (
        opened(tmp_path / "store", "ram"),
        pytest.raises(mt.ArgumentError, match=what) as caught,
    ):
        mt.Trainer(model=model, args=args, train_dataset=Rows(), **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    assert 30 < len(text) < 300
    # The model was not touched.
    assert_same(parameters(model), before, "parameter")


def test_every_refusal_is_tried(tmp_path: Path) -> None:
    assert len(_refusals(arguments(tmp_path), {})) == len(REFUSED)


def test_the_default_arguments_are_accepted(tmp_path: Path) -> None:
    with opened(tmp_path / "store", "ram"):
        trainer = mt.Trainer(model=make_model("llama"), train_dataset=Rows())
        assert trainer.args.save_strategy == "no"


def test_without_a_session(tmp_path: Path) -> None:
    with pytest.raises(mt.SessionError, match=r"mt\.init"):
        mt.Trainer(model=make_model("llama"), args=arguments(tmp_path))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = make_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        opened(tmp_path / "store", "ram"),
        pytest.raises(mt.ArgumentError, match="SGD"),
    ):
        mt.Trainer(model=model, args=arguments(tmp_path), optimizers=(optimizer, None))
