"""What a run says of the rows that it did not train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.cli.sample_data import write_rows
from raysvc.evals.held_rows import evaluated_rows
from raysvc.inspect.left_out import left_out
from raysvc.job.job_file import load_job
from raysvc.row_ids import written
from raysvc.training.run_folder import RunFolder


def test_every_row_that_was_not_trained_is_counted_once_under_one_reason(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 60)
    source.open("a").write('{"messages": "odd"}\n')
    job = load_job(
        {
            "source": {"path": str(source), "format": "chat"},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            "max_quarantine": 0.5,
            "plan": {"batch_size": 8, "skip_rows": ["0:0:4", "0:0:5"]},
            "evals": {"held": {"share": 0.2}},
        }
    )
    entry = raysvc.tokenize(job)
    held = {*evaluated_rows(job, entry.entries)}
    free = [row for row in entry.row_ids().tolist() if row not in {4, 5, *held}]
    folder = RunFolder(tmp_path)
    lines: list[dict[str, Any]] = [
        {"step": n, "mini": 0, "row_ids": list(map(written, free[:17]))} for n in range(2)
    ]
    folder.rows.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    found = left_out(job, entry, folder)
    assert sum(found["quarantined"].values()) == 1
    assert found["example"].startswith("row 60: ")
    assert found["untrained"] == {
        "in plan.skip_rows": 2, "held out for the eval held": len(held), "not reached": 60 - 2 - len(held) - 17
    }  # fmt: skip
    folder.rows.write_text(
        "".join(
            f"{json.dumps({**line, 'row_ids': list(map(written, free))}, separators=(',', ':'))}\n"
            for line in lines
        )
    )
    assert "not reached" not in left_out(job, entry, folder)["untrained"]
    for limit, value in (("COUNTED_ROWS", 59), ("COUNTED_BYTES", folder.rows.stat().st_size - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(f"raysvc.inspect.left_out.{limit}", value)
            assert left_out(job, entry, folder)["untrained"] is None
