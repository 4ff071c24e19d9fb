"""Hold a few rows of every slice against the truth.

Always true:
- a chat is compared with `apply_chat_template(tokenize=True)`, a text with the reference encoder;
- a difference says whose it is: the encoder's, or that of the text we rendered;
- a chat that our normal form did not change is given as it stands in the source, without keys whose value is null. It is read a
  second time and with another parser than the rows that are tokenized, so that a value which our own reading changed shows;
- any other is given as we normalized it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from raysvc.chat.row_counts import NULLS
from raysvc.chat.sequence import Batch
from raysvc.chat.source.examples import ChatExample, Example
from raysvc.chat.source.formats import Format
from raysvc.chat.source.json_rows import SourceRow, without_nulls
from raysvc.chat.tokens.encoder import ReferenceEncoder
from raysvc.chat.tokens.load_faults import varying_fault
from raysvc.chat.tokens.token_rows import EncoderDiffers, TokenRows
from raysvc.chat.tokens.tokenizer import LoadedTokenizer

LONGEST_BYTES = 1 << 15
ROWS_PER_SAMPLE = 2048


class RenderDiffers(Exception):
    """We rendered another text than `apply_chat_template`; the argument says on what."""


def sample_places(batch: Batch, seed: int) -> list[int]:
    """Rows to compare, others for every seed: any two and one more of every `ROWS_PER_SAMPLE`, one of them not ASCII.

    Giants are left out, unless there is nothing else.
    """
    lengths = np.diff(batch.offsets)
    fit = np.flatnonzero(lengths <= max(LONGEST_BYTES, int(lengths.min(initial=LONGEST_BYTES))))
    if not len(fit):
        return []
    random = np.random.default_rng(seed)
    beyond = np.searchsorted(np.flatnonzero(batch.data >= 0x80), batch.offsets)  # bytes that are not ASCII
    hard = fit[np.diff(beyond)[fit] > 0]
    count = min(2 + len(batch) // ROWS_PER_SAMPLE, len(fit))
    chosen = random.choice(fit, count, replace=False)
    chosen[-1] = random.choice(hard) if len(hard) else chosen[-1]
    return sorted({*chosen.tolist()})


def compare(
    places: Iterable[int],
    tokens: TokenRows,
    example: Callable[[int], Example | None],
    around: Callable[[int], tuple[tuple[int, ...], str, tuple[int, ...]]],
    tokenizer: LoadedTokenizer,
    reference: ReferenceEncoder,
) -> int:
    """Compare some rows; how many were compared.

    Args:
        places: of the rows in `tokens`.
        tokens: what was made of them.
        example: what a row came from.
        around: (ids before, text, ids behind) of a row.
        tokenizer: for the truth of a chat.
        reference: for the truth of a text.

    Raises:
        EncoderDiffers: the ids are not those of the text.
        RenderDiffers: the text is not the true one.
    """
    compared = 0
    for place in places:  # those with a fault too: it may be ours
        ids = tokens.ids[tokens.offsets[place] : tokens.offsets[place + 1]].tolist()
        before, text, behind = around(place)
        chat = example(place)
        if isinstance(chat, ChatExample):
            truth = [*before, *tokenizer.reference_ids(chat.messages, chat.tools, chat.prompt), *behind]
        else:
            truth = [*before, *reference.encode_with_offsets(text)[0], *behind]
        compared += 1
        if ids != truth:
            if isinstance(chat, ChatExample):
                _refuse_varying(truth[len(before) :], chat, tokenizer)
            own = [*before, *reference.encode_with_offsets(text)[0], *behind]
            raise (RenderDiffers if own == ids else EncoderDiffers)(repr(text[:80]))
    return compared


def raw_example(row: SourceRow, form: Format, example: Example | None) -> Example | None:
    """The same example with messages and tools of the row itself."""
    if form.name != "chat" or not isinstance(example, ChatExample) or example.changes - NULLS:
        return example
    data = row.data if row.line is None else json.loads(row.line.removeprefix(b"\xef\xbb\xbf"))
    assert data is not None
    data = without_nulls(data) if form.drop_nulls else data
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


def _refuse_varying(ids: list[int], chat: ChatExample, tokenizer: LoadedTokenizer) -> None:
    """Raise `TokenizerError` when the template itself writes something else the second time."""
    if ids != tokenizer.reference_ids(chat.messages, chat.tools, chat.prompt):
        raise varying_fault()
