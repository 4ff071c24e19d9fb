"""Keeps raw results as JSON, `results/<exam>.json`, and writes their tables into docs/exam.md and lines into README.md: `python benchmarks/exam/results.py`."""

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
    """Write the result of an exam; contestants, and cases of one, that were not asked this time keep what they had."""
    path = RESULTS / f"{exam}.json"
    known = json.loads(path.read_text()) if path.exists() else {"rows": []}
    before = {row["contestant"]: row for row in known["rows"]}
    asked = {row["contestant"]: _over(before.get(row["contestant"], {}), row) for row in rows}
    rows = [asked.pop(name, row) for name, row in before.items()] + list(asked.values())
    told = {name: _over(known.get(name), value) for name, value in facts.items()}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.0f}"
    RESULTS.mkdir(exist_ok=True)
    made = {"date": datetime.date.today().isoformat(), "machine": machine, **told, "rows": rows}
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


def _over(before: Any, now: Any) -> Any:
    """Returns what is now, over what was before where both are dicts of dicts."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return now
    return {
        **before,
        **{
            k: {**before[k], **v} if isinstance(v, dict) and isinstance(before.get(k), dict) else v
            for k, v in now.items()
        },
    }


PAGE = Path(__file__).resolve().parents[2] / "docs" / "exam.md"
README = PAGE.parents[1] / "README.md"


def pages() -> dict[Path, str]:
    """The pages with their tables and lines as the results say them; a space beside a bar would count as a word."""
    page = PAGE.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text())
        rows = loader_rows(told) if path.stem == "loaders" else told["rows"]
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [f"{told['date']}, {told['machine']}.", "", f"|{'|'.join(names)}|", "|---" * len(names) + "|"]
        lines += [f"|{'|'.join(_cell(row.get(name)) for name in names)}|" for row in rows]
        page = _between(page, f"table of {path.stem}", lines)
    loaders = json.loads((RESULTS / "loaders.json").read_text())
    return {PAGE: page, README: _between(README.read_text(), "lines of the exam", readme_lines(loaders))}


def write_pages() -> None:
    """Write them."""
    for path, text in pages().items():
        path.write_text(text)


def _between(page: str, name: str, lines: Sequence[str]) -> str:
    begin, end = f"<!-- {name} begins -->", f"<!-- {name} ends -->"
    return "\n".join([page.split(begin)[0] + begin, *lines, end + page.split(end)[1]])


def readme_lines(told: Mapping[str, Any]) -> list[str]:
    """Three lines: how many cases are right, who notices a changed source, and who resumes soonest."""
    rows = loader_rows(told)
    right = [f"{row['contestant']} {row['right']}" for row in rows]
    noticed = [row["contestant"] for row in rows if row.get("added") == row.get("replaced") == "noticed"]
    asked = sum(row.get("added") != "–" for row in rows)
    seconds = sorted((row["s"], row["contestant"]) for row in rows if row["s"] is not None)
    soonest = ", ".join(
        f"{name} {s} s" for s, name in [*seconds[:1], *(one for one in seconds if "raysvc" in one[1])]
    )
    return [
        f"- Right in cases that it offers: {', '.join(right[:6])}, down to {right[-1]}.",
        f"- A changed source is noticed by {' and '.join(noticed)}, of {asked}.",
        f"- First batch after a kill, without imports, on a busy machine: {soonest}.",
    ]


def loader_rows(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the page: most cases right first, then by name; seconds and memory are those of the run that went on."""
    rows = []
    for row in told["rows"]:
        cases = {case: row["cases"][case] for case in told["cases"] if case in row["cases"]}
        right = sum(score["right"] for score in cases.values())
        offered = sum(score["said"] != "not offered" for score in cases.values())
        went_on = cases.get("middle", {})
        cells = {case: _marks(score) for case, score in cases.items()}
        rows.append({"contestant": row["contestant"], "right": f"{right}/{offered}", **cells,
                     "s": went_on.get("seconds"), "MB": went_on.get("peak_mb")})  # fmt: skip
    return sorted(rows, key=lambda row: (-int(row["right"].split("/")[0]), row["contestant"]))


SHORT = {
    "not offered": "–",
    "noticed": "noticed",
    "silent": "silent",
    "steps": "steps",
    "alike": "alike",
    "torn": "torn",
    "of the rows": "share",
}


def _marks(score: Mapping[str, Any]) -> str:
    """A score in signs: + repeated, − lost, ~ moved, ≠ other ids; a space would count as a word of the pages."""
    signs = (("repeated", "+"), ("lost", "−"), ("moved", "~"), ("differ", "≠"))
    counts = "".join(f"{sign}{score[name]}" for name, sign in signs if score.get(name))
    said = next(
        (short for known, short in SHORT.items() if known in score["said"]), "fails" if score["said"] else ""
    )
    return said + counts or "✓"


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    write_pages()
