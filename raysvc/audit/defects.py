"""Lists the defects that an audit looks for, each with its severity, what it means, and what to type.

Always true:
- a defect is named once, here; whoever finds it in a row says the name;
- `error` is for rows that are lost, or that teach what nobody meant; `warning` for what somebody should look at; `note` for what
  is often meant;
- every reason for which a row is left out is some defect: what no other name fits is `unverified`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.select import LAST_TURN_TOO_LONG, TOO_LONG, TOO_MANY

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
EXCLUDE = "leave them out: raysvc audit {job} --ids odd.txt, then plan.rows.exclude=odd.txt"


class Defect(NamedTuple):
    """One kind of defect.

    Attributes:
        what: is wrong with the rows that have it, a clause about them.
        remedy: what to type; `{job}` stands for the job file.
    """

    severity: Severity
    what: str
    remedy: str


DEFECTS: dict[str, Defect] = {
    "unverified": Defect(
        "error",
        "cannot be read or verified, and are left out",
        "look at one, raysvc show {job} --source-row N, and fix it; or go on without them, max_quarantine=1",
    ),
    "nothing_trained": Defect(
        "error",
        "have no token with loss, and are left out",
        "set train_on, or map roles: source.roles.THEIRS=assistant",
    ),
    "no_end_of_turn": Defect(
        "error",
        "have trained turns and no end of turn, so the model does not learn to stop",
        "train_end=append",
    ),
    "too_long": Defect(
        "error",
        "are longer than the limit, and are left out",
        "raise max_length, or truncation=keep_end_turns",
    ),
    "over_model_limit": Defect(
        "error",
        "are longer than the tokenizer's model_max_length",
        "set max_length, and truncation=keep_end_turns",
    ),
    "answer_cut": Defect(
        "error", "lose trained tokens to max_length", "raise max_length, or truncation=keep_end_turns"
    ),
    "answer_unfinished": Defect("warning", "end in the middle of an answer", EXCLUDE),
    "empty_message": Defect("warning", "have a user's or an assistant's message that says nothing", EXCLUDE),
    "tools_dropped": Defect(
        "error",
        "have tools that the chat template does not write",
        "name a template that shows tools: tokenizer.chat_template=FILE",
    ),
    "calls_dropped": Defect(
        "error",
        "have tool calls that the chat template does not write",
        "name a template that shows calls: tokenizer.chat_template=FILE",
    ),
    "reasoning_removed": Defect(
        "warning",
        "lose the reasoning of trained messages to the chat template",
        "train_on=each_assistant_turn, or a template that keeps it: tokenizer.chat_template=FILE",
    ),
    "broken_call": Defect(
        "error", "have a tool call that cannot be read", "fix these rows, or max_quarantine=1"
    ),
    "unanswered_call": Defect("warning", "have a tool call without its result, and go on", EXCLUDE),
    "result_without_call": Defect("warning", "have a tool's result that no call asked for", EXCLUDE),
    "undeclared_tool": Defect("error", "call a tool that the row does not declare", EXCLUDE),
    "arguments_against_schema": Defect(
        "warning", "call a tool with arguments that its schema does not allow", EXCLUDE
    ),
    "broken_schema": Defect(
        "warning", "declare a tool whose schema is not JSON Schema", "fix its `parameters`"
    ),
    "odd_role": Defect(
        "warning", "have a role that templates seldom know", "map it: source.roles.THEIRS=user"
    ),
    "odd_order": Defect("warning", "have roles in an order that no dialogue has", EXCLUDE),
    "control_characters": Defect(
        "warning",
        "have control characters, or text that was decoded wrongly",
        "write the source as UTF-8 again",
    ),
    "odd_language": Defect("warning", "are in a language that under 1% of the rows are in", EXCLUDE),
    "duplicate": Defect("warning", "have the same tokens as an earlier row", EXCLUDE),
    "near_duplicate": Defect("warning", "say nearly the same as an earlier row", EXCLUDE),
    "eval_overlap": Defect("error", "are rows of an eval, or nearly so", EXCLUDE),
    "labels_contradict": Defect(
        "error", "have a label that another row with the same answer contradicts", EXCLUDE
    ),
    "sides_equal": Defect("error", "have the same answer as chosen and as rejected", EXCLUDE),
}

_LENGTHS = (LAST_TURN_TOO_LONG, TOO_LONG, TOO_MANY)
_NOTHING = (
    "no assistant message",
    "no trained token",
    "every message has weight 0",
    "every trained message is empty",
)
_BY_WORDS = (  # first that a reason of a fault holds
    ("does not hold its tool call", "calls_dropped"),
    ("tool call", "broken_call"),
    ("tool_calls", "broken_call"),
    ("function_call", "broken_call"),
    ("of a call", "broken_call"),
    ("no message of role", "odd_role"),
    ("no role", "odd_role"),
    ("no end of turn", "no_end_of_turn"),
)


def defect_of(why: RowFault | RowDropped) -> tuple[str, str]:
    """(name of the defect, what it is here)."""
    text = str(why) if isinstance(why, RowFault) else why.reason
    if why.reason in _LENGTHS:
        return "too_long", text
    if isinstance(why, RowDropped):
        return "nothing_trained" if why.reason.startswith(_NOTHING) else "unverified", text
    return next((name for words, name in _BY_WORDS if words in why.reason), "unverified"), text
