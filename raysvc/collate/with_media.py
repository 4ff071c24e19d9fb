"""The arrays of media beside those of tokens: all media of a rank's rows, one after the other.

Axes: S sequences of a rank, M media or patches of all of them.
Always true:
- `<name>_bounds` int32 [S + 1] says where the part of each sequence begins in `<name>` [M, ...]; a row without media, or a
  dummy, has an empty part;
- a rank without any media has the arrays too, with M = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from raysvc.collate.reused_memory import MEMORY
from raysvc.collate.shard import BOUNDS, Array, Shard
from raysvc.errors import ConfigError

Pixels = Callable[[str | None], Mapping[str, Array]]  # value of column `media` -> arrays of the row


def with_media(
    shard: Shard, media: Mapping[int, str | None], pixels: Pixels, like: Mapping[str, Array]
) -> Shard:
    """The shard with the arrays of its rows' media.

    Args:
        shard: of one rank.
        media: row id -> value of column `media`.
        pixels: makes the arrays of a row.
        like: arrays of a medium of each kind: their names, types and shapes.

    Raises:
        ConfigError: media of two rows do not lie in one array.
    """
    rows = [pixels(media.get(row)) for row in shard.row_ids.tolist()]
    arrays = dict(shard.arrays)
    for name, sample in like.items():
        pieces = [row[name] for row in rows if name in row]
        for piece in pieces:
            if piece.shape[1:] != sample.shape[1:]:
                what = f"gives {name} of shapes {list(sample.shape)} and {list(piece.shape)}, which do not lie in one array"
                raise ConfigError(
                    "the processor", what, "use a model whose images have one shape, or patches"
                )
        arrays[name] = _joined(pieces, sample)
        counts = [len(row[name]) if name in row else 0 for row in rows]
        arrays[name + BOUNDS] = np.cumsum([0, *counts], dtype=np.int32)
    return replace(shard, arrays=arrays)


def _joined(pieces: Sequence[Array], like: Array) -> Array:
    """All pieces, one after the other, in memory of an earlier step; none has the type and the further axes of `like`."""
    shape = (sum(map(len, pieces)), *like.shape[1:])
    out = MEMORY.take(math.prod(shape) * like.itemsize).view(like.dtype).reshape(shape)
    at = 0
    for piece in pieces:
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out
