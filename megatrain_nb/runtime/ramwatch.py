"""Say it before memory runs out: a model that is made or loaded whole in RAM while a session is open.

``from_pretrained`` of transformers leaves weights in the checkpoint's file, mapped, where it can: those take no RAM until
they are used. Where it converts them (another dtype, experts stacked) they are in RAM, all of them, before the runtime
sees the model. So while a session is open, torch tells us of each parameter that a module gets (its own hook for that);
nothing of transformers is replaced.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatrain_nb.errors import BudgetError
from megatrain_nb.runtime import rss
from megatrain_nb.runtime.mapped import Mapped
from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

# Smaller parameters are not counted, and it is looked at whenever so much of the budget came.
_LEAST_BYTES = 1 << 18
_SHARE = 0.05
# An error instead of a note where so little is left of what the machine could give when the session was opened.
_LEFT = 0.1

_WAYS = (
    "mt.from_pretrained(AutoModelForCausalLM, path, dtype=...) and mt.from_config(config) bring a model into the store "
    "piece by piece instead"
)


class RamWatch:
    """Counts the parameters in RAM, mapped files left out, from now until `close`.

    Parameters
    ----------
    limit_bytes
        From here on the user is told, once.
    note
        Tells the user.
    """

    def __init__(self, limit_bytes: int, note: Callable[[str], None]) -> None:
        self._limit_bytes = limit_bytes
        self._note = note
        self._told = False
        self._params: list[weakref.ref[nn.Parameter]] = []
        self._new_bytes = 0
        self._available_bytes = rss.available_bytes()
        self._handle = register_module_parameter_registration_hook(self._seen)

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._handle.remove()
        self._params.clear()

    def _seen(self, _: nn.Module, __: str, param: object) -> None:
        """Note a parameter that a module gets.

        Raises
        ------
        BudgetError
            Those in RAM take more than the budget, and the machine has hardly any more.
        """
        if type(param) is not nn.Parameter or param.device.type != "cpu":
            return
        if param.nbytes < _LEAST_BYTES:
            return
        self._params.append(weakref.ref(param))
        self._new_bytes += param.nbytes
        if self._new_bytes >= _SHARE * self._limit_bytes:
            self._new_bytes = 0
            self._check()

    def _check(self) -> None:
        mapped = Mapped()
        sizes = {}
        alive = [(ref, ref()) for ref in self._params]
        for _, param in alive:
            if type(param) is nn.Parameter and not mapped.holds(param):
                sizes[param.data_ptr()] = param.nbytes
        self._params = [ref for ref, param in alive if type(param) is nn.Parameter]
        taken = sum(sizes.values())
        if taken <= self._limit_bytes:
            return
        msg = (
            f"a model is being made whole in RAM: {format_bytes(taken)} so far, and max_ram_gb is "
            f"{format_bytes(self._limit_bytes)} (from_pretrained of transformers converts weights in RAM where they are "
            f"not in the dtype or form that the model wants). {_WAYS}"
        )
        if rss.available_bytes() < _LEFT * self._available_bytes:
            raise BudgetError(msg)
        if not self._told:
            self._told = True
            self._note(msg)
