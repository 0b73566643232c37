"""Code that the first step would import and compile, loaded before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from megatrain_nb.codec import split
from megatrain_nb.codec.lossless import chunks
from megatrain_nb.optim import encoded, gradient
from megatrain_nb.optim.adamw import warm_up

if TYPE_CHECKING:
    from megatrain_nb.codec.choice import Compression


def load_code(compression: Compression | None = None, *, packing: bool = False) -> None:
    """Import and compile what the first step would, so that it is not taken for the model's memory."""
    importlib.import_module("torch._dynamo")  # torch does when an optimizer is made
    warm_up()
    warm_up(split=True)
    split.warm_up()
    gradient.warm_up()
    for codec in () if compression is None else compression.codecs():
        encoded.warm_up(codec)  # of split weights as they come: ten seconds more, once
    if packing:
        chunks.warm_up()
