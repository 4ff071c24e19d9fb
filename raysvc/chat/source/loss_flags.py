"""Defines what a message of the assistant says about its own loss, in the spellings of those who write such rows.

Always true:
- a spelling in the table has one meaning, the one that its owner gives it;
- a key that sounds like one and is in no table, with a truth value, a number or a list, is refused by its name: `mask: 1` is
  trained for some and not for others;
- any other unknown key with a truth value or a number, also as a word, is named in the report, as an unused column is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.text_numbers import TRUTHS


class KeySpelling(NamedTuple):
    """One key of a message.

    Attributes:
        trained: what it means when it is true, or 1.
        owners: who writes or reads it so.
    """

    trained: bool
    owners: str


SPELLINGS: Mapping[str, KeySpelling] = MappingProxyType(
    {
        "weight": KeySpelling(True, "OpenAI, Fireworks, mistral-finetune, OpenChat"),
        "loss_weight": KeySpelling(True, "LLaMA-Factory"),
        "loss": KeySpelling(True, "ms-swift, XTuner"),
        "loss_scale": KeySpelling(True, "ms-swift"),
        "loss_mask": KeySpelling(True, "verl"),
        "train": KeySpelling(True, "Axolotl"),
        "training": KeySpelling(True, "Axolotl"),
        "train_on_turn": KeySpelling(True, "Axolotl, as home-llm configures it"),
        "trainable": KeySpelling(True, "tinker-cookbook"),
        "masked": KeySpelling(False, "torchtune"),
    }
)
WITHIN = ("train_detail", "training_detail")  # which characters of a message are trained, as Axolotl has it
IGNORED = "messages."  # what `source.ignore` writes before the name of such a key
_SOUNDS_SO = re.compile(r"train|loss|mask|ignor|learn|weight|supervis|label", re.IGNORECASE)
_ANSWERS = frozenset((*TRUTHS, "yes", "no", "on", "off"))
_READ = frozenset((*SPELLINGS, *WITHIN, "role", "content", "name", "prefix", "partial", "is_error"))


def says_trained(message: Mapping[str, Any]) -> bool | None:
    """Returns whether a message says that it is trained, None when it says nothing.

    Raises:
        RowFault: it says something else than yes or no, both of them, or it trains a part of itself.
    """
    found = {name: _is_true(name, message[name]) is spelling.trained for name, spelling in _given(message)}
    if len({*found.values()}) > 1:
        raise RowFault("the weights of a message contradict each other", ", ".join(sorted(found)))
    trained = next(iter(found.values()), None)
    within = next((name for name in WITHIN if message.get(name)), None)
    if within and (trained or (trained is None and message.get("role") == "assistant")):
        raise RowFault(f"{within!r} trains a part of a message", "messages are trained whole")
    return trained


def refuse_partly_trained(parts: Iterable[Any], place: str) -> None:
    """Look at the content parts of a message of the assistant, which Axolotl lets say whether they are trained.

    Raises:
        RowFault: one says that it is not.
    """
    for part in parts:
        if isinstance(part, dict) and says_trained(part) is False:
            raise RowFault(
                "a part of a message says that it is not trained", f"{place}: messages are trained whole"
            )


def unread_keys(messages: Iterable[Mapping[str, Any]], ignored: Collection[str]) -> frozenset[str]:
    """Unknown keys of the assistant's messages that hold a truth value or a number.

    Args:
        messages: in normal form.
        ignored: what `source.ignore` says.

    Raises:
        RowFault: one sounds as if it said whether the message is trained.
    """
    found: set[str] = set()
    for message in messages:
        if len(message) > 2 and message["role"] == "assistant":
            found |= {name for name, value in message.items() if _is_unread(name, value)}
    if not found:
        return frozenset()
    found -= {name.removeprefix(IGNORED) for name in ignored if name.startswith(IGNORED)}
    odd = next((name for name in sorted(found) if name != "loss" and _SOUNDS_SO.search(name)), None)
    if odd is not None:
        raise RowFault(
            f"a message has {odd!r}, which may say that it is not trained",
            f"rename it to weight (1: trained), or source.ignore: [{IGNORED}{odd}] says that it has no meaning here",
        )
    return frozenset(found)


def _given(message: Mapping[str, Any]) -> list[tuple[str, KeySpelling]]:
    known = SPELLINGS.keys() & message.keys()
    return [(name, SPELLINGS[name]) for name in sorted(known) if not _is_measured(name, message[name])]


def _is_measured(name: str, value: Any) -> bool:
    """Returns whether it is a loss that somebody measured."""
    return name == "loss" and isinstance(value, int | float) and value not in (0, 1)


def _is_true(name: str, value: Any) -> bool:
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise RowFault("a message weight is not 0 or 1", f"{name!r} is {value!r}"[:80])
    return bool(value)


def _is_unread(name: str, value: Any) -> bool:
    if name in _READ and not _is_measured(name, value):
        return False
    if isinstance(value, bool | int | float) or (
        isinstance(value, str) and value.strip().lower() in _ANSWERS
    ):
        return True
    return isinstance(value, list) and bool(_SOUNDS_SO.search(name))
