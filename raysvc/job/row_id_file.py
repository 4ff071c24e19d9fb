"""Row ids that a run leaves out, from a file.

Always true:
- ids come sorted and once each, so that two files of the same rows are the same plan;
- a line that is no id is refused with its number.
"""

from __future__ import annotations

import json
import os
from typing import Any


def read_row_ids(path: str) -> tuple[int, ...]:
    """The ids of a file: a JSON list, or one id a line (`#` begins a comment; `2:17:451` and `{"row_id": 17}` are ids too).

    Raises:
        ValueError: no such file, or something in it is not a row id.
    """
    import fsspec

    address = path if "://" in path else os.path.expanduser(path)
    try:
        with fsspec.open(address, "rt", encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or type(error).__name__})") from None
    if text.lstrip().startswith("["):
        return _sorted(path, enumerate(_json(path, text), start=1), "item")
    lines = (
        (number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), start=1)
    )
    return _sorted(path, [(number, _of_line(line)) for number, line in lines if line], "line")


def _sorted(path: str, found: Any, what: str) -> tuple[int, ...]:
    ids = set()
    for number, value in found:
        value = value.get("row_id") if isinstance(value, dict) else value
        try:
            value = row_id(value)
        except ValueError:
            value = None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{what} {number} of {path} is not a row id")
        ids.add(value)
    return tuple(sorted(ids))


def _json(path: str, text: str) -> list[Any]:
    try:
        return list(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a JSON list (line {error.lineno})") from None


def _of_line(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return line


def row_id(value: Any) -> Any:
    """The number of an id that is written as text; anything else as it is.

    Raises:
        ValueError: it is text of another form.
    """
    from raysvc.row_ids import parsed  # brings numpy, which most jobs can be read without

    return parsed(value)
