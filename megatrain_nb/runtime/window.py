"""All micro-batches of one optimizer step pass through a block before the next block is loaded.

[Note: micro-batches are suspended, not rewritten] Each micro-batch is an ordinary call of the model,
run in a greenlet of its own: at a block's border it hands over the call and waits. When all wait, the
block is loaded once and runs for each of them. So weights cross the link twice a step instead of
twice a micro-batch, and nothing of the model is re-implemented. One OS thread computes everything, so
there is one pool of matrix threads.

Backward is driven from here, block by block. What lies between the blocks (masks, rotary tables,
scalings, the loss) is a small autograd graph of its own, cut at the blocks' borders: a block's outputs
are leaves of it, and the gradient of a block's input flows on through it once the input's first
consumer has been served, since nothing that needs it comes later.

[Note: the turn] When a micro-batch leaves its last block, its loss is there and the block is still
loaded: its backward begins at once. So the head's activations (logits) exist for one micro-batch at a
time, and the head is loaded once.

[Note: random numbers] The first micro-batch draws from the caller's stream, as a plain run would. Every
further one has a stream of its own, seeded from (the caller's state, step, its index): in a plain run
it would continue where the one before ended, which layer-major order cannot know.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from megatrain_nb.errors import ModelError
from megatrain_nb.plan.schedule import Kind
from megatrain_nb.runtime.call import BlockCall, keep_weights
from megatrain_nb.runtime.threadstate import ThreadState, get_rng, set_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain_nb.runtime.bound import Bound
    from megatrain_nb.runtime.executor import Executor
    from megatrain_nb.runtime.fuse import FusedCall, Fusing
    from megatrain_nb.runtime.layers import Block


class MicroBatch:
    """One suspended call of the model."""

    def __init__(
        self, index: int, compute: Callable[[], Tensor], state: ThreadState
    ) -> None:
        self.index = index
        self.state = state
        self.greenlet = greenlet(compute)
        self.greenlet.gr_context = contextvars.copy_context()
        self.waiting: BlockCall | _Visit | None = None
        self.loss: Tensor | None = None
        self.calls: list[BlockCall] = []
        self._first_consumer: dict[int, int] = {}
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(self, call: BlockCall) -> None:
        """Note a call whose backward will come."""
        for tensor in call.tracked:
            self._first_consumer.setdefault(id(tensor), len(self.calls))
        self.calls.append(call)

    def top_block(self) -> Block | None:
        """Return the block whose backward is next."""
        return self.calls[-1].block if self.calls else None

    def leave(self, grads: Sequence[Tensor | None]) -> None:
        """Take the input gradients of the last call, and let those flow on whose time has come."""
        call = self.calls.pop()
        for tensor, grad in zip(call.tracked, grads, strict=True):
            if grad is not None:
                before = self._pending.get(id(tensor))
                self._pending[id(tensor)] = (
                    tensor,
                    grad if before is None else before[1] + grad,
                )
        due = [
            self._pending.pop(key)
            for key in [id(tensor) for tensor in call.tracked]
            if key in self._pending and self._first_consumer[key] == len(self.calls)
        ]
        for tensor in call.tracked:
            if self._first_consumer.get(id(tensor)) == len(self.calls):
                del self._first_consumer[id(tensor)]
        if due:
            flow([tensor for tensor, _ in due], [grad for _, grad in due])


class _Visit:
    """A block's call without gradients, inside a micro-batch."""

    def __init__(
        self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.block, self.args, self.kwargs = block, args, kwargs


class Window:
    """One optimizer step's forward and backward.

    Parameters
    ----------
    executor
        Runs the blocks.
    computes
        One for each micro-batch: calls the model and returns the loss to be summed, a scalar tensor.
    step
        Number of the step, for the random streams.
    model
        Give it once, to find out whether it keeps tensors of a micro-batch on its modules.
    fusing
        Lets micro-batches pass a block together; None takes them one by one.

    Attributes
    ----------
    num_batches
        How many micro-batches there are.
    """

    def __init__(
        self,
        executor: Executor,
        computes: Sequence[Callable[[], Tensor]],
        *,
        step: int,
        model: nn.Module | None = None,
        fusing: Fusing | None = None,
    ) -> None:
        self._executor = executor
        self._fusing = fusing
        self._device = executor.device.torch_device
        self._hub = getcurrent()
        self.num_batches = len(computes)
        self._attributes = (
            _Attributes(model) if model is not None and len(computes) > 1 else None
        )
        caller = ThreadState.current(self._device)
        streams = _streams(self._device, caller, len(computes), step)
        self._batches = [
            MicroBatch(index, compute, stream)
            for index, (compute, stream) in enumerate(
                zip(computes, streams, strict=True)
            )
        ]

    def run(self) -> list[Tensor]:
        """Run forward and backward; gradients are pending afterwards.

        Returns
        -------
        list
            The detached loss of each micro-batch.
        """
        self._executor.window = self
        self._executor.expect_window()
        hub = ThreadState.current(self._device)
        try:
            for batch in self._batches:
                self._resume(batch, None)
            while any(batch.waiting for batch in self._batches):
                self._forward_block()
            while any(batch.calls for batch in self._batches):
                self._backward_block()
        finally:
            self._executor.window = None
            for batch in self._batches:
                if not batch.greenlet.dead:
                    batch.greenlet.throw(GreenletExit)
            hub.restore(self._device)
        # The caller's random stream goes on where the first micro-batch left it.
        self._batches[0].state.restore(self._device)
        torch.set_grad_enabled(hub.grad)
        return [batch.loss for batch in self._batches if batch.loss is not None]

    # -- on the micro-batches' side ---------------------------------------------------------------------

    def is_inside(self) -> bool:
        """Whether the running code belongs to a micro-batch."""
        return getcurrent() is not self._hub

    def suspend(self, call: BlockCall) -> Any:
        """Hand a block's call over, and return what the block returns."""
        return self._hub.switch(call)

    def visit(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the same for a call without gradients."""
        return self._hub.switch(_Visit(block, args, kwargs))

    # -- on the driver's side ---------------------------------------------------------------------------

    def _resume(self, batch: MicroBatch, value: Any) -> None:
        """Let a micro-batch run to its next border or to its end."""
        batch.state.restore(self._device)
        moment = self._executor.device.begin()
        result = (
            batch.greenlet.switch()
            if not batch.greenlet
            else batch.greenlet.switch(value)
        )
        self._executor.device.since(moment)
        batch.state = ThreadState.current(self._device)
        if self._attributes is not None:
            self._attributes.check(batch.index)
        batch.waiting = None
        if not batch.greenlet.dead:
            batch.waiting = result
            return
        if (
            not isinstance(result, Tensor)
            or result.numel() != 1
            or not result.requires_grad
        ):
            msg = f"micro-batch {batch.index} must give a scalar loss that depends on the weights, not {_describe(result)}"
            raise ModelError(msg)
        # The part between the last block and the loss goes back at once, and its memory with it.
        flow([result], [None])
        batch.loss = result.detach()

    def _forward_block(self) -> None:
        """Run the block that the first waiting micro-batch asks for, for all that ask for it."""
        block = next(
            batch.waiting.block for batch in self._batches if batch.waiting is not None
        )
        group = [
            batch
            for batch in self._batches
            if batch.waiting is not None and batch.waiting.block is block
        ]
        executor = self._executor
        turning = executor.is_last(block)
        with executor.running(block, Kind.FORWARD, turning=turning) as bound:
            if not turning:
                self._fuse(group, bound)
            for batch in group:
                result = self._forward_call(batch, bound, turning=turning)
                self._resume(batch, result)
                del result
                while batch.loss is not None and turning and self._is_due(batch, block):
                    self._backward_call(batch, bound)
                for call in batch.calls:
                    call.end_turn()

    def _fuse(self, group: list[MicroBatch], bound: Bound) -> None:
        """Run the block at once for those of a group that fit together."""
        waiting = sum(batch.waiting is not None for batch in self._batches)
        calls = [x.waiting for x in group if isinstance(x.waiting, BlockCall)]
        if self._fusing is None or len(calls) != waiting:
            return
        size = self._fusing.group_size(calls)
        for start in range(0, len(group), size):
            batches = group[start : start + size]
            if len(batches) > 1:
                batches[0].state.restore(self._device)
                fused = self._fusing.join(
                    calls[start : start + size], bound, self._device
                )
                if fused is not None:
                    with bound:
                        fused.run(bound)
                    batches[0].state = ThreadState.current(self._device)

    def _forward_call(self, batch: MicroBatch, bound: Bound, *, turning: bool) -> Any:
        """Run one micro-batch's call of the loaded block, and return what the model gets from it."""
        call = batch.waiting
        assert call is not None
        batch.state.restore(self._device)
        with bound:
            if isinstance(call, _Visit):
                result = keep_weights(
                    call.block, call.block.forward(*call.args, **call.kwargs)
                )
            else:
                if call.fused is None:
                    call.run(bound, turning=turning)
                result = call.result(call.outputs)
                batch.enter(call)
        batch.state = ThreadState.current(self._device)
        return result

    def _backward_block(self) -> None:
        block = next(
            batch.calls[-1].block
            for batch in self._batches
            if batch.calls and self._is_due(batch, batch.calls[-1].block)
        )
        with self._executor.running(block, Kind.BACKWARD) as bound:
            for batch in self._batches:
                while self._is_due(batch, block):
                    self._backward_call(batch, bound)

    def _is_due(self, batch: MicroBatch, block: Block) -> bool:
        """Whether a micro-batch's next backward is one of the block, and every one that it is fused with is there.

        The call that ran last in forward is the last one of all its micro-batches, so something always is due.
        """
        if batch.top_block() is not block:
            return False
        fused = batch.calls[-1].fused
        return fused is None or len(self._fused_batches(fused)) == len(fused.members)

    def _fused_batches(self, fused: FusedCall) -> list[MicroBatch]:
        return [
            batch
            for batch in self._batches
            if batch.calls and batch.calls[-1].fused is fused
        ]

    def _backward_call(self, batch: MicroBatch, bound: Bound) -> None:
        call = batch.calls[-1]
        if call.fused is not None:
            with bound:
                found = call.fused.backward_all(bound)
            for each, inputs in zip(
                self._fused_batches(call.fused), found, strict=True
            ):
                each.leave(inputs)
            return
        grads = [x.grad for x in call.outputs]
        if all(grad is None for grad in grads):
            call.end_turn()
            batch.leave([None] * len(call.tracked))
            return
        with bound:
            inputs = call.backward(grads, bound)
        batch.leave(inputs)


class _Attributes:
    """Finds tensors that a forward keeps on modules: layer-major order would mix the micro-batches' ones."""

    def __init__(self, model: nn.Module) -> None:
        self._named = [(name, module) for name, module in model.named_modules()]
        self._written: dict[tuple[str, str], tuple[int, Tensor]] = {}
        self._seen = self._all()

    def check(self, batch: int) -> None:
        """Compare with the last look; a value that another micro-batch wrote must not have changed."""
        now = self._all()
        for key, value in now.items():
            if self._seen.get(key) is value:
                continue
            writer, before = self._written.get(key, (batch, value))
            if writer != batch and not (
                before.shape == value.shape and torch.equal(before, value)
            ):
                msg = (
                    f"{key[0] or 'the model'} keeps a tensor of its micro-batch in .{key[1]}; taken layer by layer, "
                    "the micro-batches of a step would see each other's. Call the model with one micro-batch per "
                    "step, or in a plain loop (loss.backward() for each)"
                )
                raise ModelError(msg)
            self._written[key] = (batch, value)
        self._seen = now

    def _all(self) -> dict[tuple[str, str], Tensor]:
        return {
            (name, key): value
            for name, module in self._named
            for key, value in vars(module).items()
            if isinstance(value, Tensor)
        }


def flow(tensors: list[Tensor], grads: list[Tensor | None]) -> None:
    """Send gradients on through what lies between the blocks; they arrive at the borders' ``.grad``.

    The graph is kept: two tensors whose time comes at different moments may share a part of it.
    """
    torch.autograd.backward(tensors, grads, retain_graph=True)


def _streams(
    device: torch.device, caller: ThreadState, count: int, step: int
) -> list[ThreadState]:
    """Return the state in which each micro-batch starts."""
    states = [caller]
    if count > 1:
        generator = torch.Generator().manual_seed(_mix(int(caller.rng[0].sum()), step))
        seeds = torch.randint(2**62, (count - 1,), generator=generator).tolist()
        before = get_rng(device)
        try:
            for seed in seeds:
                torch.manual_seed(seed)
                states.append(ThreadState.current(device))
        finally:
            set_rng(device, before)
    return states


def _mix(a: int, b: int) -> int:
    return (a * 0x9E3779B97F4A7C15 + b * 0xBF58476D1CE4E5B9) % 2**63


def _describe(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )
