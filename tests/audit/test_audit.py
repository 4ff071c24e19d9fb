"""`raysvc audit`: defects that were put into real rows are found, each once and where it is, and none is in the others."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import raysvc
from raysvc.audit.audit import audit
from raysvc.audit.defects import DEFECTS
from raysvc.audit.findings import AuditReport
from raysvc.cli.main import app
from raysvc.job.job_file import load_job
from raysvc.row_ids import parse

SHARED = Path(os.environ.get("RAYSVC_SHARED", Path(__file__).parents[3] / "shared"))
TOKENIZER = SHARED / "tokenizers" / "qwen2_5"
pytestmark = pytest.mark.skipif(
    not TOKENIZER.is_dir(), reason="needs real rows and a real tokenizer beside the checkout"
)
Row = dict[str, Any]
HAS_MINHASH, HAS_LANGUAGES = (find_spec(name) is not None for name in ("rensa", "py3langid"))
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{{- message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
STRIPS = TEMPLATE.replace("message.content", "message.content.split('</think>')[-1]")
ENDLESS = TEMPLATE.replace("<|im_end|>\\n", "")


@cache
def lines(name: str, count: int) -> list[str]:
    with (SHARED / "data" / name).open() as file:
        return [line for _, line in zip(range(count), file, strict=False)]


def rows_of(name: str, count: int, first: int = 0) -> list[Row]:
    return [json.loads(line) for line in lines(name, first + count)[first:]]


def job_of(folder: Path, rows: list[Row], **sections: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    job = {
        "source": {"path": str(source)},
        "tokenizer": str(TOKENIZER),
        "cache": {"root": str(folder / "cache")},
    }
    return {**job, "max_quarantine": 1.0, **sections}


def places(report: AuditReport) -> dict[str, list[str]]:
    return {one.defect: [row.where for row in one.examples] for one in report.findings}


def source_rows(job: dict[str, Any], report: AuditReport) -> dict[str, list[int]]:
    """Defect -> rows of the source, as the entry that a build makes says where its rows come from."""
    entry = raysvc.tokenize(job)
    return {
        defect: [
            int(where.removeprefix("source row "))
            if where.startswith("source row ")
            else entry.row(parse(where))["source_row"]
            for where in found
        ]
        for defect, found in places(report).items()
    }


def said(row: Row, text: str, place: int = -1) -> Row:
    row["messages"][place]["content"] = text
    return row


def first_call(row: Row) -> int:
    return next(n for n, message in enumerate(row["messages"]) if message.get("tool_calls"))


def with_call(row: Row, **function: Any) -> Row:
    row["messages"][first_call(row)]["tool_calls"][0]["function"] |= function
    return row


def without(row: Row, place: int) -> Row:
    del row["messages"][place]
    return row


def with_message(row: Row, place: int, role: str, text: str) -> Row:
    row["messages"].insert(place, {"role": role, "content": text})
    return row


GERMAN = "Natalia hat im April achtundvierzig Freunden Klammern verkauft, und im Mai hat sie halb so viele verkauft wie vorher."
SEEDS: dict[str, Callable[[Row], Row]] = {  # each makes one defect of a row with tools and calls
    "nothing_trained": lambda row: {**row, "messages": [m for m in row["messages"] if m["role"] == "user"]},
    "too_long": lambda row: said(row, "word " * 6000),
    "answer_unfinished": lambda row: said(row, "Here it is:\n```python\nprint(1)"),
    "empty_message": lambda row: said(row, " ", 0),
    "broken_call": lambda row: with_call(row, arguments='{"city": "San'),
    "unanswered_call": lambda row: without(row, first_call(row) + 1),
    "result_without_call": lambda row: with_message(row, 1, "tool", "[]"),
    "undeclared_tool": lambda row: with_call(row, name="Nobody_1.Knows"),
    "arguments_against_schema": lambda row: with_call(row, arguments={"party": 7}),
    "odd_role": lambda row: with_message(row, 1, "narrator", "Meanwhile, in San Jose."),
    "odd_order": lambda row: with_message(row, 1, "user", "And hurry, please."),
    "control_characters": lambda row: said(row, "Enjoy your meal\x00 in San Jose."),
}


def seeded(clean: list[Row]) -> tuple[list[Row], dict[str, list[int]]]:
    """Rows with one defect of each kind, and where each is."""
    with_calls = [n for n, row in enumerate(clean) if any(m.get("tool_calls") for m in row["messages"])]
    rows, wanted = copy.deepcopy(clean), {}
    for (name, seed), place in zip(SEEDS.items(), with_calls[3::7], strict=False):
        rows[place], wanted[name] = seed(rows[place]), [place]
    assert len(wanted) == len(SEEDS)
    wanted["duplicate"] = [len(rows)]
    rows.append(copy.deepcopy(clean[5]))
    if HAS_MINHASH:
        wanted["near_duplicate"] = [len(rows)]
        rows.append(said(copy.deepcopy(clean[9]), "Bye."))
    if HAS_LANGUAGES:
        wanted["odd_language"] = [len(rows)]
        roles = ("user", "assistant")
        rows.append({"messages": [{"role": role, "content": GERMAN} for role in roles]})
    return rows, wanted


def test_defects_put_into_rows_of_conversations_are_found_each_where_it_is(tmp_path: Path) -> None:
    rows, wanted = seeded(rows_of("sgd_train.jsonl", 200))
    job = job_of(tmp_path, rows, max_length=5000)
    report = audit(load_job(job))
    assert source_rows(job, report) == wanted
    assert report.rows == {"": len(rows)}
    assert {one.rows for one in report.findings} == {1}


def test_the_rows_of_a_mixture_have_the_addresses_of_its_entries(tmp_path: Path) -> None:
    many = rows_of("sgd_train.jsonl", 30)
    few = rows_of("gsm8k_train.jsonl", 20)
    jobs = {
        "sgd": job_of(tmp_path / "sgd", [*many, many[7]]),
        "gsm": job_of(tmp_path / "gsm", [*few, few[2], many[3]]),
    }
    sources = {name: {"source": job["source"], "weight": 1} for name, job in jobs.items()}
    job = {**{name: jobs["sgd"][name] for name in ("tokenizer", "cache")}, "mixture": {"sources": sources}}
    report = audit(load_job(job))
    assert places(report) == {"duplicate": ["sgd 0:0:30", "gsm 1:0:20", "gsm 1:0:21"]}
    entry = raysvc.tokenize(job)
    for mine, other in (("0:0:30", "0:0:7"), ("1:0:20", "1:0:2"), ("1:0:21", "0:0:3")):
        assert entry.row(mine)["input_ids"] == entry.row(other)["input_ids"]


def test_rows_of_which_a_build_makes_one_for_each_turn_are_looked_at_whole(tmp_path: Path) -> None:
    rows = rows_of("sgd_train.jsonl", 20)
    said(rows[4], "Enjoy your meal\x00 in San Jose.")
    rows += [copy.deepcopy(rows[6])]
    job = job_of(tmp_path, rows, train_on="each_assistant_turn")
    report = audit(load_job(job))
    assert source_rows(job, report) == {"control_characters": [4], "duplicate": [20]}


def test_rows_of_the_same_words_about_other_pictures_are_no_duplicates(
    tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("PIL")
    from raysvc.cli.demo_images import write_image_job

    monkeypatch.chdir(tmp_path)
    job, source = write_image_job(tmp_path, 60), tmp_path / "rows.jsonl"
    rows = [row for row in map(json.loads, source.read_text().splitlines()) if "image" in json.dumps(row)]
    assert len({row["messages"][1]["content"] for row in rows}) < len(rows) == 53
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[4]]))
    assert places(audit(load_job(job))) == {"duplicate": ["0:0:53"]}


def test_an_entry_is_audited_like_a_file_and_a_job_file_is_not_needed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    rows = rows_of("gsm8k_train.jsonl", 30)
    entry = raysvc.tokenize(job_of(tmp_path, [*rows, rows[4]]))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["audit", f"source.path={entry.uri}", f"tokenizer={TOKENIZER}", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(one["defect"], one["examples"][0][0]) for one in found["findings"]] == [("duplicate", "0:0:30")]
    tokens = [{"input_ids": [n, 11, 1879, 0], "loss_mask": [0, 0, 1, 1]} for n in range(1000, 1030)]
    tokens[3]["input_ids"][3] = 151645  # <|im_end|>
    report = audit(load_job(job_of(tmp_path / "tokens", tokens)))
    assert {one.defect: one.rows for one in report.findings} == {"no_end_of_turn": 29}


def test_rows_of_an_eval_are_found_among_those_that_are_trained(tmp_path: Path) -> None:
    rows = rows_of("gsm8k_train.jsonl", 100)
    held = [copy.deepcopy(rows[40]), *rows_of("gsm8k_train.jsonl", 20, first=200)]
    said(held[0], "It is 72.")
    test = job_of(tmp_path / "test", held)["source"]
    job = job_of(tmp_path, rows, evals={"test": {"source": test}})
    report = audit(load_job(job))
    assert places(report) == {"eval_overlap": ["0:0:40"]}
    assert "evals.test 0:0:0" in report.findings[0].examples[0].text
    assert report.rows == {"evals.test": 21, "": 100}


@pytest.mark.parametrize("truncation", ["drop", "error"])
def test_a_row_that_is_too_long_does_not_end_an_audit(tmp_path: Path, truncation: str) -> None:
    rows = rows_of("gsm8k_train.jsonl", 30)
    said(rows[7], "word " * 2000)
    report = audit(load_job(job_of(tmp_path, rows, max_length=1000, truncation=truncation)))
    assert places(report) == {"too_long": ["source row 7"]}


def test_answers_that_are_cut_are_found(tmp_path: Path) -> None:
    rows = rows_of("gsm8k_train.jsonl", 30)
    said(rows[7], "word " * 2000)
    report = audit(load_job(job_of(tmp_path, rows, max_length=1000, truncation="keep_start")))
    assert places(report) == {"answer_cut": ["0:0:7"]}


def test_rows_that_are_longer_than_the_model_takes_are_found_without_a_limit_of_the_job(
    tmp_path: Path,
) -> None:
    rows = rows_of("gsm8k_train.jsonl", 30)
    said(rows[7], "word " * 140_000)
    assert places(audit(load_job(job_of(tmp_path, rows)))) == {"over_model_limit": ["0:0:7"]}


@pytest.mark.parametrize(
    ("template", "answer", "defect"),
    [
        (STRIPS, "<think>Half of 48.</think>It is 72.", "reasoning_removed"),
        (ENDLESS, "It is 72.", "no_end_of_turn"),
    ],
)
def test_what_a_template_does_to_a_row_is_found(
    tmp_path: Path, template: str, answer: str, defect: str
) -> None:
    row = said(rows_of("gsm8k_train.jsonl", 1)[0], answer)
    clean = rows_of("gsm8k_train.jsonl", 20, first=1) if defect == "reasoning_removed" else []
    tokenizer = {"name": str(TOKENIZER), "chat_template": template}
    report = audit(load_job(job_of(tmp_path, [row, *clean], tokenizer=tokenizer)))
    assert places(report) == {defect: ["0:0:0"]}


def test_tools_and_calls_that_a_template_leaves_out_are_found(tmp_path: Path) -> None:
    found = rows_of("sgd_train.jsonl", 40)
    row = next(one for one in found if any(m.get("tool_calls") for m in one["messages"]))
    tokenizer = {"name": str(TOKENIZER), "chat_template": TEMPLATE}
    for train_on, where in (("all_assistant_messages", "source row 0"), ("last_assistant_message", "0:0:0")):
        report = audit(load_job(job_of(tmp_path, [row], tokenizer=tokenizer, train_on=train_on)))
        assert places(report)["calls_dropped"] == [where]
    assert places(report)["tools_dropped"] == ["0:0:0"]


def pair(row: Row, chosen: str, rejected: str) -> Row:
    return {"prompt": row["messages"][0]["content"] + "\n", "chosen": chosen, "rejected": rejected}


def test_labels_that_contradict_each_other_are_found(tmp_path: Path) -> None:
    rows = rows_of("gsm8k_train.jsonl", 60)
    answers = [row["messages"][1]["content"] for row in rows]
    pairs = [pair(row, answers[n], answers[n - 1]) for n, row in enumerate(rows[:30])]
    pairs += [pair(rows[4], answers[3], answers[4]), pair(rows[40], answers[40], answers[40])]
    assert places(audit(load_job(job_of(tmp_path / "pairs", pairs)))) == {
        "labels_contradict": ["0:0:60"],
        "sides_equal": ["0:0:62"],
    }
    labelled = [
        {"prompt": row["messages"][0]["content"] + "\n", "completion": answers[n], "label": True}
        for n, row in enumerate(rows)
    ]
    labelled += [{**labelled[8], "label": False}, {**labelled[9], "completion": answers[3], "label": False}]
    report = audit(load_job(job_of(tmp_path / "kto", labelled)))
    assert places(report) == {"labels_contradict": ["0:0:120"]}


def test_a_ray_dataset_is_refused_by_its_name() -> None:
    job = load_job({"source": {"ray": "rows:make"}, "tokenizer": str(TOKENIZER)})
    with pytest.raises(raysvc.errors.ConfigError, match=r"source\.ray.*write_parquet"):
        audit(job)


def test_the_command_prints_rows_and_remedies_and_writes_ids_that_a_plan_takes(tmp_path: Path) -> None:
    rows = rows_of("gsm8k_train.jsonl", 40)
    rows += copy.deepcopy(rows[3:8])
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(job_of(tmp_path, rows)))
    ids = tmp_path / "odd.txt"
    done = CliRunner().invoke(app, ["audit", str(job), "--ids", str(ids)])
    assert done.exit_code == 0, done.output
    assert "duplicate: 5 rows have the same tokens" in done.stdout
    assert "    0:0:40  the same as 0:0:3: " in done.stdout
    assert "0:0:43" not in done.stdout
    assert f"raysvc audit {job} --ids odd.txt" in done.stdout
    assert ids.read_text().split() == ["0:0:40", "0:0:41", "0:0:42", "0:0:43", "0:0:44"]
    without_them = CliRunner().invoke(app, ["audit", str(job), f"plan.rows.exclude={ids}"])
    assert "0 defects" in without_them.stdout
    said(rows[0], "", 1)
    job.write_text(json.dumps(job_of(tmp_path, rows)))
    done = CliRunner().invoke(app, ["audit", str(job), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout.splitlines()[-1])["findings"][0]["defect"] == "nothing_trained"


def test_every_remedy_has_something_to_type() -> None:
    for defect in DEFECTS.values():
        assert (
            "=" in defect.remedy
            or "`" in defect.remedy
            or "raysvc" in defect.remedy
            or "write" in defect.remedy
        )


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_twenty_defects_are_found_among_13473_real_rows_and_none_is_invented(tmp_path: Path) -> None:
    """But for calls of 18 rows that leave out an argument which their schema requires: that is true of them."""
    many, wanted = seeded(rows_of("sgd_train.jsonl", 6000))
    few = rows_of("gsm8k_train.jsonl", 7473)
    said(few[100], "<think>Half of 48.</think>It is 72.")
    said(few[3000], "word " * 140_000)
    seen = copy.deepcopy(few[7000])
    said(seen, "It is 72.")
    sides = {
        "sgd": job_of(tmp_path / "sgd", many, max_length=5000),
        "gsm": job_of(
            tmp_path / "gsm",
            few,
            tokenizer={"name": str(TOKENIZER), "chat_template": STRIPS},
            evals={"test": {"source": job_of(tmp_path / "test", [seen])["source"]}},
        ),
    }
    reports = {name: audit(load_job(job)) for name, job in sides.items()}
    found = source_rows(sides["sgd"], reports["sgd"])
    broken = json.loads(lines("sgd_train.jsonl", 6000)[found["arguments_against_schema"][-1]])
    assert wanted.pop("arguments_against_schema")[0] in found.pop("arguments_against_schema")
    assert misses_a_required_argument(broken)
    assert found == wanted
    assert source_rows(sides["gsm"], reports["gsm"]) == {
        "reasoning_removed": [100],
        "over_model_limit": [3000],
        "eval_overlap": [7000],
    }
    pairs = [pair(row, row["messages"][1]["content"], "No.") for row in rows_of("gsm8k_train.jsonl", 500)]
    pairs.append({**pairs[3], "chosen": "No.", "rejected": pairs[3]["chosen"]})
    pairs.append({**pairs[5], "rejected": pairs[5]["chosen"]})
    reports["pairs"] = audit(load_job(job_of(tmp_path / "pairs", pairs)))
    assert places(reports["pairs"]) == {"labels_contradict": ["0:0:1000"], "sides_equal": ["0:0:1002"]}
    counts = {one.defect: one.rows for report in reports.values() for one in report.findings}
    truly = sum(misses_a_required_argument(row) for row in rows_of("sgd_train.jsonl", 6000))
    assert counts.pop("arguments_against_schema") == truly + 1 == 19
    assert set(counts.values()) == {1}
    assert len(counts) + 1 == 18 + HAS_MINHASH + HAS_LANGUAGES


def misses_a_required_argument(row: Row) -> bool:
    """By the row's own schemas, without a library."""
    required = {
        tool["function"]["name"]: tool["function"]["parameters"].get("required", [])
        for tool in json.loads(row["tools"])
    }
    calls = [call["function"] for message in row["messages"] for call in message.get("tool_calls") or ()]
    return any(name not in call["arguments"] for call in calls for name in required[call["name"]])


