"""Head and loss in chunks: plain PyTorch's loss and gradients, and the whole logits never there."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import megatrain_nb as mt
from megatrain_nb.errors import ModelError
from megatrain_nb.plan.logits import Chunking
from megatrain_nb.runtime import chunks, logits
from megatrain_nb.runtime.chunks import LossTask, _Pass
from megatrain_nb.runtime.offload import offloaded_model
from tests.runtime.common import report_of
from tests.runtime.models import VOCABULARY, make_batch, make_model, make_window
from tests.runtime.plain import (
    Case,
    note,
    opened,
    plain_trace_of,
    streamed_trace,
    ulps_of_largest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Some tens of tokens are added up in another order, and every layer below adds its own sums to that: in ulp of
# the largest gradient of a parameter. Measured: at most 9.
ALLOWED_ULP = 64
CHUNK = 3

CASES = [
    Case(name, accumulation=accumulation, tied=tied, path=path, device=device)
    for name, tied in (
        ("llama", False),
        ("llama", True),
        ("qwen3", False),
        ("gpt2", True),
        ("gemma2", True),
        ("granite", False),
        ("cohere", True),
        ("opt", False),
        ("mixtral", False),
        ("t5", False),
    )
    for accumulation, path, device in (
        (1, "window", "host"),
        (4, "window", "host"),
        (4, "loop", "host"),
        (4, "window", "slots"),
        (1, "loop", "slots"),
    )
]


class Seen:
    """The largest number of rows of logits that a linear map has made at once."""

    rows = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """No logits fit; notes how many exist at once."""
    seen = Seen()

    def noted(func: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            if result.shape[-1] == VOCABULARY:
                seen.rows = max(seen.rows, result.numel() // VOCABULARY)
            return result

        return call

    for place, name in ((functional, "linear"), (torch, "mm"), (torch, "addmm")):
        monkeypatch.setattr(place, name, noted(getattr(place, name)))
    monkeypatch.setattr(logits, "cut_logits", lambda **_: Chunking(CHUNK, 5 * 10**9))
    return seen


def assert_close(
    ours: dict[str, Tensor], plain: dict[str, Tensor], allowed: float = ALLOWED_ULP
) -> None:
    assert ours.keys() == plain.keys()
    top = max(float(value.abs().max()) for value in plain.values())
    for name, value in plain.items():
        if not value.any():
            assert not ours[name].any(), name
            continue
        if float(value.abs().max()) < top * 2**-20:
            # Zero but for rounding (a key's bias moves all of a query's scores alike).
            assert float(ours[name].abs().max()) < top * 2**-20, name
            continue
        distance = ulps_of_largest(ours[name], value)
        assert distance <= allowed, (name, distance)
        if allowed == ALLOWED_ULP:
            note("gradient, logits in chunks (of its largest magnitude)", distance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_plain_pytorch(
    case: Case, tmp_path: Path, seen: Seen
) -> None:
    with opened(tmp_path, case.place, case.device) as session:
        ours = streamed_trace(case, session, steps=2)
    assert seen.rows == CHUNK
    plain = plain_trace_of(case, steps=2)
    assert_close(ours.grads[0], plain.grads[0])
    assert ulps_of_largest(ours.losses[0], plain.losses[0]) <= 8
    # After an update that divides by the gradient's own size, rounding is no bound any more; the loss still is.
    assert torch.allclose(ours.losses[1], plain.losses[1], rtol=1e-4)


def test_logits_that_fit_are_never_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(logits, "_make", refuse)
    case = Case("gemma2", accumulation=2)
    with opened(tmp_path, "disk") as session:
        ours = streamed_trace(case, session, steps=1)
        assert "would not fit" not in str(session.status())
    plain = plain_trace_of(case, steps=1)
    for name, gradient in plain.grads[0].items():
        assert torch.equal(ours.grads[0][name], gradient)


# -- one micro-batch, compared by hand -----------------------------------------------------------------------


@contextmanager
def pair(
    path: Path, name: str = "llama", **changes: Any
) -> Iterator[tuple[Any, Any, Any]]:
    """A plain model, the same one streamed, and its optimizer."""
    plain = make_model(name, **changes)
    with opened(path, "disk"):
        streamed, optimizer = mt.wrap(copy.deepcopy(plain))
        yield plain, streamed, optimizer


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: param.grad.detach().clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def window_grads(
    model: Any, optimizer: Any, windows: list[Any], loss_fn: Any = None
) -> tuple[float, dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    hook = optimizer.register_step_pre_hook(lambda *_: found.append(grads(model)))
    loss = mt.train_step(model, optimizer, windows, loss_fn).loss
    hook.remove()
    return loss, found[0]


def custom(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """A loss of the user's own over logits and labels, shifted here."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        out = model(**inputs).logits
        return loss(out[:, :-1], batch["labels"][:, 1:])

    return loss_fn


