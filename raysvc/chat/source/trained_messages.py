"""Which messages of a conversation are trained, by `train_on` and by the weights that messages carry."""

from __future__ import annotations

from collections.abc import Iterable

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.messages import Message, unknown_roles

WEIGHTS = ("weight", "loss_weight", "train")
WITHIN = ("train_detail", "training_detail")  # which characters of a message are trained, as Axolotl has it
_WEIGHTS = frozenset((*WEIGHTS, "loss", *WITHIN))


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
    """`weight`, `loss_weight` (0 or 1), `train`, or `loss` where it is true or false; an assistant message without any counts as 1."""
    assistant = message["role"] == "assistant"
    given = [message[name] for name in WEIGHTS if name in message]
    if isinstance(message.get("loss"), bool):  # ms-swift's; a number is what somebody measured
        given.append(message["loss"])
    for weight in given:
        if not isinstance(weight, bool | int | float) or weight not in (0, 1):
            raise RowFault("a message weight is not 0 or 1", f"it is {weight!r}")
    if len({bool(weight) for weight in given}) > 1:
        raise RowFault(
            "the weights of a message contradict each other", ", ".join(sorted(_WEIGHTS & message.keys()))
        )
    weight = given[0] if given else assistant
    within = next((name for name in WITHIN if message.get(name)), None)
    if within and weight:
        raise RowFault(f"{within!r} trains a part of a message", "messages are trained whole")
    if weight and not assistant:
        raise RowFault(
            "a weight on a message that is not the assistant's", f"its role is {message['role']!r}"
        )
    return bool(weight)
