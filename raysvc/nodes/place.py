"""Files and folders that every node must see as this machine does: what is tried here, and what is tried on a node.

1. This machine writes a file with a number into a folder.
2. A node lists the folder, reads the number, and writes it into a file of its own; it also removes a file that it made.
3. This machine reads the number in the node's file, and removes both files.

Always true:
- nothing stays: what was written is removed, here or where it was written;
- nothing is written where the file of this machine is not seen;
- a file that a killed process left has a name that gc of a cache removes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.errors import RaysvcError
from raysvc.redact import redacted

MARK = ".probe-"  # gc removes files of this name from the root of a cache


@dataclass(frozen=True)
class SharedFolder:
    """A folder that nodes read and write; made by `open`.

    Attributes:
        folder: where the files are written: the folder itself, or the nearest one above it that is there.
        number: of this trial.
    """

    name: str
    url: str
    folder: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def open(cls, name: str, url: str, options: Mapping[str, Any] | None = None) -> SharedFolder:
        """Write this machine's file.

        Raises:
            OSError: it cannot be written.
            StoreError: it cannot be written.
        """
        folder = url
        if (local := open_store(url, options).local_path("")) is not None:
            folder = str(next(path for path in (local, *local.parents) if path.is_dir()))
        place = cls(name, url, folder, dict(options or {}))
        place._store.write(place._mark, place.number.encode())
        return place

    def try_there(self, node: str) -> str:
        """Read what this machine wrote, and answer."""

        def answer() -> str:
            if not self._shows(self._mark):
                return "does not see a file that this machine wrote there"
            if self._store.read(self._mark) != self.number.encode():
                return "reads something else than this machine wrote there"
            own = f"{self._mark}-{uuid.uuid4().hex}"
            self._store.write(own, b"")
            self._store.delete(own)
            self._store.write(self._answer_of(node), self.number.encode())
            return ""

        return said(answer)

    def try_here(self, node: str) -> str:
        """Read the answer."""
        name = self._answer_of(node)

        def read() -> str:
            if not self._shows(name) or self._store.read(name) != self.number.encode():
                return "writes a file there that this machine does not see"
            self._store.delete(name)
            return ""

        return said(read)

    def close(self) -> None:
        """Remove this machine's file."""
        with suppress(OSError, RaysvcError):
            self._store.delete(self._mark)

    @property
    def _store(self) -> Store:
        return open_store(self.folder, self.options, unsafe_store=True)

    @property
    def _mark(self) -> str:
        return f"{MARK}{self.number}"

    def _answer_of(self, node: str) -> str:
        return f"{self._mark}-{node}"

    def _shows(self, name: str) -> bool:
        return name in self._store.list()


@dataclass(frozen=True)
class SharedFile:
    """A file that nodes read.

    Attributes:
        url: path or URL.
        size: bytes, as this machine sees it; None: it does not know.
    """

    name: str
    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    size: int | None = None

    @classmethod
    def open(cls, name: str, url: str, options: Mapping[str, Any] | None = None) -> SharedFile:
        """Describes it as this machine sees it."""
        size = os.stat(url).st_size if "://" not in url else None
        return cls(name, url, dict(options or {}), size)

    def try_there(self, node: str) -> str:
        """Look at it, open it and read a byte."""

        def read() -> str:
            import fsspec

            with fsspec.open(self.url, "rb", **self.options) as file:
                file.read(1)
            if self.size is not None and (size := os.stat(self.url).st_size) != self.size:
                return f"has another file there, of {size} bytes instead of {self.size}"
            return ""

        return said(read)

    def try_here(self, node: str) -> str:
        """It is not written."""
        return ""

    def close(self) -> None:
        """Nothing was written."""


@dataclass(frozen=True)
class SharedModel:
    """A folder of a tokenizer or a model, or a name on the hub.

    Attributes:
        url: the folder, or the name.
        files: name of a file -> its size; of a name on the hub, those that this machine has.
    """

    name: str
    url: str
    files: Mapping[str, int]
    revision: str | None = None

    @classmethod
    def open(cls, name: str, url: str, revision: str | None = None) -> SharedModel:
        """Describes it as this machine sees it."""
        folder = Path(url).expanduser()
        if folder.is_dir() or folder.is_absolute():  # one of the nodes alone has no files here
            here = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
            return cls(name, str(folder.absolute()), {file.name: file.stat().st_size for file in here})
        from huggingface_hub import try_to_load_from_cache

        asked = ("tokenizer_config.json", "config.json")
        there = (one for one in asked if isinstance(try_to_load_from_cache(url, one, revision=revision), str))
        return cls(name, url, dict.fromkeys(there, 0), revision)

    def try_there(self, node: str) -> str:
        """A folder has the same files; of a hub name one file is there or can be had."""
        return said(self._in_folder if os.path.isabs(self.url) else self._on_hub)

    def try_here(self, node: str) -> str:
        """It is not written."""
        return ""

    def close(self) -> None:
        """Nothing was written."""

    def _in_folder(self) -> str:
        missing = sorted(self.files.keys() - set(os.listdir(self.url)))
        if missing:
            return f"does not see {missing[0]} in that folder"
        for name, size in self.files.items():
            if (there := os.stat(f"{self.url}/{name}").st_size) != size:
                return f"has another {name} there, of {there} bytes instead of {size}"
        if self.files:
            with open(f"{self.url}/{next(iter(self.files))}", "rb") as file:
                file.read(1)
        return ""

    def _on_hub(self) -> str:
        from huggingface_hub import hf_hub_download

        from raysvc import hub

        for name in self.files:
            with hub.answering():
                hf_hub_download(self.url, name, revision=self.revision)
        return ""


NodePlace = SharedFolder | SharedFile | SharedModel


def said(attempt: Callable[[], str]) -> str:
    """Returns what an attempt says is wrong, or raises."""
    try:
        return attempt()
    except FileNotFoundError:
        return "does not see it"
    except Exception as error:  # noqa: BLE001 - whatever a store or a library raises is the finding
        text = str(getattr(error, "what", "") or getattr(error, "strerror", "") or error).strip()
        return redacted(f"cannot use it: {text.splitlines()[0] if text else type(error).__name__}")