def flat(**kwargs: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: functional.cross_entropy(
        x.reshape(-1, x.size(-1)), y.reshape(-1), **kwargs
    )


def two_losses(x: Tensor, y: Tensor) -> Tensor:
    return flat()(x, y) * 0.3 + flat(reduction="sum", label_smoothing=0.2)(x * 0.5, y)


def weighted(x: Tensor, y: Tensor) -> Tensor:
    each = flat(reduction="none")(x, y)
    return (each * torch.linspace(0.1, 2, len(each))).sum()


def one_is_not_used(x: Tensor, y: Tensor) -> Tensor:
    flat()(x.flatten(0, 1), y)
    return flat()(x, y)


UNDERSTOOD = {
    "mean": flat(),
    "sum": flat(reduction="sum"),
    "label smoothing": flat(label_smoothing=0.1),
    "another index is ignored": lambda x, y: flat(ignore_index=5)(
        x, y.masked_fill(y == -100, 5)
    ),
    "scaled, shifted, capped": lambda x, y: flat()(
        torch.tanh(2.0 * x / 3 + 0.5) * torch.tensor(4.0), y
    ),
    "a bias for each class": lambda x, y: flat()(
        x + torch.linspace(-1, 1, VOCABULARY), y
    ),
    "in double": lambda x, y: flat()(x.double(), y).float(),
    "a loss for each token": weighted,
    "two losses": two_losses,
    "one loss is not used": one_is_not_used,
    "only some tokens": lambda x, y: flat()(x[:, 2:-1:2].contiguous(), y[:, 2:-1:2]),
    "scaled by another number each time": lambda x, y: flat()(x, y) * float(y[0, -1]),
    "a module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
}
NOT_UNDERSTOOD = {
    "classes in the middle": lambda x, y: functional.cross_entropy(
        x.transpose(1, 2), y
    ),
    "log_softmax": lambda x, y: functional.nll_loss(
        x.log_softmax(-1).flatten(0, 1), y.flatten()
    ),
    "weights of classes": flat(weight=torch.linspace(0.5, 2, VOCABULARY)),
    "probabilities": lambda x, y: functional.cross_entropy(
        x[0], torch.eye(VOCABULARY)[y[0].clamp(0)]
    ),
    "some classes": lambda x, y: flat()(x[..., :40], y.clamp(max=39)),
    "temperature that learns": lambda x, y: flat()(
        x * torch.ones((), requires_grad=True), y
    ),
    "z-loss": lambda x, y: flat()(x, y) + 0.1 * x.logsumexp(-1).pow(2).mean(),
    "one token": lambda x, y: x[:, -1].square().mean(),
    "in half": lambda x, y: flat()(x.bfloat16(), y).float(),
}


@pytest.mark.parametrize("path", ["window", "loop"])
@pytest.mark.parametrize("kind", [*UNDERSTOOD, *NOT_UNDERSTOOD])
def test_a_loss_of_the_users_own(
    kind: str, path: str, tmp_path: Path, seen: Seen
) -> None:
    loss_fn = custom((UNDERSTOOD | NOT_UNDERSTOOD)[kind])
    window = make_window("llama", 0, 3)
    with pair(tmp_path) as (plain, streamed, optimizer):
        losses = [loss_fn(plain, batch) for batch in window]
        for loss in losses:
            loss.backward()
        seen.rows = 0
        if path == "window":
            ours, found = window_grads(streamed, optimizer, window, loss_fn)
        else:
            total = 0.0
            for batch in window:
                loss = loss_fn(streamed, batch)
                loss.backward()
                total += float(loss.detach())
            ours, found = total, grads(streamed)
    expected = float(sum(loss.detach() for loss in losses))
    assert ours == pytest.approx(expected, rel=1e-5)
    if kind == "in half":  # bf16 rounds what differs in fp32 by an ulp to its own
        assert_close(found, grads(plain), allowed=2**20)
    else:
        assert_close(found, grads(plain))
    if kind in UNDERSTOOD:
        assert seen.rows == CHUNK
    else:
        assert seen.rows > 0


@pytest.mark.parametrize("path", ["window", "loop"])
def test_a_micro_batch_without_any_valid_label(
    path: str, tmp_path: Path, seen: Seen
) -> None:
    window = make_window("llama", 0, 3)
    window[1]["labels"][:] = -100
    number = torch.tensor(20)
    with pair(tmp_path) as (plain, streamed, optimizer):
        losses = [plain(**batch, num_items_in_batch=number).loss for batch in window]
        for loss in losses:
            loss.backward()
        seen.rows = 0

        def loss_fn(model: Any, batch: Any) -> Any:
            return model(**batch, num_items_in_batch=number).loss

        if path == "window":
            ours, found = window_grads(streamed, optimizer, window, loss_fn)
        else:
            for batch in window:
                loss_fn(streamed, batch).backward()
            ours, found = float(sum(x.detach() for x in losses)), grads(streamed)
        assert seen.rows == CHUNK
    assert ours == pytest.approx(float(sum(x.detach() for x in losses)), rel=1e-5)
    assert_close(found, grads(plain))


def test_nothing_is_valid_at_all(tmp_path: Path, seen: Seen) -> None:
    """A mean over nothing is NaN with gradients of zero, as in plain PyTorch."""
    batch = make_batch("llama", 0)
    batch["labels"][:] = -100
    with pair(tmp_path) as (plain, streamed, _):
        expected = plain(**batch).loss
        expected.backward()
        loss = streamed(**batch).loss
        loss.backward()
        assert torch.isnan(loss)
        assert torch.isnan(expected)
        assert_close(grads(streamed), grads(plain))


@pytest.mark.parametrize("frozen", ["head", "body"])
@pytest.mark.parametrize("path", ["window", "loop"])
def test_frozen_parameters(frozen: str, path: str, tmp_path: Path, seen: Seen) -> None:
    plain = make_model("llama")
    for name, param in plain.named_parameters():
        param.requires_grad_((frozen == "head") != name.startswith("lm_head"))
    streamed = copy.deepcopy(plain)
    window = make_window("llama", 0, 2)
    loss_fn = custom(flat(reduction="sum"))
    for batch in window:
        loss_fn(plain, batch).backward()
    seen.rows = 0
    with opened(tmp_path, "disk"):
        streamed, optimizer = mt.wrap(streamed)
        if path == "window":
            _, found = window_grads(streamed, optimizer, window, loss_fn)
        else:
            for batch in window:
                loss_fn(streamed, batch).backward()
            found = grads(streamed)
    assert seen.rows == CHUNK
    assert_close(found, grads(plain))


def test_a_bias_of_the_head(tmp_path: Path, seen: Seen) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(
        nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
    )
    windows = [torch.randint(0, VOCABULARY, (2, 9)) for _ in range(3)]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        out = model(batch["ids"])
        return functional.cross_entropy(out.flatten(0, 1), batch["ids"].flatten())

    for ids in windows:
        loss_fn(plain, {"ids": ids}).backward()
    seen.rows = 0
    with opened(tmp_path, "disk"):
        streamed, optimizer = mt.wrap(copy.deepcopy(plain))
        batches = [{"ids": ids} for ids in windows]
        _, found = window_grads(streamed, optimizer, batches, loss_fn)
    assert seen.rows == CHUNK
    assert_close(found, grads(plain))


def test_without_a_known_home_autograd_carries_the_gradients() -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, VOCABULARY)
    hidden = torch.randn(10, 8, requires_grad=True)
    target = torch.randint(0, VOCABULARY, (10,))
    functional.cross_entropy(head(hidden), target).backward()
    expected = [x.grad for x in (hidden, head.weight, head.bias)]
    for x in (hidden, head.weight, head.bias):
        x.grad = None
    task = LossTask(torch.arange(10), target, (), -100, "mean", 0.0, CHUNK)
    task.run(hidden, head.weight, head.bias).backward()
    for x, grad in zip((hidden, head.weight, head.bias), expected, strict=True):
        assert grad is not None
        assert torch.allclose(x.grad, grad, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]


