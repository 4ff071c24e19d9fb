"""A source row -> what is to be rendered, and which of it is trained.

Always true:
- whatever is wrong with a row is that row's fault;
- a row gives one example, a preference row two: the chosen one first;
- a row with a label (KTO) gives one; the sequence beside it, with another row's completion, is made where rows are;
- a column that changes what a row means, and that its format does not use, is refused by its name.

A string prompt and its completion are one text, `prompt + completion`, joined as they are. A question and its answer, an
instruction and its output, are a user's message and an assistant's, behind the pairs of `history`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from raysvc.chat.row_counts import NULLS_IN_CALLS, NULLS_IN_TOOLS
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source import media_parts
from raysvc.chat.source.content_parts import PARTS_READ, flatten_parts, read_parts
from raysvc.chat.source.examples import (
    ChatExample,
    Example,
    StepsExample,
    TextExample,
    TokensExample,
)
from raysvc.chat.source.given_tokens import read_tokens
from raysvc.chat.source.json_rows import UnreadableValue, holds_null, without_nulls
from raysvc.chat.source.loss_flags import unread_keys
from raysvc.chat.source.messages import (
    MESSAGES_PARSED,
    Changes,
    Conversation,
    Message,
    MessageReader,
    kind_of,
    parse_json,
    text_or_messages,
)
from raysvc.chat.source.stepwise import read_steps
from raysvc.chat.source.text_numbers import TRUTHS
from raysvc.chat.source.tool_calls import arguments_of
from raysvc.chat.source.tools import read_tools
from raysvc.chat.source.trained_messages import check_weights, trained_messages
from raysvc.job.config import Format as FormatName
from raysvc.media.kinds import WORDS, Kind

NEEDS: dict[str, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "chat": ("messages",),
    "kto": ("prompt", "completion", "label"),
    "stepwise": ("prompt", "completions", "labels"),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "pretokenized": ("input_ids",),
    "text": ("text",),
    "prompt": ("prompt",),
}
KTO_CHAT = ("messages", "label")  # of `kto` too: the last message is the completion
BESIDE: dict[str, tuple[str, ...]] = {  # what a format uses where it is there
    "preference": ("prompt", "messages", "instruction", "input", "history", "tools", "system"),
    "chat": ("tools", "system", "history"),
    "kto": ("messages", "tools", "system", "history"),
    "stepwise": ("tools", "system"),
    "prompt_completion": ("tools", "system", "history"),
    "alpaca": ("input", "history", "tools", "system"),
    "question_answer": ("history", "tools", "system"),
    "pretokenized": ("loss_mask", "labels", "attention_mask"),
    "text": (),
    "prompt": ("tools", "system"),
}
ONE_FORMAT = "files of two formats need a source each, under mixture.sources"
KTO = ("label", "kto_tag")
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "pixel_values")
PAIR = ("chosen", "rejected", "chosen_messages", "rejected_messages")
WEIGHT = ("weight", "margin")
TEMPLATE_KWARGS = "chat_template_kwargs"  # TRL gives those of each row to the template
REJECTED_RESPONSE = "rejected_response"  # ms-swift's, beside messages that end with the chosen one
NO_VALUES: tuple[Any, ...] = (None, "", [], {})
FUNCTIONS = "functions"  # OpenAI's name of tools, before these were called so
PREFERRED = (
    "preferred_output"  # OpenAI's name of the chosen side; `input` has the messages and tools beside it
)
SYSTEM_UNUSED = "system columns left out beside another system message"


@dataclass(frozen=True)
class Format:
    """Says how the rows of one source are read.

    Attributes:
        name: one of the format names, never "auto".
        columns: our column name -> the source's.
        train_on: from the spec.
        roles: their role -> ours, as declared.
        ignored: columns that are declared to be without meaning here.
        carried: columns that go along as they are.
        media: what its rows may have beside text.
        drop_nulls: a null in an object means that the key is absent, as in a table.
    """

    name: FormatName
    columns: Mapping[str, str]
    train_on: str
    roles: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    media: tuple[Kind, ...] = ()
    drop_nulls: bool = False

    def __post_init__(self) -> None:
        reader = MessageReader(self.roles, self.columns.get("role"), self.columns.get("content"), self.media)
        object.__setattr__(self, "_reader", reader)
        object.__setattr__(self, "refused", tuple(sorted(self._refused())))
        object.__setattr__(self, "_refused_names", frozenset(self.refused))

    _reader: MessageReader = field(init=False, repr=False, compare=False)
    refused: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _refused_names: frozenset[str] = field(init=False, repr=False, compare=False)

    def _refused(self) -> set[str]:
        """Columns that change the meaning of a row, and that this format does not use."""
        labels = KTO if self.name not in ("prompt", "text") else ()  # there a label is about no answer
        known = {*labels, *PAIR, *MEDIA, *WEIGHT, "history"}
        if self.name not in ("text", "pretokenized"):
            known.add(TEMPLATE_KWARGS)
        if self.name != "preference":
            known.add(REJECTED_RESPONSE)
        return known - self.known_columns

    @property
    def known_columns(self) -> frozenset[str]:
        """The source's columns that are used, carried, or declared to be without meaning."""
        used = (self.column(ours) for ours in (*NEEDS[self.name], *BESIDE.get(self.name, ())))
        media = [name for kind in self.media for name in media_parts.NAMES[kind].columns]
        return frozenset((*used, *self.columns.values(), *self.carried, *self.ignored, *media))

    def media_of(self, row: Mapping[str, Any]) -> dict[Kind, list[Any]]:
        """Kind -> media in a column of the row, where there are any."""
        found: dict[Kind, list[Any]] = {}
        for kind in self.media:
            columns = media_parts.NAMES[kind].columns
            names = (self.column(columns[0]), *columns)
            values = (row.get(name) for name in names if name not in self.ignored)
            there = next((some for value in values if (some := media_parts.in_column(value))), [])
            if there:
                found[kind] = there
        return found

    def column(self, ours: str) -> str:
        """The source's name of one of our columns."""
        return self.columns.get(ours, ours)

    def get(self, row: Mapping[str, Any], ours: str) -> Any:
        """Value of one of our columns in a source row, None when it is not there."""
        return row.get(self.columns.get(ours, ours))

    def _given(self, row: Mapping[str, Any], ours: str, changes: Changes) -> Any:
        """A text, or messages; these may be JSON text."""
        given = self.get(row, ours)
        read = text_or_messages(given, self.column(ours), self.columns.get("role"))
        if read is not given:
            changes.add(MESSAGES_PARSED)
        return read

    def normalize(self, row: Mapping[str, Any]) -> tuple[Example, ...]:
        """Examples of one row.

        Raises:
            RowFault: the row cannot be read.
            RowDropped: nothing of it is to be trained.
        """
        row = self.opened(without_nulls(row) if self.drop_nulls else row)
        for ours in NEEDS[self.name]:
            if self.get(row, ours) is None:
                raise RowFault(f"no value in column {self.column(ours)!r}", _columns(self, row))
        for name in () if self._refused_names.isdisjoint(row) else self.refused:
            if name in row and row[name] not in NO_VALUES:
                raise RowFault(f"column {name!r} is not used by format {self.name}", refused_why(name))
        examples: tuple[Example, ...]
        if self.name == "preference":
            examples = tuple(self._side(row, side) for side in ("chosen", "rejected"))
        else:
            examples = (getattr(self, f"_{self.name}")(row),)
        return self._with_media(row, examples) if self.media else examples

    def _with_media(self, row: Mapping[str, Any], examples: tuple[Example, ...]) -> tuple[Example, ...]:
        found = self.media_of(row)
        if found and not all(isinstance(one, ChatExample) for one in examples):
            raise RowFault(
                f"{WORDS[next(iter(found))].many} beside text without a chat template",
                "give messages, or ignore the column",
            )
        return tuple(
            _placed(one, found, self.media) if isinstance(one, ChatExample) else one for one in examples
        )

    def check_values(self, row: Mapping[str, Any]) -> None:
        """Raise RowFault when a column that is used holds a value that JSON does not have."""
        for ours in USED:
            check_json(self.get(row, ours), self.column(ours))

    def _chat(self, row: Mapping[str, Any]) -> ChatExample:
        changes: Changes = set()
        whole = self._reader.read(self.get(row, "messages"), self.column("messages"), changes)
        if _has_value(self.get(row, "history")):
            raise RowFault(f"column {self.column('history')!r} beside messages", "put it into the messages")
        return self._conversation(row, whole, 0, changes)

    def _alpaca(self, row: Mapping[str, Any]) -> ChatExample:
        user = self._instruction(row)
        output = self._text_of(row, "output")
        before = self._history(row)
        messages = [*before, {"role": "user", "content": user}, {"role": "assistant", "content": output}]
        return self._conversation(row, Conversation(messages), len(messages) - 1, set())

    def _instruction(self, row: Mapping[str, Any]) -> str:
        instruction, given = self._text_of(row, "instruction"), self._text_of(row, "input")
        return f"{instruction}\n\n{given}".strip() if given else instruction

    def _question_answer(self, row: Mapping[str, Any]) -> ChatExample:
        changes: Changes = set()
        asked = self._turn(self._given(row, "question", changes), "user", self.column("question"), changes)
        answered = self._turn(
            self._given(row, "answer", changes), "assistant", self.column("answer"), changes
        )
        before = Conversation([*self._history(row), *asked.messages], asked.has_parts, asked.has_calls)
        return self._conversation(row, _joined(before, answered), len(before.messages), changes)

    def _prompt(self, row: Mapping[str, Any]) -> ChatExample:
        changes: Changes = set()
        whole = self._turn(self._given(row, "prompt", changes), "user", self.column("prompt"), changes)
        messages, _ = self._with_system(row, whole.messages, changes)
        tools = self._tools(row, changes)
        noted = frozenset(changes)
        parts, calls = whole.has_parts, whole.has_calls
        return ChatExample(messages, tools, (), False, parts, calls, noted, prompt=True)

    def _stepwise(self, row: Mapping[str, Any]) -> StepsExample:
        names = (self.column("completions"), self.column("labels"))
        steps = read_steps(self.get(row, "completions"), self.get(row, "labels"), names)
        prompt = self._given(row, "prompt", set())  # `_prompt` notes it
        return StepsExample(prompt if isinstance(prompt, str) else self._prompt(row), steps)

    def _kto(self, row: Mapping[str, Any]) -> Example:
        self.label_of(row)
        return self._prompt_completion(row, answer_only=True)

    def label_of(self, row: Mapping[str, Any]) -> int:
        """0 or 1, the label of a row of `kto`; text as CSV has it is read.

        Raises:
            RowFault: it is neither.
        """
        given = self.get(row, "label")
        label = TRUTHS.get(given.lower()) if isinstance(given, str) else given
        if not isinstance(label, bool | int) or label not in (0, 1):
            raise RowFault(f"{self.column('label')!r} is neither true nor false", f"it is {given!r}"[:80])
        return int(label)

    def _prompt_completion(self, row: Mapping[str, Any], answer_only: bool = False) -> Example:
        if _has_value(self.get(row, "history")):
            raise RowFault(f"column {self.column('history')!r} beside a prompt", "put it into the prompt")
        changes: Changes = set()
        prompt, completion = self._given(row, "prompt", changes), self._given(row, "completion", changes)
        return self._completed(row, prompt, completion, self.column("completion"), changes, answer_only)

    def _side(self, row: Mapping[str, Any], side: str) -> Example:
        """One answer of a preference row; the prompt may be one, messages, or an instruction."""
        changes: Changes = set()
        prompt = self._given(row, "prompt", changes)
        if prompt is None:
            prompt = self._given(row, "messages", changes)
        answer, column = self._given(row, side, changes), self.column(side)
        if prompt is not None and _has_value(self.get(row, "history")):
            raise RowFault(f"column {self.column('history')!r} beside a prompt", "put it into the prompt")
        if prompt is None and self.get(row, "instruction") is not None:
            history, user = self._history(row), {"role": "user", "content": self._instruction(row)}
            prompt = [*history, user]
            answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        other = self._given(row, "rejected" if side == "chosen" else "chosen", set())
        if prompt is None and isinstance(answer, str):
            prompt = _shared_words(answer, other)
            answer = answer[len(prompt) :]
        return self._completed(row, prompt, answer, column, changes, answer_only=True, other=other)

    def opened(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row with a column for everything that its format needs, also where one column holds several of them.

        Raises:
            RowFault: that column does not hold them.
        """
        if self.name == "preference" and self.column("chosen") == PREFERRED:
            return self._with_input_opened(row)
        if self.name == "kto" and self.get(row, "completion") is None:
            return self._with_last_turn(row)
        return row

    def _with_last_turn(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Messages and a label, as LLaMA-Factory has them, with the last message as the completion."""
        column, messages = self.column("messages"), self._given(row, "messages", set())
        if messages is None:
            return row
        if not isinstance(messages, list) or len(messages) < 2:
            raise RowFault(f"{column!r} is not a question and an answer", f"it is {kind_of(messages)}")
        role = self._reader.read(messages[-1], column, set()).messages[-1]["role"]
        if role != "assistant":
            raise RowFault(f"{column!r} does not end with an answer of the assistant", f"but with {role!r}")
        rest = {name: value for name, value in row.items() if name != column}
        return rest | {self.column("prompt"): messages[:-1], self.column("completion"): messages[-1:]}

    def _with_input_opened(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A pair as OpenAI has it, with what stands in its input as columns."""
        column = self.column("input")
        given = row.get(column)
        given = parse_json(given, column) if isinstance(given, str) else given
        if not isinstance(given, dict) or "messages" not in given:
            raise RowFault(f"{column!r} has no messages", f"it is {kind_of(given)}")
        said = {name: value for name, value in given.items() if value is not None}
        odd = sorted(said.keys() - {"messages", "tools", "parallel_tool_calls"})
        if odd:
            raise RowFault(f"{column!r} has keys that have no place", ", ".join(odd))
        opened = {self.column(ours): said[ours] for ours in ("messages", "tools") if ours in said}
        return {name: value for name, value in row.items() if name != column} | opened

    def _text(self, row: Mapping[str, Any]) -> TextExample:
        return TextExample("", self._text_of(row, "text"))

    def _text_of(self, row: Mapping[str, Any], ours: str) -> str:
        value = self.get(row, ours)
        if value is None and ours == "input":
            return ""
        if not isinstance(value, str):
            raise RowFault(f"{self.column(ours)!r} is not text", f"it is {kind_of(value)}")
        return value

    def _history(self, row: Mapping[str, Any]) -> list[Message]:
        """Earlier turns: pairs of a question and an answer, as a list or as JSON text."""
        column, value = self.column("history"), self.get(row, "history")
        if not _has_value(value):
            return []
        pairs = parse_json(value, column) if isinstance(value, str) else value
        if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
            raise RowFault(f"{column!r} is not a list of pairs of texts", f"it is {kind_of(pairs)}")
        roles = ("user", "assistant")
        return [
            {"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)
        ]

    def _pretokenized(self, row: Mapping[str, Any]) -> TokensExample:
        names = ("input_ids", "attention_mask", "loss_mask", "labels")
        ids, attention, mask, labels = (self.get(row, ours) for ours in names)
        return read_tokens(ids, attention, mask, labels, all_tokens=self.train_on == "all_tokens")

    def _completed(
        self,
        row: Mapping[str, Any],
        prompt: Any,
        completion: Any,
        column: str,
        changes: Changes,
        answer_only: bool = False,
        other: Any = None,
    ) -> Example:
        if isinstance(completion, str) and (prompt is None or isinstance(prompt, str)):
            if self.train_on == "all_tokens":
                return TextExample("", (prompt or "") + completion)
            return TextExample(prompt or "", completion)
        before = Conversation([])
        if prompt is not None:
            before = self._turn(prompt, "user", self.column("prompt"), changes)
        after = self._turn(completion, "assistant", column, changes)
        if isinstance(prompt, str) and any(message["role"] == "user" for message in after.messages[:2]):
            before, prompt = Conversation([]), None  # the completion is the whole conversation
        whole, start = _joined(before, after), len(before.messages)
        if prompt is None and other is not None:
            start = self._parting(after.messages, self._turn(other, "assistant", column, set()).messages)
        elif prompt is None:
            places = (n for n, m in enumerate(whole.messages) if m["role"] == "assistant")
            start = max(places, default=0)
        return self._conversation(row, whole, start, changes, answer_only)

    def _parting(self, said: list[Message], other: list[Message]) -> int:
        """Returns where the two conversations of a pair part, which is where its prompt ends.

        Raises:
            RowFault: the assistant does not say both of what differs there.
        """
        most = min(len(said), len(other)) - 1
        place = next((n for n in range(most) if said[n] != other[n]), most)
        roles = [side[place]["role"] for side in (said, other)]
        if roles != ["assistant", "assistant"]:
            keys = sorted(
                k for k in {*said[place], *other[place]} if said[place].get(k) != other[place].get(k)
            )
            differ = (
                f"message {place} differs in {', '.join(keys)}" if keys else f"both end with a {roles[0]}"
            )
            raise RowFault(
                f"{self.column('chosen')!r} and {self.column('rejected')!r} do not part at an answer of the assistant",
                f"{differ}: give the prompt in a column of its own",
            )
        return place

    def _turn(self, value: Any, role: str, column: str, changes: Changes) -> Conversation:
        """Messages; a string is one message of `role`."""
        if isinstance(value, str):
            return Conversation([{"role": role, "content": value}])
        return self._reader.read(value, column, changes)

    def _with_system(
        self, row: Mapping[str, Any], messages: list[Message], changes: Changes
    ) -> tuple[list[Message], int]:
        """(messages behind the system column, how many came before them)."""
        system = self.get(row, "system")
        if isinstance(system, list) and all(isinstance(part, dict) for part in system):  # as Anthropic has it
            (said,) = flatten_parts([read_parts(system, self.column("system"))])
            system = said["content"]
            changes.add(PARTS_READ)
        if system is not None and not isinstance(system, str):
            raise RowFault(f"{self.column('system')!r} is not text", f"it is {kind_of(system)}")
        if system and messages[0]["role"] != "system":
            return [{"role": "system", "content": system}, *messages], 1
        if system and messages[0].get("content") != system:
            changes.add(SYSTEM_UNUSED)
        return messages, 0

    def _tools(self, row: Mapping[str, Any], changes: Changes) -> list[Any] | None:
        given = self.get(row, "tools")
        if given is None:
            return None
        if holds_null(given):
            changes.add(NULLS_IN_TOOLS)
        return read_tools(given, changes)

    def _conversation(
        self,
        row: Mapping[str, Any],
        whole: Conversation,
        start: int,
        changes: Changes,
        answer_only: bool = False,
    ) -> ChatExample:
        messages, added = self._with_system(row, whole.messages, changes)
        tools = self._tools(row, changes)
        parts, calls = whole.has_parts, whole.has_calls
        if calls and holds_null(arguments_of(messages)):
            changes.add(NULLS_IN_CALLS)
        noted = frozenset(changes) if changes else frozenset()
        unread = unread_keys(messages, self.ignored)
        if self.train_on == "all_tokens":
            check_weights((one for one in messages if one["role"] == "assistant"), self.train_on)
            return ChatExample(messages, tools, (), True, parts, calls, noted, unread)
        train_on = "completion" if answer_only else self.train_on
        trained = trained_messages(messages, train_on, start + added)
        return ChatExample(messages, tools, trained, False, parts, calls, noted, unread)


MEDIA_WHY = (
    "{} need a processor of theirs (preprocessor_config.json) beside the tokenizer, and rows of messages; "
    "source.media: [{}] says that rows have some where the first one does not show it"
)
OTHERS_WHY = "images, audio and videos are carried to a model as files; pixels are not"
OPTIONAL = tuple(sorted({name for beside in BESIDE.values() for name in beside}))
USED = tuple(sorted({*OPTIONAL, *(name for needs in NEEDS.values() for name in needs)} - {"input_ids"}))


def _shared_words(text: str, other: Any) -> str:
    """The words that two texts begin with, without the blank behind them: the prompt of a pair that has no column for it."""
    if not isinstance(other, str):
        return ""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    shared = text[: sum(1 for _ in alike)]
    if shared in (text, other):
        shared = shared.rstrip()  # one says no more than the other begins with: its last word is the answer
    cuts = [place for place, letter in enumerate(shared) if letter.isspace()]
    return shared[: cuts[-1]].rstrip() if cuts else ""


def refused_why(name: str) -> str:
    """Says why a column is refused, and what to do."""
    nothing = f"source.ignore: [{name}] says that it has no meaning here"
    if name in KTO:
        return f"a label (KTO) is of source.format: kto, where the last message is what it judges; {nothing}"
    if name == TEMPLATE_KWARGS:
        return f"tokenizer.template_kwargs are the same for all rows of a job; {nothing}"
    if name in (*PAIR, REJECTED_RESPONSE):
        return f"a pair is of format preference; {nothing}"
    if name in MEDIA:
        kind = next((kind for kind, names in media_parts.NAMES.items() if name in names.columns), None)
        return f"{MEDIA_WHY.format(WORDS[kind].many, kind) if kind else OTHERS_WHY}; {nothing}"
    return f"it changes what a row means; source.carry: [{name}] takes it along, {nothing}"


def check_json(value: Any, column: str) -> None:
    """Raise RowFault when a value, or one inside it, is none that JSON has."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_json(item, column)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RowFault("a number is NaN or infinite, which JSON does not have", f"in {column!r}")
    elif isinstance(value, UnreadableValue):
        raise RowFault("a value cannot be read", f"in {column!r}: {value.why}")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise RowFault(f"a value is a {type(value).__name__}, which JSON does not have", f"in {column!r}")


def _placed(example: ChatExample, columns: Mapping[Kind, list[Any]], kinds: tuple[Kind, ...]) -> ChatExample:
    messages, media = media_parts.placed_media(example.messages, columns, kinds)
    return replace(example, messages=messages, media=media, has_parts=True) if media else example


def _joined(before: Conversation, after: Conversation) -> Conversation:
    return Conversation(
        before.messages + after.messages,
        before.has_parts or after.has_parts,
        before.has_calls or after.has_calls,
    )


def _has_value(value: Any) -> bool:
    return value is not None and value != [] and not (isinstance(value, str) and value.strip() in ("", "[]"))


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def _columns(form: Format, row: Mapping[str, Any]) -> str:
    there = {name for name, value in row.items() if value is not None}
    others = () if there.intersection(map(form.column, NEEDS[form.name])) else NEEDS.items()
    fits = next(
        (f", so it is of format {name}: {ONE_FORMAT}" for name, needs in others if there.issuperset(needs)),
        "",
    )
    return f"the row has {', '.join(sorted(map(str, row))) or 'no columns'}{fits}"
