"""Micro-batches that pass a block together, as one larger batch.

[Note: what changes] A matrix product of more rows uses the units better, and may add in another order: results
differ in the last places. Dropout draws one mask for all, from the first one's random stream. So it is a
setting, off by default. The last block and the loss stay one by one: a mean over tokens must not mix them.

[Note: proven, not assumed] Whether the first dimension is the batch, and whether rows influence each other
(batch statistics, a router's capacity), cannot be seen from outside. So the first time, a block runs both ways,
without dropout, and the outputs are compared. What differs, or does not fit, is not fused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from megatrain_nb.errors import ModelError
from megatrain_nb.runtime.call import BlockCall
from megatrain_nb.runtime.threadstate import get_rng, set_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain_nb.runtime.bound import Bound
    from megatrain_nb.runtime.layers import Block

# Beyond this many tokens a product gains nothing from more rows, but activations take more memory.
MAX_TOKENS = 1024

_JOINED, _SHARED, _VALUE = "joined", "shared", "value"


class FusedCall(BlockCall):
    """One call of a block for several micro-batches; they keep their own records of it, as `members`.

    Parameters
    ----------
    members
        Calls of one block that `Fusing` found to fit together.
    kinds
        For each argument: joined along its first dimension, the same for all, or no tensor.
    """

    def __init__(
        self, members: Sequence[BlockCall], kinds: Sequence[str], device: torch.device
    ) -> None:
        first = members[0]
        leaves = [
            _joined([member._inputs[index] for member in members])
            if kind is _JOINED
            else first._inputs[index]
            for index, kind in enumerate(kinds)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, first._structure)
        super().__init__(first.block, args, kwargs, device)
        self._autocast = first._autocast
        self._collector, self._collected = first._collector, first._collected
        self.members = members

    def run(self, bound: Bound, *, turning: bool = False) -> None:
        """Run the block once, and give each member its part of the outputs."""
        super().run(bound, turning=turning)
        parts = [_split(x, len(self.members)) for x in self.outputs]
        for index, member in enumerate(self.members):
            member.fused = self
            member._result = self._result
            member._recorded_counts = self._recorded_counts
            member.outputs = [
                part[index].detach().requires_grad_(x.requires_grad)
                for x, part in zip(self.outputs, parts, strict=True)
            ]

    def backward_all(self, bound: Bound) -> list[list[Tensor | None]]:
        """Send all members' gradients through the block at once; returns those of each one's inputs."""
        count = len(self.members)
        grads: list[Tensor | None] = []
        for outputs in zip(*(member.outputs for member in self.members), strict=True):
            if all(x.grad is None for x in outputs):
                grads.append(None)
            else:
                grads.append(
                    _joined(
                        [
                            torch.zeros_like(x) if x.grad is None else x.grad
                            for x in outputs
                        ]
                    )
                )
        if all(grad is None for grad in grads):
            return [[None] * len(self.tracked) for _ in self.members]
        found = [
            [None] * count if grad is None else _split(grad, count)
            for grad in self.backward(grads, bound)
        ]
        return [[part[index] for part in found] for index in range(count)]


class Fusing:
    """Decides which calls pass a block together.

    Parameters
    ----------
    note
        Told once of each kind of block that is not fused, and why.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._noted: set[tuple[type, str]] = set()
        self._proven: set[tuple[Any, ...]] = set()
        self._refused: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return what was found out, so that a run that goes on does not find otherwise."""
        return {"proven": sorted(self._proven, key=repr), "refused": [*self._refused]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._proven = set(state["proven"])
        self._refused = set(state["refused"])

    @staticmethod
    def group_size(calls: Sequence[BlockCall]) -> int:
        """Return how many micro-batches may pass together."""
        lead = _lead(calls[0])
        if lead is None:
            return 1
        tokens = lead.numel() // (lead.shape[-1] if lead.is_floating_point() else 1)
        return max(1, MAX_TOKENS // max(tokens, 1))

    def join(
        self, calls: Sequence[BlockCall], bound: Bound, device: torch.device
    ) -> FusedCall | None:
        """Return one call in the place of several, or None if they do not fit together."""
        block = calls[0].block
        if block.spec.index in self._refused:
            return None
        kinds, why = _fit(calls)
        if why:
            self._tell(block, why)
            return None
        fused = FusedCall(calls, kinds, device)
        pattern = (
            block.spec.index,
            str(fused._structure),
            *kinds,
            *(
                len(x.shape)
                if isinstance(x, Tensor)
                else str(x)  # to look is not to use
                for x in fused._inputs
            ),
        )
        if pattern in self._proven:
            return fused
        why = _difference(fused, bound, device)
        if why:
            self._refused.add(block.spec.index)
            self._tell(block, why)
            return None
        self._proven.add(pattern)
        return fused

    def _tell(self, block: Block, why: str) -> None:
        key = (type(block.module), why)
        if key not in self._noted:
            self._noted.add(key)
            self._note(
                f"fuse_micro_batches: {block.name} (and blocks like it) runs for one micro-batch at a time: {why}"
            )


def _fit(calls: Sequence[BlockCall]) -> tuple[list[str], str]:
    """Say how each argument of several calls is put together, or why it cannot be."""
    first, others = calls[0], calls[1:]
    for other in others:
        if other._structure != first._structure:
            return [], "the micro-batches give it differently structured arguments"
        if other._autocast != first._autocast or other._collected != first._collected:
            return [], "the micro-batches call it under different settings"
    lead = _lead(first)
    if lead is None:
        return [], "it takes no tensor"
    kinds = []
    with torch._C.DisableTorchFunctionSubclass():  # to compare is not to use
        for values in zip(*(call._inputs for call in calls), strict=True):
            kind, why = _kind(values, lead.shape[0])
            if why:
                return [], why
            kinds.append(kind)
    return kinds, ""


def _kind(values: Sequence[Any], size: int) -> tuple[str, str]:
    first, why = values[0], ""
    if not isinstance(first, Tensor):
        if not all(type(x) is type(first) and _same(x, first) for x in values):
            why = "the micro-batches give it different values"
        return _VALUE, why
    traits = {
        (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else None
        for x in values
    }
    if len(traits) > 1:
        why = "the micro-batches give it tensors of different shapes or kinds"
    elif first.ndim and first.shape[0] == size:
        return _JOINED, ""
    elif first.requires_grad:
        why = "a tensor without batch dimension wants a gradient"
    elif not all(x is first or torch.equal(x, first) for x in values):
        why = "a tensor without batch dimension differs between micro-batches"
    return _SHARED, why


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # an object that cannot be compared is not known to be equal
        return False


def _lead(call: BlockCall) -> Tensor | None:
    """Return the argument whose first dimension is taken for the batch."""
    tensors = [x for x in call._inputs if isinstance(x, Tensor) and x.ndim > 0]
    return next(
        (x for x in tensors if x.requires_grad), tensors[0] if tensors else None
    )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension; parts of one tensor that lie one after the other are not copied."""
    first = tensors[0]
    with torch.no_grad():
        if all(
            x.is_contiguous()
            and x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and x.storage_offset() == first.storage_offset() + index * first.numel()
            for index, x in enumerate(tensors)
        ):
            size = (len(tensors) * first.shape[0], *first.shape[1:])
            whole = first.detach().as_strided(size, first.stride())
        else:
            whole = torch.cat([x.detach() for x in tensors])
    return whole.requires_grad_(first.requires_grad)


