"""bf16 compute with an fp32 master: a plain bf16 module's numbers, and an fp32 AdamW's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

import megatrain_nb as mt
from megatrain_nb.codec.split import Split, split
from megatrain_nb.optim import adamw
from megatrain_nb.plan.logits import Chunking
from megatrain_nb.runtime import (
    fill,
    gradients,
    logits,
    pager,
    source,
    update,
)
from megatrain_nb.runtime.piece import What
from megatrain_nb.runtime.slots import SlotDevice
from megatrain_nb.runtime.source import PieceSource
from megatrain_nb.runtime.tensor import source_of, stream_parameter
from megatrain_nb.runtime.threadstate import ThreadState
from megatrain_nb.runtime.window import _streams
from tests.runtime import common
from tests.runtime.common import TinyLM, differing, seeded, window_step, wrapped
from tests.runtime.models import (
    ARCHITECTURES,
    auto_class,
    covering,
    make_batch,
    make_config,
    make_model,
    make_window,
    own_loss,
)
from tests.runtime.plain import (
    CPU,
    FACTORS,
    LR,
    WEIGHT_DECAY,
    Case,
    Trace,
    check_place,
    counted,
    loop_trace,
    loss_of,
    opened,
    parameters,
    tied_name,
    ulps,
    weights_are_kept_as_they_are,
    window_trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    from megatrain_nb.runtime.session import Session

HALF_FACTORS = FACTORS | {"given": ("float32", "bfloat16")}


@dataclass(frozen=True)
class HalfCase(Case):
    """What the model's parameters are before it is wrapped with ``dtype=bfloat16``, beside the rest."""

    given: str = "float32"

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.given}"


@dataclass
class HalfTrace(Trace):
    """The fp32 numbers after each step as well."""

    masters: list[dict[str, Tensor]] = field(default_factory=list)


# Every architecture meets every combination of the values of any two factors.
CASES = [
    HalfCase(name, **row)
    for seed, name in enumerate(ARCHITECTURES)
    for row in covering(2, 100 + seed, HALF_FACTORS)
]


def halves_of(master: Tensor) -> Split:
    """The two halves of fp32 numbers, by the codec that has its own tests."""
    found = Split(*np.zeros((2, master.numel()), np.uint16))
    split(master.detach().contiguous().view(-1).numpy(), found)
    return found


def high_half(master: Tensor) -> Tensor:
    return torch.from_numpy(halves_of(master).hi).view(torch.bfloat16).view_as(master)


def cast(model: Any) -> Any:
    """A plain bf16 model whose buffers are as they were."""
    for param in model.parameters():
        param.data = high_half(param)
    return model


def masters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the fp32 numbers behind the parameters."""
    found = {}
    for name, param in model.named_parameters():
        where = source_of(param)
        assert isinstance(where, PieceSource)
        with where.master().opened(write=False) as values:
            found[name] = values.clone()
    return found


def make_given(case: HalfCase) -> Any:
    model = make_model(case.name, tied=case.tied, dropout=case.dropout)
    return model if case.given == "float32" else model.to(torch.bfloat16)


def untied(model: Any) -> None:
    """Give embedding and head a parameter each: their gradients are then known apart."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


