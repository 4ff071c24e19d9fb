"""An entry as Parquet files, for tools that do not read Arrow streams (DuckDB, Spark, a viewer).

Always true:
- one file per part, in row order, with the entry's columns and types;
- every byte was compared with its checksum before it is written again;
- nothing is written over: the folder is new or empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raysvc.errors import EntryError

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry


def export_parquet(entry: Entry, folder: Path) -> list[Path]:
    """Write the files; their paths in row order.

    Raises:
        EntryError: the folder holds something, or a part is damaged.
    """
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise EntryError(str(folder), "it is not empty", "give a new folder")
    paths = []
    for index, table in enumerate(entry.part_tables()):
        path = folder / f"part-{index:05d}.parquet"
        parquet.write_table(table, path, compression="zstd")
        paths.append(path)
    return paths
