"""A source row -> what is to be rendered, and which of it is trained.

Always true:
- whatever is wrong with a row is that row's fault;
- a row gives one example, a preference row two: the chosen one first.

A string prompt and its completion are one text, `prompt + completion`, joined as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.messages import Conversation, Message, read_messages, read_tools
from raysvc.config import Format as FormatName

NEEDS: dict[str, tuple[str, ...]] = {
    "chat": ("messages",),
    "preference": ("chosen", "rejected"),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "pretokenized": ("input_ids",),
    "text": ("text",),
}
NO_LABEL = -100


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation to render; `trained` holds the places of the messages with loss, in order.

    `all_tokens` puts the whole render under loss; `has_parts` says that some content is a list of text parts.
    """

    messages: list[Message]
    tools: list[Any] | None
    trained: tuple[int, ...]
    all_tokens: bool = False
    has_parts: bool = False


@dataclass(frozen=True, slots=True)
class TextExample:
    """Plain text; `context` is without loss, `trained` with."""

    context: str
    trained: str


@dataclass(frozen=True, slots=True)
class TokensExample:
    """Tokens that came as tokens; `mask` is 0 or 1 for each."""

    ids: list[int]
    mask: list[int]


Example = ChatExample | TextExample | TokensExample


@dataclass(frozen=True)
class Format:
    """How rows of one source are read.

    Attributes:
        name: one of the format names, never "auto".
        columns: our column name -> the source's.
        train_on: from the spec.
    """

    name: FormatName
    columns: Mapping[str, str]
    train_on: str

    @property
    def sequences_per_row(self) -> int:
        """Sequences that one source row gives."""
        return 2 if self.name == "preference" else 1

    def column(self, ours: str) -> str:
        """The source's name of one of our columns."""
        return self.columns.get(ours, ours)

    def get(self, row: Mapping[str, Any], ours: str) -> Any:
        """Value of one of our columns in a source row, None when it is not there."""
        return row.get(self.columns.get(ours, ours))

    def normalize(self, row: Mapping[str, Any]) -> tuple[Example, ...]:
        """Examples of one row.

        Raises:
            RowFault: the row cannot be read.
            RowDropped: nothing of it is to be trained.
        """
        for ours in NEEDS[self.name]:
            if self.get(row, ours) is None:
                raise RowFault(f"no value in column {self.column(ours)!r}", _columns(row))
        if self.name == "preference":
            prompt = self.get(row, "prompt")
            return tuple(
                self._completed(row, prompt, self.get(row, side), self.column(side), answer_only=True)
                for side in ("chosen", "rejected")
            )
        return (getattr(self, f"_{self.name}")(row),)

    def _chat(self, row: Mapping[str, Any]) -> ChatExample:
        return self._conversation(row, read_messages(self.get(row, "messages"), self.column("messages")), 0)

    def _alpaca(self, row: Mapping[str, Any]) -> ChatExample:
        instruction, given, output = (self.get(row, name) for name in ("instruction", "input", "output"))
        for column, value in (("instruction", instruction), ("input", given or ""), ("output", output)):
            if not isinstance(value, str):
                raise RowFault(f"{self.column(column)!r} is not text", f"it is a {type(value).__name__}")
        user = f"{instruction}\n\n{given}".strip() if given else instruction
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
        return self._conversation(row, Conversation(messages), 1)

    def _prompt_completion(self, row: Mapping[str, Any]) -> Example:
        completion = self.get(row, "completion")
        return self._completed(row, self.get(row, "prompt"), completion, self.column("completion"))

    def _text(self, row: Mapping[str, Any]) -> TextExample:
        text = self.get(row, "text")
        if not isinstance(text, str):
            raise RowFault(f"{self.column('text')!r} is not text", f"it is a {type(text).__name__}")
        return TextExample("", text)

    def _pretokenized(self, row: Mapping[str, Any]) -> TokensExample:
        ids = _ints(self.get(row, "input_ids"), "input_ids")
        attention = self.get(row, "attention_mask")
        if attention is not None and not all(_ints(attention, "attention_mask")):
            raise RowFault("attention_mask holds zeros", "rows must not be padded")
        return TokensExample(ids, self._given_mask(row, ids))

    def _given_mask(self, row: Mapping[str, Any], ids: list[int]) -> list[int]:
        mask, labels = self.get(row, "loss_mask"), self.get(row, "labels")
        if self.train_on == "all_tokens" and mask is None and labels is None:
            return [1] * len(ids)
        if mask is not None:
            mask = _ints(mask, "loss_mask")
            if len(mask) != len(ids) or not {0, 1}.issuperset(mask):
                raise RowFault(
                    "loss_mask is not one 0 or 1 for each token", f"{len(mask)} for {len(ids)} tokens"
                )
            return mask
        if labels is None:
            raise RowFault("neither loss_mask nor labels", _columns(row))
        labels = _ints(labels, "labels")
        if len(labels) != len(ids) or any(b not in (a, NO_LABEL) for a, b in zip(ids, labels, strict=False)):
            raise RowFault(
                "labels are not the tokens themselves or -100", f"{len(labels)} for {len(ids)} tokens"
            )
        return [int(label != NO_LABEL) for label in labels]

    def _completed(
        self, row: Mapping[str, Any], prompt: Any, completion: Any, column: str, answer_only: bool = False
    ) -> Example:
        if isinstance(completion, str) and (prompt is None or isinstance(prompt, str)):
            if self.train_on == "all_tokens":
                return TextExample("", (prompt or "") + completion)
            return TextExample(prompt or "", completion)
        nothing = Conversation([])
        before = nothing if prompt is None else read_turn(prompt, "user", self.column("prompt"))
        after = read_turn(completion, "assistant", column)
        if isinstance(prompt, str) and any(message["role"] == "user" for message in after.messages[:2]):
            before, prompt = nothing, None  # the completion is the whole conversation, and holds the prompt
        messages = before.messages + after.messages
        start = len(before.messages)
        if prompt is None:
            start = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=0)
        whole = Conversation(messages, before.has_parts or after.has_parts)
        return self._conversation(row, whole, start, answer_only)

    def _conversation(
        self, row: Mapping[str, Any], whole: Conversation, start: int, answer_only: bool = False
    ) -> ChatExample:
        messages, system = whole.messages, self.get(row, "system")
        if isinstance(system, str) and system and messages[0]["role"] != "system":
            messages, start = [{"role": "system", "content": system}, *messages], start + 1
        tools = read_tools(self.get(row, "tools"))
        if self.train_on == "all_tokens":
            return ChatExample(messages, tools, (), True, whole.has_parts)
        train_on = "completion" if answer_only else self.train_on
        trained = trained_messages(messages, train_on, start)
        return ChatExample(messages, tools, trained, False, whole.has_parts)


