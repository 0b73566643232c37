"""A cell's code, compiled as IPython would and run on a thread of its own."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any

from IPython.core.displayhook import DisplayHook

from megatrain_nb.notebook.view import IN_CELL
from megatrain_nb.runtime.claim import CLAIM

if TYPE_CHECKING:
    from types import CodeType, TracebackType

    from IPython.core.interactiveshell import InteractiveShell

    from megatrain_nb.runtime.session import Session


class CellSyntaxError(Exception):
    """The cell's code does not compile; shown as IPython shows any SyntaxError."""

    def __init__(self, shell: InteractiveShell, error: SyntaxError) -> None:
        super().__init__(str(error))
        self._shell = shell
        self._error = error

    def _render_traceback_(self) -> list[str]:
        shown: list[str] = self._shell.SyntaxTB.structured_traceback(
            type(self._error), self._error, None
        )
        return shown


class Body:
    """The compiled code of a cell: runs on its thread, keeps its value or its error."""

    def __init__(self, shell: InteractiveShell, header: str, source: str) -> None:
        self.shell = shell
        self.value: object = None
        self.error: BaseException | None = None
        self._stopped: Session | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._lines = [header, *source.splitlines()]
        try:
            self._codes, self._filename = _compile(shell, header, source)
        except SyntaxError as error:
            raise CellSyntaxError(shell, error) from None
        self._thread = threading.Thread(
            # The context carries which cell prints and displays belong to.
            target=contextvars.copy_context().run,
            args=(self._run,),
            name="megatrain-cell",
            daemon=True,
        )

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def wait(self, timeout: float) -> None:
        """Wait for the end, at most ``timeout`` seconds."""
        self._thread.join(timeout)

    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def doing(self) -> str:
        """Return the line of the cell that runs now, as it is written; empty if that is not known."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_filename != self._filename:
            frame = frame.f_back
        if frame is None or not 0 < frame.f_lineno <= len(self._lines):
            return ""
        return f"line {frame.f_lineno}: {self._lines[frame.f_lineno - 1].strip()}"

    def stop(self, session: Session) -> None:
        """Ask the session to stop what trains in this body."""
        with self._lock:
            if not self._ended:
                self._stopped = session
                session.stop()

    def break_off(self) -> None:
        """Raise KeyboardInterrupt in the body wherever it is; its model may be half-way."""
        with self._lock:
            if not self._ended:
                ident = ctypes.c_ulong(self._thread.ident or 0)
                error = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)

    def reraise(self) -> None:
        """Raise the body's error, if any, so that it is shown from the user's frame on."""
        error = self.error
        if error is None:
            return
        frames = error.__traceback__
        while (
            frames is not None and frames.tb_frame.f_code.co_filename != self._filename
        ):
            frames = frames.tb_next
        if frames is not None:
            _show_from(self.shell, error, frames)
        raise error

    def _run(self) -> None:
        IN_CELL.set(True)
        try:
            with CLAIM.held("a %%megatrain cell"):
                self.value = self._evaluate()
        except BaseException as error:
            self.error = error
        finally:
            with self._lock:
                self._ended = True
                if self._stopped is not None:
                    self._stopped.clear_stop()

    def _evaluate(self) -> object:
        value: Any = None
        with asyncio.Runner() as runner:
            for code in self._codes:
                value = eval(code, self.shell.user_global_ns, self.shell.user_ns)
                if code.co_flags & inspect.CO_COROUTINE:
                    value = runner.run(value)
        return value


def _compile(
    shell: InteractiveShell, header: str, source: str
) -> tuple[list[CodeType], str]:
    """Return code objects, the last one an expression if the cell ends in one, and a name."""
    lines = shell.transform_cell(source)
    running = shell.displayhook.exec_result  # knows which In[...] this is
    number = getattr(running, "execution_count", None) or shell.execution_count
    # The body begins on the cell's second line, and the error's line numbers say so.
    name = shell.compile.cache(
        f"{header}\n{lines}", number, raw_code=f"{header}\n{source}"
    )
    tree = shell.transform_ast(shell.compile.ast_parse(f"\n{lines}", name))
    parts: list[ast.Module | ast.Expression] = [tree]
    if (
        tree.body
        and isinstance(tree.body[-1], ast.Expr)
        and not DisplayHook.semicolon_at_end_of_expression(source.rstrip())
    ):
        parts.append(ast.Expression(tree.body.pop().value))
    flags = shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    codes = [
        compile(part, name, "exec" if isinstance(part, ast.Module) else "eval", flags)
        for part in parts
    ]
    return codes, name


def _show_from(
    shell: InteractiveShell, error: BaseException, frames: TracebackType
) -> None:
    """Leave our own frames out when IPython shows this error."""

    def render(*_: Any) -> list[str]:
        shown: list[str] = shell.InteractiveTB.structured_traceback(
            type(error), error, frames, tb_offset=0
        )
        return shown

    with contextlib.suppress(AttributeError):
        error._render_traceback_ = render  # type: ignore[attr-defined]
