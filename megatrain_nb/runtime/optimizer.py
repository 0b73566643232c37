"""A real torch optimizer whose moments are in the store and whose step runs on the host."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain_nb.codec.dynamic import Role
from megatrain_nb.codec.names import DYNAMIC, RAW
from megatrain_nb.errors import ArgumentError, ModelError
from megatrain_nb.optim.adamw import Segment, update
from megatrain_nb.optim.config import AdamWConfig
from megatrain_nb.optim.encoded import caution_of
from megatrain_nb.runtime.gradients import check_stored, total_norm
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.notes import experimental_notes
from megatrain_nb.runtime.piece import MOMENTS
from megatrain_nb.runtime.recode import ask, asked_by_groups, recode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from megatrain_nb.runtime.offload import OffloadedModel

logger = logging.getLogger("megatrain_nb")

_NONFINITE = ("stop", "skip")
_NOT_OURS = ("amsgrad", "differentiable", "capturable")


class AdamW(torch.optim.Optimizer):
    """AdamW or Adam over a model in the store; the numbers are those of torch's fused kernels.

    Parameters
    ----------
    offloaded
        The model.
    params
        Parameters or groups, as every torch optimizer takes them.
    lr, betas, eps, weight_decay
        As in torch.optim.AdamW.
    decoupled
        False puts the weight decay into the gradient, as torch.optim.Adam does.
    max_grad_norm
        Clip the total 2-norm of the gradients in every step; None for no clipping.

    Attributes
    ----------
    nonfinite
        What `step` does where a gradient is NaN or infinite: ``"stop"`` raises an error that names the
        parameter, ``"skip"`` leaves weights and moments as they are and goes on.

    Raises
    ------
    ArgumentError
        A hyper-parameter outside its range, or a parameter that is not the model's.

    References
    ----------
    Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. Kingma and Ba, arXiv 1412.6980, algorithm 1.
    """

    def __init__(
        self,
        offloaded: OffloadedModel,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decoupled: bool = True,
        max_grad_norm: float | None = None,
    ) -> None:
        check_max_norm(max_grad_norm)
        self.offloaded = offloaded
        self.nonfinite = "stop"
        self.max_grad_norm = max_grad_norm
        self.last_grad_norm = torch.tensor(float("nan"))
        self.taken_over: torch.optim.Optimizer | None = None
        self._clip_once: float | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": False,
            "decoupled_weight_decay": decoupled,
            "rounding_seed": torch.initial_seed() % 2**32,
        }
        super().__init__(params, defaults)
        mine = set(offloaded.model.parameters())
        for group in self.param_groups:
            config_of(group)
            for param in group["params"]:
                if param not in mine:
                    msg = f"a parameter of shape {tuple(param.shape)} does not belong to the model; give model.parameters()"
                    raise ArgumentError(msg)
        asked = asked_by_groups(offloaded, self.param_groups)
        offloaded.adam.reset()
        ask(offloaded, asked)
        offloaded.optimizer = self  # the one before, if any, has lost its moments
        offloaded.adam.rounding_seed = self.param_groups[0]["rounding_seed"]
        self.warn_of_settings()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises
        ------
        SessionError
            The session is closed, or an earlier update failed half-way.
        ModelError
            A gradient is not finite (unless ``nonfinite="skip"``); nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        offloaded = self.offloaded
        offloaded.executor.check_usable()
        if offloaded.optimizer is not self:
            msg = "another optimizer was made for this model since; step with that one"
            raise ModelError(msg)
        check_stored(offloaded.pager)
        if self.taken_over is not None:
            self.taken_over._opt_called = True  # type: ignore[attr-defined]  # for its schedulers
        offloaded.steps.begin()
        begin, before = time.perf_counter(), offloaded.executor.not_computing()
        max_norm = (
            self._clip_once if self._clip_once is not None else self.max_grad_norm
        )
        self._clip_once = None
        self.last_grad_norm = total_norm(offloaded)
        skipped = self._why_not_finite()
        if skipped and self.nonfinite == "stop":
            msg = (
                f"{skipped} in step {offloaded.steps.done + 1}; nothing was updated, the weights are those of the "
                'step before. Lower the learning rate or clip with max_grad_norm, or give nonfinite="skip" to '
                "leave such steps out"
            )
            raise ModelError(msg)
        scale = clip_coefficient(self.last_grad_norm, max_norm)
        configs = {
            param: config_of(group, offloaded.session.controls.lr_factor)
            for group in self.param_groups
            for param in group["params"]
        }
        with interrupts_wait(offloaded.executor.stop, breakable=False):
            if skipped:
                logger.warning("step %d skipped: %s", offloaded.steps.done + 1, skipped)
            else:
                begin_update(offloaded, configs, grad_scale=scale)
            self.note_state()
            offloaded.steps.done += 1
            if not skipped:
                offloaded.executor.turn_over()
            counted = offloaded.executor.not_computing() - before
            offloaded.steps.seconds += time.perf_counter() - begin - counted
            offloaded.steps.finish(float(self.last_grad_norm))
        return loss

    def _why_not_finite(self) -> str:
        """Name a parameter whose gradient is not finite; empty if all are."""
        if self.last_grad_norm.isfinite():
            return ""
        offloaded = self.offloaded
        for name, param in offloaded.model.named_parameters():
            norm = offloaded.executor.norms.get(param)
            if norm is None and param not in offloaded.layers.homes:
                norm = None if param.grad is None else param.grad.norm().cpu()
            if norm is not None and not norm.isfinite():
                return (
                    f"the gradient of {name} is not finite (its norm is {float(norm)})"
                )
        return f"the norm of all gradients is {float(self.last_grad_norm)}, though each one's is finite"

    @torch.no_grad()
    def finish(self) -> None:
        """Do what `step` left for the next forward to do, and return when it is on the disk."""
        self.offloaded.executor.check_usable()
        self.offloaded.finish_updates()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all pending gradients, or set them to zero."""
        executor = self.offloaded.executor
        if executor.unusable:
            return
        pending = dict.fromkeys(executor.norms, torch.tensor(0.0))
        streamed = self.offloaded.layers.homes
        params = [param for group in self.param_groups for param in group["params"]]
        ordinary = [p for p in params if p not in streamed and p.grad is not None]
        with interrupts_wait(executor.stop, breakable=False):
            if not set_to_none:
                # The update still needs the gradient that is to read as zeros.
                self.offloaded.updates.finish_all()
            executor.drop_gradients()
            if not set_to_none:
                executor.tail.forget_gradients()
            for param in ordinary:
                param.grad = None if set_to_none else torch.zeros_like(param)
            if not set_to_none:
                executor.norms.update(pending)

    def clip_next(self, max_norm: float) -> Tensor:
        """Clip in the next step, and return the total norm of the pending gradients."""
        self._clip_once = max_norm
        return total_norm(self.offloaded)

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters, step counts and moments, as torch does.

        ``moment_codecs`` names the codec of every encoded parameter's moments, by index: with ``"dynamic"`` it is
        part of the state.
        """
        state = super().state_dict()
        homes = self.offloaded.layers.homes
        params = [param for group in self.param_groups for param in group["params"]]
        codecs = {
            index: homes[param].spec.codec
            for index, param in enumerate(params)
            if param in homes and homes[param].spec.codec != RAW
        }
        if codecs:
            state["moment_codecs"] = codecs
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over hyper-parameters and moments, parameter by parameter.

        Raises
        ------
        ValueError
            Groups or parameters that do not match.
        """
        groups, saved = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [
            len(group["params"]) for group in saved
        ]:
            msg = "the state holds other parameter groups than this optimizer"
            raise ValueError(msg)
        for group, other in zip(groups, saved, strict=True):
            group.update(
                {key: value for key, value in other.items() if key != "params"}
            )
        self.offloaded.adam.rounding_seed = groups[0]["rounding_seed"]
        params = [param for group in groups for param in group["params"]]
        self._take_codecs(params, state_dict.get("moment_codecs", {}))
        for index, param in enumerate(params):
            if index not in state_dict["state"]:
                self._drop_state(param)
        for index, state in state_dict["state"].items():
            self.take_state(params[index], state)
        self.note_state()

    def _take_codecs(self, params: list[Any], codecs: dict[int, str]) -> None:
        """Go on with the codecs of a saved state, where they are chosen while training."""
        offloaded = self.offloaded
        names = {
            index: offloaded.layers.homes[param].spec.name
            for index, param in enumerate(params)
            if param in offloaded.layers.homes
        }
        offloaded.updates.chooser.forget()
        recode(
            offloaded,
            {
                names[index]: codec
                for index, codec in codecs.items()
                if index in names
                and offloaded.adam.asked[names[index]] == DYNAMIC
                and codec in Role.BODY.codecs
            },
        )

    def take_state(self, param: Any, state: dict[str, Any]) -> None:
        """Copy one parameter's step count and moments into the store."""
        if not state:
            return
        self.offloaded.adam.steps[param] = int(state["step"])
        moments = [state.get(what.value) for what in MOMENTS]
        if any(moment is not None for moment in moments):
            zeros = torch.zeros(())
            with torch.no_grad():
                self.offloaded.adam.set_moments(
                    param, *(zeros if moment is None else moment for moment in moments)
                )

    def _drop_state(self, param: Any) -> None:
        if self.offloaded.adam.steps.pop(param, 0):
            del self.state[param]
            self.offloaded.adam.set_moments(param, torch.zeros(()), torch.zeros(()))

    def warn_of_settings(self) -> None:
        """Say which codecs are experimental, and where hyper-parameters are known to hurt one."""
        session, asked = self.offloaded.session, self.offloaded.adam.asked
        for text in experimental_notes(asked.values()):
            if text not in session.notes:
                session.note(text)
        homes = self.offloaded.layers.homes
        for index, group in enumerate(self.param_groups):
            specs = (homes[param].spec for param in group["params"] if param in homes)
            codecs = dict.fromkeys(
                DYNAMIC
                if spec.codec in Role.BODY.codecs and asked[spec.name] == DYNAMIC
                else spec.codec
                for spec in specs
            )
            for codec in codecs:
                caution = caution_of(codec, config_of(group))
                if caution:
                    session.note(f"parameter group {index}: {caution}")

    def note_state(self) -> None:
        """Show torch's view of the state: step count, and moments that are read when asked for."""
        for param, step in self.offloaded.adam.steps.items():
            state = self.state[param]
            if not state:
                for what in MOMENTS:
                    state[what.value] = self.offloaded.adam.moment(param, what)
            state["step"] = torch.tensor(float(step))


