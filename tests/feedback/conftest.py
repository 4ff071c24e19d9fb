"""Entries of the three sources that `mixed_server` serves."""

from __future__ import annotations

import pytest

from tests.conftest import write_entry

from .mixed_server import ROWS


@pytest.fixture(scope="module")
def uris(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Their URIs."""
    folder = tmp_path_factory.mktemp("cache")
    return [write_entry(folder, rows, seed=number) for number, rows in enumerate(ROWS)]
