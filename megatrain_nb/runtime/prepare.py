"""What is changed of a model before it trains in a session: what the runtime does itself is turned off."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch

from megatrain_nb.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

    from megatrain_nb.runtime.layers import Layers

logger = logging.getLogger("megatrain_nb")


def prepare(model: nn.Module) -> None:
    """Turn off what the runtime does itself."""
    for name in (
        "activation",
        "gradient",
    ):  # as transformers calls it now, and as it did before
        if hasattr(type(model), f"is_{name}_checkpointing"):
            if getattr(model, f"is_{name}_checkpointing"):
                logger.info(
                    "gradient checkpointing is turned off: the runtime recomputes each block already"
                )
                getattr(model, f"{name}_checkpointing_disable")()
            return


def move_what_stays(model: nn.Module, layers: Layers, device: torch.device) -> None:
    """Bring buffers, and parameters that do not stream, to where the blocks compute."""
    for name, param in layers.resident.items():
        if param.device.type == "cpu":
            param.data = param.data.to(device)
        if param.device != device:
            msg = f"{name} is on {param.device}, but the session computes on {device}; move it there first"
            raise ModelError(msg)
    if device.type == "cpu":
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def no_cache_in_training(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Leave the key-value cache out where gradients are recorded: a recompute would fill it twice."""
    if torch.is_grad_enabled() and kwargs.get("use_cache") is None:
        return args, kwargs | {"use_cache": False}
    return None


def takes_cache(module: nn.Module) -> bool:
    """Whether a module fills a key-value cache unless it is told not to."""
    return (
        hasattr(getattr(module, "config", None), "use_cache")
        and "use_cache" in inspect.signature(module.forward).parameters
    )
