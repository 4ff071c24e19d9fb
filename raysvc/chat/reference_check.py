"""Hold a few rows of every slice against the truth.

Always true:
- a chat is compared with `apply_chat_template(tokenize=True)`, a text with the reference encoder;
- a difference says whose it is: the encoder's, or that of the text we rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from raysvc.chat.source.examples import ChatExample, Example
from raysvc.chat.text_batch import Batch
from raysvc.chat.tokens.encoder import ReferenceEncoder
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
            truth = [*before, *tokenizer.reference_ids(chat.messages, chat.tools, chat.prompt)]
        else:
            truth = [*before, *reference.encode_with_offsets(text)[0], *behind]
        compared += 1
        if ids != truth:
            own = [*before, *reference.encode_with_offsets(text)[0], *behind]
            raise (RenderDiffers if own == ids else EncoderDiffers)(repr(text[:80]))
    return compared
