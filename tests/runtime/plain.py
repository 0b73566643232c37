"""The same training twice: in plain PyTorch, and streamed; and what differs between the two."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import megatrain_nb as mt
from megatrain_nb.runtime import kept
from megatrain_nb.runtime.call import BlockCall
from megatrain_nb.runtime.executor import Executor
from megatrain_nb.runtime.lanes import ThreadLanes
from megatrain_nb.runtime.offload import offloaded_model
from megatrain_nb.runtime.optimizer import AdamW
from megatrain_nb.runtime.slots import SlotDevice
from megatrain_nb.runtime.threadstate import ThreadState
from megatrain_nb.runtime.window import _streams
from megatrain_nb.store.host import HostPool
from tests.runtime.common import differing, set_tile_numel
from tests.runtime.models import make_model, make_window, own_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from megatrain_nb.runtime.session import Session

    LossOf = Callable[[nn.Module, Any, list[Any]], Tensor]

LR, WEIGHT_DECAY, MAX_NORM = 1e-2, 0.1, 0.5
CPU = torch.device("cpu")

# A few KB: every pack of a tiny model has several tiles.
TILE_NUMEL = 1024

# Bounds for a tied parameter whose gradient is summed in another order: see assert_equal_but_tied.
TIED_ULP, TIED_LOSS_ULP = 4, 64

# The worst differences seen by any comparison, in ulp; printed at the end of the run.
worst: dict[str, float] = {}


# What a case may be, and the values that every architecture meets.
FACTORS: dict[str, tuple[Any, ...]] = {
    "accumulation": (1, 3),
    "clipping": (False, True),
    "tied": (False, True),
    "dropout": (0.0, 0.1),
    "place": ("ram", "disk", "mixed"),
    "path": ("window", "loop"),
    "device": ("host", "slots"),
    "keep": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One combination of the factors."""

    name: str
    accumulation: int = 1
    clipping: bool = False
    tied: bool = False
    dropout: float = 0.0
    place: str = "disk"
    path: str = "window"
    device: str = "host"
    keep: bool = False

    def __str__(self) -> str:
        return "-".join(
            [
                self.name,
                f"x{self.accumulation}",
                "clip" if self.clipping else "noclip",
                "tied" if self.tied else "untied",
                "dropout" if self.dropout else "nodropout",
                self.place,
                self.path,
                self.device,
                "keep" if self.keep else "again",
            ]
        )

    @property
    def max_norm(self) -> float | None:
        return MAX_NORM if self.clipping else None


@dataclass
class Trace:
    """What a training run showed, step by step."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)
    random_state: Tensor = field(default_factory=lambda: torch.empty(0))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients there are."""
    return {
        name: param.grad.detach().clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copy all parameters."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return all buffers."""
    return dict(model.named_buffers())


def loop_trace(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: list[list[Any]],
    loss_of: LossOf,
    *,
    max_norm: float | None = None,
    own_streams: bool = False,
    after_step: Callable[[], None] = lambda: None,
) -> Trace:
    """Train in a plain loop; ``max_norm`` is for a torch optimizer, a streamed one has its own.

    Parameters
    ----------
    own_streams
        Start every micro-batch in the random state that a window gives it; False goes on from one to the next.
    """
    trace = Trace()
    for step, window in enumerate(windows):
        losses, states = [], []
        if own_streams:
            states = _streams(CPU, ThreadState.current(CPU), len(window), step)
        for index, batch in enumerate(window):
            if own_streams:
                torch.set_rng_state(states[index].rng[0])
            loss = loss_of(model, batch, window)
            loss.backward()
            losses.append(loss.detach())
            if own_streams and index == 0:
                states[0] = ThreadState.current(CPU)
        if own_streams:
            torch.set_rng_state(states[0].rng[0])
        trace.losses.append(sum(losses[1:], losses[0]))
        trace.grads.append(gradients(model))
        if isinstance(optimizer, AdamW):
            optimizer.step()
            trace.norms.append(optimizer.last_grad_norm)
        else:
            limit = float("inf") if max_norm is None else max_norm
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            trace.norms.append(norm.detach())
            optimizer.step()
        after_step()
        optimizer.zero_grad()
        trace.params.append(parameters(model))
    trace.random_state = torch.get_rng_state()
    return trace


def window_trace(
    model: nn.Module,
    optimizer: AdamW,
    windows: list[list[Any]],
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    after_step: Callable[[], None] = lambda: None,
) -> Trace:
    """Train with ``mt.train_step``."""
    trace = Trace()

    def before(*_: Any) -> None:
        trace.grads.append(gradients(model))

    def after(*_: Any) -> None:
        trace.norms.append(optimizer.last_grad_norm)

    hooks = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    ]
    for window in windows:
        result = mt.train_step(model, optimizer, window, loss_fn)
        assert result.grad_norm == float(trace.norms[-1])
        after_step()
        trace.losses.append(torch.tensor(result.loss))
        trace.params.append(parameters(model))
    for hook in hooks:
        hook.remove()
    trace.random_state = torch.get_rng_state()
    return trace


