"""Streamed training gives plain PyTorch's numbers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megatrain_nb.errors import ModelError
from megatrain_nb.optim.adamw import Segment
from megatrain_nb.runtime import (
    adamstate,
    bound,
    call,
    gradients,
    optimizer,
    pager,
    slots,
    update,
    window,
)
from megatrain_nb.runtime.current import current_session
from megatrain_nb.runtime.piece import What
from tests.runtime.models import ARCHITECTURES, covering
from tests.runtime.plain import (
    FACTORS,
    Case,
    assert_equal,
    assert_equal_but_tied,
    opened,
    plain_trace_of,
    streamed_trace,
    tied_name,
    weights_are_kept_as_they_are,
    worst,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Every architecture meets every combination of the values of any three factors.
CASES = [
    Case(name, **row)
    for seed, name in enumerate(ARCHITECTURES)
    for row in covering(3, seed, FACTORS)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_plain_pytorch(case: Case, tmp_path: Path) -> None:
    with opened(tmp_path, case.place, case.device) as session:
        ours = streamed_trace(case, session)
    plain = plain_trace_of(case)
    if case.tied and case.accumulation > 1:
        assert_equal_but_tied(ours, plain, tied_name(case.name), case)
    else:
        assert_equal(ours, plain)


def test_the_cases_cover_what_they_should() -> None:
    assert 100 <= len(CASES) <= 150
    for name in ARCHITECTURES:
        mine = [case for case in CASES if case.name == name]
        for factor, values in FACTORS.items():
            assert {getattr(case, factor) for case in mine} == set(values)


# -- the comparison notices every broken mechanism --------------------------------------------------------


def random_state_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(call, "set_rng", lambda *_: None)


def gradient_of_recorded_logits_is_dropped(patch: pytest.MonkeyPatch) -> None:
    backward = call.BlockCall.backward

    def without(self: call.BlockCall, grads: Any, bound: Any) -> Any:
        count = sum(self._recorded_counts.values())
        kept = [*grads[: len(grads) - count], *[None] * count]
        return backward(self, kept, bound)

    patch.setattr(call.BlockCall, "backward", without)


def recorded_logits_are_not_borders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(call, "_active_collector", lambda: None)


def second_use_overwrites_the_first(patch: pytest.MonkeyPatch) -> None:
    home = gradients.Gradients.home

    def forgetful(self: Any, param: Any, *rest: Any) -> None:
        self._executor.norms.pop(param, None)
        home(self, param, *rest)

    patch.setattr(gradients.Gradients, "home", forgetful)


def last_micro_batch_only(patch: pytest.MonkeyPatch) -> None:
    take = window.Window._backward_call

    def only_last(self: Any, batch: Any, bound: Any) -> None:
        for plain in bound.plain.values():
            plain.grad = None
        take(self, batch, bound)

    patch.setattr(window.Window, "_backward_call", only_last)


def input_gradient_flows_once_per_consumer(patch: pytest.MonkeyPatch) -> None:
    """The embedding of the last micro-batch gets nothing."""
    flow = window.flow

    def half(tensors: Any, grads: Any) -> None:
        flow(tensors, [grad if grad is None else grad * 0.5 for grad in grads])

    patch.setattr(window, "flow", half)


def weights_are_not_written(patch: pytest.MonkeyPatch) -> None:
    settle = pager.Pager.settle

    def clean(self: Any, piece: Any) -> None:
        if piece.what is What.WEIGHTS and piece.pack.index == 1:
            piece.dirty = piece.dirty and not optimizer_has_stepped()
        settle(self, piece)

    def optimizer_has_stepped() -> bool:
        session = current_session()
        assert session is not None
        return any(model.steps.done for model in session.models)

    patch.setattr(pager.Pager, "settle", clean)


def moments_are_not_written(patch: pytest.MonkeyPatch) -> None:
    write = pager.Pager.write_tile

    def skip(self: Any, piece: Any, start: int, slab: Any) -> None:
        if piece.what is What.EXP_AVG_SQ and start > 0:
            self.pool.give(slab)
        else:
            write(self, piece, start, slab)

    patch.setattr(pager.Pager, "write_tile", skip)


def gradients_are_not_written(patch: pytest.MonkeyPatch) -> None:
    settle = pager.Pager.settle

    def clean(self: Any, piece: Any) -> None:
        if piece.what is What.GRADS:
            piece.dirty = False
        settle(self, piece)

    patch.setattr(pager.Pager, "settle", clean)


def a_tile_is_shifted(patch: pytest.MonkeyPatch) -> None:
    read = pager.Pager.read_tile

    def shifted(self: Any, piece: Any, start: int, stop: int, **kwargs: Any) -> Any:
        if piece.what is What.EXP_AVG and start == self.tile_numel:
            return read(self, piece, 0, stop - start, **kwargs)
        return read(self, piece, start, stop, **kwargs)

    patch.setattr(pager.Pager, "read_tile", shifted)


def segments_begin_late(patch: pytest.MonkeyPatch) -> None:
    clip = update._clip

    def late(*args: Any) -> Any:
        return [
            Segment(min(s.start + 1, s.stop), s.stop, s.config, s.step)
            for s in clip(*args)
        ]

    patch.setattr(update, "_clip", late)


def clipping_forgets_the_millionth(patch: pytest.MonkeyPatch) -> None:
    def almost(norm: torch.Tensor, max_norm: float | None) -> float:
        return 1.0 if max_norm is None else min(1.0, max_norm / float(norm))

    patch.setattr(optimizer, "clip_coefficient", almost)


def norm_forgets_a_parameter(patch: pytest.MonkeyPatch) -> None:
    def short(offloaded: Any) -> torch.Tensor:
        norms: list[torch.Tensor] = list(offloaded.executor.norms.values())
        return torch.stack(norms[1:]).square().sum().sqrt()

    patch.setattr(optimizer, "total_norm", short)


def bias_correction_stands_still(patch: pytest.MonkeyPatch) -> None:
    count = adamstate.AdamState.count_step

    def standing(self: Any, param: Any) -> int:
        count(self, param)
        return 1

    patch.setattr(adamstate.AdamState, "count_step", standing)


def slots_keep_old_weights(patch: pytest.MonkeyPatch) -> None:
    ready = slots.SlotDevice.ready
    seen: dict[int, torch.Tensor] = {}

    def stale(self: Any, slot: Any) -> torch.Tensor:
        flat = ready(self, slot)
        flat.copy_(seen.setdefault(len(flat), flat.clone()))
        return flat

    patch.setattr(slots.SlotDevice, "ready", stale)


def kept_gradients_stay_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bound.Bound, "add_gradient", lambda *_: None)


def streams_are_those_of_the_caller(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        window,
        "_streams",
        lambda device, caller, count, step: [copy.copy(caller) for _ in range(count)],
    )


HURT = Case("llama", accumulation=3, clipping=True, place="disk")

TEETH: dict[Callable[[pytest.MonkeyPatch], None], Case] = {
    random_state_is_not_restored: replace(HURT, name="gpt2", dropout=0.1),
    gradient_of_recorded_logits_is_dropped: replace(HURT, name="mixtral"),
    recorded_logits_are_not_borders: replace(HURT, name="mixtral"),
    second_use_overwrites_the_first: replace(HURT, tied=True, accumulation=1),
    last_micro_batch_only: HURT,
    input_gradient_flows_once_per_consumer: HURT,
    weights_are_not_written: HURT,
    moments_are_not_written: HURT,
    gradients_are_not_written: HURT,
    a_tile_is_shifted: HURT,
    segments_begin_late: HURT,
    clipping_forgets_the_millionth: HURT,
    norm_forgets_a_parameter: HURT,
    bias_correction_stands_still: HURT,
    slots_keep_old_weights: replace(HURT, device="slots"),
    weights_are_kept_as_they_are: replace(HURT, keep=True),
    kept_gradients_stay_behind: replace(HURT, keep=True, place="ram"),
    streams_are_those_of_the_caller: replace(HURT, dropout=0.1),
}


@pytest.mark.parametrize("broken", TEETH, ids=lambda broken: str(broken.__name__))
def test_parity_has_teeth(
    broken: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = TEETH[broken]
    plain = plain_trace_of(case, steps=3)
    seen = worst.copy()
    with opened(tmp_path / "whole", case.place, case.device) as session:
        assert_equal(streamed_trace(case, session, steps=3), plain)
    broken(monkeypatch)
    with (
        pytest.raises((AssertionError, IndexError, ModelError)),
        opened(tmp_path / "broken", case.place, case.device) as session,
    ):
        assert_equal(streamed_trace(case, session, steps=3), plain)
    worst.clear()
    worst.update(seen)
