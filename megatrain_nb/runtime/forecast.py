"""``mt.estimate``: from what a person names to a plan. Names cost no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_nb.codec.choice import parse_storage
from megatrain_nb.errors import ArgumentError
from megatrain_nb.plan import advice, catalogue
from megatrain_nb.plan.activation import Window
from megatrain_nb.plan.choices import Choices
from megatrain_nb.plan.machine import Machine, nominal
from megatrain_nb.plan.planner import make_plan
from megatrain_nb.plan.shape import Shape
from megatrain_nb.runtime.current import current_session
from megatrain_nb.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain_nb.plan.plan import Plan

_FORMAT = 1
_DTYPES = {"float32": False, "fp32": False, "bfloat16": True, "bf16": True}

Machinelike = Machine | str | dict[str, Any] | None


def estimate(  # noqa: PLR0913 - what a person may say of a run
    what: Any,
    machine: Machinelike = None,
    *,
    seq_len: int = 1024,
    batch: int = 1,
    accumulation: int = 8,
    optimizer_compression: bool | str | Mapping[str, bool | str] = False,
    weight_compression: bool | str = False,
    dtype: Any = "float32",
    trainable: str | Sequence[str] | None = None,
    max_ram_gb: float | str | None = None,
    max_vram_gb: float | str | None = None,
    max_disk_gb: float | str | None = None,
) -> Plan:
    """Say before a run whether it fits, where every byte is, how fast it is, and what bounds it.

    Parameters
    ----------
    what
        A name in the catalogue (`models`), a model, a transformers config, or the path of a config.json.
    machine
        None for this one, measured (`probe`); a name in the catalogue (`machines`); a `Machine`; or figures, as
        ``{"ram_gb": 64, "vram_gb": 24, ...}`` (`megatrain_nb.plan.machine.nominal`).
    seq_len, batch, accumulation
        Tokens in a row, rows in a micro-batch, micro-batches in a step.
    optimizer_compression, weight_compression
        As for ``mt.init``. What is packed bit for bit is taken to shrink as it did in a small training, see
        docs/lossless.md.
    dtype
        ``"float32"`` or ``"bfloat16"`` (also torch's): what the model computes in.
    trainable
        None for all parameters; or parts of names: a pack is trained that has a parameter with one of them in its
        name.
    max_ram_gb, max_vram_gb, max_disk_gb
        Budgets, as for ``mt.init``; left out: what the machine has.

    Returns
    -------
    Plan
        Also where it does not fit: then ``plan.problems`` says why, and ``plan.advice`` what to change.

    Raises
    ------
    ArgumentError
        Something that is not known, or no number.

    Examples
    --------
    >>> plan = estimate("llama-3.1-8b", "rtx-4090", seq_len=2048, dtype="bfloat16")
    >>> plan.fits, plan.bound_by
    (True, 'disk')
    """
    window = Window(
        batch=_count(batch, "batch"),
        seq_len=_count(seq_len, "seq_len"),
        accumulation=_count(accumulation, "accumulation"),
    )
    sizes = {
        name.replace("_gb", "_bytes"): None
        if value is None
        else parse_size(value, name=name)
        for name, value in (
            ("max_ram_gb", max_ram_gb),
            ("max_vram_gb", max_vram_gb),
            ("max_disk_gb", max_disk_gb),
        )
    }
    compression, packed = parse_storage(optimizer_compression, weight_compression)
    words = (trainable,) if isinstance(trainable, str) else tuple(trainable or ())
    choices = Choices(
        window=window,
        bf16=_is_bf16(dtype),
        compression=compression,
        packed=packed,
        trainable=words,
        **sizes,
    )
    return make_plan(find_shape(what), find_machine(machine), choices)


def models() -> tuple[str, ...]:
    """Return the names of the models in the catalogue."""
    return catalogue.models()


def machines() -> tuple[str, ...]:
    """Return the names of the machines in the catalogue."""
    return catalogue.machines()


def largest_model(machine: Machinelike = None, **choices: Any) -> Plan | None:
    """Return the plan of the largest model of the catalogue that fits; None if none does.

    Parameters
    ----------
    machine
        As for `estimate`.
    **choices
        ``seq_len``, ``batch``, ``accumulation``, ``dtype``, and budgets, as for `estimate`.
    """
    found = find_machine(machine)
    first = estimate(catalogue.models()[0], found, **choices)
    return advice.largest_model(found, first.choices)


def longest_sequence(what: Any, machine: Machinelike = None, **choices: Any) -> int:
    """Return the longest row of tokens, a multiple of 64, that fits; 0 if none does.

    Parameters
    ----------
    what, machine, **choices
        As for `estimate`.
    """
    return advice.longest_sequence(estimate(what, machine, **choices))


def least_ram_gb(
    what: Any,
    machine: Machinelike = None,
    *,
    tokens_per_second: float,
    **choices: Any,
) -> float | None:
    """Return the least ``max_ram_gb`` with which it trains so fast; None if this machine cannot.

    Parameters
    ----------
    what, machine, **choices
        As for `estimate`.
    tokens_per_second
        What is wanted.
    """
    found = advice.least_ram(estimate(what, machine, **choices), tokens_per_second)
    return None if found is None else found / 1e9


def find_shape(what: Any) -> Shape:
    """Return the shape of what `estimate` takes."""
    if isinstance(what, Shape):
        return what
    if isinstance(what, str):
        plain = "/" not in what and not what.endswith(".json")
        if plain or not Path(what).exists():
            return catalogue.model(what)
    from megatrain_nb.runtime.shape import shape_of  # noqa: PLC0415 - torch

    return shape_of(what)


def find_machine(machine: Machinelike) -> Machine:
    """Return the machine that `estimate` takes."""
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, str):
        return catalogue.machine(machine)
    if machine is not None:
        return nominal("given figures", dict(machine))
    directory = session_directory()
    found = read_cache(directory)
    if found is None:
        from megatrain_nb.runtime.probe import probe  # noqa: PLC0415 - torch

        found = probe(directory)
    return found


# -- what a probe left ----------------------------------------------------------------------------------


def session_directory() -> Path | None:
    """Return the open session's directory."""
    session = current_session()
    return None if session is None else session.preflight.path


def cache_path(directory: Path | None) -> Path:
    """Return where a probe of this machine and directory is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    parts: tuple[object, ...] = (
        _FORMAT,
        [each.name for each in fields(Machine)],
        platform.node(),
        platform.machine(),
        os.cpu_count(),
        os.environ.get("OMP_NUM_THREADS"),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        importlib.metadata.version("torch"),
        None if directory is None else str(directory),
    )
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(home).expanduser() / "megatrain_nb" / f"machine-{name}.json"


def read_cache(directory: Path | None) -> Machine | None:
    """Return what a probe has found before, or None."""
    try:
        return Machine.from_json(cache_path(directory).read_text())
    except (OSError, ValueError, TypeError, KeyError):  # none, or of another version
        return None


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{name}={value!r} is not usable; give a whole number from 1 on"
        raise ArgumentError(msg)
    return value


def _is_bf16(dtype: Any) -> bool:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        msg = f"dtype={dtype!r} cannot be trained here; give 'float32' or 'bfloat16'"
        raise ArgumentError(msg)
    return _DTYPES[name]
