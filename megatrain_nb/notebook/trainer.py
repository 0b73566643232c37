"""``mt.Trainer``: the runtime's Trainer, seen while it trains in a notebook."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from megatrain_nb.notebook.surface import (
    check_mode,
    current_shell,
    display_mode,
    has_kernel,
    open_surface,
)
from megatrain_nb.notebook.view import IN_CELL, Tick, View, Watch, conclude
from megatrain_nb.runtime import trainer
from megatrain_nb.runtime.claim import CLAIM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import TrainingArguments

    from megatrain_nb.runtime.session import Session


class Trainer(trainer.Trainer):
    """A drop-in for ``transformers.Trainer`` over a model in the open session.

    Parameters
    ----------
    model
        In RAM (it moves into the session, block by block), or from ``mt.from_config``.
    args
        ``TrainingArguments`` as for transformers; what cannot be honoured is refused.
    display
        How training is shown: ``"widget"``, the live view with buttons; ``"html"``, the same without; ``"text"``, a
        line now and then; ``"none"``, as transformers shows it; ``"auto"``, the live view in a notebook, unless
        ``TrainingArguments(disable_tqdm=True)`` asks for no progress display, and ``"none"`` elsewhere. None takes
        MEGATRAIN_DISPLAY, or ``"auto"``. In a cell that begins with ``%%megatrain`` the cell's view is the only one.
    **kwargs
        As for ``transformers.Trainer``, and ``fuse_micro_batches``, ``nonfinite``, ``dtype``: see
        `megatrain_nb.runtime.trainer.Trainer`.

    Raises
    ------
    SessionError
        ``mt.init`` was not called.
    ArgumentError
        An argument that cannot be honoured: says which and why.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        display: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_mode(display, name="display")
        super().__init__(model, args, **kwargs)
        self.display = display

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the runtime's Trainer does, and show it."""
        CLAIM.check()  # a view of another thread's training stays as it is
        with shown(self.session, self.display, quiet=bool(self.args.disable_tqdm)):
            return super().train(*args, **kwargs)


@contextlib.contextmanager
def shown(session: Session, display: str | None, *, quiet: bool) -> Iterator[None]:
    """Show what trains in here, unless a ``%%megatrain`` cell shows it already.

    Parameters
    ----------
    session
        Whose training.
    display
        See `Trainer`.
    quiet
        Nothing is shown by default.
    """
    mode = "none" if IN_CELL.get() else _mode(display, quiet=quiet)
    watch = Watch(shown=mode != "none")
    surface = open_surface(mode, watch, awaited=False, returns=False)
    if surface is None:
        yield
        return
    watch.follow(session)
    view = View(watch, surface)

    def refresh() -> bool:
        view.refresh()
        return True

    tick = Tick(refresh)
    ended: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ended = error
        raise
    finally:
        tick.stop()
        asked = isinstance(ended, KeyboardInterrupt)
        conclude(watch, [view], ended, interrupted=asked)


def _mode(display: str | None, *, quiet: bool) -> str:
    mode = check_mode(display, name="display")
    shell = current_shell()
    if mode == "auto":
        if shell is None or not has_kernel(shell) or quiet:
            return "none"
        return display_mode(shell, mode)
    return mode if mode == "none" or shell is not None else "text"
