"""What may be written after ``%megatrain``, and the help that says so."""

from __future__ import annotations

import argparse
import difflib
import shlex
from typing import Any, NoReturn

from IPython.core.error import UsageError

from megatrain_nb.codec.names import LOSSLESS, NAMES
from megatrain_nb.errors import ArgumentError
from megatrain_nb.units import parse_size

NO_SESSION = "no session is open; open one: %megatrain init --offload-dir DIR"
NO_SESSION_NOW = f"{NO_SESSION}, or the last one again: %megatrain resume"

# What --crash-safe takes; None of mt.init is to leave it out.
CRASH_SAFE = ["step"]

_EXAMPLE = """\
Example, three cells:

  %load_ext megatrain_nb
  %megatrain init --offload-dir /nvme/run1 --max-ram 24GB

  import megatrain_nb as mt
  trainer = mt.Trainer(model=model, args=args, train_dataset=dataset)

  %%megatrain
  trainer.train()

The last cell shows step, loss, speed and memory while it runs; the kernel answers meanwhile.
Interrupting the kernel stops it with the model as after the last whole step.
`%megatrain COMMAND --help` says more; `x = %megatrain status` keeps the result."""


_CELL_EPILOG = """\
The view shows every layer, what the disk does, and where the time goes. Its buttons pause,
stop and save while the cell runs. Interrupting the kernel stops at the next block, with the
model as after the last whole step."""


class HelpAsked(Exception):  # noqa: N818 - not an error: the text is what was asked for
    """``--help`` was given; the message is the help text."""


