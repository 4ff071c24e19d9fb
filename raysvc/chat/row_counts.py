"""Counts what became of every row and every token.

Always true:
- rows_in = rows_written + dropped + quarantined;
- tokens_rendered = tokens_trained + tokens_context + tokens_truncated, over the written rows;
- adding row counts is associative, and the empty ones change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from raysvc.errors import QuarantineExceeded, SourceError
from raysvc.progress import how_many

EXAMPLES_SHOWN = 3
NULLS_IN_CALLS = "nulls in arguments of calls"
NULLS_IN_TOOLS = "nulls in tools"
NULLS = frozenset({NULLS_IN_CALLS, NULLS_IN_TOOLS})  # noted, and nothing is changed by it
_OF_TEMPLATES = (
    "template",
    "a trained ",
    "a token spans a ",
)  # what reasons say that another template may not have
NULLS_SHARE = 0.01  # of all rows: most may have neither calls nor tools


@dataclass(frozen=True)
class Quarantined:
    """One row that was quarantined.

    Attributes:
        source_row: its number in the source.
        reason: key in `RowCounts.quarantined`.
        detail: what is special about this row, may be empty.
        dataset: label of the source.
    """

    source_row: int
    reason: str
    detail: str = ""
    dataset: str = ""

    def __str__(self) -> str:
        place = f"{self.dataset}:{self.source_row}" if self.dataset else f"row {self.source_row}"
        return f"{place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class RowCounts:
    """Counts of one slice or of a whole build.

    Attributes:
        rows_in: source rows that were read; a preference row counts once.
        rows_written: source rows whose tokens were written.
        rows_truncated: of these, with tokens cut away.
        dropped: reason -> rows left out by a declared policy.
        quarantined: reason -> rows that could not be read or verified.
        reasoning_removed: trained messages of written rows whose reasoning the template left out.
        reasoning_kept_by_turns: of these, those of a few rows that were tried, and whose reasoning `each_assistant_turn` keeps.
        turns_without_end: trained turns of written rows that the template writes no end of.
        rows_without_end: written rows with such a turn, and none that has an end.
        normalized: what the normal form changed -> rows that were written.
        tokens_rendered: tokens of the written rows before truncation.
        tokens_trained: of these, with loss.
        tokens_context: of these, written without loss.
        tokens_truncated: of these, cut away.
    """

    rows_in: int = 0
    rows_written: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined: Mapping[str, int] = field(default_factory=dict)
    tokens_rendered: int = 0
    tokens_trained: int = 0
    tokens_context: int = 0
    tokens_truncated: int = 0
    rows_truncated: int = 0
    reasoning_removed: int = 0
    reasoning_kept_by_turns: int = 0
    turns_without_end: int = 0
    rows_without_end: int = 0
    normalized: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: RowCounts) -> RowCounts:
        both = ((name, getattr(self, name), getattr(other, name)) for name in vars(self))
        sums: dict[str, Any] = {
            name: a + b if isinstance(a, int) else dict(Counter(a) + Counter(b)) for name, a, b in both
        }
        return RowCounts(**sums)

    def check(self) -> None:
        """Raise AssertionError when rows or tokens do not balance: that is our fault, never a user's."""
        dropped, quarantined = sum(self.dropped.values()), sum(self.quarantined.values())
        assert self.rows_in == self.rows_written + dropped + quarantined, (
            f"rows do not balance: {self.rows_in} in, {self.rows_written} written, {dropped} dropped, "
            f"{quarantined} quarantined"
        )
        assert self.rows_truncated <= min(self.rows_written, self.tokens_truncated), (
            f"{self.rows_truncated} of {self.rows_written} rows lost {self.tokens_truncated} tokens"
        )
        parts = self.tokens_trained + self.tokens_context + self.tokens_truncated
        assert self.tokens_rendered == parts, (
            f"tokens do not balance: {self.tokens_rendered} rendered, {self.tokens_trained} trained, "
            f"{self.tokens_context} context, {self.tokens_truncated} truncated"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, the arguments of equal row counts."""
        return asdict(self)


def reasoning_remedy(counts: Mapping[str, Any]) -> str:
    """Returns what keeps the reasoning that the template left out of trained messages, as far as it was tried; "" when none was left out.

    Args:
        counts: what `to_json` gave.
    """
    if not counts.get("reasoning_removed", 0):
        return ""
    if counts.get("reasoning_kept_by_turns", 0):
        return "train_on: each_assistant_turn keeps it"
    return "this template has no place for it; set tokenizer.chat_template to one that has"


def warnings_of(counts: Mapping[str, Any]) -> list[str]:
    """Returns what somebody who trains these rows should know, a sentence each.

    Args:
        counts: what `to_json` gave.
    """
    found = []
    if remedy := reasoning_remedy(counts):
        found.append(
            f"the chat template removed the reasoning of {counts['reasoning_removed']} trained messages, "
            f"so the model is trained to answer without it; {remedy}"
        )
    if note := endless_note(counts):
        found.append(note)
    nulls = max((counts.get("normalized", {}).get(name, 0) for name in NULLS), default=0)
    if nulls > NULLS_SHARE * counts.get("rows_written", 0):
        found.append(
            f"{nulls} rows have nulls in arguments of calls or in tools, which are rendered: Dataset.to_json writes one "
            "for every key that another row has; source.drop_nulls: true reads them as absent, as Parquet does"
        )
    return found


def endless_note(counts: Mapping[str, Any]) -> str:
    """Returns what it means that trained turns have no end; "" when all have one.

    Args:
        counts: what `to_json` gave.
    """
    turns, rows = counts.get("turns_without_end", 0), counts.get("rows_without_end", 0)
    if not turns:
        return ""
    who = (
        "NO ROW TEACHES THE MODEL TO STOP: no trained turn has an end"
        if rows == counts["rows_written"]
        else f"{how_many(turns, 'trained turn')} without an end of turn, and {how_many(rows, 'row')} without a turn that has one"
    )
    return f"{who}, because the chat template writes none there; train_end: append adds the model's end of sequence to such a row"


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Returns what is wrong with the rows of this source of a mixture is raised with its name; "": the job has one source."""
    try:
        yield
    except (SourceError, QuarantineExceeded) as error:
        if not name:
            raise
        where = error.where if error.where.startswith("source") else f"source: {error.where}"
        remedy = error.remedy.replace("--source-row ", f"--source-row {name}:")
        raise type(error)(f"mixture.sources.{name}.{where}", error.what, remedy) from None


def check_quarantine(
    row_counts: RowCounts,
    examples: Sequence[Quarantined],
    max_share: float,
    place_of: Callable[[int], str] = lambda _: "",
) -> None:
    """Raise `QuarantineExceeded` when more than `max_share` of the rows were quarantined.

    Args:
        row_counts: of the build so far.
        examples: rows that were quarantined; three are shown, of the three commonest reasons.
        max_share: 0..1.
        place_of: number of a row -> where it lies in a file.
    """
    count = sum(row_counts.quarantined.values())
    if count > max_share * row_counts.rows_in:
        what = f"{count} of {how_many(row_counts.rows_in, 'row')} could not be verified, more than max_quarantine = {max_share:g}"
        raise quarantine_exceeded(what, row_counts.quarantined, examples, place_of(examples[0].source_row))


def quarantine_exceeded(
    what: str, quarantined: Mapping[str, int], examples: Sequence[Quarantined], place: str = ""
) -> QuarantineExceeded:
    """The error that says `what`, and shows three of the `examples`, of the three commonest reasons.

    Args:
        place: of the first example.
    """
    return QuarantineExceeded(
        "source",
        f"{what}: {shown_reasons(quarantined, examples)}",
        f"raysvc show JOB.YAML --source-row {examples[0].source_row} shows one{f', {place}' if place else ''}; "
        f"fix {what_to_fix(quarantined)}, or raise max_quarantine to go on without them",
    )


def what_to_fix(quarantined: Mapping[str, int]) -> str:
    """Names what is to blame for the commonest of these reasons: the rows, or the template where a mask could not be verified."""
    reason = max(quarantined, key=lambda one: quarantined[one])
    return (
        "these rows or the chat template" if any(words in reason for words in _OF_TEMPLATES) else "these rows"
    )


def shown_reasons(left_out: Mapping[str, int], examples: Sequence[Quarantined]) -> str:
    """The three commonest reasons, with three of the examples and what is special about these."""
    commonest = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))[:3]
    each = -(-EXAMPLES_SHOWN // max(len(commonest), 1))
    return "; ".join(
        f"{reason} ({how_many(n, 'row')}{_some(reason, examples, each)})" for reason, n in commonest
    )


def _some(reason: str, examples: Sequence[Quarantined], most: int) -> str:
    """So many rows of a reason; those of one detail together."""
    places: dict[str, list[str]] = {}
    for one in [each for each in examples if each.reason == reason][:most]:
        place = f"{one.dataset}:{one.source_row}" if one.dataset else str(one.source_row)
        places.setdefault(one.detail, []).append(place)
    text = ", ".join(
        f"row{'s' if len(rows) > 1 else ''} {' and '.join(rows)}" + (f": {detail}" if detail else "")
        for detail, rows in places.items()
    )
    return f", e.g. {text}" if text else ""