@pytest.mark.skipif(find_spec("jsonschema") is None, reason="needs raysvc[audit]")
@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"$ref": "#"}, "broken_schema"),
        ({"$schema": [1], "type": "object"}, "broken_schema"),
        ({"$id": "http://[", "properties": {"s": {"$ref": "q"}}}, "broken_schema"),
        ({"properties": {"s": {"pattern": "("}}}, "broken_schema"),
        ({"properties": {"s": {"pattern": "^b"}}}, "arguments_against_schema"),
        ({"properties": {"s": {"pattern": "a+!$"}}}, ""),
        ({"properties": {"s": {"pattern": r"^(a|a?)+$"}}}, None),  # takes centuries, or is seen through
        ({"patternProperties": {"^s$": {"type": "integer"}}, "additionalProperties": False}, "arguments_against_schema"),
        ({"patternProperties": {"^s": {"type": "string"}}, "additionalProperties": False}, ""),
    ],
)  # fmt: skip
def test_no_schema_ends_or_holds_up_an_audit(schema: dict[str, Any], found: str | None) -> None:
    from raysvc.audit.call_checks import check_calls
    from raysvc.chat.source.examples import ChatExample

    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = {"function": {"name": "f", "arguments": {"s": "a" * 60 + "!"}}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    example = ChatExample(messages, [tool], (1,))
    told = [name for name, _ in check_calls(example, True)]
    assert told == [found] * bool(found) or (found is None and told == ["arguments_against_schema"])
