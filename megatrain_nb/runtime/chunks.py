"""Head and loss in chunks of tokens: the logits of one chunk exist at a time.

[Note: one pass] A chunk's logits, its loss, and the gradients of the chunk's hidden states and of the
head's weight follow from each other, so one pass over the chunks gives all of them (as in fused linear
and cross-entropy: Liger Kernel, arXiv 2410.10989). What is not known in the pass is the number by which
the gradient of the loss will be scaled: that comes with backward. So the pass *guesses* it. The first
pass of a block's turn writes where no gradient is yet; it may guess anything, and the sum is scaled
afterwards. Every later one adds ``guess`` times its gradient to what is there, and guesses the last
scale that came. A wrong guess costs a second pass, never a wrong number.

[Note: three ways] `Way.AT_ONCE` is that pass. Where backward comes later (a plain loop, or a loss for each
token), the forward makes the loss only (`Way.LOSS`), and backward makes the gradients with the scale that
it knows (`Way.LATER`), as a block that is computed again would.

[Note: rounding] Every token's loss and gradient come from the same operations as in plain PyTorch; the
softmax is exp(x - max) / sum instead of exp(log_softmax). What differs is the order in which tokens are
added up: by chunk. A sum of n terms in another order differs by at most n * 2^-24 of the sum of their
magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatrain_nb.runtime.call import BlockCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_nb.runtime.bound import Bound

# The same scale from two divisions may differ in its last bits.
_SAME_SCALE = 2.0**-22
# Of a parameter over loaded weights: where its gradient accumulates, if that is not memory of its own.
HOME = "_gradient_home"
_LAST_SCALE = "_last_scale"

Operation = Callable[[Tensor], Tensor]


class Way(Enum):
    """What a pass makes."""

    AT_ONCE = "loss and gradients"
    LOSS = "the loss"
    LATER = "gradients, in backward"


@dataclass(eq=False)
class LossTask:
    """Cross-entropy of some rows of the logits.

    Attributes
    ----------
    rows
        For each target, which row of the flat hidden states it belongs to: int64, (n,).
    targets
        Classes, int64, (n,).
    operations
        What the model does to its logits: elementwise.
    ignore_index, reduction, label_smoothing
        As in torch.nn.functional.cross_entropy.
    chunk
        Tokens of one chunk.
    """

    rows: Tensor
    targets: Tensor
    operations: tuple[Operation, ...]
    ignore_index: int
    reduction: str
    label_smoothing: float
    chunk: int
    way: Way = Way.LOSS
    done: _Pass | None = None
    places: Tensor = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.targets)
        self.places = self.targets.ne(self.ignore_index).nonzero().squeeze(1)
        self.rows = self.rows.index_select(0, self.places)
        self.targets = self.targets.index_select(0, self.places)

    @property
    def factor(self) -> float:
        """What the sum over tokens is multiplied with; 0 where nothing counts, as torch's gradient is then."""
        if self.reduction != "mean":
            return 1.0
        return 1 / len(self.targets) if len(self.targets) else 0.0

    def run(self, hidden: Tensor, weight: Any, bias: Any) -> Tensor:
        """Return the loss, with a graph where gradients are recorded."""
        if torch.is_grad_enabled():
            node: Any = _ChunkedLoss
            loss: Tensor = node.apply(hidden, weight, bias, self)
            return loss
        return _Pass(self, hidden, weight, bias).run()

    def reduced(self, losses: list[Tensor], like: Tensor) -> Tensor:
        """Bring the tokens' losses, chunk by chunk, into the form that the caller asked for."""
        if self.reduction == "none":
            each = like.new_zeros(self.size)
            return each.index_copy_(0, self.places, torch.cat([each[:0], *losses]))
        sums = [loss.sum() for loss in losses]
        total = torch.stack(sums).sum() if sums else like.new_zeros(())
        return total / len(self.targets) if self.reduction == "mean" else total


