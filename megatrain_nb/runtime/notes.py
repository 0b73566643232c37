"""What a person is told when a session opens, one sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_nb.codec.names import EXPERIMENTAL
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatrain_nb.codec.choice import Compression
    from megatrain_nb.runtime.device import Device
    from megatrain_nb.store.checkpoint import Checkpoint
    from megatrain_nb.store.preflight import Preflight


def opening_notes(
    preflight: Preflight,
    device: Device,
    compression: Compression,
    *,
    max_vram_bytes: int | None,
    max_disk_bytes: int | None,
    reclaimed_bytes: int,
) -> tuple[str, ...]:
    """Return what to know about a directory, a device and the budgets of a session.

    Parameters
    ----------
    preflight, device, compression
        Of the session.
    max_vram_bytes, max_disk_bytes
        Budgets in bytes; None for no limit.
    reclaimed_bytes
        What was removed of a dead owner's.
    """
    notes = [*preflight.notes, preflight.direct_note]
    if reclaimed_bytes:
        notes.append(
            f"{format_bytes(reclaimed_bytes)} that an earlier, dead process had left here were removed"
        )
    kind = device.torch_device.type
    if kind == "cpu" and max_vram_bytes:
        notes.append("max_vram_gb has no effect without a GPU")
    if kind == "cpu":
        notes.append(
            "no GPU is used: blocks compute in place in RAM, which device and host share"
        )
    if kind == "mps":
        notes.append(
            "MPS: blocks are copied to it and from it without overlap; this was never measured"
        )
    if max_disk_bytes and max_disk_bytes > preflight.free_bytes:
        notes.append(
            f"max_disk_gb allows {format_bytes(max_disk_bytes)}, but only {format_bytes(preflight.free_bytes)} are free"
        )
    return (*notes, *experimental_notes(compression.experimental))


def experimental_notes(codecs: Iterable[str]) -> tuple[str, ...]:
    """Return what to know about those of these codecs that are experimental."""
    return tuple(
        f'optimizer_compression="{name}" is experimental: in small trainings its loss was up to {EXPERIMENTAL[name]} % over '
        "that of fp32 moments (docs/codecs.md)"
        for name in dict.fromkeys(codecs)
        if name in EXPERIMENTAL
    )


def describe_found(found: Sequence[Checkpoint], left_at_step: int | None) -> str:
    """Say which checkpoints are in a directory, and what was lost after the last of them.

    Parameters
    ----------
    found
        The checkpoints, oldest first; at least one.
    left_at_step
        The last step of an owner that died, or None.
    """
    last = found[-1]
    count = "a checkpoint" if len(found) == 1 else f"{len(found)} checkpoints, the last"
    lost = (left_at_step or 0) - last.step
    after = (
        f"; the process that died here had done {lost} more {'step, which is' if lost == 1 else 'steps, which are'} lost"
        if lost > 0
        else ""
    )
    return (
        f"this directory holds {count}: {last.label}{after}. Go on with session.resume(), or with "
        "trainer.train(resume_from_checkpoint=True)"
    )
