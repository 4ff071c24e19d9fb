"""A rank's shard in pieces is the same shard; Ray starts no thread to copy it."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from raysvc.collate import shard as travelling
from raysvc.collate.shard import CUT_BELOW, PIECE_BYTES, PLAIN_BYTES, cut, private, read_shard
from raysvc.job.column_dtypes import BF16
from raysvc.job.config import PlanConfig

SHAPES = [{}, {"layout": "packed", "micro_batch_tokens": 64}]
ARRAYS = {
    "lines": np.arange(300_001 * 2, dtype=np.int32).reshape(-1, 2),
    "wide": np.arange(700 * 600 * 3, dtype=np.float32).reshape(700, 600, 3),
    "flat": np.arange(PIECE_BYTES + 1, dtype=np.uint8),
    "floats": np.arange(1 << 20, dtype=np.uint16).view(BF16),
    "texts": np.array([f"row {n}" for n in range(60_000)]),
    "long lines": np.arange(PIECE_BYTES, dtype=np.int32).reshape(2, -1),
}


@pytest.mark.parametrize("shape", SHAPES, ids=["padded", "packed"])
@pytest.mark.parametrize("piece_bytes", [1, 100, 700])
def test_a_shard_that_was_cut_is_the_same_shard_in_memory_of_its_own(
    piece_bytes: int, shape: dict[str, Any], make_data: Any, make_shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(np.random.default_rng(0).integers(3, 60, 41))
    [(_, shards)] = make_shards(data, PlanConfig(batch_size=41, **shape), 3)
    monkeypatch.setattr(travelling, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(travelling, "PLAIN_BYTES", 0)
    for shard in shards:
        wire = shard.to_wire()
        travels = cut(wire)
        assert any(isinstance(value, list) for value in travels[1].values())
        own = private(travels)
        assert read_shard(own).digest() == shard.digest()
        assert own[0] == wire[0]
        assert list(own[1]) == list(wire[1])
        assert not any(np.shares_memory(own[1][name], array) for name, array in wire[1].items())
        assert all(array.flags.writeable and array.flags.c_contiguous for array in own[1].values())


@pytest.mark.parametrize("name", list(ARRAYS))
def test_pieces_are_lines_without_a_copy_and_small_enough_for_one_memcpy(name: str) -> None:
    array = ARRAYS[name]
    _, values = cut(("", {name: array}))
    cuts = values[name]
    assert isinstance(cuts, list)
    assert len(cuts) > 1
    assert all(np.shares_memory(piece, array) and piece.flags.c_contiguous for piece in cuts)
    assert all(piece.nbytes <= PIECE_BYTES or len(piece) == 1 for piece in cuts)
    whole = private(("", values))[1][name]
    assert (whole.dtype, whole.shape) == (array.dtype, array.shape)
    assert whole.tobytes() == array.tobytes()


@pytest.mark.parametrize("num_bytes", [PLAIN_BYTES + 1, PIECE_BYTES, CUT_BELOW + 1])
def test_arrays_that_ray_copies_well_stay_whole(num_bytes: int) -> None:
    array = np.zeros(num_bytes, np.uint8)
    assert cut(("", {"a": array}))[1]["a"] is array


def test_small_arrays_of_every_type_travel_without_pickle_and_come_back_in_memory_of_their_own() -> None:
    arrays = {name: array[:5].copy() for name, array in ARRAYS.items() if array[:5].nbytes <= PLAIN_BYTES}
    arrays |= {"none": np.zeros((0, 3), np.int64), "one": np.array(7, np.int16), "yes": np.array([True])}
    travels = cut(("header", arrays))
    assert msgpack.packb(travels, strict_types=True)
    header, own = private(travels)
    assert (header, len(own)) == ("header", len(arrays))
    for name, array in arrays.items():
        assert (own[name].dtype, own[name].shape, own[name].flags.writeable) == (
            array.dtype,
            array.shape,
            True,
        )
        assert own[name].tobytes() == array.tobytes()
