"""The thread's settings that a suspended or repeated computation must find again."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def get_rng(device: torch.device) -> list[Tensor]:
    """Return the random states of the CPU and of the device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        states.append(torch.mps.get_rng_state())
    return states


def set_rng(device: torch.device, states: list[Tensor]) -> None:
    """Set what `get_rng` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
    elif device.type == "mps":
        torch.mps.set_rng_state(states[1])


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast settings by device type: on or off, and to which dtype."""

    kinds: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls, device: torch.device) -> Autocast:
        """Return the settings in force on this thread."""
        return cls(
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in dict.fromkeys(["cpu", device.type])
            )
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the settings in force for a while.

        The cast cache is off: it remembers casts by tensor, and a block's parameters are new tensors
        each time it is loaded.
        """
        with ExitStack() as stack:
            for kind, enabled, dtype in self.kinds:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(
                            kind, dtype=dtype, enabled=enabled, cache_enabled=False
                        )
                    )
            yield

    def restore(self) -> None:
        """Put the settings in force for good."""
        for kind, enabled, dtype in self.kinds:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


@dataclass(slots=True)
class ThreadState:
    """Grad mode, autocast and random state, as one micro-batch left them."""

    grad: bool
    autocast: Autocast
    rng: list[Tensor]

    @classmethod
    def current(cls, device: torch.device) -> ThreadState:
        """Take the state of this thread."""
        return cls(torch.is_grad_enabled(), Autocast.current(device), get_rng(device))

    def restore(self, device: torch.device) -> None:
        """Put the state in force on this thread."""
        torch.set_grad_enabled(self.grad)
        self.autocast.restore()
        set_rng(device, self.rng)