@lru_cache(maxsize=512)
def plain_trace(
    name: str,
    accumulation: int,
    max_norm: float | None,
    tied: bool,
    dropout: float,
    own_streams: bool,
    steps: int,
) -> Trace:
    """Train one of the models in plain PyTorch."""
    model = make_model(name, tied=tied, dropout=dropout)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True
    )
    windows = [make_window(name, step, accumulation) for step in range(steps)]
    torch.manual_seed(7)
    return loop_trace(
        model,
        optimizer,
        windows,
        loss_of(name),
        max_norm=max_norm,
        own_streams=own_streams,
    )


def loss_of(name: str) -> LossOf:
    """Return the function that gives a micro-batch's part of the window's loss."""
    return lambda model, batch, window: own_loss(model, name, batch, window)


def plain_trace_of(case: Case, steps: int = 5) -> Trace:
    """Return what plain PyTorch gives for a case."""
    own_streams = case.path == "window" and case.accumulation > 1 and case.dropout > 0
    return plain_trace(
        case.name,
        case.accumulation,
        case.max_norm,
        case.tied,
        case.dropout,
        own_streams,
        steps,
    )


def late_twin(max_bytes: int | None = None, seed: int = 0) -> SlotDevice:
    """A device whose copies and results come late, and whose free slots are NaN: a wait that is missing shows."""
    lanes = ThreadLanes(most_delay_s=0.0005, late=True, seed=seed)
    return SlotDevice(CPU, max_bytes=max_bytes, poison=True, lanes=lanes)


@contextmanager
def opened(
    path: Path,
    place: str,
    device: str = "host",
    tile_numel: int = TILE_NUMEL,
    compression: Any = False,
) -> Iterator[Session]:
    """Open a session in which models live where ``place`` says: ``"ram"``, ``"disk"`` or ``"mixed"``."""
    with pytest.MonkeyPatch.context() as patch:
        set_tile_numel(patch, tile_numel)
        with mt.init(
            path, max_ram_gb=2.0, optimizer_compression=compression
        ) as session:
            if device == "slots":
                session.device = late_twin()
            session.max_resident_bytes = {"ram": None, "disk": 0, "mixed": 120_000}[
                place
            ]
            yield session


