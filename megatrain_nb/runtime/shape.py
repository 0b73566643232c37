"""The shape of a model, a transformers config, or a config.json, learned on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain_nb.errors import ArgumentError
from megatrain_nb.runtime.layers import cut
from megatrain_nb.runtime.offload import offloaded_model
from megatrain_nb.runtime.outline import shape_from

if TYPE_CHECKING:
    from megatrain_nb.plan.shape import Shape


def shape_of(what: Any) -> Shape:
    """Return the shape of a model in RAM or in a session, a transformers config, or a path of a config.json.

    Raises
    ------
    ArgumentError
        Neither of these, or a config that transformers does not know.
    """
    if isinstance(what, nn.Module):
        offloaded = offloaded_model(what)
        return shape_from(what, cut(what) if offloaded is None else offloaded.layers)
    if isinstance(what, str | Path):
        what = _read_config(Path(what))
    if not hasattr(what, "model_type"):
        msg = (
            f"{what!r} is neither a model, a transformers config, a path of a config.json, nor a name in the catalogue; "
            "mt.models() lists the names"
        )
        raise ArgumentError(msg)
    model = draft(what)
    return shape_from(model, cut(model))


def draft(config: Any, architecture: str = "") -> nn.Module:
    """Return the model on the meta device: it has shapes, and no bytes.

    Raises
    ------
    ArgumentError
        transformers cannot make it.
    """
    import transformers  # noqa: PLC0415

    named = [architecture] if architecture else (config.architectures or [])
    found = next((getattr(transformers, name, None) for name in named), None)
    try:
        with torch.device("meta"):
            if found is not None:
                made: nn.Module = found._from_config(config)
            else:
                made = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            return made
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        msg = (
            f"transformers cannot make a model of this {type(config).__name__}: {error}"
        )
        raise ArgumentError(msg) from error


def config_of(shape: Shape) -> Any:
    """Return the transformers config of a shape in the catalogue."""
    from transformers import AutoConfig  # noqa: PLC0415

    return AutoConfig.for_model(shape.family, **json.loads(shape.config))


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415

    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        msg = (
            f"{str(path)!r} is neither a name in the catalogue nor a file; mt.models() lists the names, and a path must "
            "lead to a config.json"
        )
        raise ArgumentError(msg)
    try:
        return AutoConfig.from_pretrained(path)
    except (ValueError, OSError, KeyError) as error:
        msg = f"{path} is not a config that transformers can read: {error}"
        raise ArgumentError(msg) from error
