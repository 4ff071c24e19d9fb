"""Reads the rows of one slice, inside the task that tokenizes them.

Always true:
- a reader gives the rows of its slice in order, with their numbers in the whole source;
- a line that is no JSON object becomes a row with an error; it stops nothing.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from raysvc import hub
from raysvc.chat.source.json_rows import SourceRow, json_rows, load_json
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.arrow_file import batches_behind, batches_from_start, rows_of_range
from raysvc.pipelines.reading.arrow_rows import first_of_table, rows_of_table
from raysvc.pipelines.reading.csv_rows import csv_rows
from raysvc.pipelines.reading.json_file import json_file_rows
from raysvc.pipelines.reading.pinned_file import (
    ContentStream,
    PinnedFile,
    file_system,
    is_compressed,
    read_content,
    reading,
)
from raysvc.pipelines.reading.pins import changed
from raysvc.pipelines.reading.tar_rows import rows_of_stream, tar_rows
from raysvc.pipelines.sources.cuts import MAX_LINE_BYTES
from raysvc.pipelines.sources.files import CSV_KINDS, Kind, check_text
from raysvc.pipelines.sources.slices import Piece, Slice

FIRST_BYTES = 1 << 16  # of a file whose first row is wanted
MOST_READ_BYTES = 8 << 20
ROWS_NEAR = 64  # rows whose columns are seen


def read_lines(piece: Slice, storage_options: dict[str, Any]) -> bytes:
    """The bytes of a slice of line files: whole lines, verified to be those that were scanned."""
    parts = [_lines_of(one, storage_options) for one in piece.pieces]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_rows(piece: Slice, storage_options: dict[str, Any]) -> Iterator[SourceRow]:
    """The rows of any slice.

    Raises:
        SourceError: the file is not what was scanned, or cannot be read.
    """
    number = piece.first_row
    for one in piece.pieces:
        with reading(one.path):
            yield from _numbered_rows(one, number, storage_options)
        number += one.num_rows


def has_long_line(piece: Slice) -> bool:
    """Returns whether a line of it is over the limit, so that its rows are made one by one."""
    return any(one.is_long_line for one in piece.pieces)


def _numbered_rows(piece: Piece, first_row: int, storage_options: dict[str, Any]) -> Iterator[SourceRow]:
    if piece.is_long_line:
        size = f"{(piece.end - piece.start) / 1e6:.0f} MB, the limit is {MAX_LINE_BYTES / 1e6:.0f} MB"
        yield SourceRow(first_row, None, f"line too long: {size}")
    elif piece.kind == "lines":
        yield from json_rows(_lines_of(piece, storage_options), first_row)
    elif piece.kind == "text":
        yield from _text_rows(_lines_of(piece, storage_options), first_row)
    else:
        yield from _rows_of(piece, first_row, storage_options)


def _text_rows(data: bytes, first_row: int) -> Iterator[SourceRow]:
    """Every line is the text of a row; blank ones are none but keep their number."""
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=first_row):
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            yield SourceRow(number, None, f"not UTF-8: {error}")
            continue
        if text.strip():
            yield SourceRow(number, {"text": text})


def _listed_rows(rows: list[Any], first_row: int) -> Iterator[SourceRow]:
    for number, row in enumerate(rows, start=first_row):
        error = None if isinstance(row, dict) else f"a row is {type(row).__name__}, not an object"
        yield SourceRow(number, row if error is None else None, error, odd=True)


def _lines_of(piece: Piece, storage_options: dict[str, Any]) -> bytes:
    """The bytes of a piece; its last line has its newline, so that another file can follow."""
    assert piece.pins is not None
    data = read_content(piece.path, storage_options, piece.start, piece.end, piece.pins)
    if piece.start == 0:
        data = data.removeprefix(codecs.BOM_UTF8)
    return data if data.endswith(b"\n") else data + b"\n"


def first_row(path: str, kind: Kind, storage_options: dict[str, Any]) -> dict[str, Any] | None:
    """The first readable row of a file, with nulls for columns that only rows near it have; None when there is none.

    The format is told from it. In a table every row has all columns, and so it has here where JSON leaves them out.
    """
    with reading(path):
        found = (row for row in _first_rows(path, kind, storage_options) if isinstance(row, dict))
        first = next(found, None)
        if first is None or kind not in ("lines", "json"):
            return first
        near = itertools.islice(found, ROWS_NEAR - 1)
        return first | {name: None for row in near for name in row if name not in first}


def _first_rows(path: str, kind: Kind, storage_options: dict[str, Any]) -> Iterator[Any]:
    """Rows from the beginning, reading no more of the file than its kind asks for."""
    import pyarrow.parquet as pq

    if kind == "lines":
        for lines in _first_blocks(path, storage_options):
            parsed = (row for row in map(_parsed, lines) if isinstance(row, dict))
            rows = list(itertools.islice(parsed, ROWS_NEAR))
            if rows:  # those near the first were read with it
                yield from rows
                return
        return
    if kind == "text":
        texts = (line for line in first_lines(path, storage_options) if line.strip())
        yield from ({"text": ""} for _ in texts)
        return
    if kind == "tar":
        with ContentStream(path, storage_options) as stream:
            yield from (row.data for row in rows_of_stream(stream.read, 0, whole=True))
        return
    with _unverified(path, storage_options) as stream:
        if kind == "parquet":
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=1):
                yield from first_of_table(batch)
        elif kind == "json":
            yield from json_file_rows(path, stream.read())
        elif kind == "arrow":
            yield from first_of_table(rows_of_range(batches_from_start(stream), 0, 1))
        else:
            yield from (row.data for row in csv_rows(path, stream, kind))


def _parsed(line: bytes) -> Any:
    try:
        return load_json(line, allow_nan=True)
    except (ValueError, RecursionError):
        return None


def first_lines(path: str, storage_options: dict[str, Any]) -> Iterator[bytes]:
    """Lines from the beginning of a file; what is over the limit is left out."""
    return itertools.chain.from_iterable(_first_blocks(path, storage_options))


def _first_blocks(path: str, storage_options: dict[str, Any]) -> Iterator[list[bytes]]:
    """The same, those of each read together."""
    held, skip = b"", False
    with ContentStream(path, storage_options) as stream:
        block = stream.read(FIRST_BYTES).removeprefix(codecs.BOM_UTF8)
        check_text(path, block)
        while block:
            lines = (held + block).split(b"\n")
            held = lines.pop()
            yield lines[1:] if skip else lines
            skip = (skip and not lines) or len(held) > MAX_LINE_BYTES
            held = b"" if skip else held
            block = stream.read(MOST_READ_BYTES)
    if held:
        yield [held]


def row_groups(piece: Piece, storage_options: dict[str, Any]) -> list[int]:
    """Rows of each row group of a file that is cut by rows; one of JSON has one, which is cut as it comes.

    Args:
        piece: of the whole file; its rows do not matter.
    """
    import pyarrow.parquet as pq

    with reading(piece.path), _verified(piece, storage_options) as stream:
        if piece.kind == "json":
            return [len(json_file_rows(piece.path, stream.read()))]
        known = pq.ParquetFile(stream).metadata
        return [known.row_group(number).num_rows for number in range(known.num_row_groups)]


def load_dataset_rows(config: SourceConfig) -> Any:
    """The `datasets.Dataset` that `source.dataset` names: a `save_to_disk` folder or a hub name, with its split.

    Raises:
        SourceError: it cannot be loaded, or `split` does not name exactly one split.
    """
    import datasets

    name, split = str(config.dataset), config.split
    try:
        if Path(name).is_dir() and is_saved(Path(name)):
            return _saved_split(datasets.load_from_disk(name), split)
        with hub.answering():
            data = datasets.load_dataset(name, config.subset, split=split, revision=config.revision)
    except SourceError:
        raise
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        first_line = str(error).strip().split("\n")[0]
        remedy = "check the name, the subset and HF_TOKEN, or download it first"
        raise SourceError(f"source.dataset {name!r}", f"cannot be loaded: {first_line}", remedy) from error
    if isinstance(data, dict):
        raise SourceError("source.split", f"is needed: {name!r} has {', '.join(data)}", "name one of them")
    return data


def is_saved(folder: Path) -> bool:
    """Returns whether `save_to_disk` wrote it."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _saved_split(data: Any, split: str | None) -> Any:
    from datasets import concatenate_datasets

    parts = [part.select(range(begin, end)) for part, begin, end in split_parts(data, split)]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def split_parts(data: Any, split: str | None) -> list[tuple[Any, int, int]]:
    """(dataset, first row, end) of each part of a split like "train[:10%]+test".

    Raises:
        SourceError: a part names no split of a folder that has several.
    """
    from datasets import ReadInstruction

    if not isinstance(data, dict):
        rest = "+".join("all" + "".join(part.partition("[")[1:]) for part in (split or "all").split("+"))
        split, data = rest, {"all": data}
    try:
        parts = ReadInstruction.from_spec(split or "").to_absolute(
            {name: len(one) for name, one in data.items()}
        )
    except (AssertionError, ValueError, KeyError) as error:
        names = ", ".join(data)
        what = f"{split!r} is not in the folder ({names})" if split else f"is needed: the folder has {names}"
        raise SourceError("source.split", what, "name one of them, or several with +") from error
    ends = (len(data[part.splitname]) if part.to is None else part.to for part in parts)
    return [(data[part.splitname], part.from_ or 0, end) for part, end in zip(parts, ends, strict=True)]