def _split(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    size, rest = divmod(tensor.shape[0] if tensor.dim() else 0, count)
    if rest or not size:
        msg = f"a fused output of shape {tuple(tensor.shape)} cannot be split among {count} micro-batches"
        raise ModelError(msg)
    parts: tuple[Tensor, ...] = tensor.split(size)
    return parts


# -- the proof --------------------------------------------------------------------------------------------


def _difference(fused: FusedCall, bound: Bound, device: torch.device) -> str:
    """Run a block both ways and say what differs; empty if nothing does."""
    module = fused.block.module
    if any(isinstance(x, nn.modules.batchnorm._BatchNorm) for x in module.modules()):
        return "it normalises over the batch"
    buffers = [(x, x.clone()) for x in module.buffers()]
    attributes = _attributes(module)
    rng = get_rng(device)
    try:
        with bound, _WithoutDropout():
            alone = [_outputs(member) for member in fused.members]
            if _attributes(module) != attributes:
                return "it keeps a tensor of its micro-batch on a module"
            together = _outputs(fused)
            if any(
                not torch.equal(a, b) for a, b in zip(rng, get_rng(device), strict=True)
            ):
                return "it draws random numbers by another way than dropout"
            if any(not torch.equal(x, old) for x, old in buffers):
                return "it changes its buffers"
            return _compare(alone, together, _tolerance(fused))
    except Exception as error:  # whatever it is: alone it would run
        return f"together they fail ({type(error).__name__}: {error})"
    finally:
        set_rng(device, rng)
        with torch.no_grad():
            for x, old in buffers:
                x.copy_(old)


def _attributes(module: nn.Module) -> dict[tuple[int, str], int]:
    """Return which tensors, or containers of tensors, are attributes of a module or of one inside."""
    return {
        (number, name): id(value)
        for number, inner in enumerate(module.modules())
        for name, value in vars(inner).items()
        if not name.startswith("_")
        and any(isinstance(x, Tensor) for x in pytree.tree_leaves(value))
    }


def _outputs(call: BlockCall) -> tuple[Any, list[Tensor], dict[str, int]]:
    """Run a call; returns its result with tensors left out, the tensors, and how many were recorded."""
    with torch.autograd.graph.saved_tensors_hooks(_drop, _drop):
        result, tensors, _ = call._compute()
    shape = pytree.tree_map_only(Tensor, lambda _: None, result)
    return shape, [x.detach() for x in tensors], dict(call._recorded_counts)


def _drop(tensor: Any) -> Any:
    """Keep nothing of a run whose gradients nobody asks for."""


def _compare(
    alone: list[tuple[Any, list[Tensor], dict[str, int]]],
    together: tuple[Any, list[Tensor], dict[str, int]],
    tolerance: float,
) -> str:
    count = len(alone)
    for shape, tensors, recorded in alone:
        if (
            recorded != together[2]
            or len(tensors) != len(together[1])
            or pytree.tree_structure(shape) != pytree.tree_structure(together[0])
            or not _same(pytree.tree_leaves(shape), pytree.tree_leaves(together[0]))
        ):
            return "together it returns something else than alone"
    for index, whole in enumerate(together[1]):
        parts = [tensors[index] for _, tensors, _ in alone]
        first = parts[0]
        if not first.dim() or whole.shape != (count * first.shape[0], *first.shape[1:]):
            return f"an output of shape {tuple(first.shape)} has shape {tuple(whole.shape)} for {count} micro-batches"
        expected = torch.cat(parts)
        if not whole.is_floating_point():
            if not torch.equal(whole, expected):
                return "an output that is no floating-point number differs"
            continue
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        if not bool(((whole - expected).abs() <= tolerance * largest).all()):
            return f"its outputs differ by more than {tolerance:.1g} of the largest"
    return ""


def _tolerance(call: BlockCall) -> float:
    """Return what rounding may do, relative to the largest output: the root of the format's precision.

    float32: 3.5e-4, bfloat16: 0.09. Another order of a sum moves it by some units in the last place; rows that
    influence each other move it by a part of its size.
    """
    formats = [torch.float32, *(dtype for _, on, dtype in call._autocast.kinds if on)]
    formats += [site.param.dtype for site in call.block.sites]
    return math.sqrt(max(torch.finfo(x).eps for x in formats))


class _WithoutDropout(TorchFunctionMode):
    """Lets dropout pass everything, so that two runs can be compared."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
}
