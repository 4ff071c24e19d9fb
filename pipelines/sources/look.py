"""Look at the source that a job names: files, a dataset, or a saved dataset given as a path."""

from __future__ import annotations

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.sources.dataset import DatasetSource, saved_folder
from raysvc.pipelines.sources.file_source import FileSource
from raysvc.pipelines.sources.followed import FollowedSource
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.source import Source
from raysvc.pipelines.sources.streamed import files_of_dataset
from raysvc.redact import redacted


def look_at(config: SourceConfig, slice_bytes: int | None = None, memo: Memo | None = None) -> Source:
    """The source of a job.

    Args:
        config: which files or dataset.
        slice_bytes: size of a slice; None follows from the size of the source.
        memo: what was found out before; None reads every file.

    Raises:
        SourceError: no files, or one that cannot be read; a part of a dataset is asked of files.
    """
    if config.ray is not None:
        from raysvc.pipelines.ray_data.ray_source import RaySource

        return RaySource(config)
    if config.follow:
        if memo is None:
            raise SourceError("source.follow", "needs a cache, where its listings lie", "name cache.root")
        return FollowedSource(config, slice_bytes, memo)
    if config.stream:
        return FileSource(files_of_dataset(config), slice_bytes, memo)
    if config.dataset is not None:
        return DatasetSource(config, slice_bytes, memo)
    folder = saved_folder(config)
    if folder is not None:
        return DatasetSource(config.model_copy(update={"path": (), "dataset": folder}), slice_bytes, memo)
    for name in ("subset", "revision", "split"):
        if getattr(config, name) is not None:
            what = f"names a part of a dataset, and {redacted(config.path[0])} is read whole"
            raise SourceError(
                f"source.{name}", what, "leave it out, or write the rows to a file of their own"
            )
    return FileSource(config, slice_bytes, memo)
