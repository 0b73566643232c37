"""Tensors whose values are still in files: what is done to them is written down, and done where they go.

transformers makes a model's tensors from a checkpoint's: other dtypes, experts stacked, projections joined. Given
these tensors it does so at once, without a byte being read. What it did is a small tree; its leaves are stretches of
files. When a value goes to its place in the store, the tree is walked with views of that place: a stack is the
children's views one beside the other, a cast is a copy, a transposed tensor a transposed view. So a parameter of
any size is filled chunk by chunk, with nothing beside it. What has no such form is computed whole, one at a time.

[Note: casts that lose] A cast that cannot hold every number of what is cast (fp32 to bf16) is left out: the last copy
rounds. So the fp32 master of a model that computes in bf16 holds the checkpoint's own numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatrain_nb.errors import ModelError
from megatrain_nb.runtime.tensor import (
    METADATA,
    changes_in_place,
    placeholder,
    set_requires_grad,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

Shape = tuple[int, ...]


class Leaf(Protocol):
    """Values that are somewhere, in one stretch, row by row."""

    @property
    def name(self) -> str:
        """What an error should call it."""

    @property
    def shape(self) -> Shape:
        """Of the values."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""

    def read(self, start: int, stop: int) -> AbstractContextManager[Tensor]:
        """Give elements ``start`` to ``stop`` for a moment, a flat tensor."""

    def part(self, offset: int, shape: Shape) -> Leaf:
        """Return a stretch of it that begins at element ``offset``."""


@dataclass(frozen=True, slots=True)
class Node:
    """A tensor as a tree; subclasses say of what."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class At(Node):
    """A leaf as it is."""

    leaf: Leaf


@dataclass(frozen=True, slots=True)
class Cast(Node):
    """The same values in another dtype, see [Note: casts that lose]."""

    child: Node


@dataclass(frozen=True, slots=True)
class Joined(Node):
    """Tensors one after the other along a dimension that they have (``cat``), or along a new one (``stack``)."""

    children: tuple[Node, ...]
    dim: int
    stacked: bool


@dataclass(frozen=True, slots=True)
class View(Node):
    """Elements of a tensor in another shape and order, none of them changed: a chunk, a transposed tensor."""

    child: Node
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Apply(Node):
    """What a function of torch makes of tensors; of several results the one of ``index``."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf, or a tensor to be computed whole, and the views that it fills, flat or each of its shape."""

    what: Leaf | Whole
    target: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """What can only be computed whole.

    Attributes
    ----------
    scratch_bytes
        What that takes, roughly: everything read, and twice the result.
    """

    node: Node
    scratch_bytes: int


def at(leaf: Leaf) -> At:
    """Return a leaf as a tree."""
    return At(leaf.shape, leaf.dtype, leaf)


def cast(node: Node, dtype: torch.dtype) -> Node:
    """Return a tree in another dtype, if it has another one."""
    return node if node.dtype == dtype else Cast(node.shape, dtype, node)


def whole(node: Node) -> Whole:
    """Return a tensor as one that is computed whole."""
    read = sum(num_bytes(leaf) for leaf in leaves(node))
    return Whole(node, read + 2 * num_bytes(node))


def num_bytes(what: Leaf | Node) -> int:
    """Return the bytes of a leaf's or a tree's values."""
    return math.prod(what.shape) * what.dtype.itemsize


def leaves(node: Node) -> Iterator[Leaf]:
    """Yield what is read."""
    match node:
        case At():
            yield node.leaf
        case Cast() | View():
            yield from leaves(node.child)
        case Joined():
            for child in node.children:
                yield from leaves(child)
        case Apply():
            for given in pytree.tree_leaves((node.args, node.kwargs)):
                if isinstance(given, LazyTensor):
                    yield from leaves(given._node)


def origin(node: Node) -> torch.dtype:
    """Return what the numbers are that are read; of what is computed with them, the result's dtype."""
    match node:
        case Cast() | View():
            return origin(node.child)
        case Joined():
            found = {origin(child) for child in node.children}
            return found.pop() if len(found) == 1 else torch.float32
    return node.dtype


