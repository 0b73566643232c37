"""Public facts: shapes of models and figures of machines, one small file each."""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan.machine import Machine, nominal
from megatrain_nb.plan.shape import Shape

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def models() -> tuple[str, ...]:
    """Return the names of all models in the catalogue, sorted.

    Examples
    --------
    >>> "llama-3.1-8b" in models()
    True
    """
    return _names("models")


def machines() -> tuple[str, ...]:
    """Return the names of all machines in the catalogue, sorted.

    Examples
    --------
    >>> "rtx-4090" in machines()
    True
    """
    return _names("machines")


@cache
def model(name: str) -> Shape:
    """Return a model's shape; large and small letters are one, and so are a maker's prefix and none.

    Raises
    ------
    ArgumentError
        No such name: says which are near.

    Examples
    --------
    >>> model("Meta-Llama/Llama-3.1-8B").num_params
    8030261248
    """
    return Shape.from_json(json.loads(_read("models", name)))


@cache
def machine(name: str) -> Machine:
    """Return a machine with what its makers publish; all of it is marked as assumed.

    Raises
    ------
    ArgumentError
        No such name: says which are near.

    Examples
    --------
    >>> machine("rtx-4090").vram_bytes
    24000000000
    """
    return nominal(name.lower(), json.loads(_read("machines", name)))


@cache
def _folder(kind: str) -> Traversable:
    return files("megatrain_nb.plan").joinpath(kind)


@cache
def _names(kind: str) -> tuple[str, ...]:
    found = (entry.name for entry in _folder(kind).iterdir())
    return tuple(
        sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))
    )


def _read(kind: str, name: str) -> str:
    wanted = name.lower().rpartition("/")[2].replace(" ", "-")
    known = _names(kind)
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
        hint = f"near: {', '.join(near)}; " if near else ""
        msg = f"{name!r} is not in the catalogue of {kind}; {hint}mt.{kind}() lists all {len(known)} names"
        raise ArgumentError(msg)
    return _folder(kind).joinpath(f"{wanted}.json").read_text(encoding="utf-8")
