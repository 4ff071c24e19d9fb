"""The media of rows as a person looks at them: what they are, where they lie, and a small picture.

Always true:
- what is shown of a medium comes from the entry; its bytes are read only for a picture;
- a medium that cannot be read or decoded has no picture, and is shown all the same.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.chat.row_errors import RowFault
from raysvc.errors import EntryError, StoreError
from raysvc.media.decoding import all_decoded
from raysvc.media.kinds import size_text
from raysvc.media.media_store import medium_path, read_medium
from raysvc.media.medium import COLUMN, Medium, json_of, media_of
from raysvc.media.video import EncodedVideo

if TYPE_CHECKING:
    from PIL.Image import Image

    from raysvc.actors.server.spec import ServeSpec
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.cache.store.store import Store
    from raysvc.collate.shard import Shard

PICTURE_PIXELS = 160  # of the longer side


@dataclass(frozen=True)
class ShownMedium:
    """One medium of a row.

    Attributes:
        medium: what the entry says of it.
        path: of its bytes, in the cache root.
        store: where they are read.
    """

    medium: Medium
    path: str
    store: Store

    def __str__(self) -> str:
        one = self.medium
        return (
            f"{one.kind} {size_text(one.kind, one.size)}, {one.tokens} tokens from {one.at}, "
            f"{one.num_bytes} bytes, sha256 {one.sha256}, {self.path}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**json_of(self.medium), "path": self.path}

    def picture(self) -> bytes | None:
        """A small JPEG, of audio of its waveform, of a video of its middle frame; None when the medium cannot be decoded here."""
        try:
            with all_decoded([self.medium], lambda sha256: read_medium(self.store, sha256)) as [(_, found)]:
                image = _picture_of(found)
        except (EntryError, StoreError, RowFault, ImportError):
            return None
        image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
        out = io.BytesIO()
        image.save(out, "JPEG", quality=80)
        return out.getvalue()


def _picture_of(found: Any) -> Image:
    from PIL.Image import fromarray

    if isinstance(found, EncodedVideo):
        return fromarray(next(found.frames([found.size.frames // 2])))
    return _drawn(found) if isinstance(found, np.ndarray) else found


def _drawn(waveform: npt.NDArray[np.float32]) -> Image:
    """The loudest sample of each of some stretches, as a bar."""
    from PIL.Image import fromarray

    stretches = np.array_split(np.abs(waveform), PICTURE_PIXELS)
    loud = np.array([part.max(initial=0.0) for part in stretches])
    height = PICTURE_PIXELS // 4
    far = np.abs(np.arange(height) - height / 2 + 0.5)[:, None] / (height / 2)
    gray = np.where(far <= loud / max(float(loud.max()), 1e-9), 40, 245)
    return fromarray(gray.astype(np.uint8)).convert("RGB")


def media_of_rows(entry: CacheEntry, row_ids: Sequence[int]) -> dict[int, tuple[ShownMedium, ...]]:
    """Row id -> its media, in order; rows without any are left out.

    Args:
        entry: of one source, or of a mixture.
        row_ids: of the entry.
    """
    if not any(COLUMN in one.columns for one in entry.entries) or not len(row_ids):
        return {}
    texts = entry.rows.read(np.array(row_ids, np.int64)).rows[COLUMN].tolist()
    store = entry.entries[0].store  # the entries of a mixture lie in one root
    found = {row: media_of(text) for row, text in zip(row_ids, texts, strict=True)}
    return {
        row: tuple(ShownMedium(one, f"{store.url}/{medium_path(one.sha256)}", store) for one in media)
        for row, media in found.items()
        if media
    }


def media_of_shards(spec: ServeSpec, shards: Sequence[Shard]) -> list[list[str]]:
    """Returns for each shard the digests of the media of its rows, in the order of the rows; empty lists for
    rollouts.
    """
    from raysvc.builds.cache_entry import open_served

    if not spec.sources:
        return [[] for _ in shards]
    entry = open_served(spec)
    found = []
    for shard in shards:
        rows = [row for row in shard.row_ids.tolist() if row >= 0]
        media = media_of_rows(entry, rows)
        found.append([one.medium.sha256 for row in rows for one in media.get(row, ())])
    return found
