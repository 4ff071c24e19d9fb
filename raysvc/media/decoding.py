"""Decodes the media of a row within a budget of memory that all rows of a process share.

1. What a row takes is known from the sizes of its media: the pixels of all its images stay, and one more image is being converted.
2. A row that takes more than the whole budget is refused by name, when it is built and when it is decoded.
3. Any other waits until the rows that are decoded beside it leave enough.

Always true:
- rows that are decoded at once take no more than `BUDGET_BYTES` together, by this reckoning;
- what a row took is given back whatever its decoding raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Any, Protocol

from raysvc.chat.row_errors import RowFault
from raysvc.media.kinds import Kind, decoded

BUDGET_BYTES = 2 << 30
KEPT_BYTES, WORK_BYTES = 4, 8  # of a pixel: Pillow's RGB, and what converting it takes beside
SAMPLE_BYTES = 16
TOO_MUCH = "the media of a row take too much memory"


class SizedMedium(Protocol):
    """A medium whose size is known."""

    @property
    def kind(self) -> Kind: ...
    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def sha256(self) -> str: ...


class Budget:
    """Bytes that some threads share.

    Args:
        num_bytes: in all.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._left = num_bytes  # guarded by _changed
        self._changed = Condition()

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Wait until so many bytes are free, and hold them; never more than there are in all."""
        with self._changed:
            self._changed.wait_for(lambda: self._left >= num_bytes)
            self._left -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._left += num_bytes
                self._changed.notify_all()


_budget = Budget(BUDGET_BYTES)


def memory_of(media: Iterable[SizedMedium]) -> int:
    """Bytes that the media of a row take while they are decoded.

    A video is decoded frame after frame, and those that are taken are resized one by one: it counts one frame.
    """
    kept, most = 0, 0
    for one in media:
        if one.kind == "audio":
            kept += SAMPLE_BYTES * one.size[0]
            continue
        pixels = one.size[-4] * one.size[-3] if one.kind == "video" else one.size[0] * one.size[1]
        kept, most = kept + KEPT_BYTES * pixels, max(most, pixels)
    return kept + WORK_BYTES * most


def check_decodable(media: Sequence[SizedMedium]) -> int:
    """Returns what a row takes.

    Raises:
        RowFault: it is more than the budget.
    """
    wanted = memory_of(media)
    if wanted > _budget.num_bytes:
        what = f"{len(media)} media take {wanted >> 20} MiB, the limit is {_budget.num_bytes >> 20} MiB"
        raise RowFault(TOO_MUCH, what)
    return wanted


@contextmanager
def all_decoded(
    media: Sequence[SizedMedium], read: Callable[[str], bytes]
) -> Iterator[list[tuple[Kind, Any]]]:
    """The media of a row, decoded; their memory is held until they are not needed any more.

    Args:
        media: of one row.
        read: gives the bytes of a digest.

    Raises:
        RowFault: one cannot be decoded, or they take too much together.
    """
    with _budget.held(check_decodable(media)):
        yield [(one.kind, decoded(one.kind, read(one.sha256), one.size)) for one in media]
