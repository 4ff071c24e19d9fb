"""Which rows moved the loss of a step: the oracle is what was put into the report."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import raysvc
from raysvc.actors.server.kept.served_records import served_line
from raysvc.api import serve_spec
from raysvc.cli.main import app
from raysvc.errors import ConfigError
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.feedback.request import RowOutcomes
from raysvc.inspect.why import spike_of, why
from raysvc.job.job_file import load_job

ROWS, EVERY = 240, 8  # rows of the sample, and rows a step


def run_of(
    folder: Path, sample: dict[str, str], losses: dict[tuple[int, int], float], steps: int = 90
) -> str:
    """A run whose row n costs 1 + n/1000 a target of its ten, but where `losses` says otherwise."""
    job = load_job({"source": {"path": sample["rows"], "format": "chat"}, "tokenizer": sample["tokenizer"],
                    "cache": {"root": str(folder / "cache")}, "plan": {"batch_size": EVERY, "epochs": 3}})  # fmt: skip
    entry = raysvc.tokenize(job)
    run = folder / "run"
    run.mkdir()
    (run / "served.jsonl").write_text(json.dumps(served_line(0, 1, serve_spec(job, entry, evals=()))) + "\n")
    of_steps = np.repeat(np.arange(steps), EVERY)
    rows = np.arange(len(of_steps)) % ROWS
    each = [
        losses.get((step, row), 1 + row / 1000)
        for step, row in zip(of_steps.tolist(), rows.tolist(), strict=True)
    ]
    columns = {"loss": 10 * np.array(each, np.float32), "targets": np.full(len(rows), 10, np.float32)}
    FeedbackLog(f"{run}/server/feedback").report(RowOutcomes(of_steps, rows, columns), known=0)
    metrics = []
    for step in range(steps):
        loss = float(np.mean(np.array(each)[of_steps == step]))
        metrics.append(
            {"step": step, "loss": loss, "grad_norm": 9.0 if step == 71 else 1.0 + loss, "lr": 1e-3}
        )
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return str(run)


def test_the_row_that_lifts_a_step_comes_first_with_what_it_cost_before(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    run = run_of(tmp_path, sample, {(42, 98): 30.0, (42, 99): 5.0})  # of the second epoch
    found, entry = why(run, 42)
    first, second, *others = found.rows
    assert (first.row_id, second.row_id) == ("0:0:98", "0:0:99")
    assert first.loss == pytest.approx(30)
    assert first.earlier == ((12, pytest.approx(1.098)),)
    assert first.tokens == len(entry.row(98)["input_ids"])
    assert found.loss - found.loss_around == pytest.approx(sum(row.lift for row in found.rows))
    assert first.lift == pytest.approx((30 - found.loss_around) / EVERY)
    assert all(abs(row.lift) < 0.05 for row in others)
    (source,) = found.sources
    assert (source.rows, source.lift) == (EVERY, pytest.approx(found.loss - found.loss_around))
    assert sum(group.lift for group in found.lengths) == pytest.approx(source.lift)
    assert found.metrics["loss"][0] == pytest.approx(found.loss, rel=1e-6)


def test_a_step_is_found_by_the_spike_of_a_metric(tmp_path: Path, sample: dict[str, str]) -> None:
    run = run_of(tmp_path, sample, {(42, 98): 30.0, (5, 40): float("nan")})
    assert spike_of(run, "grad_norm") == 5, "NaN is worse than any number"
    assert spike_of(run_of(tmp_path / "other", sample, {(42, 98): 30.0}), "loss") == 42
    assert spike_of(run_of(tmp_path / "third", sample, {}), "grad_norm") == 71
    found, _ = why(run, 5)
    assert found.rows[0].row_id == "0:0:40"


def test_the_command_shows_the_rows_and_ends_in_json(tmp_path: Path, sample: dict[str, str]) -> None:
    run = run_of(tmp_path, sample, {(42, 98): 30.0})
    shown = CliRunner().invoke(app, ["why", run])
    assert shown.exit_code == 0, shown.output
    assert "step 42: loss 4.712 a target" in shown.output
    assert re.search(r"0:0:98\trows\t98\t\d+\t10\t30\t\+3\.6\d+\t1\.098 at step 12", shown.output)
    assert "»" in shown.output
    told = json.loads(CliRunner().invoke(app, ["why", run, "--step", "42", "--json"]).stdout.splitlines()[-1])
    assert told == json.loads(json.dumps(asdict(why(run, 42)[0])))


def test_a_step_without_losses_and_a_folder_without_a_run_are_refused_by_name(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    run = run_of(tmp_path, sample, {})
    with pytest.raises(ConfigError, match=r"has no losses of the rows of step 90.*client\.report_rows"):
        why(run, 90)
    with pytest.raises(ConfigError, match=r"has no served\.jsonl"):
        why(str(tmp_path), 1)
    with pytest.raises(ConfigError, match=r"has no loss in metrics\.jsonl"):
        spike_of(str(tmp_path), "loss")
    for words, complaint in (
        (["why", "nowhere"], "is no run"),
        (["why", run, "--spike", "lr"], "is not known"),
    ):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2
        assert complaint in refused.output


def test_ranks_report_their_own_rows_of_a_step(tmp_path: Path) -> None:
    log = FeedbackLog(str(tmp_path))
    for rank in (0, 1, 0):  # the first one trained again
        rows: Any = np.array([rank, rank + 2])
        log.report(RowOutcomes(np.array([7, 7]), rows, {"loss": np.array([rank, rank], np.float32)}), known=0)
    found = log.outcomes(0, 9, [])
    assert dict(zip(found.row_ids.tolist(), found.columns["loss"].tolist(), strict=True)) == {
        0: 0,
        2: 0,
        1: 1,
        3: 1,
    }
    assert log.outcomes(0, 9, [], np.array([3])).row_ids.tolist() == [3]
