"""Digests of a model that raysvc exported, in a file beside it: `raysvc-digests.json`, which carries its own checksum.

Always true:
- configuration and weights of a folder with this file are what was written, or refused by name before they are used;
- a folder without it, of anybody else, is not looked at.
"""

from __future__ import annotations

from pathlib import Path

from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.local.mmap import map_file
from raysvc.cache.local.sealed import opened, sealed
from raysvc.errors import ConfigError

FILE = "raysvc-digests.json"
CONFIG = "config.json"
REMEDY = f"restore it, or export again; if it was changed on purpose, remove {FILE}"


def write_digests(folder: Path) -> None:
    """Write the file."""
    found = [folder / CONFIG, *folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    digests = {path.name: _digest(path) for path in sorted(found) if path.exists()}
    (folder / FILE).write_bytes(sealed({"files": digests}))


def check_digests(folder: Path, only: str | None = None) -> None:
    """Compare the files of a folder with what was written.

    Args:
        only: name of one of them; None: all, at the speed at which they are read (0.1 s for a gigabyte in memory).

    Raises:
        ConfigError: one is missing or damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return
    try:
        digests = opened(path.read_bytes())["files"]
    except ValueError as error:
        raise ConfigError(str(path), str(error), REMEDY) from None
    for name in digests if only is None else {only} & set(digests):
        path = folder / name
        if not path.is_file():
            raise ConfigError(str(path), "is missing", REMEDY)
        if _digest(path) != digests[name]:
            raise ConfigError(str(path), "is damaged: its bytes are not those that were exported", REMEDY)


def _digest(path: Path) -> str:
    return checksum_of(memoryview(map_file(path)))