def streamed_trace(case: Case, session: Session, steps: int = 5) -> Trace:
    """Train the same through a session."""
    session.keep_share, session.max_kept_bytes = 1.0, None if case.keep else 0
    model, optimizer = mt.wrap(
        make_model(case.name, tied=case.tied, dropout=case.dropout),
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=case.max_norm,
    )
    windows = [make_window(case.name, step, case.accumulation) for step in range(steps)]
    torch.manual_seed(7)
    with counted() as again:
        again_after: list[int] = []
        if case.path == "window":
            trace = window_trace(
                model, optimizer, windows, after_step=lambda: again_after.append(*again)
            )
        else:
            trace = loop_trace(
                model,
                optimizer,
                windows,
                loss_of(case.name),
                after_step=lambda: again_after.append(*again),
            )
    # The first step learns what activations take; then no block computes its forward again, or each layer does.
    if steps > 1:
        assert (again_after[0] == again_after[-1]) == case.keep
    check_place(case.place, session, model)
    return trace


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the calls that compute their forward again, in the one element of the list."""
    again, as_it_was = [0], BlockCall._as_it_was

    def counting(self: Any) -> Any:
        again[0] += 1
        return as_it_was(self)

    with mock.patch.object(BlockCall, "_as_it_was", counting):
        yield again


def tied_name(name: str) -> str:
    """Return the name of the parameter that is both embedding and head when they are tied."""
    model = make_model(name, tied=True)
    table = model.get_input_embeddings().weight
    names = {param: key for key, param in model.named_parameters()}
    return str(names[table])


def check_place(place: str, session: Session, model: nn.Module) -> None:
    """The model was where the case wants it."""
    offloaded = offloaded_model(model)
    assert offloaded is not None
    residency = offloaded.memory.residency
    if place == "ram":
        assert residency.disk_bytes == 0
        assert session.store.read_bytes == 0
    elif place == "disk":
        assert residency.resident_bytes == 0
        assert session.store.read_bytes > 0
    else:
        assert 0 < residency.resident_bytes < offloaded.layers.spec.state_bytes
        assert residency.weights
        assert session.store.read_bytes > 0


# -- differences ------------------------------------------------------------------------------------------


def ulps(a: Tensor, b: Tensor) -> float:
    """Return the most float32 numbers that lie between an element of ``a`` and its fellow in ``b``."""

    def ordinal(x: Tensor) -> Tensor:
        bits = x.detach().contiguous().view(torch.int32).to(torch.int64)
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return float((ordinal(a) - ordinal(b)).abs().max()) if a.numel() else 0.0


def ulps_of_largest(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, in ulp of the largest magnitude."""
    top = torch.maximum(a.abs().max(), b.abs().max())
    return float((a - b).abs().max() / _spacing(top))


def note(what: str, value: float) -> None:
    """Keep the worst value of each kind for the summary."""
    worst[what] = max(worst.get(what, 0.0), value)


def assert_same(ours: dict[str, Tensor], plain: dict[str, Tensor], what: str) -> None:
    """Assert that every tensor has the very same bits, and that none is missing."""
    assert ours.keys() == plain.keys(), f"{what}: {ours.keys() ^ plain.keys()}"
    distances = {name: ulps(ours[name], plain[name]) for name in plain}
    note(f"{what} (same order of operations)", max(distances.values(), default=0.0))
    for name, value in plain.items():
        assert torch.isfinite(value).all(), f"{what} of {name} is not finite"
    different = {
        name: distance
        for name, distance in distances.items()
        if not torch.equal(ours[name], plain[name])
    }
    assert not different, f"{what} differ, in ulp: {different}"


def assert_equal(ours: Trace, plain: Trace) -> None:
    """Assert that two trainings are the same, bit for bit."""
    for step in range(len(plain.losses)):
        assert_same(ours.grads[step], plain.grads[step], "gradient")
        assert_same(ours.params[step], plain.params[step], "parameter")
    assert_same(_by_step(ours.losses), _by_step(plain.losses), "loss")
    assert_same(_by_step(ours.norms), _by_step(plain.norms), "gradient norm")
    assert torch.equal(ours.random_state, plain.random_state)


