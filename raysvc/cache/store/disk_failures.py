"""Tells what a disk says when it is full, read-only or broken, as one line of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raysvc.errors import StoreError


@contextmanager
def named_failures(path: Path) -> Iterator[None]:
    """Say which file cannot be written, and what to do about it.

    Raises:
        StoreError: the system refused it.
    """
    try:
        yield
    except OSError as error:
        remedy = "make room or check the disk, then run the same command again"
        raise StoreError(str(path), f"cannot be written ({error})", remedy) from error
