"""Tensors whose bytes are in the store: true values or a clear error, never a stale placeholder.

A `StreamedParameter` stands in the module, the optimizer and the caller's lists while its weights
are elsewhere. Shape, dtype, device and the like are answered at once. Anything that needs values
gets a copy of the true ones; what changes values in place changes the store, also through views
(``p.data``, ``p.detach()``, ``p[0]``, ``p.T``): those stay lazy. During a block's forward and backward
the module holds a plain parameter over the loaded bytes instead, so that no operation there pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatrain_nb.errors import ModelError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Source(Protocol):
    """Where a streamed tensor's values are."""

    name: str

    def opened(self, *, write: bool) -> AbstractContextManager[Tensor]:
        """Give a plain tensor over the true values, shape as the parameter's, for a moment."""

    def grad(self) -> StreamedTensor | None:
        """Return the pending gradient, or None."""

    def set_grad(self, value: Tensor | None) -> None:
        """Replace or drop the pending gradient."""


_View = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]


class _Streamed:
    """What both classes below share: the answer to every torch function."""

    _source: Source
    _views: tuple[_View, ...]
    _meta: Tensor | None

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
        if not args and "tensor" in kwargs:  # as torch.nn.init passes it
            args = (kwargs["tensor"],)
            kwargs = {key: kwargs[key] for key in kwargs if key != "tensor"}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SPECIAL:
            return _SPECIAL[func](*args, **kwargs)
        if name in _REFUSED:
            raise ModelError(_REFUSED[name].format(_name_of(args)))
        if isinstance(kwargs.get("out"), _Streamed):
            msg = f"{_name_of(args)}: out= cannot be a streamed tensor; use copy_ under torch.no_grad()"
            raise ModelError(msg)
        if name.startswith("_foreach_"):
            return _each(func, args, kwargs)
        if func in _VIEWS and not _copies(func, args):
            return _lazy_view(args[0], func, args[1:], kwargs)
        if changes_in_place(name):
            return _in_place(func, args, kwargs)
        return _on_copies(func, args, kwargs)

    def as_subclass(self, *_: Any) -> Any:
        """Refuse: what is under this object are no values."""
        raise ModelError(_ADDRESS.format(self._source.name))

    def set_(self, *_: Any, **__: Any) -> Any:
        """Refuse: the values are in the store."""
        raise ModelError(_RESHAPED.format(self._source.name))

    def __deepcopy__(self, memo: Any) -> Any:
        self._no_copy("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._no_copy("pickling (torch.save)")

    def _no_copy(self, what: str) -> None:
        msg = (
            f"{self._source.name}: {what} would bring the whole model into RAM; save with "
            "mt.save_pretrained(model, dir), or get an ordinary model back with mt.unwrap(model)"
        )
        raise ModelError(msg)


class StreamedTensor(_Streamed, Tensor):
    """A view of values in the store, or of a pending gradient or moment; shape and dtype of the original."""


class StreamedParameter(_Streamed, nn.Parameter):
    """A parameter whose weights are in the store."""


def placeholder(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor of the given shape that occupies one element; a write into it is an error."""
    value = math.nan if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def stream_parameter(
    param: nn.Parameter,
    source: Source,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> StreamedParameter:
    """Turn a parameter into a streamed one of ``dtype``; whoever holds the object sees the change.

    The parameter's own memory is freed unless somebody else holds it.
    """
    requires_grad = param.requires_grad
    param.grad = None
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        param.data = placeholder(tuple(param.shape), dtype or param.dtype, device)
    param.__class__ = StreamedParameter
    assert isinstance(param, StreamedParameter)
    param._source, param._views, param._meta = source, (), None
    set_requires_grad(param, requires_grad)
    return param


def plain_parameter(param: StreamedParameter, values: Tensor) -> nn.Parameter:
    """Turn a streamed parameter back into an ordinary one that holds ``values``."""
    del param._source, param._views, param._meta
    param.__class__ = nn.Parameter  # type: ignore[assignment]
    with torch.no_grad():
        param.data = values
    return param


def streamed_tensor(
    source: Source, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> StreamedTensor:
    """Return a tensor whose values are read from ``source`` when they are needed."""
    tensor = placeholder(shape, dtype, device).as_subclass(StreamedTensor)
    tensor._source, tensor._views, tensor._meta = source, (), None
    return tensor


def source_of(tensor: Tensor) -> Source | None:
    """Return where the tensor's values are if it is streamed."""
    return tensor._source if isinstance(tensor, _Streamed) else None


def _lazy_view(
    base: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Describe a view without reading anything: its shape comes from the same call on a meta tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        meta = _meta_of(base)
        differentiable = torch.is_grad_enabled() and base.requires_grad
        device = base.device
    if func in _CUTTING:
        differentiable = False
    described = func(meta, *args, **kwargs)

    def lazy(meta: Tensor, index: int | None) -> StreamedTensor:
        view = streamed_tensor(base._source, tuple(meta.shape), meta.dtype, device)
        view._views = (*base._views, (func, args, kwargs, index))
        view._meta = meta
        if differentiable:
            set_requires_grad(view, True)
        return view

    if isinstance(described, Tensor):
        return lazy(described, None)
    return tuple(lazy(part, index) for index, part in enumerate(described))


def _meta_of(tensor: Any) -> Tensor:
    """Return a tensor without memory, with the shape, dtype and strides that the values have."""
    meta: Tensor | None = getattr(tensor, "_meta", None)
    if meta is not None:
        return meta
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _on_copies(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function on copies of the true values; what turns out to be a view stays lazy."""
    plain_args, plain_kwargs = pytree.tree_map_only(_Streamed, _value, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if not (args and isinstance(args[0], _Streamed)):
        return result
    parts = list(result) if isinstance(result, list | tuple) else [result]
    if not any(
        isinstance(part, Tensor) and _shares(part, plain_args[0]) for part in parts
    ):
        return result
    if result is plain_args[0]:
        return args[0]
    return _lazy_view(args[0], func, args[1:], kwargs)


def _shares(a: Tensor, b: Tensor) -> bool:
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.numel() > 0
    )


def _through(values: Tensor, views: tuple[_View, ...]) -> Tensor:
    for func, args, kwargs, index in views:
        values = func(values, *args, **kwargs)
        if index is not None:
            values = values[index]
    return values


def _value(tensor: Any) -> Tensor:
    """Copy the true values; a gradient that would reach the copy has nowhere to go, so it is an error."""
    with tensor._source.opened(write=False) as values, torch.no_grad():
        copy = _through(values, tensor._views)
        copy = copy.clone(memory_format=torch.preserve_format)
        copy = copy.to(_plain(tensor, "device"))
    if torch.is_grad_enabled() and _plain(tensor, "requires_grad"):
        copy.requires_grad_()
        copy.register_hook(_refuse_gradient(tensor._source.name))
    return copy


def _refuse_gradient(name: str) -> Callable[[Tensor], None]:
    def refuse(_: Tensor) -> None:
        msg = (
            f"{name} was read outside the module that owns it, and a gradient reached that copy: it would be "
            "lost. Compute with the parameter inside its module's forward"
        )
        raise ModelError(msg)

    return refuse


def _in_place(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    target = args[0]
    if not isinstance(target, _Streamed):
        if isinstance(target, list | tuple):
            msg = f"{getattr(func, '__name__', func)} would update copies; use the optimizer that mt.wrap(model) returns"
            raise ModelError(msg)
        return _on_copies(func, args, kwargs)
    # torch.nn.init's functions turn gradients off themselves.
    is_init = getattr(func, "__module__", None) == "torch.nn.init"
    if torch.is_grad_enabled() and _plain(target, "requires_grad") and not is_init:
        msg = f"{target._source.name} requires grad: change it in place under torch.no_grad()"
        raise ModelError(msg)
    rest = pytree.tree_map_only(_Streamed, _value, (args[1:], kwargs))
    with target._source.opened(write=True) as values, torch.no_grad():
        rest = pytree.tree_map_only(Tensor, partial(_beside, values), rest)
        func(_through(values, target._views), *rest[0], **rest[1])
    return target


def _beside(values: Tensor, given: Tensor) -> Tensor:
    """Bring what a change is made with to where the values are: in RAM, wherever the blocks compute."""
    return given if given.device == values.device else given.to(values.device)


def _each(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Apply a ``_foreach_`` function to one tensor at a time, so that one is in RAM at a time."""
    name = func.__name__
    results: list[Any] = []
    for index, tensor in enumerate(args[0]):
        one = [
            [_plain_value(x[index])] if isinstance(x, list | tuple) else _plain_value(x)
            for x in args[1:]
        ]
        if changes_in_place(name) and isinstance(tensor, _Streamed):
            with tensor._source.opened(write=True) as values, torch.no_grad():
                func([_through(values, tensor._views)], *one, **kwargs)
        else:
            results.extend(func([_plain_value(tensor)], *one, **kwargs) or ())
    return tuple(results) if results else None


_MOVED = (
    "{}: a streamed model keeps its device, dtype and shapes; "
    "mt.unwrap(model) gives an ordinary model that can be moved or cast"
)


def _plain_value(value: Any) -> Any:
    return _value(value) if isinstance(value, _Streamed) else value


def _set_data(tensor: Any, value: Any) -> None:
    if value is tensor:
        return
    with torch._C.DisableTorchFunctionSubclass():
        same = (
            value.shape == tensor.shape
            and value.dtype == tensor.dtype
            and value.device == tensor.device
        )
    if not same:
        raise ModelError(_MOVED.format(tensor._source.name))
    _in_place(Tensor.copy_, (tensor.detach(), value), {})


def set_requires_grad(tensor: Any, requires_grad: bool = True) -> Any:
    """Set whether a tensor wants gradients, past its own ``__torch_function__``."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.requires_grad_(tensor, requires_grad)


def _to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Stay lazy where nothing changes; refuse to move a parameter away."""
    with torch._C.DisableTorchFunctionSubclass():
        probe = Tensor.to(tensor, *args, **kwargs)
        same = probe.dtype == tensor.dtype and probe.device == tensor.device
    if same and not kwargs.get("copy"):
        return tensor
    if isinstance(tensor, StreamedParameter):
        raise ModelError(_MOVED.format(tensor._source.name))
    return Tensor.to(_value(tensor), *args, **kwargs)


def _numpy(tensor: Any, **kwargs: Any) -> Any:
    array = Tensor.numpy(_value(tensor).detach(), **kwargs)
    array.flags.writeable = False  # it is a copy: a write into it would be lost
    return array


def _as_array(tensor: Any, *args: Any, **_: Any) -> Any:
    array = _numpy(tensor)
    return array.astype(args[0]) if args and args[0] is not None else array


def _plain(tensor: Any, attribute: str) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(tensor, attribute)


def _name_of(args: tuple[Any, ...]) -> str:
    return next(
        (arg._source.name for arg in args if isinstance(arg, _Streamed)),
        "a streamed tensor",
    )


def _copies(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Indexing by a tensor, list or array copies in torch as well, so it is not a view."""
    if func is not Tensor.__getitem__:
        return not isinstance(args[0], _Streamed)
    indices = args[1] if isinstance(args[1], tuple) else args[1:2]
    return not all(
        isinstance(index, int | slice | EllipsisType | None)
        and not isinstance(index, bool)
        for index in indices
    )


def changes_in_place(name: str) -> bool:
    """Whether a torch function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS


_IN_PLACE_DUNDERS = {"__setitem__"} | {
    f"__i{op}__"
    for op in (
        "add",
        "sub",
        "mul",
        "truediv",
        "div",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
    )
}
_ADDRESS = (
    "{}: its address cannot be given away, since the values are in the store; take a copy first "
    "(p.detach().clone()), or save with mt.save_pretrained(model, dir)"
)
_RESHAPED = "{}: a streamed tensor keeps its memory and shape; take a copy first (p.detach().clone())"
_HOOKED = "{}: a gradient hook on a streamed parameter would not run; change gradients between backward and step"
_REFUSED = (
    dict.fromkeys(
        [
            "data_ptr",
            "untyped_storage",
            "storage",
            "_typed_storage",
            "share_memory_",
            "__dlpack__",
            "as_subclass",
        ],
        _ADDRESS,
    )
    | dict.fromkeys(
        [
            "set_",
            "resize_",
            "resize_as_",
            "t_",
            "transpose_",
            "squeeze_",
            "unsqueeze_",
            "swapaxes_",
            "swapdims_",
            "as_strided_",
        ],
        _RESHAPED,
    )
    | dict.fromkeys(("register_hook", "register_post_accumulate_grad_hook"), _HOOKED)
)


def _methods(names: str) -> set[Any]:
    return {getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)}


def _accessor(name: str) -> Any:
    return getattr(Tensor, name)


def _getters(names: str) -> set[Any]:
    return {
        getattr(Tensor, name).__get__ for name in names.split() if hasattr(Tensor, name)
    }


METADATA = _getters(
    "shape dtype device layout requires_grad is_leaf grad_fn ndim nbytes itemsize is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_mps is_nested is_xpu names _version _base output_nr retains_grad is_mkldnn _backward_hooks "
    "is_sparse_csr name is_xla is_vulkan is_ipu is_maia is_mtia"
) | _methods(
    "size dim numel nelement ndimension is_floating_point is_complex element_size __len__ is_signed get_device "
    "has_names is_same_size is_inference __hash__"
)

# Views that are known without reading a byte; others are found out when they run (_on_copies).
_VIEWS = (
    _methods(
        "detach __getitem__ view view_as t transpose swapaxes permute movedim select narrow squeeze unsqueeze "
        "unflatten expand chunk split unbind diagonal alias"
    )
    | _getters("data T mT")
    | {
        torch.detach,
        torch.transpose,
        torch.t,
        torch.permute,
        torch.narrow,
        torch.squeeze,
        torch.unsqueeze,
    }
    | {torch.chunk, torch.split, torch.unbind, torch.select}
)
_CUTTING = {Tensor.detach, torch.detach, _accessor("data").__get__}

_SPECIAL: dict[Any, Callable[..., Any]] = {
    _accessor("grad").__get__: lambda tensor: (
        None if tensor._views else tensor._source.grad()
    ),
    _accessor("grad").__set__: lambda tensor, value: tensor._source.set_grad(value),
    _accessor("grad").__delete__: lambda tensor: tensor._source.set_grad(None),
    _accessor("data").__set__: _set_data,
    _accessor("requires_grad").__set__: set_requires_grad,
    Tensor.requires_grad_: set_requires_grad,
    Tensor.is_contiguous: lambda tensor, **kwargs: _meta_of(tensor).is_contiguous(
        **kwargs
    ),
    Tensor.stride: lambda tensor, *dim: _meta_of(tensor).stride(*dim),
    Tensor.__array__: _as_array,
    Tensor.to: _to,
    Tensor.cpu: lambda tensor, **kwargs: _to(tensor, "cpu", **kwargs),
    Tensor.float: lambda tensor, **kwargs: _to(tensor, torch.float32, **kwargs),
    Tensor.numpy: _numpy,
}