class Reference:
    """A plain bf16 module, the fp32 sums of its gradients, and torch's AdamW on fp32 numbers."""

    def __init__(self, case: HalfCase) -> None:
        self.case = case
        given = make_given(case)
        self.masters = {
            name: torch.nn.Parameter(param.detach().float())
            for name, param in given.named_parameters()
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.model = cast(given) if case.given == "float32" else given
        assert {param.dtype for param in self.model.parameters()} == {torch.bfloat16}
        self.tied = tied_name(case.name) if case.tied else ""
        self.heads: list[Tensor] = []
        if case.tied:
            untied(self.model)

    def params(self) -> dict[str, nn.Parameter]:
        """The bf16 parameters, the head's copy of a tied one left out."""
        named = dict(self.model.named_parameters())
        table = self.model.get_input_embeddings().weight
        return {
            name: table if name == self.tied else named[name] for name in self.masters
        }

    def take(self, sums: dict[str, Tensor]) -> None:
        """Add one micro-batch's gradients, in the order in which the blocks go back."""
        head = self.model.get_output_embeddings().weight
        in_window = self.case.path == "window"
        for name, param in self.params().items():
            grads = [param.grad]
            if name == self.tied:
                grads = [head.grad] if in_window else [head.grad, param.grad]
                assert param.grad is not None
                self.heads.append(param.grad)
            for grad in grads:
                add(sums, name, grad)
        self.model.zero_grad()

    def run(self, steps: int) -> HalfTrace:
        trace, case = HalfTrace(), self.case
        limit = float("inf") if case.max_norm is None else case.max_norm
        for step in range(steps):
            window = make_window(case.name, step, case.accumulation)
            sums: dict[str, Tensor] = {}
            losses = self._losses(window, step, sums)
            if case.path == "window":  # the embedding's turn comes after all heads
                for grad in self.heads:
                    add(sums, self.tied, grad)
            self.heads.clear()
            trace.losses.append(sum(losses[1:], losses[0]).float())
            trace.grads.append({name: grad.clone() for name, grad in sums.items()})
            for name, master in self.masters.items():
                master.grad = sums.get(name)
            norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), limit)
            trace.norms.append(norm.detach())
            self.optimizer.step()
            head = self.model.get_output_embeddings().weight
            with torch.no_grad():
                for name, param in self.params().items():
                    param.copy_(high_half(self.masters[name]))
                    if name == self.tied:
                        head.copy_(param)
            trace.masters.append(
                {name: master.detach().clone() for name, master in self.masters.items()}
            )
            trace.params.append(
                {name: param.detach().clone() for name, param in self.params().items()}
            )
        trace.random_state = torch.get_rng_state()
        return trace

    def _losses(
        self, window: list[Any], step: int, sums: dict[str, Tensor]
    ) -> list[Tensor]:
        """Forward and backward of a window; each micro-batch with the random numbers that it gets in one."""
        case, losses = self.case, []
        own = case.path == "window" and case.accumulation > 1 and case.dropout > 0
        states = (
            _streams(CPU, ThreadState.current(CPU), len(window), step) if own else []
        )
        for index, batch in enumerate(window):
            if own:
                torch.set_rng_state(states[index].rng[0])
            loss = own_loss(self.model, case.name, batch, window)
            loss.backward()
            losses.append(loss.detach())
            if own and index == 0:
                states[0] = ThreadState.current(CPU)
            self.take(sums)
        if own:
            torch.set_rng_state(states[0].rng[0])
        return losses


def add(sums: dict[str, Tensor], name: str, grad: Tensor | None) -> None:
    if grad is not None:
        assert grad.dtype == torch.bfloat16
        sums[name] = grad.float() if name not in sums else sums[name] + grad


def streamed(case: HalfCase, session: Session, steps: int) -> HalfTrace:
    session.keep_share, session.max_kept_bytes = 1.0, None if case.keep else 0
    model, optimizer = mt.wrap(
        make_given(case),
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=case.max_norm,
        dtype=torch.bfloat16,
    )
    windows = [make_window(case.name, step, case.accumulation) for step in range(steps)]
    seen: list[dict[str, Tensor]] = []
    again_after: list[int] = []
    torch.manual_seed(7)
    with counted() as again:

        def after_step() -> None:
            again_after.append(*again)
            seen.append(masters(model))

        if case.path == "window":
            trace = window_trace(model, optimizer, windows, after_step=after_step)
        else:
            trace = loop_trace(
                model, optimizer, windows, loss_of(case.name), after_step=after_step
            )
    assert (again_after[0] == again_after[-1]) == case.keep
    check_place(case.place, session, model)
    return HalfTrace(**vars(trace), masters=seen)


