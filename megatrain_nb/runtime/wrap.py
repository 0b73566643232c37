"""The API of plain training loops: wrap a model, step over a window, get the model back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain_nb.errors import ArgumentError, ModelError
from megatrain_nb.runtime.claim import CLAIM
from megatrain_nb.runtime.current import require_session
from megatrain_nb.runtime.interrupts import interrupts_wait
from megatrain_nb.runtime.offload import OffloadedModel, offload, required_model
from megatrain_nb.runtime.optimizer import (
    AdamW,
    adopt,
    check_kind,
    check_max_norm,
    check_nonfinite,
)
from megatrain_nb.runtime.tokens import (
    NumItems,
    loss_of,
    takes_num_items,
    valid_tokens,
)
from megatrain_nb.runtime.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain_nb.runtime.callbacks import StepResult


def wrap(  # noqa: PLR0913 - settings, by keyword only
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_grad_norm: float | None = None,
    nonfinite: str = "stop",
    fuse_micro_batches: bool = False,
    dtype: torch.dtype | str | None = None,
) -> tuple[nn.Module, AdamW]:
    """Move a model into the open session; the usual training loop works on what comes back.

    Parameters
    ----------
    model
        fp32 or bf16, in RAM or made by ``mt.from_config``. Its memory is freed block by block as it moves.
    optimizer
        A torch.optim.AdamW or Adam to take over, state included; None makes an AdamW.
    lr, betas, eps, weight_decay
        Of the AdamW that is made, as in torch.optim.AdamW.
    max_grad_norm
        Clip the total norm in every ``optimizer.step()``.
    nonfinite
        Where a gradient is NaN or infinite: ``"stop"`` raises an error that names it before anything is
        updated, ``"skip"`` leaves that step's update out.
    fuse_micro_batches
        Let small micro-batches of a `train_step` pass a block together, where that gives the same up to rounding.
        Dropout then draws other masks.
    dtype
        What the model computes in: ``torch.float32``, or ``torch.bfloat16`` with an fp32 master, which is what
        AdamW updates. None: what its parameters are. Buffers stay as they are.

    Returns
    -------
    tuple
        The same model, and a torch.optim.Optimizer for it.

    Raises
    ------
    SessionError
        No session is open.
    ArgumentError
        An optimizer that cannot be taken over, or a dtype other than these.
    ModelError
        A model that cannot be streamed.
    BudgetError
        It does not fit.
    """
    session = require_session()
    given: object = model
    if not isinstance(given, nn.Module):
        msg = f"model={given!r} is not a torch.nn.Module"
        raise ArgumentError(msg)
    check_max_norm(max_grad_norm)
    check_nonfinite(nonfinite)
    if optimizer is not None:
        check_kind(optimizer)
        if (lr, betas, eps, weight_decay) != (1e-3, (0.9, 0.999), 1e-8, 1e-2):
            msg = "lr, betas, eps and weight_decay are those of the optimizer that you give; leave them out"
            raise ArgumentError(msg)
    offloaded = offload(model, session, dtype)
    offloaded.executor.check_usable()
    offloaded.fuse(fuse_micro_batches)
    if optimizer is not None:
        return model, adopt(offloaded, optimizer, max_grad_norm, nonfinite)
    params = [param for param in model.parameters() if param.requires_grad]
    made = AdamW(
        offloaded,
        params,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )
    made.nonfinite = nonfinite
    return model, made


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model as an ordinary one, its weights in ordinary memory.

    What computed in bf16 comes back in bf16; its fp32 master is gone then, so write that before with
    ``mt.save_pretrained(model, dir, dtype=torch.float32)``.

    Raises
    ------
    ModelError
        The model is not in a session.
    """
    return required_model(model).move_out()


