"""Rows of a `datasets` name, or of a folder that `save_to_disk` wrote.

Always true:
- a folder is identified by the content of its Arrow files: its fingerprint is only what the writer believed, and
  stays when a function reads another file or a global;
- a name is identified by the commit that was resolved and by the fingerprint, which chains what was made of it.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from raysvc.config import SourceConfig
from raysvc.errors import SourceError
from raysvc.pipelines.sources.files import SourceFile
from raysvc.pipelines.sources.fingerprint import Identifier
from raysvc.pipelines.sources.readers import is_saved, load_dataset_rows
from raysvc.pipelines.sources.scan import even_cuts
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.slices import Slice, numbered
from raysvc.pipelines.sources.source import MIN_SLICE_BYTES, SLICES_WANTED

_COMMIT = re.compile(r"@([0-9a-f]{40})/")


class DatasetSource:
    """See `raysvc.pipelines.sources.source.Source`."""

    def __init__(self, config: SourceConfig, memo: Memo | None = None) -> None:
        self._config, self._memo = config, memo
        self._data = load_dataset_rows(config)
        self.num_bytes = int(self._data.data.nbytes)
        self.identity = self._identity()

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """Of equal numbers of rows."""
        rows = len(self._data)
        if rows == 0:
            raise SourceError("source.dataset", f"{self._config.dataset!r} has no rows", "check source.split")
        wanted = max(1, min(SLICES_WANTED, self.num_bytes // MIN_SLICE_BYTES))
        where = self._config.model_dump_json()
        return numbered((where, "dataset", cut) for cut in even_cuts(rows, min(rows, wanted)))

    def first_row(self) -> dict[str, Any] | None:
        """The first one."""
        return dict(self._data[0]) if len(self._data) else None

    def check_unchanged(self) -> None:
        """Of a folder; what lies in the cache of `datasets` is never changed."""
        if self._identity() != self.identity:
            raise SourceError(
                "source.dataset",
                f"{self._config.dataset!r} changed while it was tokenized",
                "run again when whoever writes there has finished",
            )

    def _identity(self) -> list[dict[str, Any]]:
        told = {"kind": "dataset", "rows": len(self._data), "split": self._config.split}
        files = [Path(item["filename"]) for item in self._data.cache_files]
        if files and is_saved(Path(str(self._config.dataset))):
            here = [SourceFile(str(file.absolute()), file.stat().st_size, None) for file in files]
            contents = Identifier(MIN_SLICE_BYTES, {}, self._memo).identities(here)
            return [{**told, "files": [{n: one[n] for n in ("size", "sha256")} for one in contents]}]
        return [{**told, "revision": resolved_revision(self._data), "fingerprint": self._data._fingerprint}]


def resolved_revision(data: Any) -> str | None:
    """The commit that the hub resolved, as the addresses of the files that were loaded say it."""
    urls = " ".join(sorted(getattr(data.info, "download_checksums", None) or {}))
    commits = sorted(set(_COMMIT.findall(urls)))
    return ",".join(commits) or None
