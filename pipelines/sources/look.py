"""Look at the source that a job names: files, a dataset, or a saved dataset given as a path."""

from __future__ import annotations

from raysvc.job.config import SourceConfig
from raysvc.pipelines.sources.dataset import DatasetSource, saved_folder
from raysvc.pipelines.sources.file_source import FileSource
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.source import Source


def look_at(config: SourceConfig, slice_bytes: int | None = None, memo: Memo | None = None) -> Source:
    """The source of a job.

    Args:
        config: which files or dataset.
        slice_bytes: size of a slice; None follows from the size of the source.
        memo: what was found out before; None reads every file.

    Raises:
        SourceError: no files, or one that cannot be read.
    """
    if config.dataset is not None:
        return DatasetSource(config, slice_bytes, memo)
    folder = saved_folder(config)
    if folder is not None:
        return DatasetSource(config.model_copy(update={"path": (), "dataset": folder}), slice_bytes, memo)
    return FileSource(config, slice_bytes, memo)