def train_step(
    model: nn.Module,
    optimizer: AdamW,
    micro_batches: Sequence[Mapping[str, Any]],
    loss_fn: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None,
) -> StepResult:
    """Take one optimizer step over a window of micro-batches, layer by layer.

    Parameters
    ----------
    model, optimizer
        From `wrap`.
    micro_batches
        What ``model(**batch)`` takes, ``labels`` included; at least one.
    loss_fn
        ``loss_fn(model, batch)`` gives a micro-batch's part of the window's loss: the window's loss is their
        sum. None takes the model's own loss, normalised by the window's valid tokens.

    Returns
    -------
    StepResult
        Loss, gradient norm, tokens, and seconds by cause.

    Raises
    ------
    ArgumentError
        No micro-batch, or gradients are pending from an earlier backward.
    ModelError
        The model gives no loss.
    """
    offloaded = required_model(model)
    offloaded.executor.check_usable()
    if offloaded.optimizer is not optimizer:
        msg = "train_step needs the optimizer that mt.wrap returned last for this model"
        raise ArgumentError(msg)
    if not micro_batches:
        msg = "train_step needs at least one micro-batch"
        raise ArgumentError(msg)
    if loss_fn is None and not all(isinstance(x, Mapping) for x in micro_batches):
        msg = (
            "train_step needs micro-batches that the model can be called with, such as {'input_ids': ..., 'labels': ...}; "
            "give loss_fn for others"
        )
        raise ArgumentError(msg)
    if offloaded.executor.norms:
        msg = "gradients are pending from an earlier backward; call optimizer.step() or optimizer.zero_grad() first"
        raise ArgumentError(msg)
    tokens = sum(valid_tokens(model, batch) for batch in micro_batches)
    if loss_fn is None:
        loss_fn = partial(_own_loss, tokens=tokens, count=len(micro_batches))
    with CLAIM.held("mt.train_step"), interrupts_wait(offloaded.executor.stop):
        run_window(
            offloaded,
            [partial(loss_fn, model, batch) for batch in micro_batches],
            tokens=tokens,
        )
        try:
            optimizer.step()
        except BaseException:
            offloaded.steps.forget()
            raise
        finally:
            optimizer.zero_grad()
    assert offloaded.steps.last is not None
    return offloaded.steps.last


def run_window(
    offloaded: OffloadedModel, computes: Sequence[Callable[[], Tensor]], *, tokens: int
) -> list[Tensor]:
    """Run forward and backward of a window; after an error or interrupt no gradient of it is left.

    Parameters
    ----------
    offloaded
        The model.
    computes
        One for each micro-batch; each returns its part of the window's loss.
    tokens
        Valid tokens of the window.

    Returns
    -------
    list
        Each micro-batch's part of the window's loss, detached.
    """
    executor = offloaded.executor
    executor.check_usable()
    offloaded.steps.begin()
    try:
        with interrupts_wait(executor.stop):
            first = offloaded.model if offloaded.steps.done == 0 else None
            losses = Window(
                executor,
                computes,
                step=offloaded.steps.done,
                model=first,
                fusing=offloaded.fusing,
            ).run()
    except BaseException:
        with interrupts_wait(executor.stop, breakable=False):
            offloaded.steps.forget()
            executor.abort()
            executor.drop_gradients()
        raise
    offloaded.steps.note_loss(sum(losses[1:], start=losses[0]), tokens)
    return losses


def _own_loss(
    model: nn.Module, batch: Mapping[str, Any], *, tokens: int, count: int
) -> Tensor:
    """Return the micro-batch's part of the window's loss."""
    if takes_num_items(model) and tokens:
        number = NumItems.of(tokens)
        loss = _loss(model, model(**batch, num_items_in_batch=number))
        if number.used:
            return loss
    else:
        loss = _loss(model, model(**batch))
    if tokens:  # the model takes the mean over its own tokens: weigh it by their share
        return loss * (valid_tokens(model, batch) / tokens)
    return loss / count


def _loss(model: nn.Module, outputs: Any) -> Tensor:
    loss = loss_of(outputs)
    if loss is None:
        msg = f"{type(model).__name__} gives no loss for this batch; put 'labels' into it, or give loss_fn"
        raise ModelError(msg)
    return loss
