"""Reads the rows of one slice, inside the task that tokenizes them.

Always true:
- a reader gives the rows of its slice in order, with their numbers in the whole source;
- a line that is no JSON object becomes a row with an error; it stops nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa

from raysvc.chat.source.json_rows import SourceRow
from raysvc.config import SourceConfig
from raysvc.errors import SourceError
from raysvc.pipelines.sources.files import COMPRESSED, Kind, open_file
from raysvc.pipelines.sources.slices import Slice


def read_lines(piece: Slice, storage_options: dict[str, Any]) -> bytes:
    """The bytes of a slice of a line file: whole lines."""
    if piece.path.endswith(COMPRESSED):
        with fsspec.open(piece.path, "rb", compression="infer", **storage_options) as stream:
            return bytes(stream.read())
    fs, name = fsspec.core.url_to_fs(piece.path, **storage_options)
    return bytes(fs.cat_file(name, start=piece.start, end=piece.end))


def read_rows(piece: Slice, storage_options: dict[str, Any]) -> Iterator[SourceRow]:
    """The rows of a slice of any other kind of file."""
    for number, row in enumerate(_rows_of(piece, storage_options), start=piece.first_row):
        error = None if isinstance(row, dict) else f"a row is {type(row).__name__}, not an object"
        yield SourceRow(number, row if error is None else None, error)


def first_row(path: str, kind: Kind, storage_options: dict[str, Any]) -> dict[str, Any] | None:
    """The first readable row of a file: what the format is told from; None when there is none."""
    rows = _first_rows(path, kind, storage_options)
    return next((row for row in rows if isinstance(row, dict)), None)


def _first_rows(path: str, kind: Kind, storage_options: dict[str, Any]) -> Iterator[Any]:
    """Rows from the beginning, reading no more of the file than its kind asks for."""
    import orjson
    import pyarrow.parquet as pq

    if kind == "lines":
        with open_file(path, storage_options) as stream:
            for line in stream:
                with contextlib.suppress(orjson.JSONDecodeError):
                    yield orjson.loads(line)
    elif kind == "parquet":
        with fsspec.open(path, "rb", **storage_options) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=1):
                yield from batch.to_pylist()
    elif kind == "json":
        yield from _json_list(path, storage_options)
    else:
        yield from _read_table(path, kind, storage_options).slice(0, 1).to_pylist()


def count_rows(path: str, kind: Kind, storage_options: dict[str, Any]) -> int:
    """Rows of a file that is not read line by line."""
    if kind == "json":
        return len(_json_list(path, storage_options))
    return int(_read_table(path, kind, storage_options).num_rows)


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
        data = datasets.load_dataset(name, config.subset, split=split, revision=config.revision)
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        first_line = str(error).strip().split("\n")[0]
        remedy = "check the name, the subset and HF_TOKEN, or download it first"
        raise SourceError(f"source.dataset {name!r}", f"cannot be loaded: {first_line}", remedy) from error
    if isinstance(data, dict):
        raise SourceError("source.split", f"is needed: {name!r} has {', '.join(data)}", "name one of them")
    return data


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote it."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _saved_split(data: Any, split: str | None) -> Any:
    from datasets import ReadInstruction

    name, _, rest = (split or "").partition("[")
    if isinstance(data, dict):
        if name not in data:
            raise SourceError(
                "source.split", f"{split!r} is not in the folder ({', '.join(data)})", "name one of them"
            )
        data = data[name]
    if not rest:
        return data
    (part,) = ReadInstruction.from_spec(f"all[{rest}").to_absolute({"all": len(data)})
    return data.select(range(part.from_ or 0, len(data) if part.to is None else part.to))


def _rows_of(piece: Slice, storage_options: dict[str, Any]) -> list[Any]:
    if piece.kind == "json":
        return _json_list(piece.path, storage_options)[piece.start : piece.end]
    if piece.kind == "dataset":
        data = load_dataset_rows(SourceConfig.model_validate_json(piece.path))
        return list(data.select(range(piece.start, piece.end)).to_list())
    if piece.kind == "parquet":
        return list(_parquet_rows(piece, storage_options).to_pylist())
    table = _read_table(piece.path, piece.kind, storage_options)
    return list(table.slice(piece.start, piece.end - piece.start).to_pylist())


def _json_list(path: str, storage_options: dict[str, Any]) -> list[Any]:
    import orjson

    with fsspec.open(path, "rb", compression="infer", **storage_options) as stream:
        try:
            rows = orjson.loads(stream.read())
        except orjson.JSONDecodeError as error:
            remedy = "fix it, or use one object per line"
            raise SourceError("source.path", f"{path!r} is no JSON: {error}", remedy) from error
    if not isinstance(rows, list):
        raise SourceError("source.path", f"{path!r} holds no list of rows", "use a list of objects")
    return rows


def _parquet_rows(piece: Slice, storage_options: dict[str, Any]) -> pa.Table:
    """Only the row groups that the slice touches."""
    import pyarrow.parquet as pq

    with fsspec.open(piece.path, "rb", **storage_options) as stream:
        file = pq.ParquetFile(stream)
        groups: list[int] = []
        begin = row = 0
        for index in range(file.num_row_groups):
            count = file.metadata.row_group(index).num_rows
            if row < piece.end and row + count > piece.start:
                begin = row if not groups else begin
                groups.append(index)
            row += count
        return file.read_row_groups(groups).slice(piece.start - begin, piece.end - piece.start)


def _read_table(path: str, kind: Kind, storage_options: dict[str, Any]) -> pa.Table:
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    try:
        if kind == "arrow" and "://" not in path and not path.endswith(COMPRESSED):
            return _arrow_table(pa.memory_map(path))  # the table keeps the mapping
        with fsspec.open(path, "rb", compression="infer", **storage_options) as stream:
            if kind == "parquet":
                return pq.ParquetFile(stream).read(columns=[])
            return pc.read_csv(stream) if kind == "csv" else _arrow_table(stream)
    except pa.ArrowInvalid as error:
        raise SourceError(
            "source.path", f"{path!r} cannot be read as {kind}: {error}", "check the file"
        ) from error


def _arrow_table(stream: Any) -> pa.Table:
    magic = stream.read(6)
    stream.seek(0)
    return (pa.ipc.open_file if magic == b"ARROW1" else pa.ipc.open_stream)(stream).read_all()
