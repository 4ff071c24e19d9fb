"""Write the table of docs/templates.md: run it after a change of templates or of the rule.

python docs/make_templates.py
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- table begins -->", "<!-- table ends -->"


def main() -> int:
    """Write the table, and say what is wrong in it."""
    package = types.ModuleType("zoo_tests")
    package.__path__ = [str(ROOT / "tests" / "chat")]
    sys.modules["zoo_tests"] = package
    tests = importlib.import_module("zoo_tests.test_zoo")
    kinds = list(tests.ROWS)
    lines = ["| template | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    bad = 0
    for name, template in tests.TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            line, wrong = tests.row_of_table(template, tests.tokenizers_of(template, Path(folder)))
        lines.append(line)
        bad += len(wrong)
        for each in wrong:
            sys.stderr.write(f"{name}: {each}\n")
    page = ROOT / "docs" / "templates.md"
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)
    sys.stdout.write(f"{len(lines) - 2} templates, {bad} wrong\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
