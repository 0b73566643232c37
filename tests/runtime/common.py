"""A tiny language model in plain torch, and what the adversarial tests compare with."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import megatrain_nb as mt
from megatrain_nb.runtime.current import set_current
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.store.host import HostPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOCABULARY = 31
WIDTH = 16

# A fault that is known: the test shows it, and fails when it is gone. Only a wrong result counts.
bug = partial(pytest.mark.xfail, strict=True, raises=AssertionError)

both_ways = pytest.mark.parametrize("window", [False, True], ids=["loop", "window"])


class Layer(nn.Module):
    """Norm, two linear maps, a residual."""

    def __init__(self, width: int = WIDTH, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or 2 * width
        self.norm: nn.Module = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor, *_: Any) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, layers, norm, head: blocks 0, 1 to n, n + 1, n + 2."""

    def __init__(
        self,
        layer: Callable[[], nn.Module] = Layer,
        *,
        num_layers: int = 3,
        tied: bool = False,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head: Any = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (2, 9), generator=generator)


def loss_of(model: Any, ids: Tensor) -> Any:
    logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@contextmanager
def opened(
    directory: Path, *, disk: bool = True, max_ram_gb: Any = 0.2, **kwargs: Any
) -> Iterator[mt.Session]:
    """A session; with ``disk`` nothing stays in RAM. What is used after it was given back is NaN."""
    poisoned = partial(HostPool, poison=True)
    with mock.patch("megatrain_nb.runtime.session.HostPool", poisoned):
        session = mt.init(directory, max_ram_gb=max_ram_gb, **kwargs)
    try:
        with session:
            session.max_resident_bytes = 0 if disk else None
            yield session
    finally:
        # Where closing fails, that is one test's finding and not the next one's.
        session._lock.release()
        if mt.current_session() is session:
            set_current(None)


def set_tile_numel(patch: pytest.MonkeyPatch, tile_numel: int) -> None:
    """Let packs that are made from now on have tiles of this many elements."""
    defaults = Pager.__init__.__kwdefaults__
    assert defaults is not None
    patch.setitem(defaults, "tile_numel", tile_numel)


def wrapped(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """`mt.wrap` for a type checker that does not know the model's modules."""
    return mt.wrap(model, *args, **kwargs)


def micro_batches(step: int, count: int = 3) -> list[dict[str, Tensor]]:
    return [{"ids": batch(10 * step + index)} for index in range(count)]


def window_step(model: Any, optimizer: Any, step: int, count: int = 3) -> mt.StepResult:
    """One step, layer-major."""
    return mt.train_step(
        model,
        optimizer,
        micro_batches(step, count),
        loss_fn=lambda model, batch: loss_of(model, batch["ids"]) / count,
    )


def plain_step(model: Any, optimizer: Any, step: int, count: int = 3) -> float:
    """The same step as a plain loop, on a plain model or a streamed one."""
    total = 0.0
    for each in micro_batches(step, count):
        loss = loss_of(model, each["ids"]) / count
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def snapshot(model: Any, optimizer: Any = None) -> dict[str, Tensor]:
    """Copies of all parameters, moments and step counts."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        if optimizer is not None:
            for key, value in optimizer.state.get(param, {}).items():
                found[f"{name}:{key}"] = value.detach().clone()
    return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return sorted(
        key
        for key in a.keys() | b.keys()
        if key not in a or key not in b or not torch.equal(a[key], b[key])
    )


def wrong_gradients(plain: nn.Module, streamed: nn.Module) -> list[str]:
    """Names of parameters whose gradient is not the plain model's."""
    found = []
    for (name, param), other in zip(
        plain.named_parameters(), streamed.parameters(), strict=True
    ):
        mine, theirs = other.grad, param.grad
        if mine is None or theirs is None:
            if mine is not theirs:
                found.append(name)
        elif not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6):
            found.append(name)
    return found


def backward_both(
    make: Callable[[], Any],
    directory: Path,
    *,
    window: bool,
    count: int = 1,
    loss: Callable[[Any, Tensor], Any] = loss_of,
    before_wrap: Callable[[Any], None] | None = None,
) -> list[str]:
    """Names of wrong gradients after ``count`` micro-batches of a plain and of a streamed model."""
    plain = seeded(make)
    streamed = copy.deepcopy(plain)
    for model in (plain, streamed):
        if before_wrap is not None:
            before_wrap(model)
    for index in range(count):
        loss(plain, batch(index)).backward()
    with opened(directory):
        streamed, optimizer = mt.wrap(streamed)
        if not window:
            for index in range(count):
                loss(streamed, batch(index)).backward()
            return wrong_gradients(plain, streamed)
        mt.train_step(
            streamed,
            optimizer,
            micro_batches(0, count),
            loss_fn=lambda model, batch: loss(model, batch["ids"]),
        )
        # After the first step the first moment is a tenth of the gradient.
        for param in streamed.parameters():
            if param in optimizer.state:
                param.grad = optimizer.state[param]["exp_avg"] * 10
        return wrong_gradients(plain, streamed)


def true_or_refused(make: Callable[[], Any], directory: Path, **kwargs: Any) -> None:
    """Training equals plain PyTorch's, or an error of ours says why it cannot."""
    try:
        wrong = backward_both(make, directory, **kwargs)
    except mt.MegatrainError:
        return
    assert wrong == []


def gradients_in(
    model: Any, optimizer: Any, step: Callable[[], Any]
) -> dict[str, Tensor]:
    """The gradients that the optimizer finds in what ``step`` does, by parameter."""
    found: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        for name, param in model.named_parameters():
            if param.grad is not None:
                found[name] = param.grad.detach().clone()

    hook = optimizer.register_step_pre_hook(look)
    step()
    hook.remove()
    return found


def report_of(script: str, *arguments: object, timeout: float = 500) -> Any:
    """What a script prints in its last line, as JSON; it runs in a process of its own."""
    return _last_line("-c", script, *arguments, timeout=timeout)


def report_of_module(module: str, *arguments: object) -> Any:
    """The same for a module that is run, however long it takes."""
    return _last_line("-m", module, *arguments, timeout=None)


def _last_line(*arguments: object, timeout: float | None) -> Any:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
