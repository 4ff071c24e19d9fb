"""Processes that the tests of workers share."""

from __future__ import annotations

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks(ray_session: None) -> Ranks:
    """Three processes that meet in worlds of one, two or three ranks."""
    return Ranks()