class _ShowHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise HelpAsked(parser.format_help().rstrip())


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(
            add_help=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )
        self.add_argument(
            "-h", "--help", nargs=0, action=_ShowHelp, help="show this help"
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parse_line(line: str) -> argparse.Namespace:
    """Return the arguments of a ``%megatrain`` line; ``command`` names the subcommand.

    Raises
    ------
    UsageError
        In one line: what is wrong and what was probably meant.
    HelpAsked
        ``--help`` was among the arguments.
    """
    words = _split(line)
    if not words or words[0] in ("-h", "--help"):
        return argparse.Namespace(command="help")
    command = words[0]
    if command == "train" and {"-h", "--help"} & set(words):
        raise HelpAsked(_cell_help())
    if command == "train":
        msg = "train runs a whole cell: write %%megatrain on the cell's first line"
        raise UsageError(msg)
    if command not in COMMANDS:
        msg = (
            f"unknown command {command!r}{_nearest(command, list(COMMANDS))}; "
            f"commands: {', '.join(COMMANDS)}"
        )
        raise UsageError(msg)
    _check_options(COMMANDS[command], words[1:], options_of(command))
    return COMMANDS[command].parse_args(words[1:], argparse.Namespace(command=command))


def parse_cell_line(line: str) -> argparse.Namespace:
    """Return the options of a ``%%megatrain`` cell's first line; raises as ``parse_line`` does."""
    words = _split(line)
    if {"-h", "--help"} & set(words):
        raise HelpAsked(_cell_help())
    if words[:1] in ([], ["train"]) or words[0].startswith("--"):
        options = words[1:] if words[:1] == ["train"] else words
        _check_options(_CELL, options, CELL_OPTIONS)
        return _CELL.parse_args(options)
    msg = f"%%megatrain takes 'train' or nothing, not {' '.join(words)!r}"
    if words[0] in COMMANDS:
        msg += f"; for this command write %megatrain {words[0]} in a cell of its own"
    raise UsageError(msg)


def _cell_help() -> str:
    return _CELL.format_help().rstrip()


def options_of(command: str) -> list[str]:
    """Return the long options of a command, in the order of its help."""
    return _long_options(COMMANDS[command])


def overview() -> str:
    """Return the text of ``%megatrain help`` (and of ``%megatrain?``)."""
    entries = [
        (f"%megatrain {name}", str(parser.description))
        for name, parser in COMMANDS.items()
    ]
    entries.append(
        (
            "%%megatrain [train]",
            "run the cell's training code and show it; --background returns at once",
        )
    )
    width = max(len(entry[0]) for entry in entries)
    lines = [f"  {usage:{width}}  {what}" for usage, what in entries]
    head = "megatrain_nb trains language models larger than memory."
    init = COMMANDS["init"].format_usage().rstrip()
    return "\n".join([head, "", *lines, "", init, "", _EXAMPLE])


def _size(text: str) -> str:
    try:
        parse_size(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size=")) from None
    return text


def _commands() -> dict[str, _Parser]:
    init = _Parser(
        prog="%megatrain init",
        description="open a session: the offload directory and the budgets",
        epilog="SIZE is a number of GB (10^9 bytes) or text with a unit: 24GiB, 800MB.",
    )
    init.add_argument(
        "--offload-dir",
        required=True,
        metavar="DIR",
        help="where weights and optimizer states live, best on NVMe; made if missing",
    )
    for tier, what in (
        ("ram", "host memory: pools, resident tiles, gradients, staging"),
        ("vram", "device memory"),
        ("disk", "the offload directory"),
    ):
        init.add_argument(
            f"--max-{tier}", type=_size, metavar="SIZE", help=f"budget for {what}"
        )
    init.add_argument(
        "--compress",
        choices=[LOSSLESS, *NAMES],
        metavar="CODEC",
        help="Adam's moments: lossless, packed on disk; or in fewer bits, not lossless: "
        f"{', '.join(NAMES)}; fp32 if left out",
    )
    init.add_argument(
        "--compress-weights",
        choices=[LOSSLESS],
        metavar="CODEC",
        help="weights: lossless, packed on disk; as they are if left out",
    )
    init.add_argument("--device", help="cpu, cuda, cuda:1; a GPU if there is one")
    init.add_argument(
        "--crash-safe",
        choices=CRASH_SAFE,
        metavar="WHAT",
        help="step: mt.Trainer keeps every step, so that a crash costs the one in progress at most; takes a second "
        "version of every tile on disk",
    )
    probe = _Parser(
        prog="%megatrain probe",
        description="measure this machine (20 s, once); returns the Machine",
    )
    probe.add_argument("--refresh", action="store_true", help="measure again")
    explore = _Parser(
        prog="%megatrain explore",
        description="where every byte would be, and how fast; returns the Explorer",
    )
    explore.add_argument("model", nargs="?", help="a name in the catalogue, or a path")
    explore.add_argument("machine", nargs="?", help="a name in the catalogue")
    replay = _Parser(
        prog="%megatrain replay",
        description="show a run from its recording, or the open session's last one",
    )
    replay.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="what mt.record wrote; none: what the open session keeps",
    )
    status = "show bytes per tier and the last step's times; returns the Status"
    resume = _Parser(
        prog="%megatrain resume",
        description="go on from a checkpoint; after a kernel restart, open the session again first",
        epilog="Make model and optimizer as before, then run it; without a session it opens the last one of this notebook again.",
    )
    resume.add_argument(
        "name", nargs="?", metavar="NAME", help="which checkpoint; the last one"
    )
    resume.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer as it is"
    )
    clean = _Parser(
        prog="%megatrain clean",
        description="show what was left in a directory that no session uses, or remove it",
        epilog="Only files of this package go. Without --remove nothing is touched.",
    )
    clean.add_argument(
        "--offload-dir",
        metavar="DIR",
        help="which one; to look at: if left out, that of the last %%megatrain init",
    )
    clean.add_argument(
        "--checkpoints", action="store_true", help="checkpoints go as well"
    )
    clean.add_argument("--remove", action="store_true", help="do it")
    checkpoints = "list the checkpoints in the offload directory; returns the list"
    return {
        "init": init,
        "status": _Parser(prog="%megatrain status", description=status),
        "probe": probe,
        "explore": explore,
        "checkpoints": _Parser(prog="%megatrain checkpoints", description=checkpoints),
        "resume": resume,
        "clean": clean,
        "runs": _Parser(
            prog="%megatrain runs", description="list the runs in the background"
        ),
        "replay": replay,
        "close": _Parser(prog="%megatrain close", description="close the session"),
        "help": _Parser(prog="%megatrain help", description="show this overview"),
    }


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line.removesuffix(";"))
    except ValueError as error:
        msg = f"cannot read {line!r}: {str(error).lower()}"
        raise UsageError(msg) from None


def _long_options(parser: _Parser) -> list[str]:
    names = [name for action in parser._actions for name in action.option_strings]
    return [name for name in names if name.startswith("--")]


def _check_options(parser: _Parser, words: list[str], options: list[str]) -> None:
    """Say which option was probably meant; argparse does not."""
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in options:
            msg = (
                f"{parser.prog} has no option {option!r}{_nearest(option, options)}; "
                f"options: {', '.join(options)}"
            )
            raise UsageError(msg)


def _nearest(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _cell() -> _Parser:
    cell = _Parser(
        prog="%%megatrain train",
        description="run the cell's code, and show what it trains; 'train' may be left out",
        epilog=_CELL_EPILOG,
    )
    cell.add_argument(
        "--background",
        action="store_true",
        help="return a Run at once; later cells may stop it, wait for it, and view it",
    )
    cell.add_argument(
        "--display",
        metavar="HOW",
        help="auto, widget, html, text or none; else MEGATRAIN_DISPLAY says",
    )
    return cell


COMMANDS = _commands()
_CELL = _cell()
# --help is answered before the others are looked at.
CELL_OPTIONS = [name for name in _long_options(_CELL) if name != "--help"]
