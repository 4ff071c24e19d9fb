"""Says where rows come from: what a source holds, and how it is cut into slices.

How a source is cut depends on its bytes alone, never on the number of workers, so a build can go on where another
stopped. What it holds is known at once; the cuts are looked for when somebody asks for them, since a finished entry
needs none.

Always true:
- an identity is the content, and never a path or a time;
- slices cover every row once, in order.
"""

from __future__ import annotations

from typing import Any, Protocol

from raysvc.pipelines.sources.slices import Slice

MIN_SLICE_BYTES = 4 << 20  # below, what a slice costs itself (task, sample, part) is a third of its time
MAX_SLICE_BYTES = 32 << 20
SLICES_WANTED = 64


class Source(Protocol):
    """A source whose content is known.

    Attributes:
        identity: what the cache key holds of it, in the order of its files.
    """

    identity: list[dict[str, Any]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        ...

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices in row order; raises SourceError if there are no rows."""
        ...

    def first_row(self) -> dict[str, Any] | None:
        """The first row that can be read."""
        ...

    def check_unchanged(self) -> None:
        """SourceError when it does not hold any more what the identity says."""
        ...


def share_of(num_bytes: int) -> int:
    """Returns how many bytes of a source make a slice."""
    return max(MIN_SLICE_BYTES, min(MAX_SLICE_BYTES, num_bytes // SLICES_WANTED))
