from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from IPython.core.completer import provisionalcompleter

from megatrain_nb.notebook import complete
from megatrain_nb.notebook.complete import candidates_for
from megatrain_nb.notebook.parser import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("typed", "word", "candidates"),
    [
        ("", "", [*COMMANDS]),
        ("in", "in", ["init"]),
        ("init --max-v", "--max-v", ["--max-vram"]),
        ("init --max-ram ", "", []),
        ("init --device c", "c", ["cpu", "cuda"]),
        ("init --comp", "--comp", ["--compress", "--compress-weights"]),
        ("init --compress 4", "4", ["4bit"]),
        (
            "init --compress ",
            "",
            ["lossless", "8bit", "4bit", "3bit", "2bit", "dynamic"],
        ),
        ("init --compress-weights ", "", ["lossless"]),
        ("init --cr", "--cr", ["--crash-safe"]),
        ("init --crash-safe ", "", ["step"]),
        ("nonsense -", "-", []),
    ],
)
def test_candidates(typed: str, word: str, candidates: list[str]) -> None:
    assert candidates_for(typed) == (word, candidates)


def test_an_option_is_offered_once() -> None:
    _, candidates = candidates_for("init --device cpu --")
    assert "--device" not in candidates
    assert "--offload-dir" in candidates


def test_directories(tmp_path: Path) -> None:
    for name in ("run one", "run2", ".hidden", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.txt").touch()
    word, found = candidates_for(f"init --offload-dir {tmp_path}/run")
    assert word == f"{tmp_path}/run"
    assert found == [f"{tmp_path}/run\\ one/", f"{tmp_path}/run2/"]
    _, found = candidates_for(f"init --offload-dir {tmp_path}/")
    assert f"{tmp_path}/.hidden/" not in found
    assert candidates_for("init --offload-dir /no/such/place/x")[1] == []


def test_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("step-3", "by hand")
    held = [SimpleNamespace(name=name) for name in names]
    session = SimpleNamespace(checkpoints=lambda: held)
    monkeypatch.setattr(complete, "current_session", lambda: session)
    assert candidates_for("resume ") == ("", ["'by hand'", "step-3"])
    assert candidates_for("resume st") == ("st", ["step-3"])
    assert candidates_for("resume step-3 ") == ("", ["--help", "--weights-only"])
    assert candidates_for("resume --w") == ("--w", ["--weights-only"])
    monkeypatch.setattr(complete, "current_session", lambda: None)
    assert candidates_for("resume ") == ("", [])
    assert candidates_for("clean --che") == ("--che", ["--checkpoints"])
    assert candidates_for("check") == ("check", ["checkpoints"])


def completions(shell: Any, text: str) -> list[str]:
    with provisionalcompleter():
        found = shell.Completer.completions(text, len(text))
        return [completion.text for completion in found]


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("%megatrain st", ["status"]),
        ("x = %megatrain st", ["status"]),
        ("%%megatrain t", ["train"]),
        ("%megatrain init --of", ["--offload-dir"]),
    ],
)
def test_in_the_shell(shell: Any, text: str, matches: list[str]) -> None:
    assert completions(shell, text) == matches


def test_other_lines_are_left_alone(shell: Any) -> None:
    assert "print" in completions(shell, "prin")
