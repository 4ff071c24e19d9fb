"""A Ray Dataset as a source; see `raysvc.pipelines.sources.source`.

Always true:
- it is named by `source.version`, or else by the digests of its rows in their order;
- with a version its slices are known when it was tokenized, and nothing is read before but its first row;
- it runs once, and once more as far as the first row needs it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any

from raysvc.errors import ConfigError, SourceError
from raysvc.job.config import SourceConfig
from raysvc.job.named_function import function_of, line_of
from raysvc.pipelines.ray_data.ray_rows import WHERE, first_row, kept, numbered, rows_of_slice, slices_of
from raysvc.pipelines.sources.slices import Slice

if TYPE_CHECKING:
    import ray.data


class RaySource:
    """See the module.

    Attributes:
        rows: of the Dataset, numbered; kept in Ray's object stores where no version names them.
        slice_rows: of every slice but the last.
        slices: known from the start, or set by whoever tokenized them.

    Raises:
        ConfigError: there is no such function, or it fails.
        SourceError: the Dataset has no row, or fails.
    """

    def __init__(self, config: SourceConfig) -> None:
        data = _dataset(config)
        self._first = first_row(data)
        self.slice_rows = rows_of_slice(self._first)
        self.rows = numbered(data, self.slice_rows)
        self.slices: tuple[Slice, ...] = ()
        known: dict[str, Any] = {"kind": "ray", "slice_rows": self.slice_rows}
        if config.version is not None:
            named = {"function": config.ray, "args": config.args} if isinstance(config.ray, str) else {}
            self.identity = [{**known, "version": config.version, **named}]
            return
        self.rows = kept(self.rows)
        self.slices = slices_of(self.rows, self.slice_rows)
        digest = hashlib.sha256("".join(one.pieces[0].fingerprint for one in self.slices).encode())
        rows = sum(one.num_rows for one in self.slices)
        self.identity = [{**known, "rows": rows, "sha256": digest.hexdigest()}]

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows as JSON, as far as they are known."""
        return sum(one.num_bytes for one in self.slices)

    def first_row(self) -> dict[str, Any]:
        """The first one."""
        return self._first

    def check_unchanged(self) -> None:
        """Every slice was compared as it came."""


def _dataset(config: SourceConfig) -> ray.data.Dataset:
    import ray.data

    made = config.ray
    if isinstance(made, str):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # the job's working directory
        function = function_of(WHERE, made, ", ".join(config.args) or "no arguments")
        try:
            made = function(**config.args)
        except Exception as error:  # of the user's function: whatever it is, it is named
            what = f"{config.ray} raised {type(error).__name__}: {error}{line_of(error, 0)}"
            raise ConfigError(WHERE, what, "correct the function, or source.args") from error
    if not isinstance(made, ray.data.Dataset):
        raise SourceError(
            WHERE, f"{config.names[0]} returned {type(made).__name__}", "return a ray.data.Dataset"
        )
    return made
