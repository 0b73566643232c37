"""What a checkpoint holds beside its tiles, read back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors.torch

from megatrain_nb.errors import StoreError
from megatrain_nb.runtime.otherstate import random_state_in
from megatrain_nb.runtime.tree import from_json
from megatrain_nb.store.parsing import parsed_bytes
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from megatrain_nb.store.checkpoint import Checkpoint

# What a tensor takes besides its numbers: torch's objects, and those of the library that reads the file.
_TENSOR_BYTES = 3000
_MAX_WHY = 1000


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds beside its tiles.

    Attributes
    ----------
    identity
        What the models are, see `megatrain_nb.runtime.modelstate.identity`.
    models, objects
        States of the models, and by name those of the registered objects.
    random
        Random states.
    lr_factor
        As in `megatrain_nb.runtime.controls.Controls`.
    """

    identity: Any
    models: list[dict[str, Any]]
    objects: dict[str, Any]
    random: dict[str, Any]
    lr_factor: float


def read_state(checkpoint: Checkpoint, *, most_bytes: int) -> Saved:
    """Return what a checkpoint holds beside its tiles.

    Parameters
    ----------
    most_bytes
        What that may take of RAM, with what is read on the way.

    Raises
    ------
    StoreError
        It is damaged, or takes more RAM.
    """
    text, data = checkpoint.read(
        most_bytes=most_bytes // 2
    )  # less than is reckoned below
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    # The text is parsed, and a second tree made of it; the tensors are copies.
    needed = len(text) + 2 * parsed_bytes(text) + 2 * len(data)
    needed += len(header) + parsed_bytes(header, table_bytes=_TENSOR_BYTES)
    if needed > most_bytes:
        msg = (
            f"{checkpoint!r} in {checkpoint.folder} may take {format_bytes(needed)} of RAM beside its tiles, and "
            f"{format_bytes(most_bytes)} are left: it is damaged, or max_ram_gb is too small for it"
        )
        raise StoreError(msg)
    try:
        content = json.loads(text)
        tensors = safetensors.torch.load(data)
        pairs = zip(content["models"], content["identity"], strict=True)
        return Saved(
            identity=content["identity"],
            models=[_table(from_json(each, tensors)) for each, _ in pairs],
            objects=_table(from_json(content["objects"], tensors)),
            random=random_state_in(_table(from_json(content["random"], tensors))),
            lr_factor=_lr_factor(content["lr_factor"]),
        )
    except (
        safetensors.SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        why = repr(error)[:_MAX_WHY]
        msg = f"{checkpoint!r} in {checkpoint.folder} cannot be read: {why}"
        raise StoreError(msg) from error


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        msg = f"a {type(value).__name__} where a table belongs"
        raise TypeError(msg)
    return value


def _lr_factor(value: Any) -> float:
    if type(value) is not float or not 0 <= value < math.inf:
        msg = f"lr_factor {str(value)[:80]}"
        raise ValueError(msg)
    return value
