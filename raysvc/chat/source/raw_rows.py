"""A chat as the source holds it, for the comparison with `apply_chat_template`.

Read a second time and with another parser than the rows that are tokenized, so that a value which our own reading
changed shows as a difference.

Always true:
- a row that our normal form did not change is given as it stands in the source, without keys whose value is null;
- any other is given as we normalized it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.chat.source.formats import ChatExample, Example, Format
from raysvc.chat.source.json_rows import SourceRow


def raw_example(row: SourceRow, form: Format, example: Example | None) -> Example | None:
    """The same example with messages and tools of the row itself."""
    if form.name != "chat" or not isinstance(example, ChatExample) or example.changes:
        return example
    data = row.data if row.line is None else json.loads(bytes(row.line).removeprefix(b"\xef\xbb\xbf"))
    assert data is not None
    messages = [_without_nulls(message) for message in _json_of(form.get(data, "messages"))]
    system = form.get(data, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return replace(example, messages=messages, tools=_json_of(form.get(data, "tools")) or None)


def line_starts(data: bytes) -> npt.NDArray[np.int64]:
    """Where every line begins, and where the last one ends, int64 [lines + 1]."""
    breaks = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    ends = breaks if len(breaks) and breaks[-1] == len(data) else np.append(breaks, len(data))
    return np.concatenate([[0], ends]).astype(np.int64)


def _json_of(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value or None


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}
