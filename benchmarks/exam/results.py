"""Keeps raw results as JSON, `results/<exam>.json`, and writes their tables into docs/exam.md: `python benchmarks/exam/results.py`."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def keep(exam: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Write the result of an exam; contestants that were not asked this time keep what they had."""
    path = RESULTS / f"{exam}.json"
    known = json.loads(path.read_text()) if path.exists() else {"rows": []}
    asked = {row["contestant"] for row in rows}
    rows = [*(row for row in known["rows"] if row["contestant"] not in asked), *rows]
    told = {
        name: {**known.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in facts.items()
    }
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.0f}"
    RESULTS.mkdir(exist_ok=True)
    made = {"date": datetime.date.today().isoformat(), "machine": machine, **told, "rows": rows}
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


PAGE = Path(__file__).resolve().parents[2] / "docs" / "exam.md"
BEGIN, END = "<!-- table of {} begins -->", "<!-- table of {} ends -->"


def write_page() -> None:
    """Write the tables of the page."""
    page = PAGE.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text())
        names = list(dict.fromkeys(name for row in told["rows"] for name in row))
        lines = [
            f"{told['date']}, {told['machine']}.",
            "",
            "| " + " | ".join(names) + " |",
            "|---" * len(names) + "|",
        ]
        lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in told["rows"]]
        begin, end = (mark.format(path.stem) for mark in (BEGIN, END))
        before, after = page.split(begin)[0], page.split(end)[1]
        page = f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}"
    PAGE.write_text(page)


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    write_page()
