"""Rows read many at once are what each of them is alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.chat.sequence import FREE, Sequence, batch_of
from raysvc.chat.source import json_rows
from raysvc.chat.source.json_rows import SourceRow


@given(st.lists(st.tuples(st.text("aé你\U0001f600\n", max_size=5), st.data()), min_size=1, max_size=4))
def test_a_span_in_a_batch_has_the_bytes_of_its_characters(given_texts: list[tuple[str, Any]]) -> None:
    sequences, said = [], []
    for text, data in given_texts:
        ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        spans = [*zip(ends[::2], ends[1::2], strict=False)]
        sequences.append(Sequence(text, [(a, b, FREE) for a, b in spans]))
        said += [(len(sequences) - 1, text[a:b]) for a, b in spans]
    batch = batch_of(sequences)
    whole, spans_found = batch.data.tobytes(), batch.spans
    assert [batch.text(row) for row in range(len(batch))] == [text for text, _ in given_texts]
    places = zip(spans_found.rows, spans_found.starts, spans_found.ends, strict=True)
    assert [(int(row), whole[a:b].decode()) for row, a, b in places] == said
    starts = batch.offsets[spans_found.rows]
    assert np.all((starts <= spans_found.starts) & (spans_found.ends <= batch.offsets[spans_found.rows + 1]))


LINES = (
    b'{"a": 1}',
    b'{"a": 123456789012345678901234567890}',
    b'{"a": NaN}',
    b'\xef\xbb\xbf{"a": "after a mark"}',
    b'{"a": "\\ud800"}',
    b"[1]",
    b"3",
    b"{broken",
    b'{"a": "\xff"}',
    b"",
    b"  \r",
)


@pytest.mark.parametrize("at_once", [1, 3, 64])
@given(lines=st.lists(st.sampled_from(LINES), max_size=8), ends=st.booleans())
def test_a_json_line_is_read_alike_whatever_lines_stand_beside_it(
    at_once: int, lines: list[bytes], ends: bool
) -> None:
    alone = [row for number, line in enumerate(lines) for row in json_rows.json_rows(line, 7 + number)]
    data = b"\n".join(lines) + b"\n" * ends
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "LINES_AT_ONCE", at_once)
        found = [*json_rows.json_rows(data, 7)]
    assert [_seen(row) for row in found] == [_seen(row) for row in alone]
    for row in found:
        if row.data is not None:
            assert row.line is not None
            assert repr(json.loads(row.line.removeprefix(b"\xef\xbb\xbf"))) == repr(row.data)
    numbers = [7 + number for number, line in enumerate(lines) if line.strip()]
    assert [row.source_row for row in found] == numbers


def _seen(row: SourceRow) -> Any:
    return row.source_row, repr(row.data), row.error, (row.line or b"").strip(b"\n"), row.odd
