"""Source rows -> tokens and mask, one slice at a time.

Axes: N rows of a chunk, T tokens of a chunk.
Always true:
- a row that is written has the ids of `apply_chat_template`, and a mask that was proved;
- a fault of one row sets aside that row, never its slice;
- every slice is compared with the reference on a sample; a difference switches to the reference, with a warning;
- the books of a slice balance.

A preference row is written as two sequences, the chosen one first, with the same `source_row`; `chosen` tells them apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from raysvc.chat.align import TokenTable
from raysvc.chat.batch import Batch, batch_of
from raysvc.chat.books import Books, Quarantined
from raysvc.chat.encode import ReferenceEncoder, choose_encoder
from raysvc.chat.faults import RowDropped, RowFault
from raysvc.chat.formats import ChatExample, Format, resolve_format
from raysvc.chat.ledger import Ledger
from raysvc.chat.prepare import Preparer, Sequence
from raysvc.chat.rows import EncoderDiffers, RowEncoder, TokenRows, rows_of_tokens
from raysvc.chat.tokenizer import LoadedTokenizer
from raysvc.chat.truncate import kept_ranges
from raysvc.config import TextSpec

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
ROWS_PER_CHUNK = 2048
CHARS_PER_CHUNK = 1 << 23
SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("source_row", pa.int64())]
)
PREFERENCE_SCHEMA = SCHEMA.append(pa.field("chosen", pa.uint8()))


@dataclass(frozen=True)
class SourceRow:
    """One row as the reader found it.

    Attributes:
        source_row: its number in the source.
        data: plain JSON data, None when it could not be read.
        error: why not, beginning with a short reason and a colon.
    """

    source_row: int
    data: dict[str, Any] | None
    error: str | None = None


@dataclass(frozen=True)
class SliceResult:
    """One tokenized slice.

    Attributes:
        table: `SCHEMA`, or `PREFERENCE_SCHEMA`.
        books: balanced.
        examples: a few quarantined rows of each reason.
        encoder: that made the ids.
        switched: why it is not the fast one, empty when it is.
        sampled: rows that were compared with `apply_chat_template` or the reference encoder.
    """

    table: pa.Table
    books: Books
    examples: tuple[Quarantined, ...]
    encoder: str = ""
    switched: str = ""
    sampled: int = 0


class RenderDiffers(Exception):
    """The short code of a template gave another text than `apply_chat_template`."""


@dataclass
class _Slice:
    """What a slice has made so far: arrays of written sequences, and counts for its books."""

    ids: list[np.ndarray[Any, np.dtype[np.int32]]]
    mask: list[np.ndarray[Any, np.dtype[np.uint8]]]
    lengths: list[int]
    source_rows: list[int]
    written: int = 0
    rendered: int = 0
    sampled: int = 0


class SliceTokenizer:
    """Tokenizes slices of one source. Loads the tokenizer and probes the encoder once.

    Args:
        spec: what decides tokens and mask.
        dataset_label: names the source in messages about rows.

    Raises:
        TokenizerError: no tokenizer, no template, or a broken one.
    """

    def __init__(self, spec: TextSpec, dataset_label: str = "") -> None:
        self.spec = spec
        self.tokenizer = LoadedTokenizer(spec.tokenizer)
        self._label = dataset_label
        self._reference = ReferenceEncoder(self.tokenizer)
        self._encoder, self._switched = choose_encoder(self.tokenizer, self._reference)
        self._preparer = Preparer(self.tokenizer)
        self._table = TokenTable(self.tokenizer, self._preparer.control_tokens)
        self._format: Format | None = None

    @property
    def encoder_name(self) -> str:
        """Which encoder makes the ids."""
        return self._encoder.name

    def run(self, rows: Iterable[SourceRow]) -> SliceResult:
        """Tokenize one slice.

        Raises:
            SourceError: a column that is needed is missing, or a row is too long and `truncation` is `error`.
        """
        held = rows if isinstance(rows, list) else list(rows)
        return self._run(lambda: iter(held))

    def run_json_lines(self, data: bytes | bytearray | memoryview, first_row: int) -> SliceResult:
        """Tokenize one slice of complete JSON lines; blank lines are no rows but keep their number.

        Args:
            data: UTF-8 bytes.
            first_row: number of the first line in the source.
        """
        return self._run(lambda: json_rows(data, first_row))

    def _run(self, read: Callable[[], Iterator[SourceRow]]) -> SliceResult:
        while True:
            try:
                return self._attempt(read())
            except EncoderDiffers as differs:
                self._switched = f"{self._encoder.name} differs from the reference on {differs}"
                self._encoder = self._reference
            except RenderDiffers as differs:
                self._switched = f"the short template code differs from the reference on {differs}"
                self._preparer = Preparer(self.tokenizer, fast=False)
            logger.warning("dataset=%s switched to the reference: %s", self._label, self._switched)

    def _attempt(self, rows: Iterator[SourceRow]) -> SliceResult:
        ledger = Ledger(self._label)
        made = _Slice([], [], [], [])
        for chunk in _chunks(rows):
            self._chunk(chunk, made, ledger)
        return self._result(made, ledger)

    def _chunk(self, chunk: list[SourceRow], made: _Slice, ledger: Ledger) -> None:
        numbers, prepared = [], []
        for row in chunk:
            try:
                prepared.append(self._prepare(row))
                numbers.append(row.source_row)
            except (RowFault, RowDropped) as why:
                ledger.leave_out(row.source_row, why)
        flat = [sequence for sequences in prepared for sequence in sequences]
        if not flat:
            return
        tokens, batch = self._encode(flat)
        self._compare_sample(flat, tokens, made)
        at = 0
        for number, sequences in zip(numbers, prepared, strict=True):
            self._write(number, range(at, at + len(sequences)), tokens, batch, made, ledger)
            at += len(sequences)

    def _prepare(self, row: SourceRow) -> list[Sequence]:
        if row.data is None:
            reason, _, detail = (row.error or "no data").partition(": ")
            raise RowFault(reason, detail)
        if self._format is None:
            self._format = resolve_format(self.spec, row.data)
        sequences = self._preparer.sequences(row.data, self._format)
        for sequence in sequences:
            if not sequence.text.isascii():
                _check_text(sequence.text)
        return sequences

    def _encode(self, flat: list[Sequence]) -> tuple[TokenRows, Batch | None]:
        given = [sequence.tokens for sequence in flat if sequence.tokens is not None]
        if given:
            return rows_of_tokens(given), None
        batch = batch_of(flat)
        return RowEncoder(self._encoder, self._reference, self._table).encode(batch), batch

    def _write(
        self, number: int, places: range, tokens: TokenRows, batch: Batch | None, made: _Slice, ledger: Ledger
    ) -> None:
        """Both sequences of a row, or neither."""
        try:
            for place in places:
                if place in tokens.faults:
                    raise tokens.faults[place]
            label = f"{self._label or 'source'}:{number}"
            kept = [kept_ranges(tokens, place, batch, self.spec, label) for place in places]
        except (RowFault, RowDropped) as why:
            ledger.leave_out(number, why)
            return
        made.written += 1
        made.rendered += int(tokens.offsets[places[-1] + 1] - tokens.offsets[places[0]])
        for ranges in kept:
            made.ids += [tokens.ids[a:b] for a, b in ranges]
            made.mask += [tokens.mask[a:b] for a, b in ranges]
            made.lengths.append(sum(b - a for a, b in ranges))
            made.source_rows.append(number)

    def _compare_sample(self, flat: list[Sequence], tokens: TokenRows, made: _Slice) -> None:
        """Hold a few rows against `apply_chat_template`, or plain texts against the reference encoder.

        Raises:
            EncoderDiffers: the ids differ though the text is the same.
            RenderDiffers: the text differs.
        """
        for place in _sample(len(flat)):
            sequence = flat[place]
            if sequence.tokens is not None or place in tokens.faults:
                continue
            ids = tokens.ids[tokens.offsets[place] : tokens.offsets[place + 1]].tolist()
            if isinstance(sequence.example, ChatExample):
                truth = self.tokenizer.reference_ids(sequence.example.messages, sequence.example.tools)
            else:
                inner, _ = self._reference.encode_with_offsets(sequence.text)
                truth = [*sequence.prefix, *inner, *sequence.suffix]
            made.sampled += 1
            if ids != truth:
                inner, _ = self._reference.encode_with_offsets(sequence.text)
                self._differs(sequence, [*sequence.prefix, *inner, *sequence.suffix] == ids)

    def _differs(self, sequence: Sequence, encoder_is_right: bool) -> None:
        shown = repr(sequence.text[:80])
        if encoder_is_right:
            raise RenderDiffers(shown)
        raise EncoderDiffers(shown)

    def _result(self, made: _Slice, ledger: Ledger) -> SliceResult:
        ids = np.concatenate(made.ids) if made.ids else np.zeros(0, np.int32)
        mask = np.concatenate(made.mask) if made.mask else np.zeros(0, np.uint8)
        trained = int(mask.sum(dtype=np.int64))
        books = ledger.books(made.written, made.rendered, trained, len(mask) - trained)
        preference = self._format is not None and self._format.name == "preference"
        table = _table(ids, mask, made, preference)
        return SliceResult(table, books, ledger.examples, self._encoder.name, self._switched, made.sampled)


def json_rows(data: bytes | bytearray | memoryview, first_row: int) -> Iterator[SourceRow]:
    """Rows of complete JSON lines; one that is broken comes with its error."""
    import orjson

    for number, line in enumerate(bytes(data).split(b"\n"), first_row):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as broken:
            yield SourceRow(number, None, f"broken JSON: {broken}")
            continue
        if isinstance(value, dict):
            yield SourceRow(number, value)
        else:
            yield SourceRow(number, None, f"not a JSON object: it is a {type(value).__name__}")


def _chunks(rows: Iterator[SourceRow]) -> Iterator[list[SourceRow]]:
    while chunk := list(islice(rows, ROWS_PER_CHUNK)):
        yield chunk


def _sample(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1}) if count else []


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowFault("a text holds half a surrogate pair") from None


def _table(ids: Any, mask: Any, made: _Slice, preference: bool) -> pa.Table:
    offsets = np.zeros(len(made.lengths) + 1, np.int32)
    np.cumsum(made.lengths, out=offsets[1:])
    columns = [
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(mask)),
        pa.array(made.source_rows, pa.int64()),
    ]
    if preference:
        columns.append(pa.array([1, 0] * (len(made.lengths) // 2), pa.uint8()))
    return pa.table(columns, schema=PREFERENCE_SCHEMA if preference else SCHEMA)
