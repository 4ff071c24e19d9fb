"""Source rows -> tokens and mask, one slice at a time, a chunk of rows after the other (`row_sequences.RowChunk`):

1. rows -> messages -> texts, with the spans of what is trained (`row_sequences`);
2. texts -> ids, spans -> mask, verified by decoding;
3. some rows are compared with `apply_chat_template`;
4. rows that are too long lose their first turns, where the job says so;
5. media get their places;
6. what cannot be written is left out or cut, and counted;
7. columns go along, and all becomes a table.

Always true:
- a row that is written has the ids of `apply_chat_template`, and a mask that was verified;
- a row that fails is quarantined alone, never with its slice;
- every slice is compared with the reference on a sample; a difference switches to the reference, with a warning;
- the row counts of a slice balance.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raysvc.chat.arrow import PAIR_COLUMN, table_of
from raysvc.chat.carry import text_widths
from raysvc.chat.garbage import no_collection
from raysvc.chat.media_places import FIELDS, media_arrays, place_media, sampled_places, true_ids
from raysvc.chat.reference_check import RenderDiffers, compare, raw_example, sample_places
from raysvc.chat.render.renderer import Renderer
from raysvc.chat.row_counter import FirstRows, RowCounter
from raysvc.chat.row_counts import Quarantined, RowCounts
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.row_sequences import RowChunk, RowSequences, RowWatch, texts_of
from raysvc.chat.select import Kept, fewer_turns, keep
from raysvc.chat.sequence import Batch, Sequence
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.json_rows import SourceRow, json_blocks, json_rows
from raysvc.chat.tokens.align import TokenTable
from raysvc.chat.tokens.probe import encoders_of
from raysvc.chat.tokens.token_rows import EncoderDiffers, RowEncoder, TokenRows, rows_of_tokens
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import PAIRED, TextSpec
from raysvc.media.media_desk import MediaDesk
from raysvc.media.medium import COLUMN

REMEDIES_TRIED = 3  # rows of a chunk
logger = logging.getLogger(__name__)

FORMAT_VERSION = 12


@dataclass(frozen=True)
class SliceResult:
    """One tokenized slice.

    Attributes:
        table: as `tables` writes it.
        row_counts: balanced.
        examples: a few quarantined rows of each reason.
        encoder: that made the ids.
        switched: why it is not the fast one, empty when it is.
        sampled: rows that were compared with `apply_chat_template` or the reference encoder.
        left_out: columns of its rows that are neither used nor carried.
        text_widths: carried column of text -> characters of its longest value.
        media: digests of the media of its rows, sorted.
    """

    table: pa.Table
    row_counts: RowCounts
    examples: tuple[Quarantined, ...]
    encoder: str = ""
    switched: str = ""
    sampled: int = 0
    left_out: tuple[str, ...] = ()
    text_widths: Mapping[str, int] = field(default_factory=dict)
    media: tuple[str, ...] = ()


class SliceTokenizer:
    """Tokenizes slices of one source. Loads the tokenizer and probes the encoder once.

    Args:
        spec: what decides tokens and mask.
        dataset_label: names the source in messages about rows.
        tokenizer: that of the spec, where it is loaded already.
        desk: takes the media of rows, where the spec says that there may be some.
        watch: is shown the rows of each slice and what became of them.

    Raises:
        TokenizerError: no tokenizer, no template, or a broken one.
    """

    def __init__(
        self,
        spec: TextSpec,
        dataset_label: str = "",
        tokenizer: LoadedTokenizer | None = None,
        desk: MediaDesk | None = None,
        watch: RowWatch | None = None,
    ) -> None:
        assert spec.media == (desk.processor.kinds if desk else ())
        self.tokenizer = tokenizer or LoadedTokenizer(spec.tokenizer)
        self.desk, self._watch = desk, watch
        self._label = dataset_label
        self._reference, self._encoder, self._switched = encoders_of(self.tokenizer)
        self._appends_end = spec.train_end == "append"
        renderer = Renderer(self.tokenizer, desk, self._appends_end)
        self._rows = RowSequences(spec, self.tokenizer, renderer, desk)
        self._table = TokenTable(
            self.tokenizer, renderer.control_tokens, renderer.inner_tokens, renderer.end_tokens
        )
        self._digests: set[str] = set()  # of the slice's media

    @property
    def spec(self) -> TextSpec:
        """Returns what decides tokens and mask; with the format and columns of the source once they are known."""
        return self._rows.spec

    @property
    def encoder_name(self) -> str:
        """The name of the encoder that makes the ids."""
        return self._encoder.name

    def run(self, rows: Iterable[SourceRow], first_rows: FirstRows | None = None) -> SliceResult:
        """Tokenize one slice.

        Args:
            first_rows: decides whether to go on after the first ones.

        Raises:
            SourceError: a column that is needed is missing, or a row is too long and `truncation` is `error`.
            QuarantineExceeded: nearly all of the first rows were quarantined.
        """
        held = list(rows)
        return self._run(lambda counter: self._made_of_rows(iter(held), counter), first_rows)

    def run_json_lines(
        self, data: bytes | bytearray | memoryview, first_row: int, first_rows: FirstRows | None = None
    ) -> SliceResult:
        """Tokenize one slice of complete JSON lines; blank lines are no rows but keep their number.

        Args:
            data: UTF-8 bytes.
            first_row: number of the first line in the source.
            first_rows: as in `run`.
        """
        lines = bytes(data).removeprefix(codecs.BOM_UTF8)  # of any file whose first slice this is
        return self._run(lambda counter: self._made_of_lines(lines, first_row, counter), first_rows)

    def rendered(self, row: SourceRow) -> list[Sequence]:
        """Renders a row that was tokenized before, for a person who asks why it was left out: see `RowSequences.rendered`."""
        return self._rows.rendered(row)

    def _run(
        self, make: Callable[[RowCounter], Iterator[tuple[Kept, int]]], first_rows: FirstRows | None
    ) -> SliceResult:
        with no_collection():
            while True:
                watch = self._watch
                counter = RowCounter(self._label, first_rows, watch.leave_out if watch else None)
                if watch is not None:
                    watch.begin()
                self._rows.names.clear()
                self._digests.clear()
                try:
                    return self._result(list(make(counter)), counter)
                except EncoderDiffers as differs:
                    if self._encoder is self._reference:
                        raise  # it does not give the same ids twice
                    self._switched = f"{self._encoder.name} differs from the reference on {differs}"
                    self._encoder = self._reference
                logger.warning("dataset=%s switched to the reference: %s", self._label, self._switched)

    def _made_of_lines(self, data: bytes, first_row: int, counter: RowCounter) -> Iterator[tuple[Kept, int]]:
        for block, number in json_blocks(data, first_row):
            yield from self._made_of_rows(json_rows(block, number), counter)

    def _made_of_rows(self, rows: Iterator[SourceRow], counter: RowCounter) -> Iterator[tuple[Kept, int]]:
        while True:
            chunk, num_read = self._rows.chunk(rows, counter)
            if not num_read:
                return
            while chunk.flat:
                try:
                    yield self._passed(chunk)
                    break
                except _DamagedInside as why:  # no other look at this row decodes it before it is trained
                    row = chunk.origins[why.place].source_row
                    counter.leave_out(row, why.fault)
                    chunk = chunk.without(row)
            counter.read(num_read)

    def _passed(self, chunk: RowChunk) -> tuple[Kept, int]:
        """Returns what is written of a chunk, and how many rows of it were compared."""
        for stage in (
            self._encode,
            self._compare,
            self._shorten,
            self._place_media,
            self._cut,
            self._note,
            self._carry,
        ):
            stage(chunk)
        assert chunk.kept is not None
        if self._watch is not None:
            self._watch.chunks.append(chunk)
        return chunk.kept, chunk.compared

    def _encode(self, chunk: RowChunk) -> None:
        """Texts -> ids, spans -> mask."""
        chunk.batch = texts_of(chunk.flat)
        chunk.tokens = self._tokens_of(chunk.flat, chunk.batch)
        chunk.rendered = np.diff(chunk.tokens.offsets)

    def _compare(self, chunk: RowChunk) -> None:
        """Hold a few rows against `apply_chat_template`."""
        form, flat, batch, tokens = self._rows.format, chunk.flat, chunk.batch, chunk.tokens
        if batch is None or form is None or tokens is None:
            return
        seed = chunk.origins[0].source_row
        chunk.compared = compare(
            sample_places(batch, seed),
            tokens,
            lambda place: (
                None if flat[place].media else raw_example(chunk.origins[place], form, flat[place].example)
            ),
            lambda place: (flat[place].prefix, flat[place].text, flat[place].suffix),
            self.tokenizer,
            self._reference,
        )
        chunk.compared += self._compare_media(flat, tokens, seed)

    def _shorten(self, chunk: RowChunk) -> None:
        """`keep_end_turns`: leave turns out of rows that are too long."""
        lengths, limit = chunk.rendered, self.spec.max_length
        if self.spec.truncation != "keep_end_turns" or limit is None or lengths.max() <= limit:
            return
        shorter = [*map(self._shortened, chunk.flat, lengths.tolist())]
        if any(a is not b for a, b in zip(shorter, chunk.flat, strict=True)):
            chunk.flat, chunk.tokens = shorter, self._tokens_of(shorter, texts_of(shorter))

    def _place_media(self, chunk: RowChunk) -> None:
        """Find where the tokens of media lie."""
        if self.desk is not None and chunk.tokens is not None:
            cut_at = self.spec.max_length if self.spec.truncation == "keep_start" else None
            chunk.media = place_media(chunk.flat, chunk.tokens, self.desk.processor, cut_at)

    def _cut(self, chunk: RowChunk) -> None:
        """Choose what is written: no faults, and nothing that is too long."""
        assert chunk.tokens is not None
        kept = keep(chunk.tokens, chunk.numbers, self.spec, chunk.counter)
        after = np.diff(chunk.tokens.offsets)
        chunk.kept = _with_cut_turns(kept, chunk.numbers, chunk.rendered, after, chunk.counter)

    def _carry(self, chunk: RowChunk) -> None:
        """Columns that go along with what is written."""
        assert chunk.kept is not None
        if self._rows.carrier is not None:
            chunk.kept = replace(chunk.kept, carried=self._rows.carrier.arrays(chunk.kept))
        if chunk.media is not None:
            written = np.flatnonzero(np.isin(chunk.numbers, chunk.kept.source_rows)).tolist()
            left = [chunk.media[place] for place in written]
            self._digests.update(one.sha256 for each in left for one in each)
            chunk.kept = replace(chunk.kept, carried={**chunk.kept.carried, **media_arrays(left)})

    def _compare_media(self, flat: list[Sequence], tokens: TokenRows, seed: int) -> int:
        """Hold some rows with media against the processor itself; how many.

        Raises:
            _DamagedInside: the media of one cannot be decoded.
        """
        if self.desk is None:
            return 0
        places = sampled_places(flat, seed)
        for place in places:
            ids = tokens.ids[tokens.offsets[place] : tokens.offsets[place + 1]].tolist()
            try:
                expected = [*true_ids(flat[place], self.tokenizer, self.desk), *flat[place].suffix]
            except RowFault as fault:
                raise _DamagedInside(place, fault) from fault
            if ids != expected:
                raise RenderDiffers(f"{flat[place].text[:80]!r}, a row with media")
        return len(places)

    def _note(self, chunk: RowChunk) -> None:
        """Count what the normal form changed, and the reasoning and the ends that a template left out, in rows that are written."""
        assert chunk.kept is not None
        kept, counter = chunk.kept, chunk.counter
        changed: dict[int, frozenset[str]] = {}
        removed: list[tuple[int, Sequence]] = []
        endless: dict[int, list[Sequence]] = {}
        for row, one in zip(chunk.origins, chunk.flat, strict=True):
            number = row.source_row
            if one.changes:
                changed[number] = changed.get(number, frozenset()) | one.changes
            if one.removed:
                removed.append((number, one))
            if one.endless:
                endless.setdefault(number, []).append(one)
        written = set(kept.source_rows.tolist()) if changed or removed or endless else set()
        for number in changed.keys() & written:
            counter.note(changed[number])
        for number in endless.keys() & written:
            own = endless[number]
            counter.leave_open(sum(one.endless for one in own), not any(one.has_end for one in own))
        lost = [one for number, one in removed if number in written]
        if lost:
            counter.remove_reasoning(sum(one.removed for one in lost), self._kept_by_turns(lost))

    def _kept_by_turns(self, lost: list[Sequence]) -> int:
        """Try `each_assistant_turn` on a few conversations that lost reasoning: how many messages it keeps it for."""
        form = self._rows.format
        if form is None or form.train_on == "each_assistant_turn" or form.name in PAIRED:
            return 0
        tried = [one for one in lost if not one.media][:REMEDIES_TRIED]
        return sum(map(self._rows.renderer.kept_by_turns, tried))

    def _shortened(self, sequence: Sequence, length: int) -> Sequence:
        """`keep_end_turns`: the render of as many whole last turns as fit, the sequence itself when none does."""
        limit, example = self.spec.max_length, sequence.example
        if limit is None or length <= limit or not isinstance(example, ChatExample):
            return sequence
        choices = [chosen for chosen in fewer_turns(example) if chosen.trained or chosen.all_tokens]
        best, low, high = sequence, 0, len(choices)
        while low < high:  # the fewer turns the shorter
            middle = (low + high) // 2
            try:
                made = self._rows.renderer.sequence(choices[middle])
            except (RowFault, RowDropped):
                low = middle + 1  # the template refuses this beginning
                continue
            if int(self._tokens_of([made], texts_of([made])).offsets[-1]) <= limit:
                best, high = made, middle
            else:
                low = middle + 1
        return best

    def _tokens_of(self, flat: list[Sequence], batch: Batch | None) -> TokenRows:
        if batch is None:
            return rows_of_tokens([one.tokens for one in flat if one.tokens is not None])
        return RowEncoder(self._encoder, self._reference, self._table).encode(batch)

    def _result(self, made: list[tuple[Kept, int]], counter: RowCounter) -> SliceResult:
        kept = [part for part, _ in made]
        trained = sum(int(part.mask.sum(dtype=np.int64)) for part in kept)
        tokens = sum(len(part.ids) for part in kept)
        rendered, rows = sum(part.rendered for part in kept), sum(part.rows for part in kept)
        row_counts = counter.row_counts(rows, rendered, trained, tokens - trained)
        form, carrier = self._rows.format, self._rows.carrier
        pair = PAIR_COLUMN.get(form.name) if form is not None else None
        compared = sum(count for _, count in made)
        fields = [*(carrier.schema if carrier is not None else ()), *(FIELDS if self.desk else ())]
        table = table_of(kept, pair, fields)
        return SliceResult(
            table,
            row_counts,
            counter.examples,
            self._encoder.name,
            self._switched,
            compared,
            tuple(sorted(self._rows.names - form.known_columns)) if form is not None else (),
            {name: width for name, width in text_widths(table).items() if name != COLUMN},
            tuple(sorted(self._digests)),
        )


def _with_cut_turns(
    kept: Kept,
    numbers: npt.NDArray[np.int64],
    before: npt.NDArray[np.int64],
    after: npt.NDArray[np.int64],
    counter: RowCounter,
) -> Kept:
    """Count the tokens of turns that were left out of rows that are written."""
    cut = (after < before) & np.isin(numbers, kept.source_rows)
    if not cut.any():
        return kept
    counter.truncate(len(np.unique(numbers[cut])))
    return replace(kept, rendered=kept.rendered + int((before - after)[cut].sum()))


class _DamagedInside(Exception):
    """A row that was taken to be compared has media that cannot be decoded."""

    def __init__(self, place: int, fault: RowFault) -> None:
        super().__init__(place, fault)
        self.place, self.fault = place, fault
