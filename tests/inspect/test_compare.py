"""Runs side by side: the list in `raysvc.report.compare`, on run folders as a run writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from raysvc.cache.local.sealed import sealed
from raysvc.cli.main import app
from raysvc.job.job_file import load_job
from raysvc.training.run_identity import FILE
from raysvc.training.run_job import keep_job


def write_run(
    folder: Path, losses: list[float], rows: list[list[str]], *, entry: str = "e1", held: float | None = None, **plan: Any
) -> Path:  # fmt: skip
    folder.mkdir(parents=True)
    job = load_job(source={"path": str(folder.parent / "rows.jsonl")}, tokenizer="t", plan=plan)
    keep_job(folder, job)
    (folder / FILE).write_bytes(sealed({"plan.entry_keys": [entry]}))

    def write(name: str, lines: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    figures = {"minis": 1, "tokens": 100, "step_s": 0.5, "stall_s": 0.125}
    write("metrics.jsonl", [{"step": i, "loss": loss, "rows": len(rows[i]), **figures} for i, loss in enumerate(losses)])  # fmt: skip
    write("rows.jsonl", [{"step": i, "mini": 0, "row_ids": ids} for i, ids in enumerate(rows)])
    if held is not None:
        write("evals.jsonl", [{"step": 1, "eval": "held", "loss": held}])
    return folder


def compare(*words: object, code: int = 0) -> dict[str, Any] | str:
    done = CliRunner().invoke(app, ["report", *map(str, words), *([] if code else ["--json"])])
    assert done.exit_code == code, done.output
    return done.stderr if code else dict(json.loads(done.stdout.splitlines()[-1]))


ROWS = [["0:0:1", "0:0:2"], ["0:0:3", "0:0:4"], ["0:0:5", "0:0:6"]]


def test_figures_fields_rows_and_curves_of_two_runs(tmp_path: Path) -> None:
    other = [ROWS[0], ["0:0:3", "0:0:7"]]
    one = write_run(tmp_path / "one", [3.0, 1.0, 2.0], ROWS, held=1.5, batch_size=2)
    two = write_run(tmp_path / "two", [3.0, 2.5], other, batch_size=2, seed=5)
    page = tmp_path / "both.html"
    told = compare(one, two, "--out", page)
    assert isinstance(told, dict)
    figures = {line.pop(""): line for line in told["figures"]}
    assert figures["steps"] == {"one": "3, not ended", "two": "2, not ended"}
    assert figures["rows"] == {"one": "6", "two": "4"}
    assert figures["loss last"] == {"one": "2", "two": "2.5"}
    assert figures["loss best"] == {"one": "1 (step 1)", "two": "2.5 (step 1)"}
    assert figures["eval held best"] == {"one": "1.5 (step 1)", "two": "–"}
    assert figures["trained tokens/s (median)"]["one"] == "200"
    assert figures["waited for data"]["one"] == "25.0% of the time"
    assert told["fields"] == [{"": "plan.seed", "one": "", "two": "5"}]
    assert told["rows"] == (
        "The rows differ from optimizer step 1 on. All runs trained 3 rows; not in all: 3 of one, 1 of two."
    )
    html = page.read_text()
    assert "plan.seed" in html
    charts = json.loads(html.split('id="charts">')[1].split("</script>")[0])
    loss = next(chart for chart in charts if chart["title"] == "Loss")
    assert {each["name"]: each["values"] for each in loss["series"]} == {
        "one": [3, 1, 2],
        "two": [3, 2.5, None],
    }
    assert any(each["name"] == "eval held of one" for chart in charts for each in chart["series"])


def test_rows_of_other_entries_are_not_compared_and_three_runs_are(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [1.0, 1.0, 1.0], ROWS) for name in "abc"]
    told = compare(*runs, "--out", tmp_path / "p.html")
    assert isinstance(told, dict)
    assert told["rows"] == "The rows of the first 3 optimizer steps are the same in all runs."
    assert (told["fields"], list(told["figures"][0])) == ([], ["", "a", "b", "c"])
    elsewhere = write_run(tmp_path / "d", [1.0, 1.0, 1.0], ROWS, entry="e2")
    told = compare(runs[0], elsewhere, "--out", tmp_path / "p.html")
    assert isinstance(told, dict)
    assert "different entries" in told["rows"]
    for name, said in (
        (
            FILE,
            "It is not known of which entries the rows of c are, since its run.json is missing or damaged",
        ),
        ("rows.jsonl", "b has no row log (rows.jsonl)"),
    ):
        (next(run for run in runs if run.name in said.split()) / name).unlink()
        told = compare(*runs, "--out", tmp_path / "p.html")
        assert isinstance(told, dict)
        assert said in told["rows"]
        shutil.copy(runs[0] / FILE, runs[2])


def test_mistakes_are_one_line_and_leave_no_page(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, [1.0], [ROWS[0]]) for name in ("one", "two"))
    empty = write_run(tmp_path / "empty", [], [])
    page = tmp_path / "none.html"
    for words, told in (
        ((one, one), "the same run is named twice"),
        ((one, empty), "has trained no step"),
        ((one, tmp_path), "has trained no step"),
        ((one, two, "plan.seed=3"), "plan.seed=3: changes a job, and runs are compared as they ran"),
        ((one, two, "ohter"), "ohter: is no run"),
    ):
        said = compare(*words, "--out", page, code=2)
        assert isinstance(said, str)
        assert told in said
        assert said.count("\n") == 1
        assert not page.exists()
