"""Which tokens count, and how a model wants its loss normalised."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def valid_tokens(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Count the labels that enter the loss: not -100, and shifted where the model shifts them."""
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, Tensor):
        return 0
    if shifts_labels(model):
        labels = labels[..., 1:]
    return int(labels.ne(-100).sum())


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss compares position i with label i + 1, as causal language models do."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss  # noqa: PLC0415

    config = getattr(model, "config", None)
    loss = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
    return loss is ForCausalLMLoss and not getattr(config, "is_encoder_decoder", False)


def takes_num_items(model: nn.Module) -> bool:
    """Whether the model divides its loss by ``num_items_in_batch``, decided as transformers' Trainer does."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
    )


def loss_of(outputs: Any) -> Tensor | None:
    """Return the scalar loss that a model's outputs carry, or None."""
    loss = (
        outputs.get("loss")
        if isinstance(outputs, dict)
        else getattr(outputs, "loss", None)
    )
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


class NumItems(Tensor):
    """``num_items_in_batch`` that knows whether the model used it.

    Some models (BERT, T5) take it and ignore it: their loss stays the mean over the batch's own labels.
    """

    used: bool

    @classmethod
    def of(cls, number: int) -> NumItems:
        """Return the number as an integer tensor that has not been used."""
        tensor = torch.tensor(number).as_subclass(cls)
        tensor.used = False
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note every use but a look at an attribute."""
        if func.__name__ != "__get__":
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, cls):
                    value.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