def adopt(
    offloaded: OffloadedModel,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None,
    nonfinite: str = "stop",
) -> AdamW:
    """Take over a torch AdamW or Adam with its groups, hyper-parameters and state.

    Raises
    ------
    ArgumentError
        Another optimizer, or an option that the kernels do not have.
    """
    check_kind(optimizer)
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        group.setdefault("decoupled_weight_decay", decoupled)
    adopted = AdamW(
        offloaded,
        [dict(group) for group in optimizer.param_groups],
        decoupled=decoupled,
        max_grad_norm=max_grad_norm,
    )
    adopted.nonfinite = nonfinite
    # The very same dicts: a scheduler that was made for the old optimizer goes on setting rates here.
    adopted.param_groups = optimizer.param_groups
    for group in adopted.param_groups:
        group.setdefault("maximize", False)
        group.setdefault("rounding_seed", adopted.defaults["rounding_seed"])
    for param, state in optimizer.state.items():
        adopted.take_state(param, state)
    optimizer.state.clear()  # its moments are in the store now
    optimizer.step = _taken_over  # type: ignore[method-assign,assignment]
    adopted.taken_over = optimizer
    adopted.note_state()
    return adopted


def _taken_over(*_: Any, **__: Any) -> None:
    msg = "this optimizer was taken over by the session; call step() of the one that mt.wrap returned"
    raise ModelError(msg)


