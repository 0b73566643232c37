"""``%megatrain`` and ``%%megatrain``."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_cell_magic,
    magics_class,
    output_can_be_silenced,
)

import megatrain_nb as mt
from megatrain_nb.errors import MegatrainError
from megatrain_nb.notebook import complete
from megatrain_nb.notebook.body import Body
from megatrain_nb.notebook.cell import Run
from megatrain_nb.notebook.parser import (
    NO_SESSION,
    NO_SESSION_NOW,
    HelpAsked,
    overview,
    parse_cell_line,
    parse_line,
)
from megatrain_nb.notebook.runs import Runs
from megatrain_nb.notebook.surface import display_mode, open_surface
from megatrain_nb.notebook.view import Watch
from megatrain_nb.runtime.current import current_session

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from megatrain_nb.runtime.session import Session

Result = TypeVar("Result")

_COMMANDS = {
    "init": "_init",
    "probe": "_probe",
    "explore": "_explore",
    "status": "_status",
    "checkpoints": "_checkpoints",
    "resume": "_resume",
    "clean": "_clean",
    "runs": "_list_runs",
    "replay": "_replay",
    "close": "_close",
    "help": "_help",
}
# By notebook, what each asked for last; the one that asked last of all comes last.
_LAST_INITS = "megatrain_nb/last_inits"
_MOST_NOTEBOOKS = 100
_CALL = "get_ipython().run_cell_magic('megatrain', "
_AWAITED_CALL = "await get_ipython().run_cell_magic('megatrain_awaited', "
_EMPTY_BODY = ", '')\n"
_ASKED = re.compile(r"^(\s*%megatrain\s+\w+)\s*\?{1,2}\s*$")


def load(shell: InteractiveShell) -> None:
    """Add magics, completion and the rewriting of ``%%megatrain`` cells to this shell."""
    unload(shell)
    magics = MegatrainMagics(shell)
    shell.register_magics(magics)
    shell.input_transformers_cleanup.append(ask_for_help)
    shell.input_transformers_post.append(magics.await_cell)
    shell.Completer.custom_matchers.append(complete.match)
    shell.events.register("pre_execute", magics.enter_cell)
    shell.events.register("post_execute", magics.leave_cell)


def unload(shell: InteractiveShell) -> None:
    """Remove what ``load`` added; nothing to do if it was not loaded."""
    magics = shell.magics_manager.registry.pop(MegatrainMagics.__name__, None)
    if magics is None:
        return
    for kind, names in MegatrainMagics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.input_transformers_cleanup.remove(ask_for_help)
    shell.input_transformers_post.remove(magics.await_cell)
    shell.Completer.custom_matchers.remove(complete.match)
    shell.events.unregister("pre_execute", magics.enter_cell)
    shell.events.unregister("post_execute", magics.leave_cell)


def ask_for_help(lines: list[str]) -> list[str]:
    """Rewrite ``%megatrain status?`` to ``%megatrain status --help``; IPython would look for ``status``."""
    if len(lines) == 1:
        return [_ASKED.sub(r"\1 --help", lines[0])]
    return lines


class _Empty(list[object]):
    """An empty list that says what is not there where it is shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __repr__(self) -> str:
        return self._text


