"""One text on its way to tokens.

Always true:
- spans are characters of the text, ascending, not overlapping;
- a sequence has a text, or tokens that came as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from raysvc.chat.source.examples import ChatExample, Example, StepsExample, TokensExample
from raysvc.media.kinds import Kind

FREE = 0  # text under loss that is no turn: any token may be in it
OPEN_TURN = 1  # a turn that the template does not end with a token
CLOSED_TURN = 2  # a turn that ends with its end-of-turn token
ENDLESS_TURN = 3  # an open one behind which the template writes no end at all
Span = tuple[int, int, int]


class MediumPlace(NamedTuple):
    """A medium that a text stands for; its tokens are those of the processor's token, in the order of the media.

    Attributes:
        kind: of it.
        sha256: of its bytes.
        size: as its kind has it.
        tokens: of it in the text.
        patches: encoder work.
        num_bytes: encoded.
    """

    kind: Kind
    sha256: str
    size: tuple[int, ...]
    tokens: int
    patches: int
    num_bytes: int


@dataclass(slots=True)
class Sequence:
    """A text, and what of it is trained.

    Attributes:
        text: to encode.
        spans: (start, end, kind) characters under loss; the kind is FREE, OPEN_TURN, CLOSED_TURN or ENDLESS_TURN.
        prefix: ids before the text, without loss.
        suffix: ids behind it, with loss.
        example: what it came from.
        tokens: ids and mask that came as tokens, instead of a text.
        media: that the text stands for.
        removed: trained messages with reasoning that the template left out.
        noted: what was changed of a plain text.
    """

    text: str
    spans: list[Span]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    example: Example | None = None
    tokens: TokensExample | None = None
    media: tuple[MediumPlace, ...] = ()
    removed: int = 0
    noted: frozenset[str] = frozenset()

    @property
    def changes(self) -> frozenset[str]:
        """Returns what the normal form changed."""
        said = self.example.prompt if isinstance(self.example, StepsExample) else self.example
        return said.changes if isinstance(said, ChatExample) else self.noted

    @property
    def endless(self) -> int:
        """Trained turns that have no end."""
        return [kind for _, _, kind in self.spans].count(ENDLESS_TURN)

    @property
    def has_end(self) -> bool:
        """Returns whether a trained turn has one."""
        return any(kind == CLOSED_TURN for _, _, kind in self.spans)
