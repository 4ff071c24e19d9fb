"""Rows in a language that hardly any other row is in (`py3langid`, an extra).

Always true:
- a language is odd beside the others: a source in several languages has none that is;
- what is short, or what the library is not sure of, is in no language.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from raysvc.audit.audited_row import shown

LEAST_CHARACTERS, MOST_CHARACTERS = 80, 2000
SURE = 0.9
RARE = 0.01  # share of the rows
LEAST_KEPT = 1000


class _InLanguage(NamedTuple):
    row_id: int | None
    where: str
    text: str


class Languages:
    """See the module."""

    def __init__(self, identifier: Any) -> None:
        self._identifier = identifier
        self._counts: Counter[str] = Counter()
        self._rows: dict[str, list[_InLanguage]] = {}

    @classmethod
    def if_there(cls) -> Languages | None:
        """None where the library is not installed."""
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError:
            return None
        return cls(LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True))

    def take(self, said: str, row_id: int | None, where: str) -> None:
        """Remember the language of a row."""
        if len(said) < LEAST_CHARACTERS:
            return
        language, share = self._identifier.classify(said[:MOST_CHARACTERS])
        if share < SURE:
            return
        self._counts[language] += 1
        rows = self._rows.setdefault(language, [])
        if len(rows) <= max(
            LEAST_KEPT, RARE * self._counts.total()
        ):  # of a language that is not rare all need not be kept
            rows.append(_InLanguage(row_id, where, f"{language}: {shown(said)}"))

    def odd(self) -> Iterator[tuple[int | None, str, str]]:
        """Id, place and text of each row in a rare language."""
        for language, count in self._counts.items():
            if count <= RARE * self._counts.total():
                yield from self._rows[language]
