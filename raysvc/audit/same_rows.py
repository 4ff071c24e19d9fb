"""Rows that are there twice: the same, nearly the same, in an eval, or with labels that contradict each other.

Near-duplicates are found by MinHash (`rensa`, an extra): rows share a band of their sketches, and the sketches say that some
`ALIKE` of the sets of five words are common.

Always true:
- of rows that are the same, the first is no finding;
- rows of evals come first, and are no findings for being alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from raysvc.audit.audited_row import AuditedRow, shown, words_of

ALIKE = 0.85
PERMUTATIONS, BANDS = 128, 16
WORDS = 5  # neighbours that make one item of a set
LEAST_WORDS = 20  # of a row: less is alike by chance
MOST_ROWS = 200_000  # whose sketches are held, some 2 kB each
Found = tuple[str, str]


class SameRows:
    """See the module; one for all sources of an audit."""

    def __init__(self) -> None:
        self._seen: dict[bytes, str] = {}
        self._prompts: dict[str, str] = {}  # of evals
        self._labels: dict[bytes, tuple[int, str]] = {}
        self._pairs: dict[tuple[bytes, bytes], str] = {}
        self.near = NearRows.if_there()

    def check(self, row: AuditedRow, is_eval: bool) -> Iterator[Found]:
        """Defects of a row, beside those that came before it."""
        if is_eval:
            if row.prompt:
                self._prompts.setdefault(row.prompt, row.where)
            if self.near is not None:
                self.near.add(row, is_eval)
            return
        known = self._prompts.get(row.prompt)
        if known is not None:
            yield "eval_overlap", f"has the prompt of {known}: {shown(row.said)}"
        first = self._seen.setdefault(row.digest(), row.where)
        labels = list(self._check_labels(row))
        yield from labels
        if labels:
            return
        if first != row.where:
            yield "duplicate", f"the same as {first}: {shown(row.said)}"
        elif self.near is not None and (alike := self.near.add(row, is_eval)) is not None:
            share, other = alike
            if not (other.is_eval and known is not None):
                name = "eval_overlap" if other.is_eval else "near_duplicate"
                yield name, f"{share:.0%} of {other.where}: {shown(row.said)}"

    def _check_labels(self, row: AuditedRow) -> Iterator[Found]:
        if row.form.name == "kto":
            label = row.form.label_of(row.data)
            first, where = self._labels.setdefault(row.digest(), (label, row.where))
            if first != label:
                yield "labels_contradict", f"{bool(label)} here, {bool(first)} in {where}: {shown(row.said)}"
        if row.form.name == "preference":
            chosen, rejected = row.digest(0), row.digest(1)
            self._pairs.setdefault((chosen, rejected), row.where)
            if chosen == rejected:
                yield "sides_equal", shown(row.answer)
            elif (other := self._pairs.get((rejected, chosen))) is not None:
                yield "labels_contradict", f"chosen and rejected are swapped in {other}: {shown(row.answer)}"


class _Sketched(NamedTuple):
    sketch: Any
    where: str
    prompt: int
    is_eval: bool


class NearRows:
    """Rows by their sketches."""

    def __init__(self, rensa: Any) -> None:
        self._rensa = rensa
        self._index = rensa.RMinHashLSH(threshold=ALIKE, num_perm=PERMUTATIONS, num_bands=BANDS)
        self._rows: list[_Sketched] = []

    @classmethod
    def if_there(cls) -> NearRows | None:
        """None where the library is not installed."""
        try:
            import rensa
        except ImportError:
            return None
        return cls(rensa)

    @property
    def is_full(self) -> bool:
        """Tells whether later rows are compared with the first ones alone."""
        return len(self._rows) >= MOST_ROWS

    def add(self, row: AuditedRow, is_eval: bool) -> tuple[float, _Sketched] | None:
        """Remember a row; how much of it the one before it that is most like it has, and that one."""
        words = words_of(row.said)
        if len(words) < LEAST_WORDS or row.pictured:
            return None
        sketch, prompt = self._rensa.RMinHash(PERMUTATIONS, 0), hash(row.prompt)
        sketch.update([" ".join(words[n : n + WORDS]) for n in range(len(words) - WORDS + 1)])
        found = [self._rows[number] for number in self._index.query(sketch)]
        if row.form.name == "kto":  # another answer to the same prompt is what labels are for
            found = [one for one in found if one.prompt != prompt]
        best = max(((sketch.jaccard(one.sketch), one) for one in found), key=itemgetter(0), default=None)
        if not self.is_full:
            self._index.insert(len(self._rows), sketch)
            self._rows.append(_Sketched(sketch, row.where, prompt, is_eval))
        return best if best is not None and best[0] >= ALIKE else None
