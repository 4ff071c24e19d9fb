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

from raysvc.chat.source.examples import ChatExample, Example
from raysvc.chat.source.formats import Format
from raysvc.chat.source.json_rows import SourceRow


def raw_example(row: SourceRow, form: Format, example: Example | None) -> Example | None:
    """The same example with messages and tools of the row itself."""
    if form.name != "chat" or not isinstance(example, ChatExample) or example.changes:
        return example
    data = row.data if row.line is None else json.loads(row.line.removeprefix(b"\xef\xbb\xbf"))
    assert data is not None
    given = _json_of(form.get(data, "messages"))
    messages = [_without_nulls(message) for message in ([given] if isinstance(given, dict) else given)]
    system = form.get(data, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if form.train_on == "each_assistant_turn":
        messages = messages[: len(example.messages)]
    return replace(example, messages=messages, tools=_json_of(form.get(data, "tools")) or None)


def _json_of(value: Any) -> Any:
    if not isinstance(value, str):
        return value or None
    return json.loads(value) if value.strip() else None


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}
