"""What to change: so that it fits, or so that it goes faster; and questions that plans answer by trying."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from megatrain_nb.codec.choice import parse_compression
from megatrain_nb.codec.names import MOMENTS, WEIGHTS
from megatrain_nb.plan import catalogue
from megatrain_nb.plan.planner import make_plan
from megatrain_nb.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from megatrain_nb.plan.choices import Choices
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.plan import Plan

_LONGEST = 1 << 22
_FASTER = 1.1  # what is told must help by so much


def advise(plan: Plan) -> tuple[str, ...]:
    """Return at most two changes, the cheapest first.

    What costs nothing comes first (rows that pass one after the other instead of together, a limit that is lower than
    what the machine has), then what changes numbers (bf16, shorter sequences), then what has to be bought.
    """
    if not plan.fits:
        # Each costs plans: none is made after the second that helps.
        found = (text for text, other in _smaller(plan) if other.fits)
        return tuple(islice(found, 2)) or _bought(plan)
    if not plan.offloads:
        return (
            "everything fits into memory: plain PyTorch trains it as fast, and nothing is read or written",
        )
    if plan.fits_plainly:
        return (
            f"everything fits on the device ({format_bytes(plan.conventional_bytes)}): plain PyTorch trains it there, "
            "and faster, since nothing is moved",
        )
    faster = sorted(
        (
            (other.tokens_per_second, text)
            for text, other in _faster(plan)
            if other.fits
        ),
        reverse=True,
    )
    better = [
        f"{text}: {format_count(rate)} tokens/s instead of {format_count(plan.tokens_per_second)}"
        for rate, text in faster
        if rate > _FASTER * plan.tokens_per_second
    ]
    return tuple(better[:2])


def _smaller(plan: Plan) -> Iterator[tuple[str, Plan]]:
    choices, window = plan.choices, plan.choices.window
    batch = window.batch
    while batch > 1:
        batch = -(-batch // 2)
        more = -(-window.batch * window.accumulation // batch)
        thin = replace(window, batch=batch, accumulation=more)
        other = plan.changed(window=thin)
        if other.fits:
            yield (
                f"batch={batch} with accumulation={more}: the same tokens in a step",
                other,
            )
            break
    for tier in ("ram", "disk"):
        name, have = f"max_{tier}_bytes", getattr(plan.machine, f"{tier}_bytes")
        if getattr(choices, name) and (need := _least_budget(plan, tier)):
            text = f"max_{tier}_gb={need / 1e9:.3g} (this machine has {format_bytes(have)})"
            yield text, plan.changed(**{name: need})
    if choices.max_vram_bytes and choices.max_vram_bytes < plan.machine.vram_bytes:
        yield (
            f"max_vram_gb={plan.machine.vram_bytes / 1e9:.3g}, all that the device has",
            plan.changed(max_vram_bytes=None),
        )
    if not choices.bf16:
        yield (
            'dtype="bfloat16": bf16 compute with an fp32 master',
            plan.changed(bf16=True),
        )
    if not choices.compression:
        yield (
            'optimizer_compression="4bit": moments in 4 bits, not lossless',
            _in_4_bits(plan),
        )
    length = longest_sequence(plan)
    if length:
        shorter = plan.changed(window=replace(window, seq_len=length))
        yield f"seq_len={length} instead of {window.seq_len}", shorter


def _in_4_bits(plan: Plan) -> Plan:
    packed = plan.choices.packed - {MOMENTS}
    return plan.changed(compression=parse_compression("4bit"), packed=packed)


def _bought(plan: Plan) -> tuple[str, ...]:
    """Return what the machine lacks, where nothing else helps."""
    machine, found = plan.machine, []
    have = plan.limits
    if any(text.startswith("RAM") for text in plan.problems):
        rich = machine.changed(ram_bytes=10**18, disk_bytes=10**18)

        def fits(size: int) -> bool:
            choices = replace(plan.choices, max_ram_bytes=size)
            return make_plan(plan.shape, rich, choices).fits

        need = _least(fits, 10**9, 10**15)
        if need:
            found.append(f"a machine with {format_bytes(need)} of RAM for it")
    if plan.disk_bytes > have["disk"]:
        more = plan.disk_bytes - have["disk"]
        found.append(
            f"{format_bytes(more)} more of disk space ({format_bytes(plan.disk_bytes)} in all)"
        )
    if plan.peak_vram_bytes > have.get("vram", math.inf):
        found.append(
            f"a device with {format_bytes(plan.peak_vram_bytes)}: two blocks with their gradients are there at once"
        )
    return tuple(found[:2])


def _faster(plan: Plan) -> Iterator[tuple[str, Plan]]:
    choices, window = plan.choices, plan.choices.window
    if not choices.bf16:
        yield 'dtype="bfloat16"', plan.changed(bf16=True)
    if plan.bound_by == "disk" and not choices.compression:
        yield 'optimizer_compression="4bit" (not lossless)', _in_4_bits(plan)
        if not choices.packed:
            yield (
                'optimizer_compression="lossless" and weight_compression="lossless": the same numbers in fewer bytes',
                plan.changed(packed=frozenset({MOMENTS, WEIGHTS})),
            )
    if plan.bound_by != "compute":
        for factor in (8, 4, 2):
            more = window.accumulation * factor
            other = plan.changed(window=replace(window, accumulation=more))
            if other.fits:
                yield (
                    f"accumulation={more}: the weights are moved once for more tokens",
                    other,
                )
                break
        if choices.max_ram_bytes and choices.max_ram_bytes < plan.machine.ram_bytes:
            yield (
                f"max_ram_gb={plan.machine.ram_bytes / 1e9:.3g}, all that is free here",
                plan.changed(max_ram_bytes=None),
            )
    if window.batch == 1 and window.accumulation > 1:
        wide = replace(window, batch=2, accumulation=-(-window.accumulation // 2))
        yield (
            f"batch=2 with accumulation={wide.accumulation}: more rows use the units better",
            plan.changed(window=wide),
        )


def _least_budget(plan: Plan, tier: str) -> int | None:
    """Return the least budget, from the given one up to all of the tier, with which the plan fits; None if none does."""
    name, have = f"max_{tier}_bytes", getattr(plan.machine, f"{tier}_bytes")
    given = getattr(plan.choices, name) or have
    if have < given:
        return None
    return _least(lambda size: plan.changed(**{name: size}).fits, given, have)


def _least(does: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the least size up to ``high``, within 2 %, that does; None if not even ``high`` does."""
    if not does(high):
        return None
    while high > 1.02 * low:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high


