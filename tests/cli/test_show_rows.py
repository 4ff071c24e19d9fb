"""`raysvc show` says which turn of which conversation a row is, and whether its reasoning is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raysvc.cli.main import app

runner = CliRunner()
STRIPS = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{{- message.content.split('</think>')[-1] + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def job_file(folder: Path, rows: list[list[str]], **sections: Any) -> Path:
    roles = ("user", "assistant")
    lines = [
        json.dumps({"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(row)]})
        for row in rows
    ]
    source = folder / "rows.jsonl"
    source.write_text("\n".join(lines))
    job = {"source": {"path": str(source)}, "cache": {"root": str(folder / "cache")}, **sections}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def show(job: Path, row: int, *more: str) -> str:
    result = runner.invoke(app, ["show", "-c", str(job), "--row", str(row), *more])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_row_of_a_conversation_says_which_turn_of_which_source_row_it_is(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    rows = [["a", "b"], ["a", "b", "c", "d", "e", "f"], ["a", "b", "c", "d"]]
    job = job_file(tmp_path, rows, tokenizer=sample["tokenizer"], train_on="each_assistant_turn")
    wanted = [(0, 1, 1), (1, 1, 3), (1, 2, 3), (1, 3, 3), (2, 1, 2), (2, 2, 2)]
    for row, (source_row, turn, count) in enumerate(wanted):
        assert f"turn {turn} of {count} of source row {source_row}," in show(job, row)
    assert json.loads(show(job, 2, "--json"))["turn"] == [2, 3]


@pytest.mark.parametrize("train_on", ["all_assistant_messages", "last_assistant_message"])
def test_a_row_says_whether_the_template_removed_its_reasoning(
    train_on: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    rows = [["a", "plain"], ["a", "<think>hm</think>so", "b", "<think>well</think>then"]]
    tokenizer = {"name": sample["tokenizer"], "chat_template": STRIPS}
    job = job_file(tmp_path, rows, tokenizer=tokenizer, train_on=train_on)
    count = 2 if train_on == "all_assistant_messages" else 1
    assert json.loads(show(job, 0, "--json"))["reasoning_removed"] == 0
    assert json.loads(show(job, 1, "--json"))["reasoning_removed"] == count
    assert "of this row" not in show(job, 0)
    assert "of this row" in show(job, 1)


def test_a_row_whose_source_is_gone_says_what_is_known_of_the_entry(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.errors import SourceError
    from raysvc.inspect import row_again

    tokenizer = {"name": sample["tokenizer"], "chat_template": STRIPS}
    job = job_file(tmp_path, [["a", "<think>hm</think>so"]], tokenizer=tokenizer)

    def gone(*_: object) -> None:
        raise SourceError("source", "gone", "")

    monkeypatch.setattr(row_again, "tokenized_again", gone)
    assert "in this entry" in show(job, 0)


def test_a_column_is_shown_where_the_row_has_a_value(tmp_path: Path, sample: dict[str, str]) -> None:
    rows = [{"prompt": "p", "completion": "c", "domain": domain} for domain in ("math", None, "")]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = tmp_path / "job.yaml"
    sections = {"source": {"path": str(source), "carry": ["domain"]}, "tokenizer": sample["tokenizer"]}
    job.write_text(yaml.safe_dump({**sections, "cache": {"root": str(tmp_path / "cache")}}))
    assert "| domain: math" in show(job, 0)
    assert "domain" not in show(job, 1)
    assert "domain" not in show(job, 2)
    assert json.loads(show(job, 1, "--json"))["columns"] == {"domain": None}
    step = runner.invoke(app, ["show", "-c", str(job), "--step", "0"])
    assert step.exit_code == 0, step.stderr
    assert step.stdout.count("domain") == 1


SPELLS = STRIPS.replace("message.content", "message.content.replace('8', 'eight')")


def show_source_row(job: Path, row: int, *more: str) -> str:
    result = runner.invoke(app, ["show", str(job), "--source-row", str(row), *more])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_row_that_no_build_accepts_is_shown_as_the_template_writes_it_with_the_reason(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    tokenizer = {"name": sample["tokenizer"], "chat_template": SPELLS}
    job = job_file(tmp_path, [["a", "plain"], ["b", "it is 18"], ["c"]], tokenizer=tokenizer)
    refused = runner.invoke(app, ["show", str(job), "--row", "1"])
    assert "--source-row 1 shows one" in refused.stderr
    shown = show_source_row(job, 1)
    assert (
        f"source row 1 (line 2 of {tmp_path}/rows.jsonl) is quarantined: a trained turn does not hold its message"
        in shown
    )
    assert "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nit is 1eight<|im_end|>" in shown
    assert "»plain<|im_end|>«" in show_source_row(job, 0)
    dropped = show_source_row(job, 2)
    assert "rows.jsonl) is dropped: no assistant message" in dropped
    assert '{"messages": [{"role": "user", "content": "c"}]}' in dropped
    told = json.loads(show_source_row(job, 1, "--json"))
    assert (told["source_row"], told["written"], told["reason"]) == (
        1,
        False,
        "a trained turn does not hold its message",
    )


def test_a_row_of_a_source_is_found_by_its_own_number_where_rows_before_it_were_left_out(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = job_file(tmp_path, [["dropped"], ["a", "first"], ["b", "second"]], tokenizer=sample["tokenizer"])
    assert "second" in show(job, 1)
    assert "first" in show_source_row(job, 1)
    missing = runner.invoke(app, ["show", str(job), "--row", "2"])
    assert "--source-row" in missing.stderr
    beyond = runner.invoke(app, ["show", str(job), "--source-row", "3"])
    assert "its rows have the numbers 0 to 2" in beyond.stderr
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n" + rows.read_text())
    empty = runner.invoke(app, ["show", str(job), "--source-row", "0"])
    assert "row 0 is an empty line" in empty.stderr


def test_two_jobs_that_share_an_entry_each_name_their_own_files(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    import raysvc

    rows = [["a", "b"], ["c", "d"]]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        cache = {"root": str(tmp_path / "cache")}
        job = job_file(
            tmp_path / name, rows, tokenizer=sample["tokenizer"], plan={"batch_size": 2}, cache=cache
        )
        entry = raysvc.tokenize(job)
        assert f"source {tmp_path / name / 'rows.jsonl'}" in repr(entry)
        told = runner.invoke(app, ["show", str(job), "--step", "0", "--json"]).stdout
        assert {row["source"] for row in json.loads(told)["rows"]} == {str(tmp_path / name / "rows.jsonl")}
    assert entry.hit
