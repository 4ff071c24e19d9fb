"""Which messages of a conversation are trained, by `train_on` and by the weights that messages carry."""

from __future__ import annotations

from typing import Any

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.messages import Message, unknown_roles

WEIGHTS = ("weight", "loss_weight", "train")
_WEIGHTS = frozenset(WEIGHTS)


def trained_messages(messages: list[Message], train_on: str, start: int) -> tuple[int, ...]:
    """Places of the messages with loss; `start` is where the completion begins.

    Raises:
        RowDropped: there are none.
        RowFault: a weight that is not 0 or 1, or one on a message of another role; weight 0 on a message that another
            `train_on` trains.
    """
    if train_on == "message_weight":
        chosen = [place for place, message in enumerate(messages) if _weight(message)]
        if not chosen:
            raise RowDropped("every message has weight 0")
        return tuple(chosen)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on == "completion":
        places = [place for place in places if place >= start]
    if not places:
        _refuse_unknown_roles(messages)
        raise RowDropped("no assistant message")
    places = places[-1:] if train_on == "last_assistant_message" else places
    for place in places:
        if not _WEIGHTS.isdisjoint(messages[place]) and _given_weight(messages[place]) == 0:
            raise RowFault(
                f"a message that train_on: {train_on} trains has weight 0",
                "train_on: message_weight reads weights",
            )
    return tuple(places)


def _refuse_unknown_roles(messages: list[Message]) -> None:
    unknown = unknown_roles(messages)
    if unknown:
        what = f"no message of the assistant, and unknown roles: {', '.join(unknown)}"
        raise RowFault(what, f"map them: source.roles: {{{unknown[0]}: assistant}}")


def _weight(message: Message) -> bool:
    """`weight`, `loss_weight` (0 or 1) or `train`; an assistant message without any counts as 1."""
    assistant = message["role"] == "assistant"
    weight = _given_weight(message, assistant)
    if weight not in (0, 1):
        raise RowFault("a message weight is not 0 or 1", f"it is {weight!r}")
    if weight and not assistant:
        raise RowFault(
            "a weight on a message that is not the assistant's", f"its role is {message['role']!r}"
        )
    return bool(weight)


def _given_weight(message: Message, default: Any = None) -> Any:
    return next((message[name] for name in WEIGHTS if name in message), default)
