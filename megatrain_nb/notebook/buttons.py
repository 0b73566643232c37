"""Where buttons answer while a cell runs, and what makes them answer there.

[Note: subshells] A kernel reads a click on its main thread, which a plain cell keeps busy. JupyterLab (from 4.4 on) and
Notebook (from 7.4 on) send clicks to a *subshell* instead, a thread of the kernel that is free. ipykernel 7.4 sends
them on to whoever drew the widget last, as part of which request: that is the busy cell. What is drawn for no request
at all stays with the subshell. ipykernel has no public name for "for no request", so its variable is set in a
context of its own. A frontend makes its subshell when the first widget appears: whether it does is known a little later.

A subshell that is there does not prove that clicks come through it, nor does a release of ipykernel that they are read.
So the way is tried before it is offered: `Panel.ask` draws a widget that is not seen, of which a frontend tells the
kernel when it has drawn it. What it tells takes the way of a click.
"""

from __future__ import annotations

import importlib
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_FIRST_ANSWERS = 7  # ipykernel: messages of widgets are handled while a cell awaits
_INSTEAD = (
    "the kernel's interrupt stops it, and %%megatrain train --background has buttons"
)
NO_ANSWER = (
    "no buttons here: what shows this has not answered the kernel; the kernel's interrupt stops a cell that waits, "
    "and stop() a run in the background"
)


class Subshells:
    """The subshells of a shell's kernel."""

    def __init__(self, shell: InteractiveShell | None) -> None:
        kernel: Any = getattr(shell, "kernel", None)
        self._channel = getattr(kernel, "shell_channel_thread", None)
        self._request = getattr(kernel, "_shell_parent", None)

    @property
    def possible(self) -> bool:
        """Whether the kernel can have them, and widgets can be drawn for no request."""
        return self._channel is not None and isinstance(self._request, ContextVar)

    def there(self) -> bool:
        """Whether a frontend has made one."""
        return self._channel is not None and bool(self._channel.manager.list_subshell())

    def context(self) -> Context:
        """Return a context to draw widgets in; for no request where that is possible."""
        context = copy_context()
        if isinstance(self._request, ContextVar):
            context.run(self._request.set, {})
        return context


def why_no_buttons(*, awaited: bool) -> str:
    """Say why buttons would not answer while a cell runs, if no subshell reads them; empty where they do.

    Parameters
    ----------
    awaited
        The cell awaits its code, so that the kernel's loop goes on.
    """
    ipykernel = importlib.import_module("ipykernel")
    if int(ipykernel.version_info[0]) < _FIRST_ANSWERS:
        return (
            f"no buttons here: ipykernel {ipykernel.__version__} answers only after the cell; "
            f"ipykernel 7 answers at once; {_INSTEAD}"
        )
    if not awaited:
        return (
            "no buttons here: clicks would wait for the busy cell; with %%megatrain train on the cell's first "
            f"line they answer; {_INSTEAD}"
        )
    return ""
