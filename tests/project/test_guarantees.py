"""Every test that docs/guarantees.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_cell_of_the_matrix_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"\btest_[a-z0-9_]+\b(?!\.py)", text))
    assert len(named) > 12
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
    for path in set(re.findall(r"tests/[a-z/_]+\.py", text)):
        assert (ROOT / path).exists()