def load_parts(config: SourceConfig) -> list[tuple[Any, int, int]]:
    """The parts of a folder that `save_to_disk` wrote."""
    import datasets

    return split_parts(datasets.load_from_disk(str(config.dataset)), config.split)


def _rows_of(piece: Piece, first_row: int, storage_options: dict[str, Any]) -> Iterator[SourceRow]:
    if piece.kind == "dataset":
        data = load_dataset_rows(SourceConfig.model_validate_json(piece.path))
        if data._fingerprint != piece.fingerprint:
            raise changed(str(SourceConfig.model_validate_json(piece.path).dataset))
        yield from rows_of_table(data.with_format("arrow")[piece.start : piece.end], first_row)
        return
    if piece.kind in CSV_KINDS:
        yield from _csv_rows(piece, first_row, storage_options)
        return
    if piece.kind == "tar":
        assert piece.pins is not None
        data = read_content(piece.path, storage_options, piece.start, piece.end, piece.pins)
        yield from tar_rows(data, first_row)
        return
    with _verified(piece, storage_options) as stream:
        if piece.kind == "json":
            rows = json_file_rows(piece.path, stream.read())
            yield from _listed_rows(rows[piece.start : piece.end], first_row)
        elif piece.kind == "parquet":
            yield from rows_of_table(_parquet_rows(piece, stream), first_row)
        else:
            yield from rows_of_table(_arrow_rows(piece, stream), first_row)


