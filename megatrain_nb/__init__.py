"""Train language models larger than memory, at full precision, on one machine, from a notebook.

Start with ``mt.init(offload_dir=...)``, then ``mt.Trainer`` or ``mt.wrap``; in a notebook
``%load_ext megatrain_nb`` and ``%megatrain help``.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain_nb.errors import (
    ArgumentError,
    BudgetError,
    ChecksumError,
    MegatrainError,
    ModelError,
    SessionError,
    StoreError,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from megatrain_nb.notebook.explore import explore
    from megatrain_nb.notebook.replay import replay
    from megatrain_nb.notebook.trainer import Trainer
    from megatrain_nb.plan.machine import Machine
    from megatrain_nb.plan.plan import Plan
    from megatrain_nb.runtime.callbacks import Callback, StepResult
    from megatrain_nb.runtime.current import current_session
    from megatrain_nb.runtime.distributed import export_distributed
    from megatrain_nb.runtime.export import save_pretrained
    from megatrain_nb.runtime.forecast import (
        estimate,
        largest_model,
        least_ram_gb,
        longest_sequence,
        machines,
        models,
    )
    from megatrain_nb.runtime.init import init
    from megatrain_nb.runtime.load import from_config
    from megatrain_nb.runtime.pretrained import from_pretrained
    from megatrain_nb.runtime.probe import probe
    from megatrain_nb.runtime.recode import recompress
    from megatrain_nb.runtime.recording import export_trace, record
    from megatrain_nb.runtime.session import Session
    from megatrain_nb.runtime.takeover import import_distributed
    from megatrain_nb.runtime.wrap import train_step, unwrap, wrap
    from megatrain_nb.store.cleanup import cleanup

__version__ = "0.1.0"

# torch then asks for huge pages for tensors of 2 MiB and more: a step of the benchmark's thin micro-batches has 1 page
# fault where it had 250, a thirtieth of its time. torch looks when it makes the first tensor, so it is said here.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Importing this package costs milliseconds: torch and numba come with the first name used.
_LAZY = {
    "Callback": "runtime.callbacks",
    "Machine": "plan.machine",
    "Plan": "plan.plan",
    "Session": "runtime.session",
    "StepResult": "runtime.callbacks",
    "Trainer": "notebook.trainer",
    "cleanup": "store.cleanup",
    "current_session": "runtime.current",
    "estimate": "runtime.forecast",
    "explore": "notebook.explore",
    "export_distributed": "runtime.distributed",
    "export_trace": "runtime.recording",
    "from_config": "runtime.load",
    "from_pretrained": "runtime.pretrained",
    "import_distributed": "runtime.takeover",
    "init": "runtime.init",
    "largest_model": "runtime.forecast",
    "least_ram_gb": "runtime.forecast",
    "longest_sequence": "runtime.forecast",
    "machines": "runtime.forecast",
    "models": "runtime.forecast",
    "probe": "runtime.probe",
    "recompress": "runtime.recode",
    "record": "runtime.recording",
    "replay": "notebook.replay",
    "save_pretrained": "runtime.export",
    "train_step": "runtime.wrap",
    "unwrap": "runtime.wrap",
    "wrap": "runtime.wrap",
}

__all__ = [
    "ArgumentError",
    "BudgetError",
    "Callback",
    "ChecksumError",
    "Machine",
    "MegatrainError",
    "ModelError",
    "Plan",
    "Session",
    "SessionError",
    "StepResult",
    "StoreError",
    "Trainer",
    "cleanup",
    "current_session",
    "estimate",
    "explore",
    "export_distributed",
    "export_trace",
    "from_config",
    "from_pretrained",
    "import_distributed",
    "init",
    "largest_model",
    "least_ram_gb",
    "longest_sequence",
    "machines",
    "models",
    "probe",
    "recompress",
    "record",
    "replay",
    "save_pretrained",
    "train_step",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Make ``%megatrain`` and ``%%megatrain`` known to this shell (``%load_ext``)."""
    import_module(f"{__name__}.notebook.magics").load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove everything that loading the extension added."""
    import_module(f"{__name__}.notebook.magics").unload(shell)
