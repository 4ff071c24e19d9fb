"""The bytes of shards under a full shuffle, of one seed: what they were before rows had addresses, they still are.

The digests were taken when the id of a row was its position. Row ids are left out of them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.job.config import PlanConfig
from tests.conftest import write_entry

PADDED = {"layout": "padded_right", "micro_batch_size": 2}
PACKED = {"layout": "packed", "micro_batch_tokens": 64}
DP_SIZES = (1, 2, 3, 5)


def digest_of_run(root: Path, plan: dict[str, Any]) -> str:
    """sha256 of all arrays of all shards, for each number of ranks; an entry of 61 rows in five slices."""
    uri = write_entry(root, 61, per_part=13, seed=7)
    config = PlanConfig(batch_size=12, mini_batch_size=6, epochs=2, seed=3, **plan)
    stream = EntryStream([SourceSpec(uri=uri)], {}, Recipe(config, 0))
    digest = hashlib.sha256()
    for dp_size in DP_SIZES:
        for step in range(stream.schedule.num_steps):
            _, shards = stream.make(step, (dp_size,))
            for shard in shards:
                for name, array in sorted(shard.arrays.items()):
                    digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
                    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("plan", "known"),
    [
        (PADDED, "6e8cedd4a2179a4ed646eef5fa07f08e7cec446b80abbb5e51df6f28fc79fea8"),
        (PACKED, "e3c6d33ee329a80927c939022575231aadbef7cf7854bad34522d601600eac1c"),
        (
            PADDED | {"shuffle": "block(8)"},
            "c218d21155032b4213063314b3c821ac455afe718dad4c209519ed762b2a6228",
        ),
        (PADDED | {"shuffle": "none"}, "84517d406bbb8953fce1fc7ac0f3cd02717411e97a599f3f28b0147b0bfa82ef"),
    ],
    ids=["padded", "packed", "blocks", "unshuffled"],
)
def test_shards_of_one_seed_have_the_bytes_that_they_always_had(
    tmp_path: Path, plan: dict[str, Any], known: str
) -> None:
    assert digest_of_run(tmp_path, plan) == known
