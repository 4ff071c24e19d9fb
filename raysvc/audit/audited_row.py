"""A source row as an audit sees it: what was read, what became of it, and the words that it says.

Axes: S sequences of the row, one but for pairs and for `each_assistant_turn`; L tokens of one.
Always true:
- a row that a build writes has the address that it has in the entry; one that is left out has its number in the source;
- ids and mask are those before anything is cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from raysvc.chat.row_sequences import RowChunk
from raysvc.chat.sequence import Sequence
from raysvc.chat.source.examples import ChatExample, StepsExample, TextExample
from raysvc.chat.source.formats import Format
from raysvc.row_ids import written

SHOWN = 70  # characters of a row
SPEAKERS = ("user", "assistant")


@dataclass(frozen=True)
class AuditedRow:
    """See the module.

    Attributes:
        source: what its address begins with: "" in a job of one source.
        source_row: its number in the source.
        row_id: of its first sequence in the entry; None where it is left out.
        data: as it was read.
        form: of its source.
        sequences: S.
        tokens: (ids int32 [L], mask uint8 [L]) of each.
        cut: trained tokens that are not written.
        decode: ids -> text, for rows that came as tokens.
    """

    source: str
    source_row: int
    row_id: int | None
    data: Mapping[str, Any]
    form: Format
    sequences: tuple[Sequence, ...]
    tokens: tuple[tuple[Any, Any], ...]
    cut: int
    decode: Any

    @property
    def where(self) -> str:
        """Its address, as it is shown."""
        return place_of(self.source, self.source_row, self.row_id)

    @property
    def own(self) -> int:
        """Counts the row's own sequences, the first of the S: a row of `kto` has another one's answer beside it."""
        return 1 if self.form.name == "kto" else len(self.sequences)

    @property
    def main(self) -> int:
        """The place of the sequence that says most: the chosen side of a pair, else the last turn, before which all others stand."""
        return 0 if self.form.name == "preference" else self.own - 1

    @property
    def conversations(self) -> Iterator[tuple[ChatExample, str]]:
        """Conversations of the row, and their texts: both sides of a pair, else the one that says most."""
        chosen = self.sequences[: self.own] if self.form.name == "preference" else [self.sequences[self.main]]
        return ((one.example, one.text) for one in chosen if isinstance(one.example, ChatExample))

    @cached_property
    def pictured(self) -> str:
        """Digests of its media, which no words tell apart."""
        return " ".join(one.sha256 for one in self.sequences[self.main].media)

    @cached_property
    def prompt(self) -> str:
        """The words before the answer, in lower case and without punctuation, and the digests of media."""
        example = self.sequences[self.main].example
        if isinstance(example, ChatExample):
            text = " ".join(_text_of(one) for one in example.messages if one["role"] == "user")
        elif isinstance(example, TextExample):
            text = example.context or example.trained
        else:
            ids, mask = self.tokens[0]
            first = int(np.argmax(mask)) if mask.any() else len(ids)
            text = self.decode(ids[:first] if first > 1 else ids)
        return f"{self.pictured} {' '.join(words_of(text))}".strip()

    @cached_property
    def answer(self) -> str:
        """The words of the last trained message, or all that is trained."""
        example = self.sequences[self.main].example
        if isinstance(example, ChatExample):
            return _text_of(example.messages[example.trained[-1]]) if example.trained else ""
        if isinstance(example, TextExample):
            return example.trained
        ids, mask = self.tokens[0]
        return str(self.decode(ids[mask != 0]))

    @cached_property
    def said(self) -> str:
        """Returns what user and assistant say, or the text; of rows that came as tokens, what is trained."""
        example = self.sequences[self.main].example
        if isinstance(example, ChatExample):
            return "\n".join(_text_of(one) for one in example.messages if one["role"] in SPEAKERS)
        if isinstance(example, TextExample):
            return example.context + example.trained
        if isinstance(example, StepsExample):
            prompt = example.prompt if isinstance(example.prompt, str) else ""
            return "\n".join([prompt, *example.steps])
        return self.answer

    def digest(self, number: int | None = None) -> bytes:
        """Returns the digest of the tokens of one sequence, or of all its own, and of the row's media."""
        chosen = self.tokens[: self.own] if number is None else self.tokens[number : number + 1]
        hashed = hashlib.blake2b(self.pictured.encode(), digest_size=16)
        for ids, mask in chosen:
            hashed.update(len(ids).to_bytes(8, "little") + ids.tobytes() + mask.tobytes())
        return hashed.digest()


def place_of(source: str, source_row: int, row_id: int | None) -> str:
    """Writes where a row is, as it is shown."""
    return f"{source}{written(row_id)}" if row_id is not None else f"{source}source row {source_row}"


def shown(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


def words_of(text: str) -> list[str]:
    """Words, in lower case and without punctuation around them."""
    return [word for each in text.lower().split() if (word := each.strip(".,;:!?\"'()[]{}<>*#`"))]


def rows_of_chunk(
    chunk: RowChunk, form: Format, source: str, first_id: int, decode: Any
) -> Iterator[AuditedRow]:
    """The rows of a chunk that has passed through a tokenizer.

    Args:
        first_id: of the first sequence of the chunk that is written.
    """
    assert chunk.tokens is not None
    assert chunk.kept is not None
    offsets, kept = chunk.tokens.offsets, chunk.kept
    places = _kept_places(kept.source_rows.tolist())
    ends = np.cumsum(kept.lengths)
    trained_kept = np.add.reduceat(kept.mask, ends - kept.lengths, dtype=np.int64) if len(ends) else ends
    for number, group in groupby(range(len(chunk.flat)), lambda place: chunk.origins[place].source_row):
        own = list(group)
        tokens = tuple(
            (chunk.tokens.ids[offsets[n] : offsets[n + 1]], chunk.tokens.mask[offsets[n] : offsets[n + 1]])
            for n in own
        )
        data = chunk.origins[own[0]].data
        assert data is not None
        place, cut = places.get(number), 0
        if place is not None:
            cut = int(sum(mask.sum(dtype=np.int64) for _, mask in tokens))
            cut -= int(trained_kept[place : place + len(own)].sum())
        row_id = None if place is None else first_id + place
        sequences = tuple(chunk.flat[n] for n in own)
        yield AuditedRow(source, number, row_id, data, form, sequences, tokens, cut, decode)


def _kept_places(source_rows: list[int]) -> dict[int, int]:
    """Source row -> place of its first sequence among those that are written."""
    places: dict[int, int] = {}
    for place, number in enumerate(source_rows):
        places.setdefault(number, place)
    return places


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
