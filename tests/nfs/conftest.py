"""One laboratory for the session, both NFS versions for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .lab import Client, Lab, laboratory, missing

SETUP = """
import sys, time, os, threading, json
sys.path.insert(0, {tests!r})
import numpy as np
import helpers
from raysvc.cache.find import collect_garbage, find_entry, list_entries
from raysvc.cache.store.open import open_store
from raysvc.cache.writer import EntryWriter
from raysvc.errors import RaysvcError
ROOT = {root!r}
store = open_store(f'{{ROOT}}/cache')
KEY = helpers.KEY
"""


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Skips, saying why, where there can be none."""
    if "RAYSVC_TEST_NFS" not in os.environ:
        pytest.skip("real NFS clients: run make test-nfs")
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with laboratory(tmp_path_factory.mktemp("nfs")) as ready:
        yield ready


@pytest.fixture(params=["4.1", "3"])
def clients(lab: Lab, request: pytest.FixtureRequest) -> tuple[Client, Client]:
    """Two clients that see one empty folder."""
    root = lab.fresh_folder(request.param)
    tests = Path(__file__).resolve().parent.parent / "cache"
    for client in lab.clients:
        client.run(SETUP.format(tests=str(tests), root=root))
    return lab.clients