class _Sum:
    """Adds to one parameter's gradient in the memory where it stays; in fp32 for a bf16 parameter, rounded once."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.fresh = param.grad is None
        if param.grad is not None:
            self.total = param.grad
        else:
            home = getattr(param, HOME, None)
            if home is None:
                wide = torch.promote_types(param.dtype, torch.float32)
                home = torch.empty_like(param, dtype=wide)
            self.total = home
        self._begun = not self.fresh
        self._version = 0

    def add_product(self, dz: Tensor, hidden: Tensor, scale: float) -> None:
        """Add ``scale * dz.T @ hidden``."""
        if hidden.dtype != self.total.dtype:
            self._add(dz.t() @ hidden, scale)
            return
        self.total.addmm_(dz.t(), hidden, beta=int(self._begun), alpha=scale)
        self._begun = True

    def add_rows(self, dz: Tensor, scale: float) -> None:
        """Add ``scale`` times the sum of the rows."""
        self._add(dz.sum(0), scale)

    def _add(self, part: Tensor, scale: float) -> None:
        if not self._begun:
            self.total.zero_()
            self._begun = True
        self.total.add_(part, alpha=scale)

    def end(self) -> None:
        """Hand the sum to the parameter."""
        if not self._begun:
            self.total.zero_()
        self.param.grad = self.total.to(self.param.dtype)  # itself, but for bf16
        self._version = self.total._version

    def rescale(self, scale: float) -> None:
        """Multiply; nothing else is in the sum (`alone`, asked of all sums before the first is multiplied)."""
        self.total.mul_(scale)

    def alone(self) -> bool:
        """Whether the sum holds what this pass added, and nothing else."""
        return (
            self.fresh
            and self.param.grad is self.total
            and self.total._version == self._version
        )


class _Pass:
    """One pass over the chunks.

    Parameters
    ----------
    task
        What to compute.
    hidden
        Hidden states, float32 or bfloat16 as the head is, (..., width).
    weight, bias
        Of the head: (vocabulary, width) and (vocabulary,) or None.
    """

    def __init__(
        self, task: LossTask, hidden: Tensor, weight: nn.Parameter, bias: Any
    ) -> None:
        self.task = task
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        self.scale = 1.0
        self.sums: list[_Sum] = []
        self.d_hidden: Tensor | None = None
        self._logits: Tensor | None = None

    def run(self) -> Tensor:
        """Return the loss alone."""
        losses = [self._loss(h, t)[0] for h, t, _ in self._chunks()]
        self._logits = None
        return self.task.reduced(losses, self.hidden)

    @torch.no_grad()
    def run_with_gradients(self, scale: float, grad: Tensor | None = None) -> Tensor:
        """Return the loss; ``scale`` times its gradients are in `d_hidden` and in the parameters'.

        Parameters
        ----------
        scale
            Of the parameters' gradients.
        grad
            One factor for each target, instead, for the reduction "none".
        """
        self.scale = scale
        self.sums = [
            _Sum(param)
            for param in (self.weight, self.bias)
            if param is not None and param.requires_grad
        ]
        flat = self.hidden.reshape(-1, self.hidden.shape[-1])
        self.d_hidden = torch.zeros_like(flat) if self.hidden.requires_grad else None
        losses = []
        start = 0
        for h, t, rows in self._chunks():
            loss, dz = self._loss(h, t, gradient=True)
            assert dz is not None
            losses.append(loss)
            if grad is not None:
                dz.mul_(grad[start : start + len(rows)].unsqueeze(1))
            start += len(rows)
            if self.d_hidden is not None:
                self.d_hidden.index_add_(0, rows, dz @ self.weight)
            for each in self.sums:
                if each.param is self.weight:
                    each.add_product(dz, h, scale)
                else:
                    each.add_rows(dz, scale)
        for each in self.sums:
            each.end()
        self._logits = None
        return self.task.reduced(losses, self.hidden)

    def correct(self, scale: float) -> None:
        """Make what the parameters got ``scale`` times the gradient, whatever the guess was."""
        if math.isclose(scale, self.scale, rel_tol=_SAME_SCALE):
            return
        if all(each.alone() for each in self.sums):
            for each in self.sums:
                each.rescale(scale / self.scale)
        else:
            again = _Pass(self.task, self.hidden.detach(), self.weight, self.bias)
            again.run_with_gradients(scale - self.scale)
        self.scale = scale

    def undo(self) -> None:
        """Take back what the parameters got."""
        if all(each.alone() for each in self.sums):
            for each in self.sums:
                each.param.grad = None
        else:
            self.correct(0.0)

    # -- inside -----------------------------------------------------------------------------------------

    def _chunks(self) -> Any:
        flat = self.hidden.detach().reshape(-1, self.hidden.shape[-1])
        rows, targets, size = self.task.rows, self.task.targets, self.task.chunk
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield flat.index_select(0, part), targets[start : start + size], part

    def _loss(
        self, hidden: Tensor, targets: Tensor, *, gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token of a chunk, and the gradient of their sum at the head's output."""
        z = self._product(hidden)
        leaf, x = z, z
        if self.task.operations:
            with torch.set_grad_enabled(gradient):
                leaf = z.requires_grad_(gradient)
                x = leaf
                for operation in self.task.operations:
                    x = operation(x)
        # The operations' backward may need their result, so it is not overwritten.
        own = x.detach().clone() if gradient and self.task.operations else x.detach()
        loss = _cross_entropy_in_place(own, targets, self.task.label_smoothing)
        if not gradient:
            return loss, None
        if self.task.operations:
            (own,) = torch.autograd.grad(x, leaf, own)
        return loss, own

    def _product(self, hidden: Tensor) -> Tensor:
        """Return the logits of a chunk, (n, classes), in memory that every chunk uses: new pages cost time."""
        weight = self.weight.detach()
        if self._logits is None:
            most = min(self.task.chunk, len(self.task.rows))
            self._logits = hidden.new_empty((most, len(weight)))
        out = self._logits[: len(hidden)]
        if self.bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(self.bias.detach(), hidden, weight.t(), out=out)


