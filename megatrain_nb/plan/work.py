"""What a model computes in a step on a machine, block by block, in seconds; and the step that comes of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatrain_nb.plan.activation import block_work
from megatrain_nb.plan.own import kept_by_block
from megatrain_nb.plan.packing import IO_THREADS
from megatrain_nb.plan.reserve import large_bytes
from megatrain_nb.plan.simulate import BlockTimes, Simulation
from megatrain_nb.plan.traffic import step_traffic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatrain_nb.plan.choices import Choices
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.memory import Residency
    from megatrain_nb.plan.model import ModelSpec
    from megatrain_nb.plan.shape import Part, Shape
    from megatrain_nb.plan.simulate import Simulated

# On a CPU: what a call costs however few tokens it has (Python, torch's dispatch). Measured (docs/forecast.md).
_FORWARD_CALL_S, _BACKWARD_CALL_S = 1.5e-3, 3.5e-3


class ModelWork:
    """How long each block of a model computes.

    Parameters
    ----------
    shape, machine, choices
        The model, where it computes, and what is decided about the run.
    """

    def __init__(self, shape: Shape, machine: Machine, choices: Choices) -> None:
        self._shape, self._machine, self._choices = shape, machine, choices
        self._parts = [part for _, part in shape.blocks()]
        self._by_part = {id(part): self._measure(part) for part in shape.parts}

    def times(self, kept: frozenset[int], *, lost_s: float = 0.0) -> list[BlockTimes]:
        """Return the seconds of each block for a whole window.

        Parameters
        ----------
        kept
            Blocks that keep their activations: their backward does not compute the forward again. Nor does that of
            the last block, which turns while it is loaded.
        lost_s
            What moving bytes takes of the step from the cores that the blocks compute on.
        """
        last = len(self._parts) - 1
        found = []
        for index, part in enumerate(self._parts):
            forward, again, backward = self._by_part[id(part)]
            again = 0.0 if index in kept or index == last else again
            found.append(BlockTimes(forward, again, backward))
        if not lost_s:
            return found
        factor = 1 + lost_s / total_s(found)
        return [
            BlockTimes(t.forward_s * factor, t.again_s * factor, t.backward_s * factor)
            for t in found
        ]

    def simulate(
        self,
        spec: ModelSpec,
        residency: Residency,
        order: Sequence[int],
        *,
        kept: frozenset[int],
        trained: frozenset[int],
        stay: frozenset[int] = frozenset(),
    ) -> Simulated:
        """Return one step in the middle of training.

        Parameters
        ----------
        spec, residency, order, trained, stay
            As for `Simulation`.
        kept
            Blocks that keep their activations.
        """
        machine, on_disk = self._machine, self._choices.on_disk
        lost_s = 0.0
        if machine.in_place and residency.disk_bytes:  # blocks compute on the cores
            traffic = step_traffic(spec, residency, order, on_disk)
            moved_s = traffic.moved_bytes * machine.io_cpu_s_per_byte
            # Who packs takes a core for longer: the others wait for its share of a product. Measured on two cores.
            together = max(1, min(IO_THREADS, machine.cores) // 2)
            lost_s = moved_s / machine.cores + traffic.packing_cpu_s / together
        times = self.times(kept, lost_s=lost_s)
        return Simulation(
            spec,
            residency,
            order,
            times,
            machine,
            trained,
            stay,
            on_disk=on_disk,
            lent=self._lent(residency, order, kept),
        ).run()

    def _lent(
        self, residency: Residency, order: Sequence[int], kept: frozenset[int]
    ) -> dict[int, int]:
        """Return the bytes that blocks keep in what is lent to them, by block: what was set aside is full first."""
        if not residency.lent_bytes:
            return {}
        sizes = kept_by_block(self._shape, self._choices)
        found, own = {}, residency.keep_bytes - residency.lent_bytes
        for block in order:
            if block in kept and (size := sizes.get(block, 0)):
                found[block] = max(0, size - own)
                own = max(0, own - size)
        return found

    def _measure(self, part: Part) -> tuple[float, float, float]:
        """Return the seconds of forward, of what is computed again, and of backward for a whole window."""
        choices, machine = self._choices, self._machine
        window, count = choices.window, choices.window.accumulation
        work = block_work(self._shape, part, window)
        products = sum(self._product_s(*each) for each in work.products)
        forward, backward = products, 2 * products
        if machine.in_place:
            rest = work.moved_bytes / machine.memory_bytes_per_s
            forward += rest + _FORWARD_CALL_S
            # A gradient is made in fresh memory; the first micro-batch's is copied to where the update reads it, others
            # are added; its norm is one more pass.
            numel = part.numel + (
                self._shape.dims.vocabulary * self._shape.dims.hidden
                if part.kind == "head" and not part.params
                else 0
            )
            landed = numel * (16 * count + 4 * (count - 1) + 4) / count
            backward += 2 * rest + landed / machine.memory_bytes_per_s
            backward += _BACKWARD_CALL_S
            logits, gradients = self._fresh_bytes(part)
            forward += logits / machine.fresh_bytes_per_s
            backward += (logits + gradients) / machine.fresh_bytes_per_s
        again = forward - self._product_s(*work.last)
        return forward * count, again * count, backward * count

    def _product_s(self, rows: float, flops: float) -> float:
        """Return the seconds of a matrix product with so many rows and operations."""
        return flops / self._machine.flops_per_s(rows, bf16=self._choices.bf16)

    def _fresh_bytes(self, part: Part) -> tuple[int, int]:
        """Return the bytes of large tensors, which the system gives anew: of logits in each way, and of gradients."""
        dims, choices = self._shape.dims, self._choices
        large = large_bytes(choices.max_ram_bytes or self._machine.ram_bytes)
        sizes = [math.prod(size) for _, size in part.params]
        logits = 0
        if part.kind == "head":
            sizes += [dims.vocabulary * dims.hidden] if not sizes else []
            logits = choices.window.rows * dims.vocabulary * 4
        width = 2 if choices.bf16 else 4
        gradients = [width * size for size in sizes if width * size >= large]
        # Two of the four copies in cross-entropy are made in its forward.
        return 2 * logits if logits >= large else 0, sum(gradients)


def total_s(times: Iterable[BlockTimes]) -> float:
    """Return the seconds of all blocks."""
    return sum(each.total_s for each in times)
