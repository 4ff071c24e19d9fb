"""Every test that docs/guarantees.md and SECURITY.md name is there."""

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


def test_every_promise_of_security_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    promises = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(promises) > 12
    for promise, _, named in promises:
        names = re.findall(r"`(test_[a-z0-9_]+)`", named)
        assert names, promise
        assert [name for name in names if f"def {name}(" not in tests] == []