def _cross_entropy_in_place(
    x: Tensor, targets: Tensor, label_smoothing: float
) -> Tensor:
    """Return each row's cross-entropy, (n,); the logits ``x``, (n, classes), become its gradient.

    With smoothing e the target is (1 - e) at its class plus e / classes everywhere, as in
    torch.nn.functional.cross_entropy.
    """
    index = targets.unsqueeze(1)
    x.sub_(x.amax(1, keepdim=True))
    log_p = x.gather(1, index)
    mean = x.mean(1, keepdim=True) if label_smoothing else None
    x.exp_()
    total = x.sum(1, keepdim=True)
    log_total = total.log()
    loss = log_total - log_p
    x.div_(total)
    if mean is not None:
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_total - mean)
        x.sub_(label_smoothing / x.shape[1])
    x.scatter_add_(1, index, torch.full_like(log_p, label_smoothing - 1))
    return loss.squeeze(1)


class _ChunkedLoss(torch.autograd.Function):
    """Head and loss as one node; the gradient of the head's parameters goes where it stays by itself."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: nn.Parameter, bias: Any, task: LossTask
    ) -> Tensor:
        ctx.task = task
        ctx.save_for_backward(hidden, weight, bias)
        if task.way is Way.LATER:  # computed again: only the gradients are wanted
            shape = (task.size,) if task.reduction == "none" else ()
            return hidden.new_zeros(shape)
        this = _Pass(task, hidden, weight, bias)
        scale = _guess(this) if task.way is Way.AT_ONCE else None
        if scale is None:
            return this.run()
        loss = this.run_with_gradients(scale)
        task.done = this
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        task: LossTask = ctx.task
        each = task.reduction == "none"
        scale = 1.0 if each else float(grad) * task.factor
        this, task.done = task.done, None
        homed = hasattr(weight, HOME)
        if this is None:
            if not homed:  # nobody looks into .grad: let autograd carry the gradients
                weight, bias = _stand_in(weight), _stand_in(bias)
            this = _Pass(task, hidden, weight, bias)
            this.run_with_gradients(
                scale, grad.index_select(0, task.places) if each else None
            )
        else:
            this.correct(scale)
        if homed and not each:
            setattr(weight, _LAST_SCALE, scale)
        d_hidden = this.d_hidden
        if d_hidden is not None:
            d_hidden = d_hidden.mul_(scale).view(hidden.shape)
        if homed:
            return d_hidden, None, None, None
        return d_hidden, weight.grad, None if bias is None else bias.grad, None


def _stand_in(param: Tensor | None) -> nn.Parameter | None:
    """Return a parameter over the same values whose gradient is its own."""
    if param is None:
        return None
    return nn.Parameter(param.detach(), requires_grad=param.requires_grad)


def _guess(this: _Pass) -> float | None:
    """Return the scale that backward will probably ask for, or None if the pass must wait for it."""
    weight = this.weight
    if this.task.reduction == "none" or not hasattr(weight, HOME):
        return None
    if weight.grad is None:
        return 1.0
    return getattr(weight, _LAST_SCALE, None)


class LossCall(BlockCall):
    """One call of a head together with its loss: ``block.forward(hidden, task)``."""

    keepable = False  # the logits are what must not be kept

    def run(self, bound: Bound, *, turning: bool = False) -> None:
        """Run it; in a turn the gradients are made at once."""
        self._task.way = Way.AT_ONCE if turning else Way.LOSS
        super().run(bound, turning=turning)

    def backward(
        self, grads: Sequence[Tensor | None], bound: Bound, *, seal: bool = False
    ) -> list[Tensor | None]:
        """Send the loss's gradient back."""
        self._task.way = Way.LATER
        return super().backward(grads, bound, seal=seal)

    def end_turn(self) -> None:
        """Take back the gradients of a loss whose backward does not come now."""
        done, self._task.done = self._task.done, None
        if done is not None:
            done.undo()
        super().end_turn()

    @property
    def _task(self) -> LossTask:
        task = self._inputs[1]
        assert isinstance(task, LossTask)
        return task
