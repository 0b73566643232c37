"""A block's call as one node of the caller's autograd graph: the path of plain training loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatrain_nb.errors import ModelError
from megatrain_nb.plan.schedule import Kind
from megatrain_nb.runtime.call import check_same_weights

if TYPE_CHECKING:
    from megatrain_nb.runtime.call import BlockCall
    from megatrain_nb.runtime.executor import Executor


def through_autograd(executor: Executor, call: BlockCall) -> Any:
    """Run a block so that ``loss.backward()`` comes back through it."""
    with executor.running(call.block, Kind.FORWARD) as bound, bound:
        call.run(bound)
    if not any(x.requires_grad for x in call.outputs):
        return call.result(call.outputs)
    # Without an input that wants a gradient (token ids), this keeps the node in the graph.
    anchor = torch.zeros((), requires_grad=True)
    node: Any = _BlockNode
    return call.result(
        node.apply(executor, call, executor.version, anchor, *call.tracked)
    )


class _BlockNode(torch.autograd.Function):
    """Forward hands over what the block returned; backward runs the block again."""

    @staticmethod
    def forward(
        ctx: Any,
        executor: Executor,
        call: BlockCall,
        version: int,
        _anchor: Tensor,
        *_tracked: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.executor, ctx.call, ctx.version = executor, call, version
        ctx.set_materialize_grads(False)
        outputs = tuple(x.detach() for x in call.outputs)
        ctx.mark_non_differentiable(
            *(
                out
                for out, x in zip(outputs, call.outputs, strict=True)
                if not x.requires_grad
            )
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        executor: Executor = ctx.executor
        call: BlockCall = ctx.call
        executor.check_usable()
        if not torch.autograd._is_checkpoint_valid():
            msg = (
                f"{call.block.name}: torch.autograd.grad and backward(inputs=...) would add to every parameter's "
                "gradient; use loss.backward()"
            )
            raise ModelError(msg)
        check_same_weights(call.block, ctx.version, executor.version)
        with executor.running(call.block, Kind.BACKWARD) as bound, bound:
            inputs = call.backward(grads, bound, seal=True)
        return (None, None, None, None, *inputs)
