"""`raysvc init` on rows of several kinds: the job loads, and its own command takes it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc.chat.tokens import probe
from raysvc.cli import first_job, other_templates
from raysvc.cli.main import app
from raysvc.cli.sample_data import chat_rows
from raysvc.job.job_file import load_job
from raysvc.training.objective import objective_of
from tests.actors.small_models import small_folder, small_model

Rows = Callable[[dict[str, Any]], dict[str, Any]]


def pair(row: dict[str, Any]) -> tuple[str, str]:
    return row["messages"][0]["content"], row["messages"][-1]["content"]


KINDS: dict[str, Rows] = {
    "chat": lambda row: row,
    "alpaca": lambda row: dict(zip(("instruction", "output"), pair(row), strict=True)),
    "question_answer": lambda row: dict(zip(("question", "answer"), pair(row), strict=True)),
    "text": lambda row: {"text": pair(row)[1]},
    "preference": lambda row: {"prompt": pair(row)[0], "chosen": pair(row)[1], "rejected": "no"},
    "stepwise": lambda row: {
        "prompt": pair(row)[0],
        "completions": [pair(row)[1], "so"],
        "labels": [True, False],
    },
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["init", *arguments])


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_written_for_rows_of_every_kind(tmp_path: Path, sample: dict[str, str], kind: str) -> None:
    rows = [KINDS[kind](row) for row in chat_rows(40)]
    data, out = tmp_path / "my rows (1).jsonl", tmp_path / "new" / "job.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"broken\n')
    result = run(str(data), "--tokenizer", sample["tokenizer"], "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert (said["format"], said["num_rows"]) == (kind, 41)
    assert (said["row_counts"]["rows_in"], said["row_counts"]["rows_written"]) == (41, 40)
    job = load_job(out)
    assert (job.source.format, job.source.path) == (kind, (str(data),))
    assert job.server.name == "my-rows-1"
    assert job.trainer.model == "tiny"
    cache = job.cache.model_copy(update={"root": str(tmp_path / "cache")})
    job = job.model_copy(update={"cache": cache, "max_quarantine": 0.1})
    objective_of(job, raysvc.tokenize(job))  # refuses what does not fit
    text = out.read_text()
    assert "# Not usable: 1, " in text
    assert f"half of them at most {said['length']}, the longest {said['longest']}" in text


def test_the_lengths_are_those_that_transformers_counts_and_the_editor_finds_its_schema(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    from jsonschema import Draft202012Validator
    from transformers import AutoTokenizer

    out = tmp_path / "job.yaml"
    assert run(sample["rows"], "--tokenizer", sample["tokenizer"], "--out", str(out)).exit_code == 0
    (
        first,
        *_,
    ) = out.read_text().splitlines()
    schema = out.with_name(first.removeprefix("# yaml-language-server: $schema="))
    Draft202012Validator(json.loads(schema.read_text())).validate(yaml.safe_load(out.read_text()))
    hf = AutoTokenizer.from_pretrained(sample["tokenizer"])
    rows = [json.loads(line) for line in Path(sample["rows"]).read_text().splitlines()]
    ids = [
        hf.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=True, return_dict=False)
        for row in rows
    ]
    assert f"the longest {max(map(len, ids))};" in out.read_text()


def test_a_model_folder_is_trained_and_nothing_is_written_over(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(sample["tokenizer"], model)
    (model / "config.json").write_text("{}")
    out = tmp_path / "tiny.yaml"
    told = run(sample["rows"], "--tokenizer", str(model), "--out", str(out)).output
    assert load_job(out).trainer.model == "tiny"
    assert f"{model} has config.json and no weights, so the job trains tiny." in told
    (model / "model.safetensors").touch()
    out = tmp_path / "job.yaml"
    assert run(sample["rows"], "--tokenizer", str(model), "--out", str(out)).exit_code == 0
    assert load_job(out).trainer.model == str(model)
    before = out.read_bytes()
    again = run(sample["rows"], "--tokenizer", str(model), "--out", str(out))
    assert (again.exit_code, out.read_bytes()) == (2, before)
    (tmp_path / "odd.jsonl").write_text('{"colour": "red"}\n')
    odd = run(str(tmp_path / "odd.jsonl"), "--tokenizer", str(model), "--out", str(tmp_path / "odd.yaml"))
    assert (odd.exit_code, odd.stderr.count("\n")) == (2, 1)
    assert "colour" in odd.stderr
    assert not (tmp_path / "odd.yaml").exists()


def rate_of(sample: dict[str, str], folder: Path) -> tuple[float, str]:
    """The rate that `init` writes for a model folder, and its line."""
    out = folder.parent / f"{folder.name}.yaml"
    assert run(sample["rows"], "--tokenizer", str(folder), "--out", str(out)).exit_code == 0
    line = next(line for line in out.read_text().splitlines() if "learning_rate" in line)
    return load_job(out).trainer.learning_rate, line.strip()


def test_the_rate_fits_the_size_of_the_model(tmp_path: Path, sample: dict[str, str]) -> None:
    for name in ("own", "small", "unknown", "wide"):
        shutil.copytree(sample["tokenizer"], tmp_path / name)
    small_folder("llama", tmp_path / "small")
    small_folder("llama", tmp_path / "wide", hidden_size=1024, intermediate_size=4096, num_hidden_layers=1)
    (tmp_path / "unknown" / "config.json").write_text("{}")
    (tmp_path / "unknown" / "model.bin").touch()
    count = sum(weight.numel() for weight in small_model("llama").parameters())
    assert rate_of(sample, tmp_path / "small") == (
        1e-2,
        f"learning_rate: 1.0e-2   # for {count / 1e6:.3g} million weights",
    )
    assert rate_of(sample, tmp_path / "own")[0] == 1e-2
    assert rate_of(sample, tmp_path / "wide")[0] == 3e-3
    assert rate_of(sample, tmp_path / "unknown") == (1e-5, "learning_rate: 1.0e-5")


def test_rows_with_weights_of_messages_get_a_job_that_reads_them(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "job.yaml"
    asked, *_, answer = next(iter(chat_rows(1)))["messages"]
    row = {"messages": [asked, {**answer, "weight": 0}, asked, {**answer, "weight": 1}]}
    data.write_text(f"{json.dumps(row)}\n" * 8)
    command = (str(data), "--tokenizer", sample["tokenizer"], "--out", str(out))
    refused = run(*command)
    assert (refused.exit_code, out.exists()) == (2, False)
    assert "train_on: message_weight reads weights" in refused.output
    assert run(*command, "train_on=message_weight").exit_code == 0
    job = load_job(out)
    assert job.train_on == "message_weight"
    entry = raysvc.tokenize(job, cache={"root": str(tmp_path / "cache")})
    assert entry.report["row_counts"]["rows_written"] == 8


@pytest.mark.parametrize(
    ("data", "here", "out"),
    [
        ("rows.jsonl", "pictures", "../job.yaml"),
        (".", "pictures", "../job.yaml"),
        ("pictures/rows.jsonl", ".", "job.yaml"),  # pictures are named relative to the rows, wherever one is
    ],
)
def test_a_folder_of_pictures_with_rows_about_them_gets_a_job_that_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, here: str, out: str
) -> None:
    from raysvc.cli.demo_images import write_image_job
    from raysvc.training.model_name import vision_of

    ours = write_image_job(tmp_path / "pictures", 12).parent
    (ours / "job.yaml").unlink()
    tokenizer = (ours / "tokenizer").rename(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path / here)
    result = run(data, "--tokenizer", str(tokenizer), "--out", out, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert (said["num_rows"], said["row_counts"]["rows_written"]) == (12, 12)
    assert said["media"] == {"image": len(list((ours / "images").iterdir()))} == {"image": 11}
    assert "# They have 11 images." in Path(out).read_text()
    job = load_job(out)
    job = job.model_copy(update={"cache": job.cache.model_copy(update={"root": str(tmp_path / "cache")})})
    assert job.source.media == ("image",)
    entry = raysvc.tokenize(job)
    assert entry.num_rows == 12
    assert job.trainer.model == "tiny-vision"
    assert vision_of(job, entry) is not None


def test_a_template_that_only_the_processor_has_is_used(tmp_path: Path) -> None:
    """As `chat_template.json` of early models of images, which tokenizers do not read."""
    from raysvc.cli.demo_images import write_image_job

    ours = write_image_job(tmp_path / "pictures", 12).parent
    template = ours / "tokenizer" / "chat_template.jinja"
    (template.parent / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    out = tmp_path / "job.yaml"
    result = run(str(ours / "rows.jsonl"), "--tokenizer", str(template.parent), "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["row_counts"]["rows_written"] == 12


@pytest.mark.parametrize(
    ("model", "layout"), [("llama", "packed"), ("gpt_oss", "packed"), ("lfm2", "padded_right")]
)
def test_the_layout_is_one_in_which_the_model_keeps_rows_apart(
    tmp_path: Path, sample: dict[str, str], model: str, layout: str
) -> None:
    folder, out = tmp_path / "model", tmp_path / "job.yaml"
    shutil.copytree(sample["tokenizer"], folder)
    small_model(model).config.save_pretrained(folder)
    (folder / "model.safetensors").touch()
    assert run(sample["rows"], "--tokenizer", str(folder), "--out", str(out)).exit_code == 0
    job = load_job(out)
    assert (job.trainer.model, job.plan.layout) == (str(folder), layout)
    assert ("would let this model see several rows as one" in out.read_text()) == (layout != "packed")


def test_init_says_what_tokenize_warns_of(tmp_path: Path, sample: dict[str, str], caplog: Any) -> None:
    tool = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
    answer = {"role": "assistant", "content": "hi", "reasoning_content": "a thought", "toxic": False}
    row = {"messages": [{"role": "user", "content": "hello"}, answer], "tools": [tool], "hash": "a"}
    data, out = tmp_path / "rows.jsonl", tmp_path / "job.yaml"
    data.write_text(json.dumps(row) + "\n")
    assert run(str(data), "--tokenizer", sample["tokenizer"], "--out", str(out)).exit_code == 0
    job = load_job(out)
    with caplog.at_level("WARNING"):
        entry = raysvc.tokenize(
            job.model_copy(update={"cache": job.cache.model_copy(update={"root": str(tmp_path / "cache")})})
        )
    warnings = [record.getMessage() for record in caplog.records if record.name.endswith("builds.build")]
    assert any("removed the reasoning of 1 trained messages" in warning for warning in warnings)
    said = out.read_text().lower()
    assert all(warning.lower() in said for warning in warnings)
    assert entry.report["left_out"] == ["hash", "messages.toxic"]
    assert "# left out: hash, messages.toxic." in said
    assert [*entry.report["row_counts"]["normalized"]] == ["bare tool declarations wrapped as functions"]
    assert "# bare tool declarations wrapped as functions: 1." in said


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("template", "the template refused the conversation: no system (12 rows, e.g. rows 1 and 3 and 5); write tokenizer: {"),
        ("rows", "broken JSON (12 rows, e.g. rows 1 and 3 and 5: Expecting property name enclosed in double quotes at character 2); fix these rows"),
        ("formats", "is of format text: files of two formats need a source each, under mixture.sources); fix these rows"),
    ],
)  # fmt: skip
def test_rows_that_no_command_would_accept_are_said_with_their_cause_and_no_next_command(
    tmp_path: Path, sample: dict[str, str], fault: str, told: str
) -> None:
    folder = Path(shutil.copytree(sample["tokenizer"], tmp_path / "tokenizer"))
    template = folder / "chat_template.jinja"
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template.write_text(refuses + template.read_text())
    lines = []
    for number, row in enumerate(chat_rows(24)):
        messages = [one for one in row["messages"] if one["role"] != "system"]
        if number % 2:
            messages = [{"role": "system", "content": "s"}, *messages]
        line = json.dumps({"messages": messages})
        bad = {"rows": "{broken", "formats": '{"text": "s"}'}.get(fault, line)
        lines.append(bad if number % 2 else line)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(line + "\n" for line in lines))
    said = run(str(data), "--tokenizer", str(folder), "--out", str(tmp_path / "job.yaml")).output
    where = f" (the first is line 2 of {data})"
    assert f"12 of the first 24 rows{where} cannot be used, so every command would end: " in said
    assert told in said
    assert "next:" not in said


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize("at_hand", ["template", "folder", "nothing"])
def test_the_line_that_init_says_for_rows_that_the_template_refuses_makes_a_job_of_all_of_them(
    tmp_path: Path, sample: dict[str, str], at_hand: str
) -> None:
    """TRL's templates of ChatML fit the tokens of the sample's tokenizer; they fit no tokenizer with other marks of a turn."""
    folder = Path(shutil.copytree(sample["tokenizer"], tmp_path / "here" / "tokenizer"))
    template = folder / "chat_template.jinja"
    template.write_text(NO_SYSTEM + template.read_text())
    if at_hand != "template":
        for path in folder.iterdir():
            path.write_text(path.read_text().replace("<|im_", "<|turn_"))
    if at_hand == "folder":
        shutil.copytree(sample["tokenizer"], tmp_path / "here" / "another")
    out = tmp_path / "job.yaml"
    result = run(sample["rows"], "--tokenizer", str(folder), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert (
        "cannot be used, so every command would end: the template refused the conversation: no system ("
        in result.output
    )
    if at_hand == "nothing":
        assert "name a tokenizer whose chat template takes them" in result.output
        return
    line = next(one for one in out.read_text().splitlines() if one.startswith("# tokenizer: "))
    said = line.removeprefix("# ").split("   #")[0]
    assert f"write {said} into the job" in result.output
    assert str(folder if at_hand == "template" else tmp_path / "here" / "another") in said
    text = out.read_text().replace(
        next(one for one in out.read_text().splitlines() if one.startswith("tokenizer: ")), said
    )
    out.write_text(text)
    entry = raysvc.tokenize(load_job(out), cache={"root": str(tmp_path / "cache")})
    assert entry.num_rows == len(Path(sample["rows"]).read_text().splitlines())


@pytest.mark.parametrize("own", ["refuses", "is not there"])
@pytest.mark.parametrize("at_hand", ["template", "folder"])
def test_a_template_that_takes_no_row_is_named_as_the_cause_and_what_init_says_instead_works(
    tmp_path: Path, sample: dict[str, str], at_hand: str, own: str
) -> None:
    folder, out = Path(shutil.copytree(sample["tokenizer"], tmp_path / "tokenizer")), tmp_path / "job.yaml"
    if at_hand == "folder":
        for path in folder.iterdir():
            path.write_text(path.read_text().replace("<|im_", "<|turn_"))
        shutil.copytree(sample["tokenizer"], tmp_path / "another")
    if own == "refuses":
        (folder / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    else:
        (folder / "chat_template.jinja").unlink()
    refused = run(sample["rows"], "--tokenizer", str(folder), "--out", str(out))
    assert refused.exit_code == 2
    told = "the template refused the conversation: never" if own == "refuses" else "has no chat template"
    assert told in refused.stderr
    said = re.search(r"; (?:give|add) (.*), (?:whose template|which) takes them", refused.stderr)
    assert said is not None, refused.stderr
    named = [
        sample["rows"],
        *([] if at_hand == "folder" else ["--tokenizer", str(folder)]),
        "--out",
        str(out),
    ]
    assert "next: raysvc show" in run(*named, *shlex.split(said[1])).output
    entry = raysvc.tokenize(load_job(out), cache={"root": str(tmp_path / "cache")})
    assert entry.num_rows == len(Path(sample["rows"]).read_text().splitlines())


def test_many_templates_are_tried_with_encoders_that_are_chosen_once(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, tried = [], []
    choose, takes = probe.choose_encoder, other_templates._takes
    monkeypatch.setattr(probe, "choose_encoder", lambda *both: chosen.append(0) or choose(*both))
    monkeypatch.setattr(other_templates, "_takes", lambda *all_: tried.append(0) or takes(*all_))
    refusing = tmp_path / "never.jinja"
    refusing.write_text("{{ raise_exception('never') }}")
    files = [refusing, refusing, refusing, other_templates.TEMPLATE_FILE]
    monkeypatch.setattr(other_templates, "_template_files", lambda: files)
    told = run(sample["rows"], "--tokenizer", sample["tokenizer"], f"tokenizer.chat_template={refusing}")
    assert str(other_templates.TEMPLATE_FILE) in told.stderr
    assert len(tried) >= 3
    assert len(chosen) == 2, "once for the first rows, once for all templates"


def test_a_completion_that_joins_its_prompt_is_no_fault_of_a_template(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_job, "template_that_takes", lambda *_: pytest.fail("no row has messages"))
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "the answer i", "completion": "s it is the answer"}) + "\n")
    told = run(str(data), "--tokenizer", sample["tokenizer"])
    assert "a token spans the prompt and its completion" in told.stderr
    assert "fix these rows" in told.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_the_job_that_is_written_learns_within_twenty_steps(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "job.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(400)))
    assert "next: raysvc show" in run(str(data), "--tokenizer", sample["tokenizer"], "--out", str(out)).output
    summary = raysvc.train(
        load_job(out), cache={"root": str(tmp_path / "cache")}, trainer={"run_dir": str(tmp_path / "run")}
    ).metrics
    assert summary["steps"] >= 20
    assert summary["loss_last"] < 0.8 * summary["loss_first"]