def places(node: Node, target: Sequence[Tensor]) -> Iterator[Place]:
    """Yield what fills the target, views of the tensor's shape, each element once."""
    match node:
        case At():
            yield Place(node.leaf, tuple(target))
        case Cast():
            yield from places(node.child, target)
        case Joined():
            start = 0
            for index, child in enumerate(node.children):
                if node.stacked:
                    views = [view.select(node.dim, index) for view in target]
                else:
                    length = child.shape[node.dim]
                    views = [view.narrow(node.dim, start, length) for view in target]
                    start += length
                yield from places(child, views)
        case View(child=At() as child):
            order = sorted(range(len(node.shape)), key=lambda dim: -node.stride[dim])
            shape = tuple(node.shape[dim] for dim in order)
            if _is_row_by_row(shape, tuple(node.stride[dim] for dim in order)):
                views = [view.permute(order) for view in target]
                yield from places(at(child.leaf.part(node.offset, shape)), views)
            else:
                yield Place(whole(node), tuple(target))
        case _:
            yield Place(whole(node), tuple(target))


def value(node: Node) -> Tensor:
    """Compute a tensor whole."""
    match node:
        case At():
            with node.leaf.read(0, math.prod(node.shape)) as values:
                return values.clone().view(node.shape)
        case Cast():
            values = value(node.child)
            holds_all = torch.promote_types(values.dtype, node.dtype) == node.dtype
            return values.to(node.dtype) if holds_all else values
        case Joined():
            join = torch.stack if node.stacked else torch.cat
            return join([value(child) for child in node.children], dim=node.dim)
        case View():
            values = value(node.child).contiguous()
            return values.as_strided(node.shape, node.stride, node.offset)
        case Apply():
            args, kwargs = _computed((node.args, node.kwargs))
            result = node.func(*args, **kwargs)
            found: Tensor = result if node.index is None else result[node.index]
            return found
    raise AssertionError(node)