# -- reading the logits ---------------------------------------------------------------------------------------


def test_logits_can_be_read_after_the_loss(tmp_path: Path, seen: Seen) -> None:
    batch = make_batch("gemma2", 0)
    with pair(tmp_path, "gemma2") as (plain, streamed, optimizer):
        expected = plain(**batch).logits
        outputs = streamed(**batch)
        assert isinstance(outputs.logits, logits.Logits)
        assert outputs.logits.shape == expected.shape
        assert outputs.logits.requires_grad
        assert seen.rows > CHUNK  # the plain model
        outputs.loss.backward()
        assert torch.equal(outputs.logits.argmax(-1), expected.argmax(-1))
        assert torch.allclose(outputs.logits.detach(), expected, rtol=1e-5)
        assert "tensor(" in repr(outputs.logits)
        optimizer.step()
        outputs = streamed(**batch)
        outputs.loss.backward()
        optimizer.step()
        with pytest.raises(ModelError, match=r"before\s+optimizer.step"):
            outputs.logits.argmax(-1)


def test_logits_can_be_read_inside_a_window(tmp_path: Path, seen: Seen) -> None:
    window = make_window("llama", 0, 3)
    read: list[Tensor] = []

    def loss_fn(model: Any, batch: Any) -> Any:
        outputs = model(**batch)
        with torch.no_grad():
            read.append(outputs.logits.float().argmax(-1))
        return outputs.loss + outputs.logits.square().mean()

    with pair(tmp_path) as (plain, streamed, optimizer):
        for batch in window:
            loss_fn(plain, batch).backward()
        expected, read = read, []
        _, found = window_grads(streamed, optimizer, window, loss_fn)
        assert_close(found, grads(plain))
    assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))