def _csv_rows(piece: Piece, first_row: int, storage_options: dict[str, Any]) -> Iterator[SourceRow]:
    assert piece.pins is not None
    data = read_content(piece.path, storage_options, piece.start, piece.end, piece.pins)
    stream = io.BytesIO(base64.b64decode(piece.head) + data)
    for row in csv_rows(piece.path, stream, piece.kind):
        yield row._replace(source_row=first_row + row.source_row)


def _verified(piece: Piece, storage_options: dict[str, Any]) -> PinnedFile:
    """The file that a piece is of; every byte that is read from it is compared with the scan."""
    assert piece.pins is not None
    return PinnedFile(piece.path, storage_options, piece.pins)


@contextlib.contextmanager
def _unverified(path: str, storage_options: dict[str, Any]) -> Iterator[Any]:
    """A file before it was scanned, as something that can be read anywhere."""
    if "://" not in path and not is_compressed(path):
        with open(path, "rb") as file:
            yield file
    elif not is_compressed(path) and not path.startswith(("http://", "https://")):
        fs, name = file_system(path, storage_options)
        with fs.open(name, "rb") as file:
            yield file
    else:
        with ContentStream(path, storage_options) as stream:
            yield io.BytesIO(stream.read_all())


def _parquet_rows(piece: Piece, stream: PinnedFile) -> pa.Table:
    """Only the row groups that the piece touches."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream)
    groups: list[int] = []
    begin = row = 0
    for index in range(file.num_row_groups):
        count = file.metadata.row_group(index).num_rows
        if row < piece.end and row + count > piece.start:
            begin = row if not groups else begin
            groups.append(index)
        row += count
    stream.stop = max((_end_of(file.metadata.row_group(index)) for index in groups), default=0)
    return file.read_row_groups(groups).slice(piece.start - begin, piece.end - piece.start)


def _end_of(group: Any) -> int:
    """The byte behind a row group."""
    columns = [group.column(number) for number in range(group.num_columns)]
    begins = [
        min(one.data_page_offset, one.dictionary_page_offset or one.data_page_offset) for one in columns
    ]
    sizes = [one.total_compressed_size for one in columns]
    return max((begin + size for begin, size in zip(begins, sizes, strict=True)), default=0)


def _arrow_rows(piece: Piece, stream: Any) -> pa.Table:
    """The rows of a piece; batches before its range are not read."""
    stream.seek(piece.start)
    head = base64.b64decode(piece.head)
    batches = batches_behind(stream, head) if piece.start else batches_from_start(stream)
    return rows_of_range(batches, piece.skip, piece.num_rows)