_taken_over._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # what torch's schedulers look for


def check_max_norm(max_norm: float | None) -> None:
    """Raise ArgumentError if a norm cannot be clipped to."""
    given: object = max_norm
    usable = isinstance(given, int | float) and math.isfinite(given) and given > 0
    if given is not None and not usable:
        msg = f"max_grad_norm={max_norm!r} is not usable; give a finite number > 0, or None for no clipping"
        raise ArgumentError(msg)


def check_nonfinite(nonfinite: str) -> None:
    """Raise ArgumentError if it is not known what to do with gradients that are not finite."""
    if nonfinite not in _NONFINITE:
        msg = f'nonfinite={nonfinite!r} is not known; give "stop" or "skip"'
        raise ArgumentError(msg)


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError if the optimizer is not an AdamW or Adam that can be taken over."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        msg = f"{type(optimizer).__name__} cannot run on the host kernels; give torch.optim.AdamW or torch.optim.Adam"
        raise ArgumentError(msg)
    for group in optimizer.param_groups:
        for option in _NOT_OURS:
            if group.get(option):
                msg = f"{type(optimizer).__name__}({option}=True) cannot be honoured; leave {option} out"
                raise ArgumentError(msg)


def clip_coefficient(norm: Tensor, max_norm: float | None) -> float:
    """Return the factor on the gradients, as torch.nn.utils.clip_grad_norm_ computes it in float32."""
    if max_norm is None:
        return 1.0
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def begin_update(
    offloaded: OffloadedModel,
    configs: dict[nn.Parameter, AdamWConfig],
    *,
    grad_scale: float,
) -> None:
    """Begin one AdamW step of every parameter of ``configs`` that has a pending gradient.

    Streamed parameters are updated when the next forward needs them, ordinary ones at once, in place.
    """
    # What is due of the step before may need the disk; if that fails, nothing of this one has begun.
    offloaded.pay_updates()
    segments: dict[int, list[Segment]] = {}
    for param, config in configs.items():
        home = offloaded.layers.homes.get(param)
        if home is not None and param in offloaded.executor.norms:
            start, stop = home.spec.offset, home.spec.offset + home.spec.numel
            step = offloaded.adam.count_step(param)
            _, seed = offloaded.adam.rounding_of(home.spec.name)
            segment = Segment(start, stop, config, step, seed)
            segments.setdefault(home.pack.index, []).append(segment)
    offloaded.adam.look_at_update(p for p in configs if p in offloaded.executor.norms)
    offloaded.executor.begin_update(segments, grad_scale=grad_scale)
    for param, config in configs.items():
        if param not in offloaded.layers.homes and param.grad is not None:
            segment = Segment(
                0, param.numel(), config, offloaded.adam.count_step(param)
            )
            _update_ordinary(offloaded, param, segment, grad_scale)


def _update_ordinary(
    offloaded: OffloadedModel, param: nn.Parameter, segment: Segment, grad_scale: float
) -> None:
    assert param.grad is not None
    moments = [offloaded.adam.moment(param, what) for what in MOMENTS]
    tensors = (param, *moments, param.grad)
    hosts = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
    values, exp_avg, exp_avg_sq, grad = (host.view(-1).numpy() for host in hosts)
    threads = offloaded.session.threads
    update(
        values,
        exp_avg,
        exp_avg_sq,
        grad,
        [segment],
        grad_scale=grad_scale,
        threads=threads,
    )
    for tensor, host in zip(tensors[:3], hosts, strict=False):
        if tensor.data_ptr() != host.data_ptr():
            tensor.copy_(host)


def config_of(group: dict[str, Any], lr_factor: float = 1.0) -> AdamWConfig:
    """Return what the settings of a parameter group mean for the kernels.

    Raises
    ------
    ArgumentError, TypeError, ValueError
        They are none of AdamW's.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return AdamWConfig(
        lr=float(group["lr"]) * lr_factor,
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )
