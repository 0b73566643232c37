"""Logits that would break the budget are put off until it is known what they are for.

[Note: a call that waits] Where the logits of a micro-batch would not fit, the call of the head (the last
block, an ``nn.Linear``) does not happen when the model makes it. The model gets a `Logits` tensor instead,
which knows shape and dtype, and writes down what the model does to it: scaling, soft-capping, casts, the
choice of tokens. If cross-entropy is asked of it, head and loss become one call of the block, in chunks of
tokens (see `megatrain_nb.runtime.chunks`). If anything else is, the head's ordinary call happens then, and
the operations after it: the same numbers, and the memory they need. So nothing has to be understood for
the result to be right.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from megatrain_nb.errors import ModelError
from megatrain_nb.plan.logits import Chunking, cut_logits, room_for_logits
from megatrain_nb.runtime.call import BlockCall
from megatrain_nb.runtime.chunks import LossCall, LossTask
from megatrain_nb.runtime.tensor import METADATA, changes_in_place, placeholder

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain_nb.runtime.chunks import Operation
    from megatrain_nb.runtime.executor import Executor
    from megatrain_nb.runtime.layers import Block

_STALE = (
    "the logits of {} were not kept, since they would not fit into the budget, and {} since: read them before "
    "optimizer.step(), or raise max_ram_gb"
)
_ESCAPED = (
    "the logits of {} reached a function that torch does not tell about (a torch.autograd.Function, say), and "
    "their gradient would be lost; give it logits * 1.0 where they may exist, or raise max_ram_gb"
)
_CHANGED = (
    "the logits of {} were put off, since they would not fit into the budget, and what was made of them cannot be "
    "changed in place; make a new tensor instead, or raise max_ram_gb"
)


class LargeLogits:
    """Decides which calls of the head wait.

    Parameters
    ----------
    executor
        Runs the blocks.
    room
        Bytes that the budget has for what the model allocates.

    Attributes
    ----------
    chunking
        How the largest logits that did not fit were cut, or None.
    """

    def __init__(self, executor: Executor, room: Callable[[], int]) -> None:
        self.chunking: Chunking | None = None
        self._executor = executor
        self._room = room
        self._fused: dict[Block, Block] = {}

    def put_off(
        self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Logits | None:
        """Return logits that wait, or None where the call should happen now."""
        executor = self._executor
        last = executor.is_last(block) or block is executor.layers.blocks[-1]
        if not last or not _is_head(block):
            return None
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return None
        hidden = args[0]
        if (
            type(hidden) is not Tensor
            or hidden.dim() < 2
            or hidden.dtype != block.module.weight.dtype
            or torch.is_autocast_enabled(hidden.device.type)
        ):
            return None
        head = Head(self._executor, block, hidden, self)
        # The operations that follow are not known yet: soft-capping's three are the most that models have.
        if self.cut(head, operations=3) is None:
            return None
        return head.logits()

    def cut(self, head: Head, *, operations: int) -> Chunking | None:
        """Return how to cut a head's logits, or None where they fit."""
        window = self._executor.window
        tokens, width = head.num_rows, head.hidden.shape[-1]
        room = room_for_logits(
            self._room(),
            micro_batches=window.num_batches if window is not None else 1,
            blocks=len(self._executor.layers.blocks) if head.recorded else 0,
            tokens=tokens,
            width=width,
        )
        return cut_logits(
            tokens=tokens,
            vocabulary=head.classes,
            room_bytes=room,
            training=head.recorded,
            operations=operations,
        )

    def fused(self, block: Block) -> Block:
        """Return the block whose forward is head and loss."""
        if block not in self._fused:
            fused = self._fused[block] = copy.copy(block)
            module: Any = block.module
            fused.forward = lambda hidden, task: task.run(
                hidden, module.weight, module.bias
            )
        return self._fused[block]


def _is_head(block: Block) -> bool:
    """Whether a block is a plain linear map whose output nobody else looks at on its way out."""
    module = block.module
    hooks = (module._backward_hooks, module._backward_pre_hooks)
    return (
        type(module) is nn.Linear
        and getattr(block.forward, "__func__", None) is nn.Linear.forward
        and not any(hooks)
        and not torch.nn.modules.module._global_backward_hooks
        and not torch.nn.modules.module._global_backward_pre_hooks
    )


class Head:
    """One call of the head that waits.

    Attributes
    ----------
    hidden
        Its input, (..., width).
    recorded
        Whether gradients were recorded when the model called it.
    whole
        All logits, once they had to be made.
    """

    def __init__(
        self, executor: Executor, block: Block, hidden: Tensor, owner: LargeLogits
    ) -> None:
        module: Any = block.module
        self.block = block
        self.hidden = hidden
        self.classes: int = module.out_features
        self.num_rows = hidden.numel() // hidden.shape[-1]
        self.recorded = torch.is_grad_enabled()
        self.requires_grad = self.recorded and (
            hidden.requires_grad or any(x.requires_grad for x in module.parameters())
        )
        self.whole: Tensor | None = None
        self._whole_version = 0
        self._executor = executor
        self._owner = owner
        self._version = executor.version
        self._hidden_version = _version(hidden)

    def logits(self) -> Logits:
        """Return the logits that wait."""
        shape = (*self.hidden.shape[:-1], self.classes)
        return _make(self, shape, self.hidden.dtype)

    def make_whole(self) -> Tensor:
        """Return all logits as an ordinary tensor; later uses get the same one."""
        if self.whole is None:
            with torch.set_grad_enabled(self.recorded):
                whole = self._call(self.block, self.hidden)
            self.whole, self._whole_version = whole, _version(whole)
        return self.whole

    def rows(self, rows: Tensor | None) -> Tensor:
        """Return some rows of the logits, or all of them."""
        if self.whole is not None or (rows is None and self._is_used_with_gradients()):
            whole = self.make_whole()
            if rows is None:
                return whole
            if _version(whole) != self._whole_version:
                msg = f"the logits of {self.block.name} were changed in place after a part of them was chosen; choose it afterwards"
                raise ModelError(msg)
            return whole.reshape(-1, self.classes)[rows]
        hidden = self.hidden
        if rows is not None:
            hidden = hidden.reshape(-1, hidden.shape[-1])[rows]
        return self._call(self.block, hidden)

    def chunking(self, operations: int) -> Chunking | None:
        """Return how to cut the logits, or None where they fit."""
        return self._owner.cut(self, operations=operations)

    def loss(self, task: LossTask, chunking: Chunking) -> Tensor:
        """Run head and loss as one block."""
        known = self._owner.chunking
        if known is None or known.whole_bytes < chunking.whole_bytes:
            self._owner.chunking = chunking
        return self._call(self._owner.fused(self.block), self.hidden, task)

    def _is_used_with_gradients(self) -> bool:
        return self.recorded == torch.is_grad_enabled()

    def _call(self, block: Block, *args: Any) -> Tensor:
        name, executor = self.block.name, self._executor
        if executor.version != self._version:
            raise ModelError(_STALE.format(name, "the weights have changed"))
        if _version(self.hidden) != self._hidden_version:
            raise ModelError(_STALE.format(name, "the head's input has changed"))
        if executor.inside is not None:
            msg = f"the logits of {name} are used inside {executor.inside.name}; pass them to it as an argument"
            raise ModelError(msg)
        make = BlockCall if block is self.block else LossCall
        with torch.autocast(self.hidden.device.type, enabled=False):
            result = executor.call_now(block, args, {}, make=make)
        assert isinstance(result, Tensor)
        return result


class Logits(Tensor):
    """Logits that wait: shape, dtype and device are there; values come when something asks for them."""

    _head: Head
    _rows: Tensor | None
    _operations: tuple[Operation, ...]
    _recorded: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Write down what can wait; else bring the values."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        in_place = _changes_first(func, args) or isinstance(kwargs.get("out"), cls)
        waiting = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        if not in_place and len(waiting) == 1 and waiting[0]._head.whole is None:
            understood = _understand(waiting[0], func, args, kwargs)
            if understood is not None:
                return understood
        bring = partial(_values, in_place=in_place)
        args, kwargs = pytree.tree_map_only(cls, bring, (args, kwargs))
        return func(*args, **kwargs)


def plain_arguments(args: Any, kwargs: Any) -> Any:
    """Bring the values of logits that a block is called with."""
    return pytree.tree_map_only(Logits, _values, (args, kwargs))


def _make(
    head: Head,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    rows: Tensor | None = None,
    operations: tuple[Operation, ...] = (),
    recorded: bool | None = None,
) -> Logits:
    with torch.inference_mode(False), torch.no_grad():
        logits = placeholder(shape, dtype, head.hidden.device).as_subclass(Logits)
    logits._head, logits._rows, logits._operations = head, rows, operations
    logits._recorded = head.recorded if recorded is None else recorded
    if head.requires_grad and logits._recorded:
        with torch._C.DisableTorchFunctionSubclass():
            logits.requires_grad_()
            logits.register_hook(_refuse(head.block.name))  # type: ignore[no-untyped-call]
    return logits


def _refuse(name: str) -> Callable[[Tensor], None]:
    def refuse(_: Tensor) -> None:
        raise ModelError(_ESCAPED.format(name))

    return refuse


def _values(logits: Logits, *, in_place: bool = False) -> Tensor:
    """Return the true values, their graph included where gradients are recorded."""
    head = logits._head
    if in_place:  # what is changed must be what everybody else reads
        if logits._rows is not None or logits._operations:
            raise ModelError(_CHANGED.format(head.block.name))
        head.make_whole()
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits._recorded):
        values = head.rows(logits._rows)
        for operation in logits._operations:
            values = operation(values)
    return values if logits._recorded else values.detach()