def check(case: HalfCase, directory: Path, steps: int = 3) -> None:
    """Assert that training is the reference's, bit for bit."""
    with opened(directory, case.place, case.device, tile_numel=2048) as session:
        ours = streamed(case, session, steps)
    reference = Reference(case)
    torch.manual_seed(7)
    theirs = reference.run(steps)
    for step in range(steps):
        assert torch.equal(ours.losses[step].float(), theirs.losses[step]), step
        assert differing(ours.grads[step], theirs.grads[step]) == []
        assert torch.equal(ours.norms[step], theirs.norms[step])
        distances = {
            name: ulps(ours.masters[step][name], master)
            for name, master in theirs.masters[step].items()
        }
        assert max(distances.values()) == 0, distances
        assert differing(ours.params[step], theirs.params[step]) == []
    assert torch.equal(ours.random_state, theirs.random_state)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_a_plain_bf16_module(
    case: HalfCase, tmp_path: Path
) -> None:
    check(case, tmp_path)


def test_the_cases_cover_what_they_should() -> None:
    assert 50 <= len(CASES) <= 100
    for name in ARCHITECTURES:
        mine = [case for case in CASES if case.name == name]
        for factor, values in HALF_FACTORS.items():
            assert {getattr(case, factor) for case in mine} == set(values)


# -- the comparison notices every broken mechanism --------------------------------------------------------


def gradients_add_up_in_bf16(patch: pytest.MonkeyPatch) -> None:
    take = gradients.Gradients.take

    def rounded(self: Any, block: Any, bound: Any, slots: Any) -> None:
        for total in bound.sums.values():
            total.copy_(total.bfloat16())
        take(self, block, bound, slots)

    patch.setattr(gradients.Gradients, "take", rounded)


def lower_halves_are_not_written(patch: pytest.MonkeyPatch) -> None:
    write = pager.Pager.write_tile

    def skip(self: Any, piece: Any, start: int, slab: Any) -> None:
        if piece.what is What.LOW:
            self.pool.give(slab)
        else:
            write(self, piece, start, slab)

    patch.setattr(pager.Pager, "write_tile", skip)


def lower_halves_are_not_read(patch: pytest.MonkeyPatch) -> None:
    inner = adamw.update

    def without(param: Any, *args: Any, **kwargs: Any) -> None:
        param.lo[:] = 0
        inner(param, *args, **kwargs)

    patch.setattr(update, "update", without)


def a_tile_of_lower_halves_is_shifted(patch: pytest.MonkeyPatch) -> None:
    read = pager.Pager.read_tile

    def shifted(self: Any, piece: Any, start: int, stop: int, **kwargs: Any) -> Any:
        if piece.what is What.LOW and start == self.tile_numel:
            return read(self, piece, 0, stop - start, **kwargs)
        return read(self, piece, start, stop, **kwargs)

    patch.setattr(pager.Pager, "read_tile", shifted)


def the_model_moves_in_rounded(patch: pytest.MonkeyPatch) -> None:
    def rounded(master: Any, halves: Split) -> None:
        split(master, halves)
        halves.lo[:] = 0

    for module in (fill, source):
        patch.setattr(module, "split", rounded)


def pending_sums_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    sum_gradient = gradients.Gradients.sum

    def forgetful(self: Any, param: Any, *args: Any) -> None:
        self._executor.norms.pop(param, None)
        sum_gradient(self, param, *args)

    patch.setattr(gradients.Gradients, "sum", forgetful)


def slots_keep_old_weights(patch: pytest.MonkeyPatch) -> None:
    ready = SlotDevice.ready
    seen: dict[int, Tensor] = {}

    def stale(self: Any, slot: Any) -> Tensor:
        flat = ready(self, slot)
        return flat.copy_(seen.setdefault(len(flat), flat.clone()))

    patch.setattr(SlotDevice, "ready", stale)


HURT = HalfCase("llama", accumulation=3, clipping=True, place="disk")

TEETH: dict[Callable[[pytest.MonkeyPatch], None], HalfCase] = {
    gradients_add_up_in_bf16: HURT,
    lower_halves_are_not_written: HURT,
    lower_halves_are_not_read: replace(HURT, place="ram"),
    a_tile_of_lower_halves_is_shifted: HURT,
    the_model_moves_in_rounded: HURT,
    pending_sums_are_forgotten: replace(HURT, path="loop"),
    slots_keep_old_weights: replace(HURT, device="slots"),
    weights_are_kept_as_they_are: replace(HURT, keep=True),
}


