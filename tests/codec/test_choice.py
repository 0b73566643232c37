from __future__ import annotations

from typing import Any

import pytest

from megatrain_nb.codec.choice import Compression, parse_compression, safe_codec
from megatrain_nb.codec.dynamic import Role
from megatrain_nb.codec.names import NAMES, title
from megatrain_nb.errors import ArgumentError


@pytest.mark.parametrize("name", NAMES)
def test_one_for_all(name: str) -> None:
    found = parse_compression(name)
    assert found.asked("model.layers.3.up.weight") == name
    assert str(found) == name
    assert bool(found)
    assert parse_compression(found) is found


def test_what_is_experimental_says_so() -> None:
    found = parse_compression({"a": "4bit", "b": "2bit", "c": "2bit", "d": True})
    assert found.experimental == ("2bit", "dynamic")
    assert parse_compression("4bit").experimental == ()
    assert [title(name) for name in ("4bit", "2bit")] == ["4bit", "2bit (experimental)"]


def test_true_and_false() -> None:
    assert parse_compression(True) == parse_compression("dynamic")
    assert parse_compression(False) == parse_compression({}) == Compression()
    assert not parse_compression({"*": False})
    assert parse_compression(False).asked("w") == "raw"
    assert parse_compression(False).codecs() == ()


def test_the_first_pattern_that_matches_counts() -> None:
    found = parse_compression(
        {"*.up.weight": "8bit", "layers.[01]": "2bit", "layers": "4bit", "h": True}
    )
    assert found.asked("layers.0.up.weight") == "8bit"
    assert found.asked("layers.1.down.weight") == "2bit"
    assert found.asked("layers.7.down.weight") == "4bit"
    assert found.asked("h.weight") == "dynamic"
    assert found.asked("hh.weight") == "raw"
    assert found.codecs() == ("8bit", "2bit", "4bit", "3bit")


@pytest.mark.parametrize(
    ("asked", "role", "codec"),
    [
        ("raw", Role.BODY, "raw"),
        ("raw", Role.TABLE, "raw"),
        ("2bit", Role.BODY, "2bit"),
        ("8bit", Role.BODY, "8bit"),
        ("dynamic", Role.BODY, "4bit"),
        ("dynamic", Role.TABLE, "8bit"),
        ("3bit", Role.TABLE, "8bit"),
        ("8bit", Role.SMALL, "raw"),
        ("dynamic", Role.SMALL, "raw"),
    ],
)
def test_what_is_safe(asked: str, role: Role, codec: str) -> None:
    assert safe_codec(asked, role) == codec


@pytest.mark.parametrize("value", [None, 4, "5bit", "raw", "", ["4bit"], "4-bit"])
def test_what_is_not_known(value: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"optimizer_compression=.*False.*8bit.*True"
    ):
        parse_compression(value)
    with pytest.raises(ArgumentError, match=r"optimizer_compression\['\*'\]="):
        parse_compression({"*": value})


@pytest.mark.parametrize("pattern", [3, "", None])
def test_what_is_no_pattern(pattern: Any) -> None:
    with pytest.raises(ArgumentError, match="is not a pattern"):
        parse_compression({pattern: "4bit"})