def _changes_first(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function changes logits that wait, or notes something on them."""
    name = getattr(func, "__name__", "")
    if not (changes_in_place(name) or name in _NOTES):
        return False
    return any(isinstance(x, Logits) for x in pytree.tree_leaves(args[:1]))


# -- what can wait ------------------------------------------------------------------------------------------


def _understand(
    logits: Logits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of a function as a tensor that waits or as a loss; None if it cannot wait."""
    if func is functional.cross_entropy:
        return _cross_entropy(logits, args, kwargs)
    if func in _ELEMENTWISE:
        return _elementwise(logits, func, args, kwargs)
    first = args and args[0] is logits
    return (
        _OF_ONE[func](logits, func, args, kwargs) if first and func in _OF_ONE else None
    )


def _detach(logits: Logits, *_: Any) -> Logits:
    return _derive(logits, recorded=False)


def _layout(
    logits: Logits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return func(_meta(logits), *args[1:], **kwargs)


def _derive(logits: Logits, **changes: Any) -> Logits:
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = tuple(logits.shape), logits.dtype
    given: dict[str, Any] = {
        "shape": shape,
        "dtype": dtype,
        "rows": logits._rows,
        "operations": logits._operations,
        "recorded": logits._recorded,
    }
    return _make(logits._head, **(given | changes))


def _meta(logits: Logits) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device="meta")


def _row_numbers(logits: Logits) -> Tensor:
    """Return for each place of the leading dimensions the row of the flat logits that is there."""
    head = logits._head
    if logits._rows is not None:
        return logits._rows
    numbers = torch.arange(head.num_rows, device=head.hidden.device)
    return numbers.view(head.hidden.shape[:-1])


def _cast(
    logits: Logits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Logits | None:
    """Note a cast; one to the same dtype and device changes nothing, as in torch."""
    if any(isinstance(x, Tensor) for x in pytree.tree_leaves((args[1:], kwargs))):
        return None
    probe = torch.empty(0, dtype=logits.dtype, device=logits.device)
    cast = func(probe, *args[1:], **kwargs)
    if cast.device != probe.device or not cast.is_floating_point():
        return None
    if cast.dtype == probe.dtype:
        return logits
    to = partial(Tensor.to, dtype=cast.dtype)
    return _derive(logits, dtype=cast.dtype, operations=(*logits._operations, to))


def _reshape(
    logits: Logits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Logits | None:
    """Note a new shape that leaves each row whole."""
    meta = _meta(logits)
    if any(isinstance(x, torch.dtype) for x in pytree.tree_leaves((args, kwargs))):
        return None
    shape = tuple(func(meta, *args[1:], **kwargs).shape)
    if not shape or shape[-1] != logits.shape[-1]:
        return None
    if shape == tuple(logits.shape):
        return logits
    return _derive(logits, shape=shape, rows=_row_numbers(logits).reshape(shape[:-1]))


def _choose(
    logits: Logits, _: Any, args: tuple[Any, ...], __: dict[str, Any]
) -> Logits | None:
    """Note a choice of rows."""
    index = args[1]
    items = index if isinstance(index, tuple) else (index,)
    if any(type(x) not in (int, slice, EllipsisType, type(None)) for x in items):
        return None
    if items.count(Ellipsis) > 1:
        return None
    taken = sum(type(x) in (int, slice) for x in items)
    if taken == logits.dim():
        # Something is said of the classes: it must keep all of them.
        last = items[-1]
        full = isinstance(last, slice) and last.indices(logits.shape[-1]) == (
            0,
            logits.shape[-1],
            1,
        )
        if not full:
            return None
        items = items[:-1]
    elif Ellipsis in items and items[-1] is not Ellipsis:
        # [..., a, :] counts from the end: the last one is about the classes
        last = items[-1]
        if not (isinstance(last, slice) and last == slice(None)):
            return None
        items = items[:-1]
    rows = _row_numbers(logits)[items]
    return _derive(logits, shape=(*rows.shape, logits.shape[-1]), rows=rows)


def _elementwise(
    logits: Logits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Logits | None:
    """Note an operation that treats every logit by itself, with numbers or one number for each class."""
    classes = logits.shape[-1]
    leaves, structure = pytree.tree_flatten((args, kwargs))
    noted: list[Any] = []
    for leaf in leaves:
        if leaf is logits:
            noted.append(_HERE)
        elif type(leaf) is Tensor and not leaf.requires_grad:
            by_class = leaf.dim() <= logits.dim() and leaf.numel() == classes
            if leaf.dim() > 0 and not (by_class and leaf.shape[-1] == classes):
                return None
            # A copy: the model may change it before the logits are made.
            noted.append(leaf.clone().view(-1) if leaf.dim() else leaf.clone())
        elif isinstance(leaf, bool | int | float | None):
            noted.append(leaf)
        else:
            return None

    def operation(x: Tensor) -> Tensor:
        filled = [x if leaf is _HERE else leaf for leaf in noted]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        result: Tensor = func(*args, **kwargs)
        return result

    probe = torch.empty((0, classes), dtype=logits.dtype, device=logits.device)
    result = operation(probe)
    if not result.is_floating_point() or result.shape != probe.shape:
        return None
    return _derive(
        logits, dtype=result.dtype, operations=(*logits._operations, operation)
    )


def _cross_entropy(
    logits: Logits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Run head and loss in chunks if this is a loss over rows, and the logits do not fit whole."""
    given = _CROSS_ENTROPY.bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    target = asked["target"]
    if (
        asked["input"] is not logits
        or any(asked[name] is not None for name in ("weight", "size_average", "reduce"))
        or asked["reduction"] not in ("mean", "sum", "none")
        or not isinstance(target, Tensor)
        or target.dtype != torch.int64
        or target.device != logits.device
        or logits.dim() != 2
        or tuple(target.shape) != tuple(logits.shape[:1])
        or logits.dtype not in (torch.float32, torch.float64)
    ):
        return None
    chunking = logits._head.chunking(len(logits._operations))
    if chunking is None:
        return None
    recorded = logits._recorded and torch.is_grad_enabled()
    with torch.set_grad_enabled(recorded):
        task = LossTask(
            _row_numbers(logits),
            target.detach(),
            logits._operations,
            ignore_index=asked["ignore_index"],
            reduction=asked["reduction"],
            label_smoothing=float(asked["label_smoothing"]),
            chunk=chunking.tokens,
        )
        loss: Tensor = logits._head.loss(task, chunking)
        return loss


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _functions(names: str, *places: Any) -> set[Any]:
    found = [getattr(place, name, None) for name in names.split() for place in places]
    return {func for func in found if func is not None}


def _accessor(name: str) -> Any:
    return getattr(Tensor, name)


_HERE = object()
_NOTES = {
    "__set__",
    "__delete__",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
}
_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)
_OF_ONE: dict[Any, Callable[..., Any]] = {
    func: understand
    for understand, functions in (
        (_layout, _functions("stride is_contiguous storage_offset", Tensor)),
        (_cast, _functions("to float double half bfloat16", Tensor)),
        (
            _reshape,
            _functions(
                "view reshape flatten squeeze unsqueeze contiguous", Tensor, torch
            ),
        ),
        (_choose, {Tensor.__getitem__}),
        (_detach, _functions("detach", Tensor, torch) | {_accessor("data").__get__}),
    )
    for func in functions
}
_ELEMENTWISE = _functions(
    "mul multiply __mul__ __rmul__ div divide true_divide __truediv__ add __add__ __radd__ sub subtract __sub__ "
    "neg negative __neg__ tanh clone",
    Tensor,
    torch,
)
