"""What a person decides about a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatrain_nb.codec.choice import Compression
from megatrain_nb.codec.names import LOSSLESS, MOMENTS
from megatrain_nb.plan.packing import PACKING_BYTES, OnDisk

if TYPE_CHECKING:
    from megatrain_nb.plan.activation import Window
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.plan.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a person decides about a run.

    Attributes
    ----------
    window
        The tokens of one step.
    bf16
        Compute in bf16 with an fp32 master; else in fp32.
    compression
        In which codecs Adam's moments are stored.
    packed
        What is packed on the disk, bit for bit: ``weights``, ``moments``.
    max_ram_bytes, max_vram_bytes, max_disk_bytes
        Budgets; None for what the machine has.
    max_tail_bytes
        Gradients and moments may take this much of a device's memory; None for all there is room for.
    trainable
        Parts of names; a parameter is trained whose name has one of them. Empty for all.
    """

    window: Window
    bf16: bool = False
    compression: Compression = field(default_factory=Compression)
    packed: frozenset[str] = frozenset()
    max_ram_bytes: int | None = None
    max_vram_bytes: int | None = None
    max_disk_bytes: int | None = None
    max_tail_bytes: int | None = None
    trainable: tuple[str, ...] = ()

    def limit_bytes(self, tier: str, machine: Machine) -> int:
        """Return the budget of ``vram`` or ``disk``: what is asked for, but not more than the machine has."""
        asked: int | None = getattr(self, f"max_{tier}_bytes")
        have: int = getattr(machine, f"{tier}_bytes")
        return min(asked or have, have)

    def ram_limit_bytes(self, machine: Machine) -> int:
        """Return the budget of RAM: what is asked for, also where that is more than the machine has."""
        return self.max_ram_bytes or machine.ram_bytes

    @property
    def on_disk(self) -> OnDisk:
        """What pieces take on the disk."""
        return OnDisk(self.packed)

    @property
    def packing_bytes(self) -> int:
        """What packing takes of the RAM."""
        return PACKING_BYTES if self.packed else 0

    @property
    def moments(self) -> str:
        """How moments are stored, as a person says it; empty for fp32."""
        return LOSSLESS if MOMENTS in self.packed else str(self.compression)


def spec_of(shape: Shape, choices: Choices) -> ModelSpec:
    """Return blocks and packs of a model as a run has them."""
    return shape.spec(split=choices.bf16, compression=choices.compression)
