"""A processor of each family, saved once."""

from __future__ import annotations

from pathlib import Path

import pytest

from .families import FAMILIES


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of tokenizer and processor."""
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))
