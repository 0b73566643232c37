"""Bytes per tier: what must be in RAM to make progress, and what stays there to save traffic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatrain_nb.errors import BudgetError
from megatrain_nb.plan.model import TILE_NUMEL
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from megatrain_nb.plan.model import ModelSpec, PackSpec

# Tiles of the optimizer's pipeline that are in RAM at once: one is read, one updated, one written.
STEP_TILES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Which packs stay in RAM, and the bytes that follow from it.

    Attributes
    ----------
    weights, grads, states
        Pack indices whose weights, pending gradients, and what else the update uses, stay in RAM.
    elsewhere
        Pack indices that live on a device: they move neither, and need no RAM, but room on disk to come back to.
    resident_bytes
        Bytes of those.
    working_bytes
        Bytes for what streams: see `streaming_bytes`; less where there is less room.
    activation_bytes
        Bytes set aside for what the model itself allocates.
    keep_bytes
        Bytes that activations may take which are kept from forward to backward.
    lent_bytes
        Those of them that are taken from what streams, while it needs less.
    packing_bytes
        Bytes through which packed tiles pass on their way to the disk and back.
    disk_bytes
        Bytes that live on disk: unpacked, since a tile that does not pack needs that much.
    """

    weights: frozenset[int] = field(default_factory=frozenset)
    grads: frozenset[int] = field(default_factory=frozenset)
    states: frozenset[int] = field(default_factory=frozenset)
    elsewhere: frozenset[int] = field(default_factory=frozenset)
    resident_bytes: int = 0
    working_bytes: int = 0
    activation_bytes: int = 0
    keep_bytes: int = 0
    lent_bytes: int = 0
    packing_bytes: int = 0
    disk_bytes: int = 0

    @property
    def aside_bytes(self) -> int:
        """Bytes that the pool never has: those set aside, but for what is lent."""
        return self.activation_bytes + self.keep_bytes - self.lent_bytes


def working_bytes(spec: ModelSpec, *, tile_numel: int = TILE_NUMEL) -> int:
    """Return the RAM, in bytes, that streaming needs when nothing is resident.

    The larger of two moments: a block in backward beside the next one and its own gradient; or the
    tiles of the optimizer's pipeline.
    """
    backward = _largest(spec, weights=2, grads=1)
    different = {pack.layout: pack for pack in spec.packs}
    step = STEP_TILES * max(
        (_tile_bytes(pack, tile_numel) for pack in different.values()), default=0
    )
    return max(backward, step)


def streaming_bytes(spec: ModelSpec) -> int:
    """Return the RAM, in bytes, with which streaming need not wait for room when nothing is resident.

    While a block computes in forward: its weights and the next block's; gradients and both moments of the
    next one, read for its update; the moments of this one and the weights of the one before, on their
    way back to the disk. All counted as large as the largest.
    """
    return _largest(spec, weights=3, grads=1, states=2)


def turning_bytes(spec: ModelSpec) -> int:
    """Return the RAM, in bytes, that streaming needs from the end of forward on.

    A block's weights and the next one's; gradients and moments of that one, read for its update, while what was written
    has landed. Backward needs no more. All counted as large as the largest.
    """
    return _largest(spec, weights=2, grads=1, states=1)


def written_bytes(spec: ModelSpec) -> int:
    """Return the most bytes that are on their way to the disk at once.

    The weights of one block and the moments of the one before, as large as the largest.
    """
    return _largest(spec, weights=1, states=1)


def disk_need_bytes(spec: ModelSpec, residency: Residency) -> int:
    """Return what must be free on the disk: tiles are written while their old versions are still there."""
    return residency.disk_bytes and residency.disk_bytes + written_bytes(spec)