@pytest.mark.parametrize("broken", TEETH, ids=lambda broken: str(broken.__name__))
def test_the_comparison_has_teeth(
    broken: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(TEETH[broken], tmp_path / "whole")
    broken(monkeypatch)
    with pytest.raises((AssertionError, IndexError, mt.ModelError)):
        check(TEETH[broken], tmp_path / "broken")


# -- what a user sees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_made_in_the_store_keeps_its_fp32_numbers(
    name: str, place: str, tmp_path: Path
) -> None:
    config = make_config(name, tied=name == "gpt2")
    torch.manual_seed(3)
    plain: Any = auto_class(name).from_config(copy.deepcopy(config))
    after = torch.get_rng_state()
    with opened(tmp_path, place):
        model: Any = mt.from_config(
            config, auto_class(name), dtype=torch.bfloat16, seed=3
        )
        assert torch.equal(torch.get_rng_state(), after)
        assert differing(masters(model), parameters(plain)) == []
        buffers = dict(plain.named_buffers())
        assert differing(dict(model.named_buffers()), buffers) == []
        cast(plain)
        assert differing(parameters(model), parameters(plain)) == []
        assert model.dtype == model.config.dtype == torch.bfloat16
        batch = make_batch(name, 0)
        with torch.no_grad():
            mine, other = model.eval()(**batch), plain.eval()(**batch)
        assert torch.equal(mine.logits, other.logits)
        mt.wrap(model, dtype="bfloat16")  # it is
        with pytest.raises(mt.ArgumentError, match=r"as torch\.bfloat16 already"):
            mt.wrap(model, dtype=torch.float32)


def test_a_write_sets_the_master_where_it_changes_the_value(tmp_path: Path) -> None:
    with common.opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM), dtype=torch.bfloat16)
        window_step(model, optimizer, 0)
        before = masters(model)["head.weight"]
        assert not torch.equal(before, before.bfloat16().float())
        weight = model.head.weight
        with torch.no_grad():
            weight[3] = 0.5
            weight.mul_(1)  # changes no value
            weight.copy_(weight.clone())
            weight[4, :2] *= 2
        after = masters(model)["head.weight"]
        expected = before.clone()
        expected[3] = 0.5
        expected[4, :2] = 2 * high_half(before)[4, :2].float()
        assert torch.equal(after, expected)
        assert torch.equal(weight, high_half(expected))
        # And training goes on from there.
        window_step(model, optimizer, 1)
        assert not torch.equal(masters(model)["head.weight"], after)


def test_gradients_and_moments_are_fp32(tmp_path: Path) -> None:
    with common.opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM).bfloat16())
        common.loss_of(model, common.batch(0)).backward()
        weight = model.head.weight
        assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
        with torch.no_grad():
            weight.grad[:] = 0.3
        optimizer.step()
        state = optimizer.state[weight]
        assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {
            torch.float32
        }
        expected = torch.full(weight.shape, 0.03)
        assert torch.allclose(state["exp_avg"].clone(), expected, rtol=1e-6)


