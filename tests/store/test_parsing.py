"""JSON from elsewhere takes the RAM that was allowed, at most."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from megatrain_nb.store.parsing import parse_json

N = 50_000
SMILE = "\U0001f600"
# Texts of which every byte makes as much as it can.
BOMBS = {
    "lists": "[" + "[]," * N + "0]",
    "lists in lists": "[" + "[[]]," * N + "0]",
    "tables": "[" + "{}," * N + "0]",
    "tables of one": "[" + '{"":0},' * N + "0]",
    "numbers": "[" + "999," * N + "0]",
    "fractions": "[" + "1.5," * N + "0]",
    "texts": json.dumps([f"{i:06d}" for i in range(N)]),
    "wide text": f'["{"a" * 5 * N}{SMILE}"]',
    "wide texts": json.dumps([f"{SMILE}{i}" for i in range(N)], ensure_ascii=False),
    "names": json.dumps({f"{i:06d}": 0 for i in range(N)}),
    "wide names": json.dumps({f"{SMILE}{i}": {} for i in range(N)}, ensure_ascii=False),
}  # fmt: skip


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs)


@pytest.mark.parametrize("pairs", [None, once])
@pytest.mark.parametrize("kind", BOMBS)
def test_it_takes_no_more_than_allowed(kind: str, pairs: Any) -> None:
    text = BOMBS[kind].encode()
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    most_bytes = 10 * len(text) + 200 * values
    with pytest.raises(ValueError, match="of RAM"):
        parse_json(text, most_bytes=most_bytes - 1, pairs=pairs)
    tracemalloc.start()
    try:
        found = parse_json(text, most_bytes=most_bytes, pairs=pairs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == json.loads(text)
    assert peak < most_bytes


def test_what_the_caller_makes_of_a_table_counts() -> None:
    text = b'{"a": {}, "b": {}}'
    assert parse_json(text, most_bytes=4000, table_bytes=1000) == {"a": {}, "b": {}}
    with pytest.raises(ValueError, match="of RAM"):
        parse_json(text, most_bytes=4000, table_bytes=2000)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 200_000, b"1" * 10_000, b"\xef\xbb\xbf{}", "{}".encode("utf-16")])  # fmt: skip
def test_whatever_is_wrong_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_json(text, most_bytes=2**30)
