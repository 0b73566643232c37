"""Everything a session does, mixed, with random delays in every read, write, copy and update."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megatrain_nb.optim import adamw
from megatrain_nb.runtime.pager import Pager
from megatrain_nb.runtime.session import Session
from megatrain_nb.store.tilefile import TileFile
from tests.runtime.common import (
    TinyLM,
    batch,
    differing,
    loss_of,
    opened,
    plain_step,
    seeded,
    snapshot,
    window_step,
    wrapped,
)
from tests.runtime.plain import late_twin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    import megatrain_nb as mt


class Script:
    """The same random actions for plain PyTorch and for a streamed model; what they showed is noted.

    Actions on two models alternate. Where a session is given, its plan changes in between.
    """

    def __init__(
        self, pairs: list[tuple[Any, Any]], session: mt.Session | None, seed: int
    ) -> None:
        self.pairs, self.session = pairs, session
        self.draw = random.Random(seed)
        self.seen: list[Tensor] = []
        self.said: list[str] = []

    def run(self, steps: int) -> None:
        actions = [self.window] * 5 + [self.loop] * 4 + [
            self.evaluate, self.look, self.look_at_moment, self.write, self.write_moment, self.gradients,
            self.change_gradient, self.twice, self.zeros, self.replan, self.rest, self.one_layer,
        ]  # fmt: skip
        for step in range(steps):
            model, optimizer = self.pairs[self.draw.randrange(len(self.pairs))]
            action = self.draw.choice(actions)
            self.said.append(
                f"{step} {action.__name__} {self.pairs.index((model, optimizer))}"
            )
            action(model, optimizer, step)

    def window(self, model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        count = self.draw.randint(1, 3)
        if self.session is None:
            plain_step(model, optimizer, step, count)
        else:
            window_step(model, optimizer, step, count)

    def loop(self, model: Any, optimizer: Any, step: int) -> None:
        plain_step(model, optimizer, step, self.draw.randint(1, 2))

    def evaluate(self, model: Any, _: Any, step: int) -> None:
        with torch.no_grad():
            self.seen.append(model(batch(step)))

    def param(self, model: Any) -> Any:
        params = list(model.parameters())
        return params[self.draw.randrange(len(params))]

    def look(self, model: Any, _: Any, __: int) -> None:
        self.seen.append(self.param(model).detach().clone())

    def look_at_moment(self, model: Any, optimizer: Any, _: int) -> None:
        state = optimizer.state.get(self.param(model), {})
        if state:
            self.seen.append(state[self.draw.choice(["exp_avg", "exp_avg_sq"])].clone())

    def write(self, model: Any, _: Any, __: int) -> None:
        with torch.no_grad():
            self.param(model).mul_(1.01)

    def write_moment(self, model: Any, optimizer: Any, _: int) -> None:
        state = optimizer.state.get(self.param(model), {})
        if state:
            state[self.draw.choice(["exp_avg", "exp_avg_sq"])].mul_(0.5)

    def gradients(self, model: Any, optimizer: Any, step: int) -> None:
        loss_of(model, batch(step)).backward()
        param = self.param(model)
        self.seen.append(param.grad.clone())
        if self.draw.random() < 0.5:
            optimizer.zero_grad()  # else the next loop adds to them

    def change_gradient(self, model: Any, optimizer: Any, step: int) -> None:
        loss_of(model, batch(step)).backward()
        self.param(model).grad.mul_(0.5)
        optimizer.step()
        param = self.param(model)
        if self.draw.random() < 0.5:
            self.seen.append(param.grad.clone())
            param.grad.mul_(0.25)
            optimizer.step()
        optimizer.zero_grad()

    def twice(self, model: Any, optimizer: Any, step: int) -> None:
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.step()
        if self.draw.random() < 0.5:
            optimizer.zero_grad()

    def zeros(self, model: Any, optimizer: Any, step: int) -> None:
        loss_of(model, batch(step)).backward()
        if self.draw.random() < 0.5:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        self.seen.append(self.param(model).grad.clone())

    def one_layer(self, model: Any, optimizer: Any, step: int) -> None:
        """A forward that leaves out most of the model."""
        optimizer.zero_grad()
        model.layers[0](model.embed(batch(step))).square().mean().backward()
        optimizer.step()
        if self.draw.random() < 0.7:
            optimizer.zero_grad()

    def replan(self, _: Any, __: Any, ___: int) -> None:
        resident = self.draw.choice([None, 0, 10_000, 40_000])
        kept = self.draw.choice([None, 0, 20_000])
        if self.session is not None:
            self.session.max_resident_bytes, self.session.max_kept_bytes = (
                resident,
                kept,
            )
            self.session.models.plan()

    def rest(self, model: Any, optimizer: Any, _: int) -> None:
        how = self.draw.randrange(3)
        if self.session is None:
            return
        if how == 0:
            optimizer.finish()
        elif how == 1:
            model._megatrain.executor.rest()
        else:
            self.session.pool.trim()

    def state(self) -> dict[str, Tensor]:
        found = {f"seen:{index}": value for index, value in enumerate(self.seen)}
        for index, pair in enumerate(self.pairs):
            found |= {f"{index}:{key}": value for key, value in snapshot(*pair).items()}
        return found


def plain_script(steps: int, seed: int) -> Script:
    models = [seeded(lambda: TinyLM(num_layers=2), index) for index in range(2)]
    pairs = [
        (model, torch.optim.AdamW(model.parameters(), fused=True)) for model in models
    ]
    script = Script(pairs, None, seed)
    script.run(steps)
    return script


@contextmanager
def delays(patch: pytest.MonkeyPatch, share: float) -> Iterator[None]:
    """Let reads, writes, copies and updates take their own time."""
    chance = random.Random(0)

    def delayed(original: Callable[..., Any]) -> Callable[..., Any]:
        def later(*args: Any, **kwargs: Any) -> Any:
            if chance.random() < share:
                time.sleep(chance.random() * 0.003)
            return original(*args, **kwargs)

        return later

    with patch.context() as inner:
        for name in ("read", "write"):
            inner.setattr(TileFile, name, delayed(getattr(TileFile, name)))
        inner.setattr("megatrain_nb.runtime.update.update", delayed(adamw.update))
        # What the model's own tensors take changes at any moment, and the plan with it.
        for name in ("other_bytes", "other_peak_bytes"):
            inner.setattr(
                Session, name, lambda _: chance.choice([0, 10_000, 20_000, 60_000])
            )
        yield


def streamed_script(
    path: Path, steps: int, seed: int, *, slots: bool, room: str
) -> tuple[Script, dict[str, Tensor]]:
    with opened(path, max_ram_gb=room) as session:
        if slots:
            session.device = late_twin(200_000 if seed % 2 else None, seed=seed)
        pairs = [
            wrapped(seeded(lambda: TinyLM(num_layers=2), index)) for index in range(2)
        ]
        script = Script(pairs, session, seed)
        script.run(steps)
        state = script.state()
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model._megatrain.executor.rest()
            model._megatrain.pager.barrier()
            assert [
                str(x) for x in model._megatrain.pager._pieces.values() if x.users
            ] == []
    return script, state


def differences(plain: Script, mine: Script, state: dict[str, Tensor]) -> list[str]:
    assert plain.said == mine.said
    return differing(plain.state(), state)


@pytest.mark.parametrize("slots", [False, True], ids=["in_place", "slots"])
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        *((seed, 40) for seed in range(3)),
        pytest.param(100, 1000, marks=pytest.mark.slow),
    ],
)
def test_random_actions_with_random_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, steps: int, slots: bool
) -> None:
    defaults = Pager.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "tile_numel", 1024)
    plain = plain_script(steps, seed)
    with delays(monkeypatch, 0.3):
        mine = streamed_script(tmp_path, steps, seed, slots=slots, room="600 kB")
    assert differences(plain, *mine) == []
