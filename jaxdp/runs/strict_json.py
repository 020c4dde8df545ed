"""Strict JSON: what every file of a run is written in.

UTF-8, no `NaN` or `Infinity` tokens: a non-finite number is the string "NaN", "Infinity" or
"-Infinity", so that any strict parser reads every line. A file of records holds one object a line;
a torn last line costs only itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_plain(value: Any) -> Any:
    """`value` as dicts, lists and scalars, with non-finite numbers as their strings.

    Takes dataclasses, mappings with text keys, sequences, paths and NumPy scalars. Raises
    `TypeError` for anything else: a record never holds a `repr` by accident.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _non_finite_text(value)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_text_key(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0:
        return to_plain(getattr(value, "tolist")())  # noqa: B009 (a NumPy or JAX scalar, whichever is imported)
    raise TypeError(f"A {type(value).__name__} cannot be written as JSON.")


def dumps(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """`value` as strict JSON text; one line unless `indent` is given."""
    return json.dumps(to_plain(value), ensure_ascii=False, allow_nan=False, indent=indent, sort_keys=sort_keys)


def encode(text: str) -> bytes:
    """UTF-8 bytes of JSON text. A file name's undecodable byte becomes the JSON escape of its surrogate."""
    return text.encode("utf-8", "backslashreplace")


def loads(text: str | bytes) -> Any:
    """Parses strict JSON. Raises `ValueError` for anything else, a bare `NaN` included."""
    return json.loads(text, parse_constant=_refuse_constant)


def restore_numbers(value: Any) -> Any:
    """`value` with the strings "NaN", "Infinity" and "-Infinity" as floats again, at any depth."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [restore_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: restore_numbers(item) for key, item in value.items()}
    return value


def record_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole records of a file with one JSON object a line: (the line with its newline, the object).

    Yields nothing for a file that does not exist. A line that is not a JSON object (torn by a
    crash) is passed over.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield line.rstrip(b"\n") + b"\n", record


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole records of a file with one JSON object a line, as parsed."""
    return [record for _, record in record_lines(path)]


def _non_finite_text(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text_key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"A JSON object's key must be text; got {key!r}.")
    return key


def _refuse_constant(token: str) -> None:
    raise ValueError(f"{token} is not strict JSON")