def trained_messages(messages: list[Message], train_on: str, start: int) -> tuple[int, ...]:
    """Places of the messages with loss; `start` is where the completion begins.

    Raises:
        RowDropped: there are none.
        RowFault: a weight that is not 0 or 1, or one on a message of another role.
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
        raise RowDropped("no assistant message")
    return tuple(places[-1:] if train_on == "last_assistant_message" else places)


def _weight(message: Message) -> bool:
    """`weight` (0 or 1) or `train`; an assistant message without either counts as 1."""
    assistant = message["role"] == "assistant"
    weight = message.get("weight", message.get("train", assistant))
    if weight not in (0, 1):
        raise RowFault("a message weight is not 0 or 1", f"it is {weight!r}")
    if weight and not assistant:
        raise RowFault(
            "a weight on a message that is not the assistant's", f"its role is {message['role']!r}"
        )
    return bool(weight)


def read_turn(value: Any, role: str, column: str) -> Conversation:
    """Messages; a string is one message of `role`."""
    if isinstance(value, str):
        return Conversation([{"role": role, "content": value}])
    return read_messages(value, column)


def _ints(value: Any, column: str) -> list[int]:
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list) or not all(isinstance(item, int) for item in values):
        raise RowFault(f"{column!r} is not a list of integers", f"it is a {type(value).__name__}")
    return [int(item) for item in values]


def _columns(row: Mapping[str, Any]) -> str:
    return f"the row has {', '.join(sorted(map(str, row))) or 'no columns'}"
