"""A real torch optimizer whose moments are in the store and whose step runs on the host."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain_nb.errors import ArgumentError, ModelError
from megatrain_nb.optim.config import AdamWConfig
from megatrain_nb.runtime.pager import What
from megatrain_nb.runtime.update import update_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from megatrain_nb.runtime.offload import OffloadedModel

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
        self.offloaded = offloaded
        self.max_grad_norm = max_grad_norm
        self.last_grad_norm = torch.tensor(float("nan"))
        self._clip_once: float | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": False,
            "decoupled_weight_decay": decoupled,
        }
        super().__init__(params, defaults)
        mine = set(offloaded.model.parameters())
        for group in self.param_groups:
            _config(group)
            for param in group["params"]:
                if param not in mine:
                    msg = f"a parameter of shape {tuple(param.shape)} does not belong to the model; give model.parameters()"
                    raise ArgumentError(msg)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises
        ------
        SessionError
            The session is closed, or an earlier update failed half-way.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        offloaded = self.offloaded
        offloaded.executor.check_usable()
        offloaded.executor.rest()
        offloaded.begin_step()
        begin, waited = time.perf_counter(), offloaded.pager.wait_seconds
        max_norm = (
            self._clip_once if self._clip_once is not None else self.max_grad_norm
        )
        self._clip_once = None
        self.last_grad_norm = offloaded.total_norm()
        scale = clip_coefficient(self.last_grad_norm, max_norm)
        configs = {
            param: _config(group)
            for group in self.param_groups
            for param in group["params"]
        }
        with _interrupts_wait():
            try:
                update_all(offloaded, configs, grad_scale=scale)
            except BaseException as error:
                offloaded.executor.usable = (
                    f"an update failed half-way ({type(error).__name__}: {error}); some weights are those of the "
                    "step before, so the model must not be used. Close the session and start again"
                )
                raise
            self._note_state()
            offloaded.num_steps += 1
        waited = offloaded.pager.wait_seconds - waited
        offloaded.update_seconds += time.perf_counter() - begin - waited
        offloaded.finish_step(float(self.last_grad_norm))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all pending gradients."""
        self.offloaded.executor.drop_gradients()

    def clip_next(self, max_norm: float) -> Tensor:
        """Clip in the next step, and return the total norm of the pending gradients."""
        self._clip_once = max_norm
        return self.offloaded.total_norm()

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
        params = [param for group in groups for param in group["params"]]
        for index, state in state_dict["state"].items():
            self.take_state(params[index], state)
        self._note_state()

    def take_state(self, param: Any, state: dict[str, Any]) -> None:
        """Copy one parameter's step count and moments into the store."""
        if not state:
            return
        self.offloaded.steps[param] = int(state["step"])
        for what in (What.EXP_AVG, What.EXP_AVG_SQ):
            if state.get(what.value) is not None:
                with torch.no_grad():
                    self.offloaded.moment(param, what).copy_(state[what.value])

    def _note_state(self) -> None:
        """Show torch's view of the state: step count, and moments that are read when asked for."""
        for param, step in self.offloaded.steps.items():
            state = self.state[param]
            if not state:
                for what in (What.EXP_AVG, What.EXP_AVG_SQ):
                    state[what.value] = self.offloaded.moment(param, what)
            state["step"] = torch.tensor(float(step))


def adopt(
    offloaded: OffloadedModel,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None,
) -> AdamW:
    """Take over a torch AdamW or Adam with its groups, hyper-parameters and state.

    Raises
    ------
    ArgumentError
        Another optimizer, or an option that the kernels do not have.
    """
    check_kind(optimizer)
    groups = [
        {key: value for key, value in group.items() if key not in _IGNORED}
        for group in optimizer.param_groups
    ]
    for group in groups:
        group.setdefault(
            "decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)
        )
    adopted = AdamW(
        offloaded,
        groups,
        decoupled=isinstance(optimizer, torch.optim.AdamW),
        max_grad_norm=max_grad_norm,
    )
    for param, state in optimizer.state.items():
        adopted.take_state(param, state)
    optimizer.state.clear()  # its moments are in the store now
    adopted._note_state()
    return adopted


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


_IGNORED = ("foreach", "fused", *_NOT_OURS)


def clip_coefficient(norm: Tensor, max_norm: float | None) -> float:
    """Return the factor on the gradients, as torch.nn.utils.clip_grad_norm_ computes it in float32."""
    if max_norm is None:
        return 1.0
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _config(group: dict[str, Any]) -> AdamWConfig:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return AdamWConfig(
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C take effect after the update: a step is done wholly or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


__all__ = ["AdamW", "ModelError", "adopt", "check_kind", "clip_coefficient"]
