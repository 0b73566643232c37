from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from megatrain_nb.notebook.parser import (
    COMMANDS,
    HelpAsked,
    overview,
    parse_cell_line,
    parse_line,
)


def test_init_line() -> None:
    line = "init --offload-dir '/nvme/my run' --max-ram=24GiB --max-vram 10"
    args = parse_line(line)
    assert args.command == "init"
    assert args.offload_dir == "/nvme/my run"
    assert (args.max_ram, args.max_vram) == ("24GiB", "10")
    assert args.max_disk is None
    assert args.device is None
    assert args.crash_safe is None
    assert parse_line(f"{line} --crash-safe step").crash_safe == "step"


@pytest.mark.parametrize("line", ["", "  ", "help", "--help", "-h"])
def test_help_is_the_default(line: str) -> None:
    assert parse_line(line).command == "help"


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    with pytest.raises(HelpAsked, match=f"usage: %megatrain {command}"):
        parse_line(f"{command} --help")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("statsu", r"unknown command 'statsu' \(did you mean 'status'\?\)"),
        (
            "frobnicate",
            f"commands: {', '.join(COMMANDS)}",
        ),
        ("init", "required: --offload-dir"),
        ("init --offload-dir d --max-rma 2GB", r"did you mean '--max-ram'\?"),
        ("init --offload-dir d --max-ram 3XB", "'3XB' is not a size"),
        ("init --offload-dir d extra", "unrecognized arguments: extra"),
        ("init --offload-dir 'd", "no closing quotation"),
        ("init --offload-dir d --compress zip", "invalid choice: 'zip'.*lossless"),
        ("init --offload-dir d --crash-safe always", "invalid choice: 'always'.*step"),
        ("status --fast", "has no option '--fast'"),
        ("train", "%%megatrain"),
    ],
)
def test_mistakes_are_told_in_one_line(line: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        parse_line(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["", "train", " train "])
def test_cell_line(line: str) -> None:
    parse_cell_line(line)


def test_cell_line_mistakes() -> None:
    with pytest.raises(UsageError, match="takes 'train' or nothing, not 'now'"):
        parse_cell_line("now")
    with pytest.raises(UsageError, match="write %megatrain status"):
        parse_cell_line("status")
    with pytest.raises(HelpAsked, match="%%megatrain"):
        parse_cell_line("train --help")


def test_overview_names_everything() -> None:
    text = overview()
    assert all(f"%megatrain {command}" in text for command in COMMANDS)
    assert "%%megatrain\n" in text
