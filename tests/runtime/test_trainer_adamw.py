"""``TrainingArguments`` of AdamW keep their meaning and reach the kernels, whatever the moments are stored in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM
from transformers.training_args import OptimizerNames

import megatrain_nb as mt
from megatrain_nb.runtime.trainer import check_arguments
from tests.codec.common import QUANTISED
from tests.runtime.common import differing, snapshot
from tests.runtime.plain import opened
from tests.runtime.test_codecs import Reference, codecs_of, codes, llama
from tests.runtime.test_trainer import arguments

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SETTINGS: dict[str, Any] = {
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.2,
}
OURS = ("adamw_torch", "adamw_torch_fused")


class TwinAdamW(torch.optim.AdamW):
    """Updates by the codec's twin in numpy, parameter group by parameter group."""

    def __init__(self, groups: Any, reference: Reference) -> None:
        super().__init__(groups)
        self.reference = reference

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.reference.step(self.param_groups, max_norm=math.inf)


def with_twin(codec: str) -> Any:
    """Return transformers' Trainer, its own groups and settings, on encoded moments."""

    class PlainTrainer(transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            made = super().create_optimizer(model)
            assert isinstance(self.model, nn.Module)
            found = Reference(self.model, codec, seed=self.args.seed)
            self.optimizer = TwinAdamW(made.param_groups, found)
            return self.optimizer

    return PlainTrainer


def run(base: Any, path: Path, steps: int = 3, **args: Any) -> Any:
    """Return a trainer after some steps of a Llama that has biases, with two micro-batches and clipping.

    Among its small parameters, which keep fp32 moments, are some that a tile cuts where no block of codes would end.
    """
    config = llama()
    config.attention_bias = config.mlp_bias = True
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 97, (12, 8), generator=torch.Generator().manual_seed(0))
    trainer = base(
        model=model,
        args=arguments(
            path / "out",
            gradient_accumulation_steps=2,
            max_steps=steps,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            **args,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )
    trainer.train()
    return trainer


def ours(path: Path, codec: Any, **args: Any) -> tuple[dict[str, Tensor], Any]:
    """Return parameters and moments."""
    with opened(path / "store", "disk", compression=codec) as _:
        trainer = run(mt.Trainer, path, **args)
        return snapshot(trainer.model), codes(trainer.model)


def moments(trainer: Any) -> dict[str, bytes]:
    """Both moments of each parameter of a plain trainer, as `codes` gives fp32 ones."""
    state = trainer.optimizer.state
    return {
        name: b"".join(
            state[param][key].numpy().tobytes() for key in ("exp_avg", "exp_avg_sq")
        )
        for name, param in trainer.model.named_parameters()
    }


@pytest.mark.parametrize("optim", OURS)
def test_on_fp32_moments_as_transformers(tmp_path: Path, optim: str) -> None:
    """Both names give the bits of torch's fused AdamW; the other one of torch rounds in another order."""
    found = ours(tmp_path, False, optim=optim, **SETTINGS)
    fused = run(transformers.Trainer, tmp_path, optim="adamw_torch_fused", **SETTINGS)
    assert differing(found[0], snapshot(fused.model)) == []
    assert found[1] == moments(fused)
    plain = run(transformers.Trainer, tmp_path, optim=optim, **SETTINGS)
    for name, param in plain.model.named_parameters():
        assert torch.allclose(found[0][name], param, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize(("name", "optim"), [*zip(QUANTISED, OURS * 2, strict=True)])
def test_on_encoded_moments_as_the_twin(tmp_path: Path, name: str, optim: str) -> None:
    found = ours(tmp_path, name, optim=optim, **SETTINGS)
    plain = run(with_twin(name), tmp_path, optim=optim, **SETTINGS)
    assert differing(found[0], snapshot(plain.model)) == []
    data = plain.optimizer.optimizer.reference.data
    assert found[1] == {key: value.tobytes() for key, value in data.items()}


@pytest.mark.parametrize("missing", SETTINGS)
def test_every_setting_counts(tmp_path: Path, missing: str) -> None:
    """What the comparisons above see: without one of them, weights and encoded moments are others."""
    fewer = {key: value for key, value in SETTINGS.items() if key != missing}
    every = ours(tmp_path / "all", "4bit", **SETTINGS)
    other = ours(tmp_path / "fewer", "4bit", **fewer)
    assert differing(every[0], other[0])
    assert every[1] != other[1]


@pytest.mark.parametrize("codec", [False, "4bit"])
def test_norms_and_biases_do_not_decay(tmp_path: Path, codec: Any) -> None:
    with opened(tmp_path / "store", "disk", compression=codec) as _:
        trainer = run(mt.Trainer, tmp_path, steps=1, **SETTINGS)
        names = {param: name for name, param in trainer.model.named_parameters()}
        decaying, others = trainer.streamed_optimizer.param_groups
        assert (decaying["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
        found = {names[param] for param in others["params"]}
        assert found == {n for n in names.values() if "norm" in n or "bias" in n}
        assert len(found) == 2 * (2 + 4 + 3) + 1
        for group in (decaying, others):
            assert group["betas"] == (0.8, 0.95)
            assert group["eps"] == 1e-4
        assert ("4bit" in codecs_of(trainer.model).values()) == bool(codec)


def test_settings_that_hurt_a_codec_are_told(tmp_path: Path) -> None:
    with opened(tmp_path / "store", "ram", compression="3bit") as session:
        run(mt.Trainer, tmp_path, steps=1, adam_beta2=0.9999)
        assert any("not with 0.9 and 0.9999" in note for note in session.notes)


@pytest.mark.parametrize("optim", [x.value for x in OptimizerNames])
def test_every_other_optimizer_is_refused(tmp_path: Path, optim: str) -> None:
    """Before anything is made; also those that are AdamW with other moments."""
    args = arguments(tmp_path, optim=optim)
    if optim in OURS:
        check_arguments(args, {})
        return
    with pytest.raises(mt.ArgumentError) as caught:
        check_arguments(args, {})
    text = str(caught.value)
    for part in (f"optim='{optim}'", *OURS, "mt.init(optimizer_compression=...)"):
        assert part in text