def test_changes_in_place(tmp_path: Path, seen: Seen) -> None:
    batch = make_batch("llama", 0)
    inputs = {key: x for key, x in batch.items() if key != "labels"}

    def loss(model: Any) -> Tensor:
        out = model(**inputs).logits
        out[..., 7] = -5.0
        return flat()(out[:, :-1], batch["labels"][:, 1:])

    with pair(tmp_path) as (plain, streamed, _):
        loss(plain).backward()
        loss(streamed).backward()
        assert_close(grads(streamed), grads(plain))
        out = streamed(**inputs).logits
        with pytest.raises(ModelError, match="changed in place"):
            out[:, :-1].zero_()
        part = out[:, :-1]
        out.detach().zero_()
        with pytest.raises(ModelError, match="changed in place"):
            part.sum()


class OfTheirOwn(torch.autograd.Function):
    """Takes the logits past torch's functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ones(2, 9, VOCABULARY)


def test_a_gradient_is_never_lost(tmp_path: Path, seen: Seen) -> None:
    batch = make_batch("llama", 0)
    with pair(tmp_path) as (_, streamed, _):
        loss: Any = OfTheirOwn.apply(streamed(**batch).logits)  # type: ignore[no-untyped-call]
        with pytest.raises(ModelError, match="lm_head"):
            loss.backward()


# -- evaluation -------------------------------------------------------------------------------------------------


def test_evaluation(tmp_path: Path, seen: Seen) -> None:
    batch = make_batch("gemma2", 0)
    with pair(tmp_path, "gemma2") as (plain, streamed, _), torch.no_grad():
        expected = plain(**batch)
        seen.rows = 0
        outputs = streamed(**batch)
        assert seen.rows == CHUNK
        assert not outputs.loss.requires_grad
        assert float(outputs.loss) == pytest.approx(float(expected.loss), rel=1e-6)
        last = outputs.logits[:, -1].clone().numpy()
        assert seen.rows == CHUNK  # two rows are all that was made
        assert last == pytest.approx(expected.logits[:, -1].numpy(), rel=1e-5)
        assert torch.equal(outputs.logits.argmax(-1), expected.logits.argmax(-1))


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, VOCABULARY, (9,), generator=generator)
        labels = ids.clone()
        labels[: index % 4] = -100
        return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "granite"])
def test_trainer(name: str, loss_only: bool, tmp_path: Path, seen: Seen) -> None:
    def metrics(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (8, 9, VOCABULARY)
        hit = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"hits": float(hit.sum()), "sum": float(prediction.predictions.sum())}

    def run(kind: Any, model: Any, **changes: Any) -> tuple[Any, Any]:
        args = transformers.TrainingArguments(
            str(tmp_path / "out"),
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=1,
            learning_rate=1e-3,
            logging_steps=1,
            disable_tqdm=True,
            prediction_loss_only=loss_only,
            **changes,
        )
        trainer = kind(
            model=model,
            args=args,
            train_dataset=Data(),
            eval_dataset=Data(),
            compute_metrics=None if loss_only else metrics,
        )
        trainer.train()
        seen.rows = 0
        found = trainer.evaluate()
        return found, trainer.state.log_history[0]

    plain = make_model(name)
    expected, first = run(transformers.Trainer, copy.deepcopy(plain))
    with opened(tmp_path / "session", "disk"):
        ours, log = run(mt.Trainer, plain)
    if loss_only:
        assert seen.rows == CHUNK
    for key in ("eval_loss", "eval_hits", "eval_sum"):
        if key in expected:
            assert ours[key] == pytest.approx(expected[key], rel=1e-4), key
    assert log["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert log["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)


def test_an_evaluation_without_the_logits_does_not_confuse_training(
    tmp_path: Path, seen: Seen
) -> None:
    batch = make_batch("llama", 0)
    inputs = {key: x for key, x in batch.items() if key != "labels"}
    with pair(tmp_path) as (plain, streamed, optimizer):
        plain(**batch).loss.backward()
        for _ in range(2):
            with torch.no_grad():
                streamed(**inputs)
        seen.rows = 0
        _, found = window_grads(streamed, optimizer, [batch])
        assert seen.rows == CHUNK
        assert_close(found, grads(plain))


def test_the_status_says_it_in_one_line(tmp_path: Path, seen: Seen) -> None:
    with pair(tmp_path) as (_, streamed, _):
        session = mt.current_session()
        assert session is not None
        assert "would not fit" not in str(session.status())
        streamed(**make_batch("llama", 0))
        text = str(session.status()).splitlines()
        lines = [x for x in text if x.startswith("logits ")]
        assert len(lines) == 1
        assert "in chunks of 3 tokens: 5.00 GB would not fit" in lines[0]


def test_the_budget_decides(tmp_path: Path) -> None:
    """No patch: with little room, the rule itself cuts; with much, it does not."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 20_000, bias=False)
    )
    ids = torch.randint(0, 64, (4, 300))
    for budget, cut in (("40MB", True), ("2GB", False)):
        with mt.init(tmp_path, max_ram_gb=budget) as session:
            model, _ = mt.wrap(copy.deepcopy(plain))
            loss: Any = functional.cross_entropy(
                model(ids).flatten(0, 1), ids.flatten()
            )
            loss.backward()
            offloaded = offloaded_model(model)
            assert offloaded is not None
            chunking = offloaded.logits.chunking
            assert (chunking is not None) == cut
            assert ("would not fit" in str(session.status())) == cut
            if chunking is not None:
                assert chunking.whole_bytes == 4 * 1200 * 20_000 * 4


