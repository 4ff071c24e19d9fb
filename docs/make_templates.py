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
    alike: dict[str, list[str]] = {}  # marks -> templates that have them
    bad = 0
    for name, template in tests.TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            marks, wrong = tests.row_of_table(template, tests.tokenizers_of(template, Path(folder)))
        alike.setdefault(marks, []).append(name)
        bad += len(wrong)
        for each in wrong:
            sys.stderr.write(f"{name}: {each}\n")
    lines = ["| " + " | ".join(kinds) + " | templates |", "|---" * (len(kinds) + 1) + "|"]
    lines += [f"{marks} {', '.join(names)} |" for marks, names in alike.items()]
    page = ROOT / "docs" / "templates.md"
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)
    sys.stdout.write(f"{len(tests.TEMPLATES)} templates, {bad} wrong\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
