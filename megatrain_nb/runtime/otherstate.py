"""What a checkpoint says beside the models: random states, and the state of objects that were registered."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatrain_nb.errors import ArgumentError, StoreError

# Words of the state of a Mersenne Twister.
_NUM_WORDS = 624


def random_state() -> dict[str, Any]:
    """Return the random states of Python, numpy and torch."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what transformers seeds
        "torch": torch.get_rng_state(),
        "cuda": [],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def random_state_in(state: dict[str, Any]) -> dict[str, Any]:
    """Return random states from anywhere, tried on generators that nobody uses.

    Raises
    ------
    ArithmeticError, LookupError, RuntimeError, TypeError, ValueError
        They are none.
    """
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(state["numpy"])
    kind, words, place, *_ = state["numpy"]
    # numpy does not look at it, and would read that word, wherever it is.
    if kind != "MT19937" or len(words) != _NUM_WORDS or not 0 <= place <= _NUM_WORDS:
        msg = f"a random state of numpy at word {place}"
        raise ValueError(msg)
    torch.Generator().set_state(state["torch"])
    if not all(x.dtype == torch.uint8 and x.dim() == 1 for x in state["cuda"]):
        msg = "a random state of CUDA that is not bytes"
        raise ValueError(msg)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the random states of Python, numpy and torch.

    Raises
    ------
    StoreError
        They are of another kind of device.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    try:
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    except RuntimeError as error:
        msg = f"the checkpoint's random states are of another kind of device: {error}"
        raise StoreError(msg) from error


def check_stateful(name: str, each: Any) -> None:
    """Raise ArgumentError if an object's state cannot be kept."""
    pairs = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
    if not any(all(callable(getattr(each, x, None)) for x in pair) for pair in pairs):
        msg = (
            f"{name}={each!r} has neither state_dict and load_state_dict nor get_state and set_state, so a checkpoint "
            "cannot hold it"
        )
        raise ArgumentError(msg)


def state_of_object(each: Any) -> Any:
    """Return the state of an object."""
    return each.state_dict() if hasattr(each, "load_state_dict") else each.get_state()


def load_object(name: str, each: Any, state: Any) -> None:
    """Give an object a state that it had.

    Raises
    ------
    StoreError
        It does not take it.
    """
    try:
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(state)
        else:
            each.set_state(state)
    except Exception as error:  # of a class of the user's
        msg = f"{name} does not take the state that the checkpoint holds of it: {str(error)[:1000] or type(error).__name__}"
        raise StoreError(msg) from error