def test_saved_folders(tmp_path: Path) -> None:
    model = make_model("llama", tied=True)
    batch = make_batch("llama", 0)
    with opened(tmp_path / "s", "disk"):
        model, optimizer = mt.wrap(model, dtype=torch.bfloat16, lr=LR)
        mt.train_step(model, optimizer, [batch])
        exact, halves = masters(model), parameters(model)
        mt.save_pretrained(model, tmp_path / "half")
        mt.save_pretrained(model, tmp_path / "exact", dtype=torch.float32)
        with pytest.raises(mt.ArgumentError, match=r"torch\.float64"):
            mt.save_pretrained(model, tmp_path / "half", dtype=torch.float64)
        for folder, dtype, expected in (
            ("half", torch.bfloat16, halves),
            ("exact", torch.float32, exact),
        ):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / folder
            )
            assert {param.dtype for param in loaded.parameters()} == {dtype}
            assert loaded.config.dtype == dtype
            assert differing(parameters(loaded), expected) == []
        plain = mt.unwrap(model)
        assert all(type(param) is torch.nn.Parameter for param in plain.parameters())
        assert differing(parameters(plain), halves) == []
        plain(**batch).loss.backward()
    # An fp32 model may be written as bf16: rounded, as torch does.
    with opened(tmp_path / "s", "disk"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exact")
        mt.wrap(again)
        mt.save_pretrained(again, tmp_path / "rounded", dtype="bfloat16")
        assert again.config.dtype == torch.float32
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rounded")
    rounded = {name: value.bfloat16() for name, value in exact.items()}
    assert differing(parameters(loaded), rounded) == []


def test_a_bf16_model_may_train_in_fp32(tmp_path: Path) -> None:
    plain = seeded(TinyLM).bfloat16().float()
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    common.plain_step(plain, theirs, 0)
    with common.opened(tmp_path):
        model, optimizer = wrapped(seeded(TinyLM).bfloat16(), dtype=torch.float32)
        window_step(model, optimizer, 0)
        assert differing(common.snapshot(plain), common.snapshot(model)) == []


class Mixed(common.Layer):
    """A layer that computes its norm in fp32, as some models do."""

    def forward(self, x: Tensor, *_: Any) -> Any:
        normed = self.norm(x.float()).to(x.dtype)
        return x + self.down(torch.tanh(self.up(normed)))


def test_fp32_and_bf16_parameters_in_one_block(tmp_path: Path) -> None:
    def make() -> Any:
        model = TinyLM(Mixed).bfloat16()
        for layer in model.layers:
            layer.norm.float()
        return model

    plain = seeded(make)
    common.loss_of(plain, common.batch(0)).backward()
    with common.opened(tmp_path):
        model, optimizer = wrapped(seeded(make))
        common.loss_of(model, common.batch(0)).backward()
        for (name, mine), other in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert mine.dtype == other.dtype, name
            assert torch.equal(mine.grad, other.grad.float()), name
        optimizer.step()
        status = optimizer.offloaded.session.status()
        assert "of them compute in bf16" in str(status)


def test_fp32_and_bf16_parameters_kept_or_computed_again(tmp_path: Path) -> None:
    found = []
    for kept_bytes in (0, None):
        with common.opened(tmp_path) as session:
            session.keep_share, session.max_kept_bytes = 1.0, kept_bytes
            model = seeded(lambda: TinyLM(Mixed)).bfloat16()
            for layer in model.layers:
                layer.norm.float()
            model, optimizer = wrapped(model)
            for step in range(3):
                window_step(model, optimizer, step)
            found.append(masters(model) | common.snapshot(model, optimizer))
    assert differing(*found) == []


def test_an_optimizer_is_taken_over_with_its_state(tmp_path: Path) -> None:
    """Moments that an fp32 model had; from then on the numbers are those of an fp32 AdamW."""
    model = seeded(TinyLM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    common.plain_step(model, optimizer, 0)
    numbers = copy.deepcopy(model)
    theirs = torch.optim.AdamW(numbers.parameters(), lr=LR, fused=True)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with common.opened(tmp_path):
        model, ours = wrapped(model, optimizer, dtype=torch.bfloat16)
        common.loss_of(model, common.batch(5)).backward()
        for param, number in zip(model.parameters(), numbers.parameters(), strict=True):
            number.grad = param.grad.clone()
        ours.step()
        theirs.step()
        expected = {name: x.detach() for name, x in numbers.named_parameters()}
        assert differing(masters(model), expected) == []


def test_there_is_no_second_copy(tmp_path: Path) -> None:
    """Two bytes that stream, two beside the moments, and nothing else."""
    with common.opened(tmp_path) as session:
        model, optimizer = wrapped(seeded(TinyLM).bfloat16())
        frozen = model.layers[1]
        frozen.requires_grad_(False)
        moved_in = session.store.keys()
        assert all("/weights/" in key for key in moved_in)  # no lower halves yet
        for step in range(2):
            window_step(model, optimizer, step)
        optimizer.finish()
        record = model._megatrain
        record.executor.rest()
        record.pager.barrier()
        sizes: dict[str, int] = {}
        for key in session.store.keys():  # noqa: SIM118
            kind, pack = key.split("/")[1:3]
            if record.pager.packs[int(pack)].name == "layers.1":
                assert kind == "weights"
            else:
                sizes[kind] = sizes.get(kind, 0) + session.store.nbytes(key)
        numel = sum(
            pack.numel for pack in record.pager.packs if pack.name != "layers.1"
        )
        assert sizes == {
            "weights": 2 * numel,
            "low": 2 * numel,
            "exp_avg": 4 * numel,
            "exp_avg_sq": 4 * numel,
        }
        assert session.pool.in_use_bytes == 0
        assert "compute in bf16 with an fp32 master" in str(session.status())


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_model_that_could_not_move_in_is_as_it_was(
    given: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(TinyLM).to(given)
    before = common.snapshot(model)
    moved: list[Any] = []

    def fails(param: Any, *args: Any) -> None:
        moved.append(param)
        if len(moved) == 9:
            raise mt.StoreError("no more")
        stream_parameter(param, *args)

    monkeypatch.setattr(fill, "stream_parameter", fails)
    with common.opened(tmp_path), pytest.raises(mt.StoreError, match="no more"):
        mt.wrap(model, dtype=torch.bfloat16)
    assert len(moved) == 9
    assert differing(before, common.snapshot(model)) == []


def test_refusals(tmp_path: Path) -> None:
    with common.opened(tmp_path):
        for dtype in (torch.float16, "float16", 3):
            with pytest.raises(mt.ArgumentError, match="bf16 compute"):
                wrapped(seeded(TinyLM), dtype=dtype)
        model = seeded(TinyLM)
        model.scale = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(mt.ModelError, match="scale lies beside the blocks"):
            wrapped(model, dtype=torch.bfloat16)
        model.scale.requires_grad_(False)
        model, _ = wrapped(model, dtype=torch.bfloat16)
        assert model.scale.dtype == torch.bfloat16


def test_the_trainer_takes_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = [make_window("llama", step, 2) for step in range(2)]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        save_strategy="no",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [
        {key: value[row] for key, value in batch.items()}
        for window in windows
        for batch in window
        for row in range(2)
    ]
    with opened(tmp_path / "a", "disk"):
        trainer = mt.Trainer(
            make_model("llama"), arguments, train_dataset=rows, dtype=torch.bfloat16
        )
        in_order = torch.utils.data.SequentialSampler(rows)
        monkeypatch.setattr(trainer, "_get_train_sampler", lambda *_: in_order)
        trainer.train()
        ours = masters(trainer.offloaded.model)
    with opened(tmp_path / "b", "disk"):
        model, optimizer = mt.wrap(
            make_model("llama"),
            dtype=torch.bfloat16,
            lr=LR,
            weight_decay=0,
            max_grad_norm=0.5,
        )
        for window in windows:
            mt.train_step(model, optimizer, window)
        assert differing(ours, masters(model)) == []


@pytest.mark.parametrize("path", ["window", "loop"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_logits_in_chunks(
    name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of three tokens: the head's gradient adds up in fp32, everything else is rounded as often."""
    case = HalfCase(name, accumulation=3, path=path)
    cut = mock.Mock(return_value=Chunking(3, 10**9))
    monkeypatch.setattr(logits, "cut_logits", cut)
    with opened(tmp_path, "disk", tile_numel=2048) as session:
        ours = streamed(case, session, 2)
        assert "in chunks of 3 tokens" in str(session.status())
    assert cut.called
    theirs = Reference(case).run(1)
    assert torch.allclose(ours.losses[0], theirs.losses[0], rtol=2**-8)
    for key, gradient in theirs.grads[0].items():
        largest = float(gradient.abs().max())
        difference = float((ours.grads[0][key] - gradient).abs().max())
        assert difference <= 2**-5 * largest, (key, difference / largest)
