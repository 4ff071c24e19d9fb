"""Finds the messages of a conversation that are trained, by `train_on` and by the weights that messages carry."""

from __future__ import annotations

from collections.abc import Iterable

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.loss_flags import SPELLINGS, WITHIN, says_trained
from raysvc.chat.source.messages import Message, unknown_roles

_WEIGHTS = frozenset((*SPELLINGS, *WITHIN))


def trained_messages(messages: list[Message], train_on: str, start: int) -> tuple[int, ...]:
    """Places of the messages with loss; `start` is where the completion begins.

    Raises:
        RowDropped: there are none.
        RowFault: a weight that is not 0 or 1, weights that contradict each other, or one on a message of another role;
            weight 0 on a message that another `train_on` trains; a message of which only a part is trained.
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
    check_weights((messages[place] for place in places), train_on)
    return tuple(places)


def check_weights(trained: Iterable[Message], train_on: str) -> None:
    """Look at the weights of the assistant's messages that a policy trains which does not read weights.

    Raises:
        RowFault: as `trained_messages`.
    """
    for message in trained:
        if not _WEIGHTS.isdisjoint(message) and not _weight(message):
            raise RowFault(
                f"a message that train_on: {train_on} trains has weight 0",
                "train_on: message_weight reads weights",
            )


def _refuse_unknown_roles(messages: list[Message]) -> None:
    unknown = unknown_roles(messages)
    if unknown:
        what = f"no message of the assistant, and unknown roles: {', '.join(unknown)}"
        raise RowFault(what, f"map them: source.roles: {{{unknown[0]}: assistant}}")


def _weight(message: Message) -> bool:
    """Returns what the message says; one of the assistant that says nothing is trained."""
    assistant, trained = message["role"] == "assistant", says_trained(message)
    if trained and not assistant:
        raise RowFault(
            "a weight on a message that is not the assistant's", f"its role is {message['role']!r}"
        )
    return assistant if trained is None else trained