def assert_equal_but_tied(ours: Trace, plain: Trace, tied: str, case: Case) -> None:
    """Assert that two trainings of a model with a tied parameter are the same but for the order of one sum.

    Over micro-batches 1, 2, 3 plain PyTorch adds (head + embedding of 1) + (head + embedding of 2) + ...; in a
    window the head's gradients come first, of all micro-batches, then the embedding's; in a loop they are added
    one by one. So the tied gradient may differ by some ulp of its largest terms; and nothing else may, until
    the first update spreads that. The first update is g / (|g| + eps) for each element: where |g| is not far
    above eps, a difference of g comes out enlarged, by exactly as much as that formula says. Later steps
    divide by the root of a second moment, which has no such bound; their losses are compared.
    """
    for name, gradient in plain.grads[0].items():
        if name == tied:
            distance = ulps_of_largest(ours.grads[0][name], gradient)
            note("tied gradient (of its largest magnitude)", distance)
            assert distance <= TIED_ULP, name
        else:
            assert_same({name: ours.grads[0][name]}, {name: gradient}, "gradient")
    assert ours.grads[0].keys() == plain.grads[0].keys()
    assert torch.equal(ours.losses[0], plain.losses[0])
    distance = ulps(ours.norms[0], plain.norms[0])
    note("gradient norm (tied)", distance)
    assert distance <= TIED_ULP
    _assert_first_update(ours, plain, tied, case)
    for mine, other in zip(ours.losses, plain.losses, strict=True):
        distance = ulps(mine, other)
        note("loss of 5 steps (tied)", distance)
        assert distance <= TIED_LOSS_ULP
    for step in (0, -1):
        note(
            f"parameter after {len(plain.params) if step else 1} (tied, not asserted), in lr",
            max(
                float((ours.params[step][name] - value).abs().max()) / LR
                for name, value in plain.params[step].items()
            ),
        )
    assert torch.equal(ours.random_state, plain.random_state)


def _assert_first_update(ours: Trace, plain: Trace, tied: str, case: Case) -> None:
    def update(trace: Trace, name: str) -> Tensor:
        scale = 1.0
        if case.max_norm is not None:
            scale = min(1.0, case.max_norm / (float(trace.norms[0]) + 1e-6))
        scaled = trace.grads[0][name].double() * scale
        return LR * scaled / (scaled.abs() + 1e-8)

    for name, value in plain.params[0].items():
        mine = ours.params[0][name]
        if case.max_norm is None and name != tied:
            assert torch.equal(mine, value), name
            continue
        rounding = 2 * _spacing(value) + 8 * LR * 2**-24
        allowed = (update(ours, name) - update(plain, name)).abs() + rounding
        assert ((mine.double() - value.double()).abs() <= allowed).all(), name


def _spacing(x: Tensor) -> Tensor:
    return torch.nextafter(x.abs(), torch.tensor(float("inf"))) - x.abs()


def _by_step(values: list[Tensor]) -> dict[str, Tensor]:
    return {f"step {step}": value for step, value in enumerate(values)}


def report() -> list[str]:
    """Describe the worst differences."""
    return [f"{what:<56} {value:.3g}" for what, value in sorted(worst.items())]


def weights_are_kept_as_they_are(patch: pytest.MonkeyPatch) -> None:
    """A tooth for both comparisons: a kept graph holds the weights' memory, which is another's by then."""
    patch.setattr(kept.Saver, "pack", lambda _, tensor: kept.Saved(tensor.detach()))
    patch.setattr(kept.Saver, "weights_are_free", lambda _: True)
    # In a model this small nothing would leave its memory between forward and backward ...
    patch.setattr(Executor, "_soon", lambda *_: ())
    # ... and a slab could come back with the same bytes.
    give = HostPool.give

    def unmap(self: HostPool, slab: Any) -> None:
        give(self, slab)
        self.trim()

    patch.setattr(HostPool, "give", unmap)


def copies_out_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Break the twin: what leaves the device leaves before it is there."""
    copy_out = ThreadLanes.copy_out
    patch.setattr(
        ThreadLanes,
        "copy_out",
        lambda self, host, values, _: copy_out(self, host, values, None),
    )


def assert_shows(
    train: Callable[[], dict[str, Tensor]], expected: dict[str, Tensor]
) -> None:
    """A wait that is missing shows: in an error, or in another number than the expected ones."""
    try:
        found = train()
    except (mt.MegatrainError, AssertionError):
        return
    except RuntimeError as error:
        # A copy that lands while torch saves the tensor: torch sees its version change.
        assert "modif" in str(error)  # noqa: PT017
        return
    assert differing(expected, found) != []