# -- the comparison notices every broken mechanism ------------------------------------------------------------


def gradient_of_hidden_states_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tensor, "index_add_", lambda self, *_: self)


def a_chunk_overwrites_the_one_before(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, dz: Tensor, hidden: Tensor, scale: float) -> None:
        self.total.addmm_(dz.t(), hidden, beta=0, alpha=scale)
        self._begun = True

    patch.setattr(chunks._Sum, "add_product", add)


def a_guess_is_not_corrected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Pass, "correct", lambda *_: None)


def an_unused_loss_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Pass, "undo", lambda *_: None)


def operations_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    derive = logits._derive

    def forgetful(tensor: Any, **changes: Any) -> Any:
        changes.pop("operations", None)
        return derive(tensor, **changes)

    patch.setattr(logits, "_derive", forgetful)


def labels_that_do_not_count_count(patch: pytest.MonkeyPatch) -> None:
    init = LossTask.__post_init__

    def all_count(self: Any) -> None:
        self.targets = self.targets.clamp(min=0)
        init(self)

    patch.setattr(LossTask, "__post_init__", all_count)


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (gradient_of_hidden_states_is_dropped, "mean"),
    (a_chunk_overwrites_the_one_before, "mean"),
    (a_guess_is_not_corrected, "scaled by another number each time"),
    (an_unused_loss_is_not_undone, "one loss is not used, later"),
    (operations_are_forgotten, "scaled, shifted, capped"),
    (labels_that_do_not_count_count, "mean"),
]


