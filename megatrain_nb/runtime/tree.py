"""State as JSON and tensors: what goes into a checkpoint, and comes back, without ever running code.

Dicts, lists, tuples, texts, numbers, tensors and numpy arrays come back as they were, floats to the last
bit. Anything else is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatrain_nb.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


def to_json(tree: Any, tensors: dict[str, Tensor], where: str = "state") -> Any:
    """Return a tree as what JSON can hold; tensors go to ``tensors``, copied to the CPU.

    Parameters
    ----------
    tree
        Nested dicts, lists and tuples.
    tensors
        By name; the tree refers to them.
    where
        What the tree is, for errors.

    Raises
    ------
    ArgumentError
        Something in it is neither data nor a tensor.

    Examples
    --------
    >>> to_json({"lr": (0.1, None)}, {})
    {'lr': {'__tuple__': [0.1, None]}}
    """
    if isinstance(tree, Tensor) or (
        isinstance(tree, np.ndarray) and not tree.dtype.hasobject
    ):
        return _tensor_to_json(tree, tensors)
    if isinstance(tree, dict):
        return _dict_to_json(tree, tensors, where)
    if isinstance(tree, list | tuple):
        values = [
            to_json(value, tensors, f"{where}[{index}]")
            for index, value in enumerate(tree)
        ]
        return {"__tuple__": values} if isinstance(tree, tuple) else values
    if isinstance(tree, np.generic):
        tree = tree.item()
    if isinstance(tree, bool | int | float):
        plain = next(x for x in (bool, int, float) if isinstance(tree, x))
        return plain(tree)  # an enum becomes the number that it is
    if tree is None or isinstance(tree, str):
        return tree and str.__str__(tree)
    msg = (
        f"{where} is a {type(tree).__name__}, which a checkpoint cannot hold: dicts, lists, texts, numbers, tensors "
        "and numpy arrays can be kept. Leave it out of state_dict()"
    )
    raise ArgumentError(msg)


def from_json(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return what `to_json` was given; each tensor is taken out of ``tensors``, so none comes twice.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is not what `to_json` returned.
    """
    if isinstance(tree, list):
        return [from_json(value, tensors) for value in tree]
    if not isinstance(tree, dict):
        return tree
    for mark, make in _MARKED.items():
        if mark in tree:
            return make(tree, tensors)
    return {key: from_json(value, tensors) for key, value in tree.items()}


def _tensor_to_json(
    values: Tensor | NDArray[Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    if isinstance(values, Tensor):
        name = str(len(tensors))
        tensors[name] = values.detach().to("cpu", copy=True).contiguous()
        return {"__tensor__": name}
    data = torch.from_numpy(np.frombuffer(values.tobytes(), np.uint8).copy())
    return {
        "__array__": _tensor_to_json(data, tensors),
        "dtype": values.dtype.str,
        "shape": list(values.shape),
    }


def _dict_to_json(
    tree: dict[Any, Any], tensors: dict[str, Tensor], where: str
) -> dict[str, Any]:
    items = [
        (key, to_json(value, tensors, f"{where}[{key!r}]"))
        for key, value in tree.items()
    ]
    if all(isinstance(key, str) and not key.startswith("__") for key in tree):
        return dict(items)
    return {"__dict__": [[to_json(key, tensors, where), value] for key, value in items]}


def _array(tree: dict[str, Any], tensors: dict[str, Tensor]) -> NDArray[Any]:
    dtype = np.dtype(tree["dtype"])
    if dtype.hasobject:
        msg = "an array of objects"
        raise ValueError(msg)
    data: NDArray[np.uint8] = from_json(tree["__array__"], tensors).numpy()
    values: NDArray[Any] = data.view(dtype).reshape(tree["shape"]).copy()
    return values


_MARKED: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], Any]] = {
    "__tensor__": lambda tree, tensors: tensors.pop(tree["__tensor__"]),
    "__array__": _array,
    "__tuple__": lambda tree, tensors: tuple(
        from_json(value, tensors) for value in tree["__tuple__"]
    ),
    "__dict__": lambda tree, tensors: {
        from_json(key, tensors): from_json(value, tensors)
        for key, value in tree["__dict__"]
    },
}
