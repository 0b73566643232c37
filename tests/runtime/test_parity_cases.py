"""What people do beside the usual: each must still give plain PyTorch's numbers."""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import megatrain_nb as mt
from tests.runtime.models import make_batch, make_model, make_window
from tests.runtime.plain import (
    LR,
    Trace,
    assert_equal,
    assert_same,
    gradients,
    loop_trace,
    loss_of,
    note,
    opened,
    parameters,
    ulps_of_largest,
    window_trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from megatrain_nb.runtime.session import Session

    Scheduler = Callable[[torch.optim.Optimizer], Any]

get_linear_schedule: Any = transformers.get_linear_schedule_with_warmup

PATHS = pytest.mark.parametrize("path", ["window", "loop"])


@pytest.fixture(params=["ram", "disk"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    with opened(tmp_path, request.param) as session:
        yield session


def adamw(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **({"lr": LR, "fused": True} | kwargs))


def both(
    model: nn.Module,
    path: str,
    *,
    name: str = "llama",
    accumulation: int = 2,
    steps: int = 3,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = (
        lambda model: adamw(model.parameters())
    ),
    make_scheduler: Scheduler | None = None,
    max_norm: float | None = 0.5,
) -> tuple[Trace, Trace]:
    """Train a model streamed and its copy in plain PyTorch."""
    windows = [make_window(name, step, accumulation) for step in range(steps)]
    reference = copy.deepcopy(model)
    plain_optimizer = make_optimizer(reference)
    scheduler = make_scheduler(plain_optimizer) if make_scheduler else None
    torch.manual_seed(7)
    plain = loop_trace(
        reference,
        plain_optimizer,
        windows,
        loss_of(name),
        max_norm=max_norm,
        own_streams=path == "window" and accumulation > 1,
        after_step=scheduler.step if scheduler else lambda: None,
    )
    model, optimizer = mt.wrap(model, make_optimizer(model), max_grad_norm=max_norm)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    after_step = scheduler.step if scheduler else lambda: None
    torch.manual_seed(7)
    if path == "window":
        ours = window_trace(model, optimizer, windows, after_step=after_step)
    else:
        ours = loop_trace(
            model, optimizer, windows, loss_of(name), after_step=after_step
        )
    return ours, plain


# -- parameters and groups --------------------------------------------------------------------------------


class Spare(nn.Module):
    """A model of its own kind: a root parameter, and layers that some batches or all batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.never = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        hidden = self.first(x * self.scale)
        for layer in self.layers[:depth]:
            hidden = torch.tanh(layer(hidden))
        out: Tensor = self.last(hidden)
        return out


def spare_loss(model: nn.Module, batch: Any, window: Any = None) -> Tensor:
    x, depth = batch
    out: Tensor = model(x, depth=depth)
    return out.pow(2).mean()


@PATHS
def test_modules_that_are_not_called_keep_their_weights(
    session: Session, path: str
) -> None:
    torch.manual_seed(0)
    model: Any = Spare()
    windows = [
        [(torch.randn(5, 4), depth), (torch.randn(5, 4), 1)] for depth in (3, 1, 2, 3)
    ]
    reference = copy.deepcopy(model)
    plain = loop_trace(
        reference,
        adamw(reference.parameters(), weight_decay=0.5),
        windows,
        spare_loss,
    )
    never = reference.never.weight.detach().clone()
    model, optimizer = mt.wrap(model, lr=LR, weight_decay=0.5)
    if path == "window":
        ours = window_trace(model, optimizer, windows, spare_loss)
    else:
        ours = loop_trace(model, optimizer, windows, spare_loss)
    assert "never.weight" not in ours.grads[0]
    assert "layers.2.weight" not in ours.grads[1]
    assert torch.equal(ours.params[-1]["never.weight"], never)
    assert_equal(ours, plain)


@PATHS
@pytest.mark.parametrize("tied", [False, True])
def test_frozen_parameters_stay_as_they_are(
    session: Session, path: str, tied: bool
) -> None:
    model = make_model("llama", tied=tied)
    model.get_input_embeddings().weight.requires_grad_(False)
    for param in model.model.layers[0].parameters():
        param.requires_grad_(False)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    before = parameters(model)
    ours, plain = both(
        model,
        path,
        make_optimizer=lambda model: adamw(
            [param for param in model.parameters() if param.requires_grad]
        ),
    )
    assert_equal(ours, plain)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert torch.equal(before[name], ours.params[-1][name]), name


@PATHS
def test_parameters_frozen_and_thawed_between_steps(
    session: Session, path: str
) -> None:
    model = make_model("llama")
    layer = "model.layers.0."

    def train(
        model: nn.Module, step: Callable[[list[Any]], None]
    ) -> list[dict[str, Tensor]]:
        seen = []
        for index in range(4):
            for name, param in model.named_parameters():
                if name.startswith(layer):
                    param.requires_grad_(index not in (1, 2))
            step(make_window("llama", index, 1))
            seen.append(parameters(model))
        return seen

    reference = copy.deepcopy(model)
    plain_optimizer = adamw(reference.parameters())

    def plain_step(window: list[Any]) -> None:
        loss_of("llama")(reference, window[0], window).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    plain = train(reference, plain_step)
    model, optimizer = mt.wrap(model, adamw(model.parameters()))

    def step(window: list[Any]) -> None:
        if path == "window":
            mt.train_step(model, optimizer, window)
        else:
            loss_of("llama")(model, window[0], window).backward()
            optimizer.step()
            optimizer.zero_grad()

    ours = train(model, step)
    for mine, other in zip(ours, plain, strict=True):
        assert_same(mine, other, "parameter")


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    return adamw(
        [
            {"params": decayed, "weight_decay": 0.3, "betas": (0.8, 0.95)},
            {"params": others, "weight_decay": 0.0, "lr": 3 * LR, "eps": 1e-6},
        ]
    )


@PATHS
def test_parameter_groups_keep_their_own_settings(session: Session, path: str) -> None:
    assert_equal(
        *both(
            make_model("bert"),
            path,
            name="bert",
            make_optimizer=two_groups,
            accumulation=1,
        )
    )
    assert_equal(
        *both(make_model("gpt2"), path, name="gpt2", make_optimizer=two_groups)
    )


SCHEDULERS: dict[str, Scheduler] = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (step + 1)
    ),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.05, total_steps=6
    ),
    "cosine, restarted": lambda optimizer: (
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    ),
    "transformers' linear": lambda optimizer: get_linear_schedule(optimizer, 2, 8),
}


@PATHS
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_learning_rate_schedules(session: Session, path: str, scheduler: str) -> None:
    ours, plain = both(
        make_model("llama"),
        path,
        make_optimizer=two_groups,
        make_scheduler=SCHEDULERS[scheduler],
        steps=5,
    )
    assert_equal(ours, plain)


# -- the optimizer's state --------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: adamw(model.parameters(), weight_decay=0.2),
    "AdamW, maximize": lambda model: adamw(model.parameters(), maximize=True),
    "AdamW, lr is a tensor": lambda model: adamw(
        model.parameters(), lr=torch.tensor(LR)
    ),
    "Adam": lambda model: torch.optim.Adam(
        model.parameters(), lr=LR, weight_decay=0.2, fused=True
    ),
    "two groups": two_groups,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_taken_over_in_the_middle_goes_on(
    session: Session, kind: str
) -> None:
    reference = make_model("llama", tied=True)
    windows = [make_window("llama", step, 1) for step in range(5)]
    plain_optimizer = OPTIMIZERS[kind](reference)
    loop_trace(reference, plain_optimizer, windows[:2], loss_of("llama"))
    model = copy.deepcopy(reference)
    before = OPTIMIZERS[kind](model)
    before.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    model, optimizer = mt.wrap(model, before)
    plain = loop_trace(reference, plain_optimizer, windows[2:], loss_of("llama"))
    ours = loop_trace(model, optimizer, windows[2:], loss_of("llama"))
    assert_equal(ours, plain)
    assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())
    # And back again: torch's own optimizer goes on from there.
    state = optimizer.state_dict()
    state = {
        "param_groups": state["param_groups"],
        "state": {
            key: {name: value.clone() for name, value in one.items()}
            for key, one in state["state"].items()
        },
    }
    model = mt.unwrap(model)
    after = OPTIMIZERS[kind](model)
    after.load_state_dict(state)
    for group in after.param_groups:
        group["fused"] = True
    more = [make_window("llama", step, 1) for step in (5, 6)]
    assert_equal(
        loop_trace(model, after, more, loss_of("llama")),
        loop_trace(reference, plain_optimizer, more, loss_of("llama")),
    )


def assert_same_state(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["state"].keys() == plain["state"].keys()
    for key, state in plain["state"].items():
        assert_same(
            {name: value.clone() for name, value in ours["state"][key].items()},
            state,
            "optimizer state",
        )
    for mine, other in zip(ours["param_groups"], plain["param_groups"], strict=True):
        for name in mine.keys() - {"initial_lr", "rounding_seed"}:
            assert mine[name] == other[name], name


def test_a_state_dict_is_taken_back(session: Session) -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    windows = [make_window("llama", step, 1) for step in range(4)]
    plain_optimizer = two_groups(reference)
    loop_trace(reference, plain_optimizer, windows[:2], loss_of("llama"))
    model.load_state_dict(reference.state_dict())
    model, optimizer = mt.wrap(model, two_groups(model))
    optimizer.load_state_dict(plain_optimizer.state_dict())
    assert_equal(
        loop_trace(model, optimizer, windows[2:], loss_of("llama")),
        loop_trace(reference, plain_optimizer, windows[2:], loss_of("llama")),
    )


def test_a_new_optimizer_starts_anew(session: Session) -> None:
    """Moments and step counts belong to the optimizer, not to the model."""
    model = make_model("llama")
    reference = copy.deepcopy(model)
    windows = [make_window("llama", step, 1) for step in range(4)]
    for part in (windows[:2], windows[2:]):
        plain_optimizer = adamw(reference.parameters())
        plain = loop_trace(reference, plain_optimizer, part, loss_of("llama"))
        model, optimizer = mt.wrap(model, lr=LR)
        ours = loop_trace(model, optimizer, part, loss_of("llama"))
        assert_equal(ours, plain)
        assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())


def test_a_schedule_made_before_the_optimizer_is_handed_over(
    session: Session,
) -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    windows = [make_window("llama", step, 1) for step in range(4)]
    traces = []
    for one in (reference, model):
        made: Any = adamw(one.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (step + 1))
        if one is model:
            _, made = mt.wrap(one, made)
        traces.append(
            loop_trace(one, made, windows, loss_of("llama"), after_step=scheduler.step)
        )
    assert_equal(traces[1], traces[0])


@pytest.mark.parametrize("how", ["out", "list"])
def test_values_written_by_unusual_ways_arrive_or_are_refused(
    session: Session, how: str
) -> None:
    model = make_model("llama")
    mt.wrap(model)
    param = model.lm_head.weight
    expected = param.detach().clone() * 2
    try:
        with torch.no_grad():
            if how == "out":
                torch.mul(param, 2, out=param.data)
            else:
                torch._foreach_add_([param.data], [param.data])
    except mt.MegatrainError:
        return
    assert torch.equal(param.detach().clone(), expected)


def test_a_gradient_that_was_read_dropped_and_set(session: Session) -> None:
    model, optimizer = mt.wrap(make_model("llama"))
    model(**make_batch("llama", 0)).loss.backward()
    param = model.get_parameter("lm_head.weight")
    assert param.grad is not None
    param.grad.clone()
    optimizer.zero_grad()
    assert gradients(model) == {}
    param.grad = torch.ones(tuple(param.shape))
    assert float(param.grad.sum()) == param.numel()


def test_torchs_own_clipping_in_a_plain_loop(session: Session) -> None:
    model = make_model("llama")
    windows = [make_window("llama", step, 2) for step in range(3)]
    reference = copy.deepcopy(model)
    optimizers = adamw(reference.parameters()), mt.wrap(model, lr=LR)[1]
    for window in windows:
        for one in (reference, model):
            for batch in window:
                loss_of("llama")(one, batch, window).backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.3)
        assert_same(gradients(model), gradients(reference), "clipped gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(parameters(model), parameters(reference), "parameter")


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=LR),
        lambda params: torch.optim.SGD(params, lr=LR, foreach=True),
        lambda params: torch.optim.SGD(params, lr=LR, fused=True),
        lambda params: torch.optim.AdamW(params, lr=LR),
        lambda params: torch.optim.AdamW(params, lr=LR, foreach=True),
        lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
    ],
    ids=["sgd", "sgd-foreach", "sgd-fused", "adamw", "adamw-foreach", "adamw-fused"],
)
def test_an_optimizer_that_was_not_handed_over_updates_or_refuses(
    session: Session, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    mt.wrap(model)
    batch = make_batch("llama", 0)
    for one in (reference, model):
        optimizer = make(one.parameters())
        one(**batch).loss.backward()
        try:
            optimizer.step()
        except mt.MegatrainError:
            assert one is model
            return
    assert_same(parameters(model), parameters(reference), "parameter")


# -- other kinds of models --------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layers_that_share_their_weights(
    session: Session, path: str, dropout: float
) -> None:
    """ALBERT calls one layer several times; one backward adds its uses up in the same order."""
    model = make_model("albert", tied=True, dropout=dropout, num_hidden_layers=3)
    assert_equal(*both(model, path, name="albert", accumulation=1))


@PATHS
@pytest.mark.parametrize("tied", [False, True])
def test_encoder_and_decoder(session: Session, path: str, tied: bool) -> None:
    """T5 has one embedding for both, tied to the head or not."""
    model = make_model("t5", dropout=0.1, tied=tied, num_decoder_layers=1)
    ours, plain = both(model, path, name="t5", accumulation=1)
    if not tied:
        assert_equal(ours, plain)
    else:  # three uses of one weight: in plain PyTorch (head + decoder) + encoder or another order
        assert_close(ours, plain, {"shared.weight"})


@PATHS
def test_encoder_output_that_many_decoder_layers_take(
    session: Session, path: str
) -> None:
    """Each takes it twice. Plain PyTorch adds the four gradients one by one, streaming adds layer sums."""
    model = make_model("t5", dropout=0.1)
    ours, plain = both(model, path, name="t5", accumulation=1)
    behind = {
        name for name in plain.grads[0] if name.startswith(("encoder.", "shared."))
    }
    assert_close(ours, plain, behind)


def assert_close(ours: Trace, plain: Trace, others: set[str]) -> None:
    """Assert equal first gradients but for ``others``, which are summed in another order."""
    assert ours.grads[0].keys() == plain.grads[0].keys()
    for name, value in plain.grads[0].items():
        if name in others:
            distance = ulps_of_largest(ours.grads[0][name], value)
            note("gradient behind a sum in another order", distance)
            assert distance <= 16, name
        else:
            assert torch.equal(ours.grads[0][name], value), name
    assert torch.equal(ours.losses[0], plain.losses[0])
    for mine, other in zip(ours.losses, plain.losses, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0)


@PATHS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt"])
def test_kinds_of_attention(
    session: Session, path: str, attention: str, name: str
) -> None:
    model = make_model(name, attention=attention, dropout=0.1)
    assert_equal(*both(model, path, name=name, accumulation=1, steps=2))


@pytest.mark.parametrize(
    ("path", "accumulation"), [("window", 1), ("window", 2), ("loop", 3)]
)
def test_layers_dropped_at_random(
    session: Session, path: str, accumulation: int
) -> None:
    """OPT leaves layers out as the dice fall: the order of blocks is another one every time."""
    model = make_model("opt", layerdrop=0.5, num_hidden_layers=4, dropout=0.1)
    ours, plain = both(model, path, name="opt", accumulation=accumulation, steps=6)
    assert any(len(one) < len(ours.params[0]) for one in ours.grads)
    assert_equal(ours, plain)


@PATHS
def test_a_plain_sequence_of_modules(session: Session, path: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(6, 16),
        nn.GELU(),
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.2)),
        nn.Linear(16, 3),
    )
    windows = [
        [
            (torch.randn(4 + index, 6), torch.randint(0, 3, (4 + index,)))
            for index in range(2)
        ]
        for _ in range(4)
    ]

    def loss_fn(model: nn.Module, batch: Any, window: Any = None) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum") / 9

    reference = copy.deepcopy(model)
    torch.manual_seed(7)
    plain = loop_trace(
        reference,
        adamw(reference.parameters()),
        windows,
        loss_fn,
        own_streams=path == "window",
    )
    model, optimizer = mt.wrap(model, lr=LR)
    torch.manual_seed(7)
    if path == "window":
        ours = window_trace(model, optimizer, windows, loss_fn)
    else:
        ours = loop_trace(model, optimizer, windows, loss_fn)
    assert_equal(ours, plain)


class Skips(nn.Module):
    """Every layer takes the first hidden state as well, and the loss reads what two of them give."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Joined() for _ in range(4)])
        self.last = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.first(ids)
        scaled = first * 0.5
        hidden = first
        middle = first
        for index, layer in enumerate(self.layers):
            hidden, beside = layer(hidden, scaled, extra={"first": first})
            if index == 1:
                middle = beside
        logits = self.last(hidden)
        entropy: Tensor = nn.functional.cross_entropy(
            logits.flatten(0, 1), ids.flatten()
        )
        total: Tensor = entropy + 0.1 * middle.pow(2).mean() + 0.01 * scaled.mean()
        return total


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 8)
        self.gate = nn.Linear(8, 8)

    def forward(
        self, hidden: Tensor, scaled: Tensor, *, extra: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        mixed = self.mix(torch.cat([hidden, scaled], -1))
        return hidden + torch.tanh(mixed), self.gate(extra["first"])


@PATHS
def test_tensors_that_many_layers_take(session: Session, path: str) -> None:
    """Their gradient goes on once, after the last consumer; sums of three may be in another order."""
    torch.manual_seed(0)
    model: nn.Module = Skips()
    reference = copy.deepcopy(model)
    windows = [[torch.randint(0, 11, (2, 5)) for _ in range(2)] for _ in range(3)]

    def loss_fn(model: nn.Module, batch: Any, window: Any = None) -> Tensor:
        loss: Tensor = model(batch)
        return loss

    plain = loop_trace(reference, adamw(reference.parameters()), windows, loss_fn)
    model, optimizer = mt.wrap(model, lr=LR)
    if path == "window":
        ours = window_trace(model, optimizer, windows, loss_fn)
    else:
        ours = loop_trace(model, optimizer, windows, loss_fn)
    assert_close(ours, plain, set(plain.grads[0]))


# -- beside training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "opt", "t5"])
def test_forward_without_gradients_and_generation(session: Session, name: str) -> None:
    model = make_model(name, tied=True, use_cache=True).eval()
    model.config.output_router_logits = False  # Mixtral cannot generate with them
    reference = copy.deepcopy(model)
    model, optimizer = mt.wrap(model, lr=LR)
    batches = make_window(name, 0, 2)
    for _ in range(2):
        for batch in batches:
            with torch.no_grad():
                mine, other = model(**batch), reference(**batch)
            assert torch.equal(mine.loss, other.loss)
            assert torch.equal(mine.logits, other.logits)
            prompt = {key: batch[key] for key in ("input_ids", "attention_mask")}
            for kwargs in (
                {"do_sample": False},
                {"do_sample": True, "temperature": 0.8},
                {"num_beams": 2, "do_sample": False},
            ):
                tokens = []
                one: Any
                for one in (model, reference):
                    torch.manual_seed(3)
                    tokens.append(
                        one.generate(
                            **prompt, max_new_tokens=4, pad_token_id=1, **kwargs
                        )
                    )
                assert torch.equal(*tokens)
        # A step in between: what is read afterwards is the new weights.
        model(**batches[0], use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.load_state_dict({**parameters(model)}, strict=False)
        reference.tie_weights()


def test_evaluation_between_the_micro_batches_of_a_loop(session: Session) -> None:
    model = make_model("llama", dropout=0.1)
    reference = copy.deepcopy(model)
    window = make_window("llama", 0, 2)
    model, optimizer = mt.wrap(model, lr=LR)
    plain_optimizer = adamw(reference.parameters())
    for one in (reference, model):
        torch.manual_seed(7)
        for batch in window:
            loss_of("llama")(one, batch, window).backward()
            with torch.no_grad():
                one.eval()(**batch)
            one.train()
    assert_same(gradients(model), gradients(reference), "gradient")
    optimizer.step()
    plain_optimizer.step()
    assert_same(parameters(model), parameters(reference), "parameter")


def test_two_forwards_then_two_backwards(session: Session) -> None:
    """One loss of two calls, as contrastive losses are; gradients are added in autograd's order."""
    model = make_model("llama", dropout=0.1)
    reference = copy.deepcopy(model)
    mt.wrap(model, lr=LR)
    batches = make_window("llama", 0, 2)
    for one in (reference, model):
        torch.manual_seed(7)
        first, second = (one(**batch).loss for batch in batches)
        second.backward()
        first.backward()
    assert_same(gradients(model), gradients(reference), "gradient")


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bert"])
def test_autocast_in_a_plain_loop(session: Session, name: str) -> None:
    model = make_model(name)

    def autocast_loss(model: nn.Module, batch: Any, window: list[Any]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(name)(model, batch, window)

    reference = copy.deepcopy(model)
    windows = [make_window(name, step, 2) for step in range(3)]
    plain = loop_trace(reference, adamw(reference.parameters()), windows, autocast_loss)
    model, optimizer = mt.wrap(model, lr=LR)
    ours = loop_trace(model, optimizer, windows, autocast_loss)
    assert_equal(ours, plain)


def test_a_gradient_with_dropout_is_the_slope_of_the_loss(session: Session) -> None:
    """Against finite differences, with the same masks: no plain run is involved."""
    model = make_model("gpt2", dropout=0.1)
    model, _ = mt.wrap(model)
    batch = make_batch("gpt2", 0)

    def loss() -> Tensor:
        torch.manual_seed(7)
        value: Tensor = model(**batch).loss
        return value

    loss().backward()
    found = gradients(model)
    norm = math.sqrt(sum(float(grad.double().pow(2).sum()) for grad in found.values()))
    step = 1e-2
    ends = []
    for sign in (1, -2):
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.add_(found[name], alpha=sign * step / norm)
            ends.append(float(loss()))
    slope = (ends[0] - ends[1]) / (2 * step)
    assert slope == pytest.approx(norm, rel=2e-3)


# -- failures ---------------------------------------------------------------------------------------------


class FailsError(Exception):
    pass


class Failing:
    """A loss function that fails once, at a chosen place of the window's second micro-batch."""

    def __init__(self, session: Session, what: str, where: str) -> None:
        self.session, self.what, self.where = session, what, where
        self.bad: Any = None

    @property
    def expected(self) -> type[BaseException]:
        return FailsError if self.what == "error" else KeyboardInterrupt

    def fail(self, *_: Any) -> None:
        if self.what == "error":
            raise FailsError
        if self.what == "interrupt":
            raise KeyboardInterrupt
        self.session.stop()

    def __call__(self, model: Any, batch: Any) -> Tensor:
        where = self.where if batch is self.bad else ""
        if where == "before":
            self.fail()
        with ExitStack() as stack:
            if where == "inside":
                layer = model.model.layers[1].mlp
                stack.enter_context(closing_hook(layer, self.fail))
            loss: Tensor = model(**batch).loss
        if where == "after":
            self.fail()
        return loss


@contextmanager
def closing_hook(module: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("what", ["error", "interrupt", "stop"])
def test_a_window_that_failed_leaves_nothing(
    session: Session, where: str, what: str
) -> None:
    windows = [make_window("llama", step, 3) for step in range(3)]
    loss_fn = Failing(session, what, where)
    traces = []
    for fails in (False, True):
        model, optimizer = mt.wrap(make_model("llama", dropout=0.1), lr=LR)
        torch.manual_seed(7)
        trace = window_trace(model, optimizer, windows[:1], loss_fn)
        if fails:
            loss_fn.bad = windows[1][1]
            before, state = parameters(model), torch.get_rng_state()
            with pytest.raises(loss_fn.expected):
                mt.train_step(model, optimizer, windows[1], loss_fn)
            session.clear_stop()
            loss_fn.bad = None
            assert_same(parameters(model), before, "parameter")
            assert gradients(model) == {}
            torch.set_rng_state(state)
        more = window_trace(model, optimizer, windows[1:], loss_fn)
        traces.append((trace, more))
        mt.unwrap(model)
    for mine, other in zip(traces[1], traces[0], strict=True):
        assert_equal(mine, other)


def test_a_backward_that_failed_in_a_loop_leaves_what_zero_grad_forgets(
    session: Session,
) -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    model, optimizer = mt.wrap(model, lr=LR)
    plain_optimizer = adamw(reference.parameters())

    def refuse(grad: Tensor) -> None:
        raise FailsError

    batch = make_batch("llama", 0)
    hidden = model(**batch, output_hidden_states=True).hidden_states[1]
    loss = model(**batch).loss
    loss.backward()
    hidden.register_hook(refuse)
    with pytest.raises(FailsError):
        hidden.sum().backward()
    optimizer.zero_grad()
    for one, used in ((reference, plain_optimizer), (model, optimizer)):
        one(**make_batch("llama", 1)).loss.backward()
        used.step()
    assert_same(parameters(model), parameters(reference), "parameter")
