"""State as JSON and tensors: what goes into a checkpoint, and comes back, without ever running code.

Dicts, lists, tuples, texts, numbers, tensors and numpy arrays come back as they were, floats to the last
bit. Anything else is refused by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain_nb.errors import ArgumentError

_MARK = "__"
_PLAIN = (str, int, float, bool, type(None))


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
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().to("cpu", copy=True).contiguous()
        return {"__tensor__": name}
    if isinstance(tree, np.ndarray):
        array = {"__array__": tree.dtype.str, "shape": list(tree.shape)}
        data = np.frombuffer(tree.tobytes(), np.uint8).copy()
        return array | {"bytes": to_json(torch.from_numpy(data), tensors, where)}
    if isinstance(tree, np.generic):
        return to_json(tree.item(), tensors, where)
    if isinstance(tree, dict):
        items = [
            (key, to_json(value, tensors, f"{where}[{key!r}]"))
            for key, value in tree.items()
        ]
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in tree):
            return dict(items)
        return {
            "__dict__": [[to_json(key, tensors, where), value] for key, value in items]
        }
    if isinstance(tree, list | tuple):
        values = [
            to_json(value, tensors, f"{where}[{index}]")
            for index, value in enumerate(tree)
        ]
        return {"__tuple__": values} if isinstance(tree, tuple) else values
    if isinstance(tree, _PLAIN):
        if isinstance(tree, str):
            return str.__str__(tree)  # an enum becomes the text or number that it is
        plain = next((x for x in (bool, int, float) if isinstance(tree, x)), None)
        return None if plain is None else plain(tree)
    msg = (
        f"{where} is a {type(tree).__name__}, which a checkpoint cannot hold: dicts, lists, texts, numbers, tensors "
        "and numpy arrays can be kept. Leave it out of state_dict()"
    )
    raise ArgumentError(msg)


def from_json(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return what `to_json` was given.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is not what `to_json` returned.
    """
    if isinstance(tree, list):
        return [from_json(value, tensors) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if "__tensor__" in tree:
        return tensors[tree["__tensor__"]]
    if "__array__" in tree:
        dtype = np.dtype(tree["__array__"])
        if dtype.hasobject:
            msg = "an array of objects"
            raise ValueError(msg)
        data = from_json(tree["bytes"], tensors).numpy().tobytes()
        return np.frombuffer(data, dtype).reshape(tree["shape"]).copy()
    if "__tuple__" in tree:
        return tuple(from_json(value, tensors) for value in tree["__tuple__"])
    if "__dict__" in tree:
        return {
            from_json(key, tensors): from_json(value, tensors)
            for key, value in tree["__dict__"]
        }
    return {key: from_json(value, tensors) for key, value in tree.items()}
