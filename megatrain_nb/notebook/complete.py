"""Tab completion of ``%megatrain`` and ``%%megatrain`` lines."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.completer import (
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from megatrain_nb.codec.names import LOSSLESS, NAMES
from megatrain_nb.notebook.parser import (
    CELL_OPTIONS,
    COMMANDS,
    CRASH_SAFE,
    options_of,
)
from megatrain_nb.notebook.surface import MODES
from megatrain_nb.runtime.current import current_session

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext

_LINE = re.compile(r"\s*(?:[\w, ]+=\s*)?(%%?)megatrain\s+(.*)")
# What may follow an option.
_VALUES = {
    "--compress": [LOSSLESS, *NAMES],
    "--compress-weights": [LOSSLESS],
    "--crash-safe": CRASH_SAFE,
    "--device": ["cpu", "cuda"],
}
_LAST_WORD = re.compile(r"(?:\\.|[^\s\\])*$")


@context_matcher()  # type: ignore[untyped-decorator]
def match(context: CompletionContext) -> SimpleMatcherResult:
    """Complete commands, options, directories after ``--offload-dir``, and checkpoints after ``resume``."""
    line = context.full_text.split("\n")[context.cursor_line]
    found = _LINE.fullmatch(line[: context.cursor_position])
    if found is None:
        return SimpleMatcherResult(completions=[])
    word, candidates = candidates_for(found[2], whole_cell=found[1] == "%%")
    return SimpleMatcherResult(
        completions=[SimpleCompletion(text=text, type="magic") for text in candidates],
        matched_fragment=word,
        suppress=True,
    )


def candidates_for(typed: str, *, whole_cell: bool = False) -> tuple[str, list[str]]:
    """Return the word being typed and what it may become.

    Examples
    --------
    >>> candidates_for("st")
    ('st', ['status'])
    >>> candidates_for("init --offload-dir /tmp --max-r")
    ('--max-r', ['--max-ram'])
    """
    last = _LAST_WORD.search(typed)
    word = last[0] if last else ""
    before = typed[: len(typed) - len(word)].split()
    if whole_cell:
        choices = [name for name in CELL_OPTIONS if name not in before]
        if not before:
            choices = ["train", *choices]
        elif before[-1] == "--display":
            choices = list(MODES)
    elif not before:
        choices = list(COMMANDS)
    elif before[-1] == "--offload-dir":
        return word, _directories(word)
    elif before[-1] in _VALUES:
        choices = _VALUES[before[-1]]
    elif before[0] == "explore" and not word.startswith("-"):
        choices = _known("models" if len(before) == 1 else "machines")
    elif before == ["resume"] and not word.startswith("-"):
        choices = _checkpoints()
    elif before[0] not in COMMANDS or before[-1].startswith("--max-"):
        choices = []
    else:
        choices = [name for name in options_of(before[0]) if name not in before]
    return word, [choice for choice in choices if choice.startswith(word)]


def _known(what: str) -> list[str]:
    """Return the names of the catalogue's models or machines; it is only read when somebody asks."""
    catalogue = import_module("megatrain_nb.plan.catalogue")
    return list(getattr(catalogue, what)())


def _checkpoints() -> list[str]:
    """Return the names of the open session's checkpoints, the last one first, as they are typed."""
    session = current_session()
    held = [] if session is None else session.checkpoints()
    return [shlex.quote(each.name) for each in reversed(held)]


def _directories(word: str) -> list[str]:
    typed = word.replace("\\ ", " ")
    head = typed[: typed.rfind("/") + 1]
    try:
        entries = sorted(Path(head or ".").expanduser().iterdir())
        names = [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []
    stem = typed[len(head) :]
    wanted = [name for name in names if name.startswith(stem)]
    shown = [name for name in wanted if stem or not name.startswith(".")]
    return [f"{head}{name}/".replace(" ", "\\ ") for name in shown]