class LazyTensor(Tensor):
    """A tensor that is a tree of what is to be read; shape and dtype are known, values are not here."""

    _node: Node

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in _SAME:
            return lazy(args[0]._node)
        if func in METADATA or (name in ("__get__", "__set__") and func not in _VIEWS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SPECIAL:
            return _SPECIAL[func](*args, **kwargs)
        if name in _CASTS:
            return _cast(func, *args, **kwargs)
        if changes_in_place(name) or isinstance(kwargs.get("out"), LazyTensor):
            msg = (
                f"{_name_of(args, kwargs)}: {name} would change a tensor that is still in its file. Load the model with "
                "from_pretrained of transformers and hand it to mt.wrap or mt.Trainer"
            )
            raise ModelError(msg)
        return _noted(func, args, kwargs)


def lazy(node: Node) -> LazyTensor:
    """Return a tensor that is this tree."""
    with torch.no_grad():
        shell = placeholder(node.shape, node.dtype, torch.device("cpu"))
    found: LazyTensor = torch.Tensor._make_subclass(LazyTensor, shell)
    found._node = node
    return found


def node_of(tensor: Tensor) -> Node | None:
    """Return the tree of a tensor whose values are not here, or None."""
    return tensor._node if isinstance(tensor, LazyTensor) else None


def make_plain(tensor: LazyTensor) -> None:
    """Read a tensor's values; whoever holds the object has an ordinary one then, a parameter if it was one."""
    values = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
    values.copy_(value(tensor._node))
    is_param = isinstance(tensor, nn.Parameter)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensor.data = values
        del tensor._node
        tensor.__class__ = nn.Parameter if is_param else Tensor  # type: ignore[assignment]


def make_lazy(param: nn.Parameter, node: Node) -> None:
    """Let a parameter be this tree again; whoever holds the object sees it."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        param.data = placeholder(node.shape, node.dtype, torch.device("cpu"))
        param.__class__ = LazyTensor  # type: ignore[assignment]
        param._is_param = True
    param._node = node  # type: ignore[attr-defined]


def _noted(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Write a call down; its shapes come from the same call on tensors without memory."""
    bases: list[tuple[Node, Tensor]] = []

    def meta(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, LazyTensor):
            return torch.empty_like(tensor, device="meta")
        found = _meta_of(tensor._node)
        bases.append((tensor._node, found))
        return found

    metas = pytree.tree_map_only(Tensor, meta, (args, kwargs))
    described = func(*metas[0], **metas[1])
    parts = described if isinstance(described, list | tuple) else [described]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        args, kwargs = _computed((args, kwargs))
        return func(*args, **kwargs)

    def made(part: Tensor, index: int | None) -> LazyTensor:
        for node, found in bases:
            same = part.untyped_storage()._cdata == found.untyped_storage()._cdata
            if same and part.dtype == found.dtype:
                return lazy(_view(node, part))
        shape = tuple(part.shape)
        return lazy(Apply(shape, part.dtype, func, args, kwargs, index))

    if isinstance(described, Tensor):
        return made(described, None)
    return tuple(made(part, index) for index, part in enumerate(parts))


def _meta_of(node: Node) -> Tensor:
    """Return a tensor without memory; of a view with its strides in what it is a view of."""
    inner = under_casts(node)
    if not isinstance(inner, View):
        return torch.empty(node.shape, dtype=node.dtype, device="meta")
    numel = math.prod(inner.child.shape)
    base = torch.empty(numel, dtype=node.dtype, device="meta")
    return base.as_strided(inner.shape, inner.stride, inner.offset)


def _view(node: Node, part: Tensor) -> Node:
    """Return the node of a view of another one, as `_meta_of` describes it."""
    if isinstance(node, Cast):
        return cast(_view(node.child, part), node.dtype)
    shape, stride = tuple(part.shape), part.stride()
    base = node.child if isinstance(node, View) else node
    if isinstance(base, At) and _is_row_by_row(shape, stride):
        return at(base.leaf.part(int(part.storage_offset()), shape))
    return View(shape, base.dtype, base, stride, int(part.storage_offset()))


def _joined(stacked: bool) -> Callable[..., LazyTensor]:
    func = torch.stack if stacked else torch.cat

    def join(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
        same = len({tensor.dtype for tensor in tensors}) == 1
        if kwargs or not same or not all(isinstance(x, LazyTensor) for x in tensors):
            return _noted(func, (list(tensors), dim), kwargs)
        metas = [torch.empty(tuple(x.shape), device="meta") for x in tensors]
        shape = tuple(func(metas, dim).shape)
        nodes = tuple(x._node for x in tensors if isinstance(x, LazyTensor))
        return lazy(Joined(shape, nodes[0].dtype, nodes, dim % len(shape), stacked))

    return join


def _cast(func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty((), dtype=tensor.dtype)
        dtype = func(probe, *args, **kwargs).dtype
    return lazy(cast(tensor._node, dtype))


def _equal(one: Any, other: Any) -> bool:
    """Compare chunk by chunk; of tied weights that a checkpoint holds twice transformers wants to know it."""
    if one.shape != other.shape:
        return False
    nodes = [node_of(x) for x in (one, other)]
    first, second = (None if node is None else _leaf_under(node) for node in nodes)
    if first is None or second is None:
        return torch.equal(*_computed((one, other)))
    if first == second:
        return True
    for start in range(0, one.numel(), _STEP):
        stop = min(start + _STEP, one.numel())
        with first.read(start, stop) as a, second.read(start, stop) as b:
            if not torch.equal(a.to(one.dtype), b.to(other.dtype)):
                return False
    return True


def under_casts(node: Node) -> Node:
    """Return what is cast, see [Note: casts that lose]."""
    while isinstance(node, Cast):
        node = node.child
    return node


def _leaf_under(node: Node) -> Leaf | None:
    inner = under_casts(node)
    return inner.leaf if isinstance(inner, At) else None


def _is_row_by_row(shape: Shape, stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _computed(tree: Any) -> Any:
    return pytree.tree_map_only(LazyTensor, lambda x: value(x._node), tree)


def _name_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for given in pytree.tree_leaves((args, kwargs)):
        if isinstance(given, LazyTensor):
            return next((leaf.name for leaf in leaves(given._node)), "a tensor")
    return "a tensor"


_STEP = 1 << 22


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_SAME = {
    Tensor.detach, torch.detach, Tensor.contiguous, Tensor.clone, torch.clone, Tensor.cpu, _getter("data"),
}  # fmt: skip
_VIEWS = {_getter("T"), _getter("mT"), _getter("data"), _getter("H"), _getter("mH")}
_CASTS = ("to", "type", "float", "half", "bfloat16", "double")
_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.stack: _joined(stacked=True),
    torch.cat: _joined(stacked=False),
    torch.concat: _joined(stacked=False),
    torch.equal: _equal,
    Tensor.equal: _equal,
    Tensor.requires_grad_: set_requires_grad,
    Tensor.is_contiguous: lambda *_, **__: True,
    Tensor.stride: lambda tensor, *dim: torch.empty(
        tuple(tensor.shape), device="meta"
    ).stride(*dim),
}
