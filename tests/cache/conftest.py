"""Servers and stores that several files use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raysvc.cache.local import part_cache
from raysvc.cache.store import retry

from .gcs import gcs_server
from .servers import S3, given_server, moto_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A real S3 server: moto, or the one that RAYSVC_TEST_S3 names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        given = given_server()
        if given is not None:
            yield given
            return
        with moto_server() as server:
            yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[str]:
    """Endpoint of a stand-in for Google Cloud Storage."""
    with gcs_server() as url:
        yield url


@pytest.fixture(autouse=True)
def private_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copies of remote parts go to the test's own folder, and pauses between attempts are short."""
    monkeypatch.setenv("RAYSVC_PART_CACHE_DIR", str(tmp_path / "copies"))
    monkeypatch.setenv("RAYSVC_PART_CACHE_GB", "1")
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    part_cache.node_copies.cache_clear()
    yield tmp_path / "copies"
    part_cache.node_copies.cache_clear()
