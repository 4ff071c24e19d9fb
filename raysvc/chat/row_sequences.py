"""Rows of a source -> sequences to encode, a chunk at a time: the one form in which they pass through all that follows.

Axes: N sequences, T tokens.
Always true:
- sequences are in the order of their rows, each with the row that it is of;
- those of one row lie together;
- a row that fails is counted and left out, and stops nothing;
- the first row that can be read decides on the format, and what is carried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.chat.carry import Carrier, resolved
from raysvc.chat.media_places import Media
from raysvc.chat.render.renderer import Renderer
from raysvc.chat.row_counter import RowCounter
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.select import Kept
from raysvc.chat.sequence import Batch, Sequence, batch_of
from raysvc.chat.source.detect import format_of, resolve_format
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.formats import Format
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.source.loss_flags import IGNORED
from raysvc.chat.source.stepwise import STEP_LABELS
from raysvc.chat.tokens.token_rows import TokenRows
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.carried import CarriedColumn
from raysvc.job.config import TextSpec
from raysvc.media.media_desk import MediaDesk

MAX_NAMES = 1000  # of columns and keys of messages
ROWS_PER_CHUNK = 2048


@dataclass
class RowChunk:
    """Rows of one slice, side by side.

    Attributes:
        counter: of the slice; counts what becomes of the rows.
        flat: N texts with the places of what is trained.
        origins: the row of each.
        tokens: T of all of them; None before they are encoded.
        rendered: int64 [N], tokens of each before turns were left out.
        compared: how many were held against the truth.
        media: of each, where rows may have some.
        kept: what is written; None before it is known.
    """

    counter: RowCounter
    flat: list[Sequence]
    origins: list[SourceRow]
    batch: Batch | None = None
    tokens: TokenRows | None = None
    rendered: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    compared: int = 0
    media: Media | None = None
    kept: Kept | None = None

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """int64 [N], number of the row in the source."""
        return np.array([row.source_row for row in self.origins], np.int64)

    def without(self, source_row: int) -> RowChunk:
        """The same rows but for one, before they are encoded."""
        left = [place for place, origin in enumerate(self.origins) if origin.source_row != source_row]
        return RowChunk(self.counter, [self.flat[n] for n in left], [self.origins[n] for n in left])


@dataclass
class RowWatch:
    """The rows of a slice beside what became of them, for whoever looks at more than its tokens.

    Attributes:
        chunks: rows that were tokenized, some of which may not be written.
        left_out: number of a row that is not written, and why.
    """

    chunks: list[RowChunk] = field(default_factory=list)
    left_out: list[tuple[int, RowFault | RowDropped]] = field(default_factory=list)

    def begin(self) -> None:
        """Forget all: a slice begins, or begins again because an encoder differed."""
        self.chunks.clear()
        self.left_out.clear()

    def leave_out(self, source_row: int, why: RowFault | RowDropped) -> None:
        """Note a row that is not written."""
        self.left_out.append((source_row, why))


def texts_of(flat: list[Sequence]) -> Batch | None:
    """Their texts in columns; None of rows that came as tokens."""
    return batch_of(flat) if flat and flat[0].tokens is None else None


class RowSequences:
    """See the module.

    Attributes:
        spec: what decides tokens and mask; with the format and columns of the source once they are known.
        format: of the rows, None before the first one.
        carrier: of the columns that go with them, if any.
        names: columns of the slice's rows.
        renderer: as given.

    Args:
        spec: of the source.
        tokenizer: that of the spec.
        renderer: of the same tokenizer.
        desk: takes the media of rows, where there may be some.
    """

    def __init__(
        self, spec: TextSpec, tokenizer: LoadedTokenizer, renderer: Renderer, desk: MediaDesk | None
    ) -> None:
        self.spec, self.renderer = spec, renderer
        self.format: Format | None = None
        self.carrier: Carrier | None = None
        self.names: set[str] = set()
        self._tokenizer, self._desk = tokenizer, desk

    def chunk(self, rows: Iterator[SourceRow], counter: RowCounter) -> tuple[RowChunk, int]:
        """(the next rows, how many were read)."""
        if self.carrier is not None:
            self.carrier.clear()
        flat: list[Sequence] = []
        origins: list[SourceRow] = []
        num_read, keys = 0, set[tuple[str, ...]]()
        for row in islice(
            rows, ROWS_PER_CHUNK
        ):  # one by one: what was just parsed is in the processor's cache
            num_read += 1
            if row.data is not None:
                keys.add(tuple(row.data))
            try:
                sequences = self._prepare(row)
            except (RowFault, RowDropped) as why:
                counter.leave_out(row.source_row, why)
                continue
            flat += sequences
            origins += [row] * len(sequences)
        self.names.update(*keys)
        if self.format is not None and self.format.name == "kto":
            flat, origins = self._with_mismatched(flat, origins, counter)
        return RowChunk(counter, flat, origins), num_read

    def rendered(self, row: SourceRow) -> list[Sequence]:
        """Renders a row that was read before, whatever is wrong with it; the list is empty where nothing can be rendered."""
        if row.data is None or self.format is None:
            return []
        try:
            return self.renderer.unverified(row.data, self.format)
        except (RowFault, RowDropped):
            return []

    def _with_mismatched(
        self, flat: list[Sequence], origins: list[SourceRow], counter: RowCounter
    ) -> tuple[list[Sequence], list[SourceRow]]:
        """Beside each row's one sequence that of its prompt with the completion of the row before; of the chunk's last before its first."""
        form = self.format
        assert form is not None
        completion = form.column("completion")
        if len(origins) == 1:
            why = RowDropped("no other row whose completion could be its mismatched one")
            counter.leave_out(origins[0].source_row, why)
            return [], []
        made: list[Sequence] = []
        kept: list[SourceRow] = []
        for place, (row, own) in enumerate(zip(origins, flat, strict=True)):
            other = origins[place - 1].data
            assert row.data is not None
            assert other is not None
            try:
                if self._desk is not None:
                    self._desk.go_to(row.source_row)
                answer = form.opened(other)[completion]
                wrong = self.renderer.sequences({**form.opened(row.data), completion: answer}, form)
            except (RowFault, RowDropped) as why:
                counter.leave_out(row.source_row, why)
                continue
            made += [own, *wrong]
            kept += [row] * (1 + len(wrong))
        return made, kept

    def _prepare(self, row: SourceRow) -> list[Sequence]:
        if row.data is None:
            reason, _, detail = (row.error or "no data").partition(": ")
            raise RowFault(reason, detail)
        if self.format is None:
            self.format = self._resolved(row.data)
            self.carrier = self._new_carrier(self.format, row.data)
        if self._desk is not None:
            self._desk.go_to(row.source_row)
        if row.odd:
            self.format.check_values(row.data)
        sequences = self.renderer.sequences(row.data, self.format)
        for sequence in sequences:
            if not sequence.text.isascii():
                _check_text(sequence.text)
            if isinstance(sequence.example, ChatExample) and sequence.example.unread:
                self._note_unread(sequence.example.unread)
        if self.carrier is not None:
            form, data = self.format, row.data
            if form.name == "kto":
                data = {**data, form.column("label"): form.label_of(data)}
            self.carrier.take(row.source_row, data, sequences[0].tokens)
        return sequences

    def _note_unread(self, keys: frozenset[str]) -> None:
        """Name keys of messages as columns that are left out, except those that a template asks for."""
        asked = "".join(self._tokenizer.templates.values())
        found = sorted(key for key in keys if key not in asked)
        self.names.update(f"{IGNORED}{key}" for key in found if len(self.names) < MAX_NAMES)

    def _new_carrier(self, form: Format, row: Mapping[str, Any]) -> Carrier | None:
        columns, sources = resolved(self.spec.carry, row), {}
        if form.name == "kto":
            columns["label"], sources["label"] = CarriedColumn(dtype="uint8"), form.column("label")
        if form.name == "stepwise":
            labels = CarriedColumn(dtype="float32", per="token", align="response", pad=-1)
            columns[STEP_LABELS], sources[STEP_LABELS] = labels, form.column("labels")
        return Carrier(columns, form.name, sources) if columns else None

    def _resolved(self, row: Mapping[str, Any]) -> Format:
        """Returns the format of a spec that names one, else that of a row."""
        form = resolve_format(self.spec, row) if self.spec.format == "auto" else format_of(self.spec)
        if form.name not in ("text", "pretokenized"):
            self._tokenizer.check_repeats()
        if form.name == "chat":
            self._tokenizer.template_name(has_tools=False)  # rows without tools may come later
        self.spec = self.spec.model_copy(update={"format": form.name, "columns": dict(form.columns)})
        return form


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowFault("a text holds a lone surrogate") from None
