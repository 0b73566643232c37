"""Where transformers' loop is, as a checkpoint holds it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerState

from megatrain_nb.errors import ArgumentError, StoreError
from megatrain_nb.store.parsing import parse_json

if TYPE_CHECKING:
    from megatrain_nb.runtime.trainer import Trainer


class Progress:
    """Where transformers' loop is: its state, and the losses that it has not logged yet."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.seed = torch.initial_seed()
        self.carried: dict[str, Any] | None = None

    def text(self) -> str:
        """Return transformers' state as JSON."""
        state = dataclasses.asdict(self._trainer.state)
        return json.dumps(state, indent=2, sort_keys=True) + "\n"

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "state": self.text(),
            "seed": self.seed,
            "loss": self._trainer._tr_loss,
            "last_logged": self._trainer._globalstep_last_logged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it until transformers' loop has begun."""
        self.carried = state

    def begin(self) -> None:
        """Give the loop what it does not carry over itself."""
        trainer, carried, self.carried = self._trainer, self.carried, None
        self.seed = torch.initial_seed() if carried is None else carried["seed"]
        if carried is not None:
            trainer._tr_loss += carried["loss"].to(trainer._tr_loss.device)
            trainer._globalstep_last_logged = carried["last_logged"]
            # transformers reports the mean loss of this call's steps only.
            trainer._total_loss_scalar -= carried["loss"].item()


def state_in(state: Any, *, most_bytes: int) -> str:
    """Return the Trainer's own state, JSON, out of what a checkpoint holds.

    Parameters
    ----------
    state
        From anywhere.
    most_bytes
        What it may take of RAM.

    Raises
    ------
    ArgumentError
        The checkpoint was not taken by a Trainer.
    StoreError
        It is damaged.
    """
    if not isinstance(state, dict) or not isinstance(state.get("state"), str):
        msg = "this checkpoint was not taken by mt.Trainer; go on from it with session.resume() in a plain loop"
        raise ArgumentError(msg)
    text = state["state"]
    try:
        content = parse_json(text.encode(), most_bytes=most_bytes)
        torch.Generator().manual_seed(state["seed"])
        known = vars(TrainerState())
        numbers = [
            content[key] for key, x in known.items() if isinstance(x, int | float)
        ]
        numbers += [state["last_logged"], state["loss"].item()]
        good = all(isinstance(x, int | float) for x in numbers)
        good &= all(isinstance(x, dict) for x in content["log_history"])
        good &= isinstance(content["stateful_callbacks"], dict)
        if not good or content.keys() - known.keys():
            raise TypeError(good)  # noqa: TRY301
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        msg = (
            f"what the checkpoint says of the Trainer is damaged ({repr(error)[:200]})"
        )
        raise StoreError(msg) from error
    return str(text)
