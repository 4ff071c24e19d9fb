"""A batch of texts -> tokens and mask of its rows, verified or with a fault.

Axes: N rows, T tokens of all rows.
Always true:
- ids are the encoder's; the ids of a row whose bytes do not add up are checked against the reference;
- a row without a fault has only verified spans under loss.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.sequence import FREE, Batch
from raysvc.chat.source.examples import TokensExample
from raysvc.chat.tokens.align import (
    OVER_PROMPT,
    OVER_START,
    TokenTable,
    align,
    align_by_offsets,
    align_words,
    differing_rows,
)
from raysvc.chat.tokens.encoder import EncodedTexts, Encoder, Ints32, Ints64, ReferenceEncoder
from raysvc.ragged import offsets_of

logger = logging.getLogger(__name__)

UNDECODABLE = "the tokens of a trained turn do not decode to it"
UNKNOWN = "a trained turn holds text that the tokenizer has no token for"


class EncoderDiffers(Exception):
    """The fast encoder gave other ids than the reference; the argument says on what."""


@dataclass
class TokenRows:
    """N rows of tokens.

    Attributes:
        ids: int32 [T].
        mask: uint8 [T].
        offsets: int64 [N + 1].
        faults: row -> why it cannot be used.
    """

    ids: Ints32
    mask: npt.NDArray[np.uint8]
    offsets: Ints64
    faults: dict[int, RowFault | RowDropped] = field(default_factory=dict)


class RowEncoder:
    """Encodes, aligns and verifies batches.

    Args:
        encoder: that makes the ids.
        reference: for rows whose bytes do not add up.
        table: bytes of the ids.
    """

    def __init__(self, encoder: Encoder, reference: ReferenceEncoder, table: TokenTable) -> None:
        self._encoder, self._reference, self._table = encoder, reference, table

    def encode(self, batch: Batch) -> TokenRows:
        """Tokens of a batch.

        Raises:
            EncoderDiffers: on a row that was encoded again by the reference.
        """
        encoded = self._encoder.encode_bytes(batch.data, batch.offsets)
        seen, token_ends, odd = self._seen(encoded, batch)
        found = align(encoded, token_ends, seen, self._table, odd)
        mask = found.mask(len(encoded.ids))
        rows = TokenRows(
            encoded.ids, mask, encoded.offsets, {r: RowFault(w) for r, w in found.faults.items()}
        )
        for row in sorted(odd):
            self._align_odd(rows, batch, row)
        if batch.prefix or batch.suffixes:
            return _surrounded(rows, batch)
        return rows

    def _seen(self, encoded: EncodedTexts, batch: Batch) -> tuple[Batch, Ints64, set[int]]:
        """(texts that the ids decode to, int64 [T + 1] ends of the tokens in them, rows for which there is no such text)."""
        ids_said = self._table.decode(encoded.ids)
        token_ends, decoded = self._table.texts_of(encoded, ids_said, batch)
        folded = self._table.folded
        changed = differing_rows(encoded, token_ends, decoded, batch, folded).tolist()
        if not changed:
            return batch, token_ends, set()
        batch = self._table.normal_text.batch(batch, changed)
        token_ends, decoded = self._table.texts_of(encoded, ids_said, batch)
        odd = set(differing_rows(encoded, token_ends, decoded, batch, folded).tolist())
        if odd:
            logger.debug("rows=%d of %d aligned one by one", len(odd), len(batch))
        return batch, token_ends, odd

    def _align_odd(self, rows: TokenRows, batch: Batch, row: int) -> None:
        """A row that the tokenizer normalizes, or one of a tokenizer that is not made of bytes."""
        text = batch.text(row)
        ids, offsets = self._reference.encode_with_offsets(text)
        first, last = int(rows.offsets[row]), int(rows.offsets[row + 1])
        if ids != rows.ids[first:last].tolist():
            raise EncoderDiffers(f"a row of {len(text)} characters")
        base = int(batch.offsets[row])
        data = batch.data[base : batch.offsets[row + 1]].tobytes()
        for index in np.flatnonzero(batch.spans.rows == row).tolist():
            start = len(data[: batch.spans.starts[index] - base].decode())
            end = len(data[: batch.spans.ends[index] - base].decode())
            if self._table.drops_blanks:
                place = align_words(offsets, start, end)
            else:
                place = align_by_offsets(offsets, text, start, end)
            fault = (
                place
                if isinstance(place, str)
                else self._odd_fault(ids, place, text[start:end], batch, index)
            )
            if fault:
                free = fault == OVER_START and batch.spans.kinds[index] == FREE
                rows.faults[row] = RowFault(OVER_PROMPT if free else fault, text[start:end][:60])
                return
            rows.mask[first + place[0] : first + place[1]] = 1  # type: ignore[operator]

    def _odd_fault(self, ids: list[int], place: tuple[int, int], text: str, batch: Batch, index: int) -> str:
        """Returns what is wrong with one span of such a row, or nothing: its tokens have to decode to its normalized text."""
        span = ids[place[0] : place[1]]
        said, normal = self._reference.decode(span), self._table.normal_text.of(text)
        if self._table.drops_blanks:
            said, text, normal = ("".join(each.split()) for each in (said, text, normal))
        if said.strip() not in (text.strip(), normal.strip()):
            return UNKNOWN if self._reference.unknown in span else UNDECODABLE
        return self._table.control_fault(np.array(span, np.int32), int(batch.spans.kinds[index]))


def rows_of_tokens(examples: list[TokensExample]) -> TokenRows:
    """Rows that came as tokens."""
    offsets = offsets_of([len(e.ids) for e in examples])
    ids = np.fromiter((token for e in examples for token in e.ids), np.int32, int(offsets[-1]))
    mask = np.fromiter((bit for e in examples for bit in e.mask), np.uint8, int(offsets[-1]))
    return TokenRows(ids, mask, offsets)


def _surrounded(rows: TokenRows, batch: Batch) -> TokenRows:
    """The same rows with the ids that the tokenizer puts around a text."""
    suffixes = batch.suffixes or [()] * len(batch)
    prefix = np.array(batch.prefix, np.int32)
    ids, mask, sizes = [], [], []
    for row, suffix in enumerate(suffixes):
        first, last = rows.offsets[row], rows.offsets[row + 1]
        ids += [prefix, rows.ids[first:last], np.array(suffix, np.int32)]
        mask += [np.zeros(len(prefix), np.uint8), rows.mask[first:last], np.ones(len(suffix), np.uint8)]
        sizes.append(len(prefix) + int(last - first) + len(suffix))
    offsets = offsets_of(sizes)
    return TokenRows(np.concatenate(ids), np.concatenate(mask), offsets, rows.faults)


__all__ = ["EncodedTexts", "EncoderDiffers", "RowEncoder", "TokenRows", "rows_of_tokens"]
