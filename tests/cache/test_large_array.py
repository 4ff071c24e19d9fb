"""The list in `raysvc.cache.local.large_array`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raysvc.cache.local.large_array import concatenated, large_array
from raysvc.errors import StoreError


def test_a_small_array_is_held_and_a_large_one_is_a_file_that_nobody_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSVC_PART_CACHE_DIR", str(tmp_path))
    assert not isinstance(large_array(4, np.int32, held_bytes=16), np.memmap)
    large = large_array(5000, np.int32, held_bytes=16)
    large[:] = np.arange(5000)
    assert isinstance(large, np.memmap)
    assert list(tmp_path.iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 1
    assert large[[17, 4999]].tolist() == [17, 4999]
    del large
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_arrays_are_joined_in_their_order_held_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSVC_PART_CACHE_DIR", str(tmp_path))
    parts = [np.array([3, 1], np.int32), np.zeros(0, np.int32), np.array([7], np.int32)]
    for held_bytes in (1 << 20, 4):
        found = concatenated(parts, held_bytes)
        assert found.tolist() == [3, 1, 7]
        assert found.dtype == np.int32
    assert concatenated(parts[:1]) is parts[0]


def test_a_disk_without_room_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSVC_PART_CACHE_DIR", str(tmp_path))
    free = os.statvfs(tmp_path)
    too_many = free.f_frsize * free.f_blocks + (1 << 30)
    with pytest.raises(StoreError, match=r"no room for .* bytes of row lengths .*; use plan.shuffle: window"):
        large_array(too_many, np.uint8, held_bytes=16)
