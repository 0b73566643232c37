"""What a model computes in a step on a machine, block by block, in seconds; and the step that comes of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatrain_nb.plan.activation import block_work, kept_bytes
from megatrain_nb.plan.memory import working_bytes
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

# On a CPU: what a call costs however few tokens it has (Python, torch's dispatch), and what a step does besides for each
# block, and once more where it streams. Measured (docs/forecast.md).
_FORWARD_CALL_S, _BACKWARD_CALL_S, _STEP_S, _STREAM_S = 2.5e-3, 1.5e-3, 1.1e-3, 3e-3

# Pages of 4 KiB that the heap gives back and gets again, in bytes per second: 0.4 and 2.0 us each, measured.
_HEAP_BYTES_PER_S = 1.7e9


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

    def times(
        self, kept: frozenset[int], *, lost_s: float = 0.0, full: bool = False
    ) -> list[BlockTimes]:
        """Return the seconds of each block for a whole window.

        Parameters
        ----------
        kept
            Blocks that keep their activations: their backward does not compute the forward again. Nor does that of
            the last block, which turns while it is loaded.
        lost_s
            What moving bytes takes of the step from the cores that the blocks compute on.
        full
            The budget has no room for what waits in the heap: each backward gives it back, and gets it again.
        """
        last = len(self._parts) - 1
        found = []
        for index, part in enumerate(self._parts):
            forward, again, backward = self._by_part[id(part)]
            if full:
                backward += self._freed_bytes(part) / _HEAP_BYTES_PER_S
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
        return Simulation(
            spec,
            residency,
            order,
            self.times_beside(spec, residency, order, kept),
            self._machine,
            trained,
            stay,
            on_disk=self._choices.on_disk,
            lent=self._lent(residency, order, kept),
        ).run()

    def times_beside(
        self,
        spec: ModelSpec,
        residency: Residency,
        order: Sequence[int],
        kept: frozenset[int],
    ) -> list[BlockTimes]:
        """Return the seconds of each block for a whole window, while bytes move as this residency makes them."""
        machine, lost_s = self._machine, 0.0
        streams = machine.in_place and bool(residency.disk_bytes)
        if streams:  # blocks compute on the cores that move bytes
            traffic = step_traffic(spec, residency, order, self._choices.on_disk)
            lost_s = traffic.moved_bytes * machine.io_lost_s_per_byte
            lost_s += _STREAM_S * len(order)
            # Who packs takes a core for longer: the others wait for its share of a product. Measured on two cores.
            together = max(1, min(IO_THREADS, machine.cores) // 2)
            lost_s += traffic.packing_cpu_s / together
        return self.times(kept, lost_s=lost_s, full=self._is_full(spec, residency))

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

    def _is_full(self, spec: ModelSpec, residency: Residency) -> bool:
        """Whether the budget has not even room for what blocks may take beside what must stream."""
        choices = self._choices
        needed = (
            working_bytes(spec) + choices.packing_bytes + residency.activation_bytes
        )
        limit = choices.ram_limit_bytes(self._machine)
        return self._machine.in_place and bool(residency.disk_bytes) and needed >= limit

    def _freed_bytes(self, part: Part) -> int:
        """Return what a block's backward frees in the heap: what it kept, and gradients that are not large."""
        choices = self._choices
        kept = kept_bytes(self._shape, part, choices.window, bf16=choices.bf16)
        return kept + sum(s for s in self._gradients(part) if s < self._large_bytes)

    @property
    def _large_bytes(self) -> int:
        return large_bytes(self._choices.ram_limit_bytes(self._machine))

    def _gradients(self, part: Part) -> list[int]:
        """Return the bytes of each gradient as a backward makes it."""
        dims, width = self._shape.dims, 2 if self._choices.bf16 else 4
        sizes = [math.prod(size) for _, size in part.params]
        if part.kind == "head" and not sizes:  # that of the tied embedding
            sizes = [dims.vocabulary * dims.hidden]
        return [width * size for size in sizes]

    def _measure(self, part: Part) -> tuple[float, float, float]:
        """Return the seconds of forward, of what is computed again, and of backward for a whole window."""
        choices, machine = self._choices, self._machine
        window, count = choices.window, choices.window.accumulation
        work = block_work(self._shape, part, window, bf16=choices.bf16)
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
            backward += _BACKWARD_CALL_S + _STEP_S / count
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
        large, logits = self._large_bytes, 0
        if part.kind == "head":
            logits = self._choices.window.rows * self._shape.dims.vocabulary * 4
        gradients = [size for size in self._gradients(part) if size >= large]
        # Two of the four copies in cross-entropy are made in its forward.
        return 2 * logits if logits >= large else 0, sum(gradients)


def total_s(times: Iterable[BlockTimes]) -> float:
    """Return the seconds of all blocks."""
    return sum(each.total_s for each in times)