def later_not_used(x: Tensor, y: Tensor) -> Tensor:
    """Of every micro-batch, one loss that nobody uses; the second one's guess is added to what is there."""
    loss = flat()(x, y)
    flat()(x * 2.0, y)
    return loss


@pytest.mark.parametrize("fault", [None, *BROKEN], ids=lambda x: x and x[0].__name__)
def test_a_broken_mechanism_is_noticed(
    fault: Any, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[str, Any] = UNDERSTOOD | {"one loss is not used, later": later_not_used}
    for name in [fault[1]] if fault else [kind for _, kind in BROKEN]:
        loss_fn = custom(kinds[name])
        window = make_window("llama", 0, 3)
        with pair(tmp_path) as (plain, streamed, optimizer):
            for batch in window:
                loss_fn(plain, batch).backward()
            with monkeypatch.context() as patch:
                if fault:
                    fault[0](patch)
                _, found = window_grads(streamed, optimizer, window, loss_fn)
            if fault:
                with pytest.raises(AssertionError):
                    assert_close(found, grads(plain))
            else:
                assert_close(found, grads(plain))


# -- memory, as the kernel counts it ------------------------------------------------------------------------

MEMORY = """
import json, sys
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
from megatrain_nb.runtime import logits, rss
from megatrain_nb.runtime.warmup import load_code

def config():
    return LlamaConfig(vocab_size=131072, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                       num_attention_heads=2, tie_word_embeddings=False)

with torch.device("meta"):
    LlamaForCausalLM(config())
import megatrain_nb as mt
if sys.argv[2] == "whole":
    logits.cut_logits = lambda **_: None
budget = 400_000_000
load_code()
base, meter = rss.resident_bytes(), rss.PeakMeter()

def peak():
    most = meter.read()
    meter.restart()
    return most - base

session = mt.init(sys.argv[1], max_ram_gb=budget / 1e9)
model, optimizer = mt.wrap(mt.from_config(config(), seed=0), lr=1e-3)
ids = torch.randint(0, 131072, (1, 512), generator=torch.Generator().manual_seed(0))
peak()
losses = [mt.train_step(model, optimizer, [{"input_ids": ids, "labels": ids}]).loss for _ in range(3)]
training = peak()
with torch.no_grad():
    loss = float(model(input_ids=ids, labels=ids).loss)
evaluating = peak()
lines = [x for x in str(session.status()).splitlines() if x.startswith("logits")]
print(json.dumps({"training": training, "evaluating": evaluating, "losses": losses, "loss": loss,
                  "budget": budget, "lines": lines}))
session.close()
"""


def in_a_process(tmp_path: Path, kind: str) -> dict[str, Any]:
    report: dict[str, Any] = report_of(MEMORY, tmp_path, kind)
    print(report)
    return report


@pytest.mark.slow
def test_logits_larger_than_the_budget_train_within_it(tmp_path: Path) -> None:
    """512 tokens x 131072 classes: 268 MB of logits, 1.1 GB with what the loss makes of them."""
    report = in_a_process(tmp_path, "chunks")
    assert report["training"] <= 1.05 * report["budget"]
    assert report["evaluating"] <= 1.05 * report["budget"]
    assert report["losses"][2] < report["losses"][0]
    assert report["loss"] < report["losses"][2]
    assert "1.07 GB would not fit" in report["lines"][0]
    # The same without chunks breaks the budget: so the measurement would notice.
    whole = in_a_process(tmp_path, "whole")
    assert whole["training"] > 2 * whole["budget"]
    assert whole["losses"] == pytest.approx(report["losses"], rel=1e-4)


def test_cases_are_distinct() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)
    assert replace(CASES[0], accumulation=4) in CASES
