"""The files of a `datasets` name as a source: read by their addresses, slice by slice, where nothing is downloaded and converted before.

Always true:
- the files are those that `datasets` itself resolves for the split, in its order;
- a dataset that `datasets` would not read from these files as they are is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from raysvc import hub
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig

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
