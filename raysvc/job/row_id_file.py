"""Row ids that a run takes or leaves out, from a file or a folder of files.

Always true:
- ids come sorted and once each, so that two files of the same rows are the same plan;
- a line that is no id is refused with its number.
"""

from __future__ import annotations

import json
import os
from typing import Any


def read_row_ids(path: str) -> tuple[int, ...]:
    """The ids of a file: a JSON list, one id a line (`#` begins a comment; `2:17:451` and `{"row_id": 17}` are ids too), or a
    Parquet file with a column `row_id`. Of a folder, as Ray Data writes it: of all its files.

    Raises:
        ValueError: no such file, or something in it is not a row id.
    """
    import fsspec

    address = path if "://" in path else os.path.expanduser(path)
    try:
        files, inside = fsspec.core.url_to_fs(address)
        if not files.isdir(inside):
            return _of_file(files, inside, path)
        names = [one for one in sorted(files.ls(inside, detail=False)) if not _is_hidden(one)]
        return tuple(sorted({number for name in names for number in _of_file(files, name, name)}))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or type(error).__name__})") from None


def _is_hidden(path: str) -> bool:
    return path.rstrip("/").rpartition("/")[2].startswith((".", "_"))


def _of_file(files: Any, inside: str, path: str) -> tuple[int, ...]:
    if inside.endswith(".parquet"):
        return _of_parquet(files, inside, path)
    with files.open(inside, "rt", encoding="utf-8") as file:
        text = file.read()
    if text.lstrip().startswith("["):
        return _sorted(path, enumerate(_json(path, text), start=1), "item")
    lines = (
        (number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), start=1)
    )
    return _sorted(path, [(number, _of_line(line)) for number, line in lines if line], "line")


def _of_parquet(files: Any, inside: str, path: str) -> tuple[int, ...]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with files.open(inside, "rb") as file:
            column = parquet.read_table(file, columns=["row_id"]).column(0)
    except (pa.ArrowException, IndexError, KeyError) as error:
        raise ValueError(f"{path} has no column row_id ({type(error).__name__})") from None
    return _sorted(path, enumerate(column.to_pylist(), start=1), "row")


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
