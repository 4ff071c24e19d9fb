"""Rows that bring their tokens, and say which of them are trained: by a mask, or by labels as trainers have them."""

from __future__ import annotations

from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import TokensExample
from raysvc.chat.source.messages import kind_of

NO_LABEL = -100


def read_tokens(ids: Any, attention: Any, mask: Any, labels: Any, all_tokens: bool) -> TokensExample:
    """Tokens and their mask, of the columns `input_ids`, `attention_mask`, `loss_mask` and `labels`.

    Raises:
        RowFault: they are no such lists, do not fit each other, or neither a mask nor labels say what is trained.
    """
    ids = _ints(ids, "input_ids")
    if attention is not None and not all(_ints(attention, "attention_mask")):
        raise RowFault("attention_mask holds zeros", "rows must not be padded")
    if mask is not None:
        return TokensExample(ids, _read_mask(mask, ids))
    if labels is not None:
        return TokensExample(ids, _mask_of(labels, ids))
    if not all_tokens:
        raise RowFault("neither loss_mask nor labels", "train_on: all_tokens trains every token of a row")
    return TokensExample(ids, [1] * len(ids))


def _read_mask(given: Any, ids: list[int]) -> list[int]:
    mask = _ints(given, "loss_mask")
    if len(mask) != len(ids) or not {0, 1}.issuperset(mask):
        raise RowFault("loss_mask is not one 0 or 1 for each token", f"{len(mask)} for {len(ids)} tokens")
    return mask


def _mask_of(given: Any, ids: list[int]) -> list[int]:
    labels = _ints(given, "labels")
    if len(labels) != len(ids) or any(b not in (a, NO_LABEL) for a, b in zip(ids, labels, strict=False)):
        raise RowFault("labels are not the tokens themselves or -100", f"{len(labels)} for {len(ids)} tokens")
    return [int(label != NO_LABEL) for label in labels]


def _ints(value: Any, column: str) -> list[int]:
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list) or not all(isinstance(item, int) for item in values):
        raise RowFault(f"{column!r} is not a list of integers", f"it is {kind_of(value)}")
    return [int(item) for item in values]
