"""Look at the source that a job names: files, a dataset, or a saved dataset given as a path.

Always true of a dataset that is read by the addresses of its files (`stream`):
- the files are those that `datasets` itself resolves for the split, in its order;
- one that `datasets` would not read from these files as they are is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from raysvc import hub
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.sources.dataset import DatasetSource, saved_folder
from raysvc.pipelines.sources.file_source import FileSource
from raysvc.pipelines.sources.followed import FollowedSource
from raysvc.pipelines.sources.listing import find_files
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.source import Source
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
    _refuse_part(config)
    return FileSource(config, slice_bytes, memo)


def check_files(config: SourceConfig) -> None:
    """List the files of a source, and read none; a dataset is not looked at, nor what is followed.

    Raises:
        SourceError: there are none, or a part of a dataset is asked of them.
    """
    elsewhere = config.ray is not None or config.dataset is not None
    if not (elsewhere or config.follow or saved_folder(config)):
        _refuse_part(config)
        find_files(config)


def _refuse_part(config: SourceConfig) -> None:
    for name in ("subset", "revision", "split"):
        if getattr(config, name) is not None:
            what = f"names a part of a dataset, and {redacted(config.path[0])} is read whole"
            raise SourceError(
                f"source.{name}", what, "leave it out, or write the rows to a file of their own"
            )


BUILDERS = ("json", "parquet")
NOT_READING = ("name", "version", "data_dir", "data_files", "description", "features")


def files_of_dataset(config: SourceConfig) -> SourceConfig:
    """The source with the files of the dataset as `path`.

    Raises:
        SourceError: they are not known, or `datasets` reads them in a way of its own.
    """
    builder = _builder(config)
    what = f"source.dataset {str(config.dataset)!r}"
    package, _, kind = type(builder).__module__.rpartition(".")
    if not package.startswith("datasets.packaged_modules") or kind not in BUILDERS:
        raise SourceError(
            what, f"is read by {kind!r}, and stream reads {' and '.join(BUILDERS)}", "leave source.stream out"
        )
    found: Mapping[Any, Any] = builder.config.data_files or {}
    if not found:
        raise SourceError(
            what, "does not tell its files here", "check the network, or leave source.stream out"
        )
    own = [name for name in _read_otherwise(builder.config) if name not in NOT_READING]
    if own:
        raise SourceError(
            what, f"sets {', '.join(own)}, which its files are read by", "leave source.stream out"
        )
    splits = {str(name): [str(file) for file in files] for name, files in found.items()}
    split = config.split or (next(iter(splits)) if len(splits) == 1 else "")
    if split not in splits:
        there = ", ".join(splits)
        raise SourceError(
            "source.split", f"{config.split!r} is not one of {there}", "with stream, name a whole split"
        )
    update = {"path": tuple(splits[split]), "dataset": None, "stream": False}
    return config.model_copy(update={**update, "subset": None, "revision": None, "split": None})


def _builder(config: SourceConfig) -> Any:
    import datasets

    try:
        with hub.answering():
            return datasets.load_dataset_builder(str(config.dataset), config.subset, revision=config.revision)
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        first_line = str(error).strip().split("\n")[0]
        remedy = "check the name, the subset and HF_TOKEN"
        raise SourceError(
            f"source.dataset {config.dataset!r}", f"cannot be found: {first_line}", remedy
        ) from error


def _read_otherwise(config: Any) -> list[str]:
    """Fields of a builder's config that are not as they are by default."""
    default = type(config)()
    names = [field.name for field in dataclasses.fields(config)]
    return [name for name in names if getattr(config, name) != getattr(default, name)]