# -- questions ------------------------------------------------------------------------------------------


def longest_sequence(plan: Plan) -> int:
    """Return the most tokens in a row, a multiple of 64, with which the plan fits; 0 if none do."""

    def fits(length: int) -> bool:
        window = replace(plan.choices.window, seq_len=length)
        return plan.changed(window=window).fits

    if not fits(64):
        return 0
    low, high = 64, _LONGEST
    while high - low > 64:
        middle = (low + high) // 128 * 64
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_model(machine: Machine, choices: Choices) -> Plan | None:
    """Return the plan of the catalogue's largest model that fits, by parameters; None if none does."""
    shapes = sorted(
        (catalogue.model(name) for name in catalogue.models()),
        key=lambda shape: shape.num_params,
        reverse=True,
    )
    plans = (make_plan(shape, machine, choices) for shape in shapes)
    return next((plan for plan in plans if plan.fits), None)


def least_ram(plan: Plan, tokens_per_second: float) -> int | None:
    """Return the least ``max_ram_bytes`` that trains as fast as wanted; None if this machine cannot.

    Within 2 %; between it and all of the machine's RAM speed only grows.
    """

    def fast(size: int) -> bool:
        other = plan.changed(max_ram_bytes=size)
        return other.fits and other.tokens_per_second >= tokens_per_second

    return _least(fast, 10**8, plan.machine.ram_bytes)
