"""What text from elsewhere takes of RAM. JSON takes no more than it may, and whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from megatrain_nb.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

# What Python takes at most, measured with tables and lists of every kind (tests/store/test_parsing.py): of each byte, as
# text (four bytes a character where one of them is large, and a copy), and of each value or name.
_BYTE_BYTES, _VALUE_BYTES = 10, 200

PICKLE_BYTES = 128
"""What each byte of a pickle may become in RAM: an empty list and its mark."""


def parsed_bytes(data: bytes, *, table_bytes: int = 0) -> int:
    """Return what parsing a JSON text takes of RAM at most, besides the text.

    Parameters
    ----------
    data
        UTF-8; anything else takes no more.
    table_bytes
        What the caller makes of each table takes besides.

    Examples
    --------
    >>> parsed_bytes(b'{"a": [1, 2]}')
    730
    """
    tables = data.count(b"{")
    values = data.count(b",") + data.count(b"[") + tables
    return _BYTE_BYTES * len(data) + _VALUE_BYTES * values + table_bytes * tables


def parse_json(
    data: bytes,
    *,
    most_bytes: int,
    table_bytes: int = 0,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return what a JSON text says.

    A few bytes of text can be many values: ``[[],[],[]`` takes 25 times its length in RAM. So they are counted first.

    Parameters
    ----------
    data
        UTF-8.
    most_bytes
        What may be taken of RAM.
    table_bytes
        What the caller makes of each table takes besides.
    pairs
        Makes a table of its names and values; None: a dictionary.

    Raises
    ------
    ValueError
        It is not JSON, is nested too deep, or would take more RAM.

    Examples
    --------
    >>> parse_json(b'{"a": [1, 2]}', most_bytes=10_000)
    {'a': [1, 2]}
    >>> parse_json(b"[" + b"[]," * 1000 + b"0]", most_bytes=10_000)
    Traceback (most recent call last):
    ...
    ValueError: reading its 3.00 kB may take 430 kB of RAM, 10.0 kB are allowed
    """
    needed = parsed_bytes(data, table_bytes=table_bytes)
    if needed > most_bytes:
        msg = (
            f"reading its {format_bytes(len(data))} may take {format_bytes(needed)} of RAM, "
            f"{format_bytes(most_bytes)} are allowed"
        )
        raise ValueError(msg)
    try:
        return json.loads(data.decode(), object_pairs_hook=pairs)
    except RecursionError as error:
        msg = "it is nested too deep"
        raise ValueError(msg) from error