def plan_residency(  # noqa: PLR0913 - budgets, by keyword only
    spec: ModelSpec,
    *,
    limit_bytes: int,
    activation_bytes: int,
    keep_bytes: int = 0,
    keep_share: float = 0.0,
    resident_bytes: int | None = None,
    packing_bytes: int = 0,
    tile_numel: int = TILE_NUMEL,
    elsewhere: frozenset[int] = frozenset(),
) -> Residency:
    """Fill the RAM budget by value: bytes of traffic saved per byte kept.

    Parameters
    ----------
    spec
        The model.
    limit_bytes
        RAM budget in bytes.
    activation_bytes
        Bytes set aside for the model's own tensors while a block computes.
    keep_bytes
        What every block's activations take that could be kept from forward to backward.
    keep_share
        Where not everything fits: the share, 0 to 1, of the RAM beside what streams that goes to kept
        activations (they save computing) before packs get any (they save traffic).
    resident_bytes
        Keep at most this much in RAM, however large the budget is.
    packing_bytes
        What packing tiles takes of the budget: a fixed amount for each I/O thread.
    tile_numel
        Elements of one tile.
    elsewhere
        Pack indices that live on a device.

    Raises
    ------
    BudgetError
        Not even streaming fits: says what is needed and what would help.

    Notes
    -----
    A resident weight saves three reads and a write each step, a gradient or a moment one of each; so
    weights come first, and within them the blocks that backward needs first. An access order that is
    known leaves nothing for an eviction policy to guess: a cyclic scan through LRU would keep nothing.
    Kept activations grow while a forward passes the blocks, and are freed by the backward; what streams needs the
    most room in the forward, where updates are done. So activations may take some of that room.
    """
    all_packs = frozenset(range(len(spec.packs)))
    fixed_bytes = activation_bytes + packing_bytes
    if resident_bytes is None and spec.state_bytes + fixed_bytes <= limit_bytes:
        return Residency(
            weights=all_packs,
            grads=all_packs,
            states=all_packs,
            elsewhere=elsewhere,
            resident_bytes=spec.state_bytes,
            activation_bytes=activation_bytes,
            keep_bytes=min(keep_bytes, limit_bytes - spec.state_bytes - fixed_bytes),
            packing_bytes=packing_bytes,
        )
    working = working_bytes(spec, tile_numel=tile_numel)
    room = limit_bytes - fixed_bytes
    if room < working:
        minimum = (
            working if resident_bytes is not None else min(working, spec.state_bytes)
        )
        largest = max(spec.blocks, key=lambda block: spec.block_bytes(block.index))
        msg = (
            f"max_ram_gb: {format_bytes(limit_bytes)} is too little for this model: streaming needs "
            f"{format_bytes(working)} (largest block: {largest.name}, "
            f"{format_bytes(spec.block_bytes(largest.index))}) and the activations "
            f"{format_bytes(activation_bytes)}"
            + (f", packing {format_bytes(packing_bytes)}" if packing_bytes else "")
            + f". Raise max_ram_gb to at least {format_bytes(1.005 * (minimum + fixed_bytes))}, or shorten the sequence or the micro-batch"
        )
        raise BudgetError(msg)
    turning = max(working, turning_bytes(spec))
    working = max(working, min(streaming_bytes(spec), room))
    lendable = max(0, working - turning)
    kept_bytes = min(keep_bytes, int(keep_share * (room - working + lendable)))
    lent = min(kept_bytes, lendable)
    left = room - working - kept_bytes + lent
    allowed = left if resident_bytes is None else min(left, resident_bytes)
    left = allowed
    kept: dict[str, set[int]] = {"weights": set(), "grads": set(), "states": set()}
    sizes = {
        "weights": [pack.weight_bytes for pack in spec.packs],
        "grads": [pack.grad_bytes for pack in spec.packs],
        "states": [pack.states_bytes for pack in spec.packs],
    }
    for what, num_bytes in sizes.items():
        for index in reversed(range(len(spec.packs))):
            if index not in elsewhere and num_bytes[index] <= left:
                left -= num_bytes[index]
                kept[what].add(index)
    resident = allowed - left
    return Residency(
        weights=frozenset(kept["weights"]),
        grads=frozenset(kept["grads"]),
        states=frozenset(kept["states"]),
        elsewhere=elsewhere,
        resident_bytes=resident,
        working_bytes=working,
        activation_bytes=activation_bytes,
        keep_bytes=kept_bytes,
        lent_bytes=lent,
        packing_bytes=packing_bytes,
        disk_bytes=spec.state_bytes - resident,
    )


def _largest(spec: ModelSpec, *, weights: int, grads: int = 0, states: int = 0) -> int:
    """Return the most bytes that so many times a block's weights, gradients and states take."""
    return max(
        (
            sum(
                weights * pack.weight_bytes
                + grads * pack.grad_bytes
                + states * pack.states_bytes
                for pack in spec.packs_of(block.index)
            )
            for block in spec.blocks
        ),
        default=0,
    )


def _tile_bytes(pack: PackSpec, tile_numel: int) -> int:
    """Return the bytes of everything of a pack's largest tile."""
    fixed = pack.weight_bytes + pack.grad_bytes + pack.states_bytes - pack.moments_bytes
    if not pack.encoded:
        fixed += pack.moments_bytes
    share = fixed * min(tile_numel, pack.numel) // max(pack.numel, 1)
    if not pack.encoded:
        return share
    spans = [pack.encoded_span(*tile) for tile in pack.tiles(tile_numel)]
    return share + max(end - first for first, end in spans)