@magics_class
class MegatrainMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self._run: Run | None = None
        self._runs = Runs()
        self._in_cell = False

    @line_cell_magic
    @output_can_be_silenced
    def megatrain(self, line: str, cell: str | None = None) -> object:
        """Run one command, or a cell; a kernel does not answer meanwhile."""
        if cell is not None:
            run = self._new_run(line, cell, awaited=False)
            return run.finish() if run and not run.in_background else run
        return _helped(lambda: self._command(line))

    @cell_magic
    async def megatrain_awaited(self, line: str, cell: str) -> object:
        """Run a cell and await it; `await_cell` turns ``%%megatrain`` into this."""
        run = self._new_run(line, cell, awaited=True)
        return await run.finish_async() if run and not run.in_background else run

    def await_cell(self, lines: list[str]) -> list[str]:
        """Rewrite a ``%%megatrain`` cell so that it is awaited, where that is possible."""
        empty = "".join(lines).endswith(_EMPTY_BODY)  # IPython says so, of this name
        if lines and lines[0].startswith(_CALL) and not empty and self._can_await():
            return [_AWAITED_CALL + lines[0].removeprefix(_CALL), *lines[1:]]
        return lines

    def enter_cell(self) -> None:
        """Note that a cell runs: code that is transformed now is inside of it."""
        self._in_cell = True

    def leave_cell(self) -> None:
        """Note that no cell runs."""
        self._in_cell = False

    def _can_await(self) -> bool:
        """Only a whole cell (not one inside ``%%capture``) that a running loop executes."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        shell = self._shell
        uses_asyncio = shell.loop_runner is shell.loop_runner_map["asyncio"][0]
        return bool(uses_asyncio and shell.autoawait and not self._in_cell)

    def _command(self, line: str) -> object:
        args = parse_line(line)
        command: Callable[[Namespace], object] = getattr(self, _COMMANDS[args.command])
        return command(args)

    def _new_run(self, line: str, cell: str, *, awaited: bool) -> Run | None:
        """Return a run, which has begun if it is one in the background; None where only help was asked for."""
        args = _helped(lambda: parse_cell_line(line))
        if args is None:
            return None
        if self._run is not None and self._run.running:
            msg = (
                "the code of an earlier %%megatrain cell still runs; "
                "wait for it to end, or restart the kernel"
            )
            raise UsageError(msg)
        mode = _one_line_errors(lambda: display_mode(self._shell, args.display))
        body = Body(self._shell, f"%%megatrain {line}".rstrip(), cell)
        watch = Watch(shown=mode != "none", doing=body.doing)
        surface = open_surface(mode, watch, awaited=awaited, returns=args.background)
        run = self._run = Run(body, watch, surface, in_background=args.background)
        if run.in_background:
            self._runs.append(run)
            run.start()
        return run

    def _init(self, args: Namespace) -> object:
        options = {
            "offload_dir": str(Path(args.offload_dir).expanduser().absolute()),
            "max_vram_gb": args.max_vram,
            "max_ram_gb": args.max_ram,
            "max_disk_gb": args.max_disk,
            "optimizer_compression": args.compress or False,
            "weight_compression": args.compress_weights or False,
            "device": args.device,
            "crash_safe": args.crash_safe,
        }
        session = mt.init(**options)
        self._remember(options)
        return session

    def _remember(self, options: dict[str, object]) -> None:
        asked = dict(self._shell.db.get(_LAST_INITS, {}))
        asked.pop(_notebook(), None)
        asked[_notebook()] = options
        self._shell.db[_LAST_INITS] = dict(list(asked.items())[-_MOST_NOTEBOOKS:])

    def _status(self, _args: Namespace) -> object:
        return self._open_session().status()

    def _checkpoints(self, _args: Namespace) -> object:
        session = self._open_session()
        return session.checkpoints() or _Empty(
            f"no checkpoint in {session.preflight.path}; session.save_checkpoint() takes one, and mt.Trainer does with "
            "save_strategy='steps'"
        )

    def _resume(self, args: Namespace) -> object:
        session = current_session()
        if session is not None:
            return session.resume(args.name, weights_only=args.weights_only)
        options = self._last_init()
        if options is None:
            raise UsageError(NO_SESSION)
        if not Path(options["offload_dir"]).is_dir():
            msg = (
                f"the directory of the last %megatrain init, {options['offload_dir']}, is not there any more; "
                "open another one with %megatrain init"
            )
            raise UsageError(msg)
        session = mt.init(**options)
        held = session.checkpoints()
        if not held:
            print(f"session in {options['offload_dir']} opened again; no checkpoint is in it")  # fmt: skip
            return session
        print(
            f"session in {options['offload_dir']} opened again; last checkpoint: {held[-1].label}. Run the cells that "
            "make the model, the optimizer and what you registered, then %megatrain resume once more; with mt.Trainer "
            "call trainer.train(resume_from_checkpoint=True)"
        )
        return session

    def _clean(self, args: Namespace) -> object:
        directory = args.offload_dir
        if directory is None:
            last = self._last_init()
            if args.remove or last is None:
                msg = "say which directory: %megatrain clean --offload-dir DIR"
                raise UsageError(msg)
            directory = last["offload_dir"]
        return mt.cleanup(directory, checkpoints=args.checkpoints, remove=args.remove)

    def _last_init(self) -> dict[str, Any] | None:
        """Return what this notebook asked of the last session, or what another one did."""
        asked: dict[str, dict[str, Any]] = self._shell.db.get(_LAST_INITS, {})
        return asked.get(_notebook()) or next(reversed(asked.values()), None)

    def _open_session(self) -> Session:
        session = current_session()
        if session is None:
            raise UsageError(NO_SESSION_NOW if self._last_init() else NO_SESSION)
        return session

    def _probe(self, args: Namespace) -> object:
        return mt.probe(refresh=args.refresh)

    def _explore(self, args: Namespace) -> object:
        return mt.explore(args.model, args.machine)

    def _close(self, _args: Namespace) -> None:
        session = current_session()
        if session is not None:
            session.close()
        print("session closed" if session else "no session is open")

    def _list_runs(self, _args: Namespace) -> object:
        return self._runs

    def _replay(self, args: Namespace) -> object:
        return mt.replay(args.path)

    def _help(self, _args: Namespace) -> None:
        print(overview())


MegatrainMagics.megatrain.__doc__ = overview()


def _notebook() -> str:
    """Return which notebook this kernel is of, as Jupyter's server says; empty where nobody says."""
    return os.environ.get("JPY_SESSION_NAME", "")


def _helped(call: Callable[[], Result]) -> Result | None:
    """Call, and show help as what it is."""
    try:
        return _one_line_errors(call)
    except HelpAsked as help_text:
        print(help_text)
    return None


def _one_line_errors(call: Callable[[], Result]) -> Result:
    """Call, and show our own errors as one line."""
    try:
        return call()
    except MegatrainError as error:
        raise UsageError(" ".join(str(error).split())) from None
