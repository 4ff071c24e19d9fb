"""Mistakes of a first hour, as they are typed: what is said, and that the remedy, typed as it stands, works."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from raysvc.cli.main import app


class Mistake(NamedTuple):
    """A command that is wrong, the end of its error line, and a command that follows the remedy.

    `{here}` is the folder. None: the remedy is no command (another machine, another network, a file to repair).
    """

    typed: str
    says: str
    then: str | None


JOB = """\
source: {path: rows.jsonl, format: chat}
tokenizer: tokenizer
plan: {batch_size: 4}
server: {name: first}
trainer: {model: tiny, run_dir: runs/first}
"""
FILES = {
    "job.yaml": JOB,
    "no_comma.yaml": "source: {path: rows.jsonl\ntokenizer: tokenizer\n",
    "no_tokenizer.yaml": "source: {path: rows.jsonl}\n",
    "wrong_place.yaml": JOB + "batch_size: 4\n",
    "tab.yaml": "\tsource: rows.jsonl\n",
    "twice.yaml": JOB + "plan: {batch_size: 8}\n",
    "two.yaml": "tokenizer: tokenizer\nmixture: {sources: {a: {source: {path: rows.jsonl}, weight: 1}, b: {source: {path: alpaca.jsonl}, weight: 1}}}\n",
    "empty.yaml": "",
    "empty.jsonl": "",
    "list.jsonl": '[\n{"messages":\n[]}\n]\n',
    "cut.jsonl": '{"messages": [{"role": "user", "content": "x"},\n',
    "text.jsonl": '{"messages": "hello"}\n' * 4,
    "asked.jsonl": '{"messages": [{"role": "user", "content": "x"}]}\n' * 4,
    "alpaca.jsonl": '{"instruction": "Add 1 and 2", "input": "", "output": "3"}\n' * 4,
    "odd.jsonl": '{"q": "Add 1 and 2", "a": "3"}\n' * 4,
    "narrator.jsonl": '{"messages": [{"role": "user", "content": "x"}, {"role": "narrator", "content": "y"}]}\n'
    * 4,
    "not.parquet": '{"messages": []}\n',
    "skip.txt": "0:0:1\n",
}
QUARANTINED = "rows could not be verified, more than max_quarantine = 0.01: "
COLUMNS = (
    "leave source.format out, and name columns: source.columns.messages=YOURS, or source.columns.question=YOURS "
    "source.columns.answer=ANOTHER"
)
SUFFIXES = "name files that end in .jsonl, .ndjson, .json, .txt, .csv, .tsv, .parquet, .arrow, .tar"
MISTAKES = [
    # files
    Mistake(
        "init nothing.jsonl --tokenizer tokenizer --out new.yaml",
        f"source.path: 'nothing.jsonl' matches no file (it is looked for as {{here}}/nothing.jsonl); {SUFFIXES}",
        "init rows.jsonl --tokenizer tokenizer --out new.yaml",
    ),
    Mistake(
        "init rows.jsonl --tokenizer tokenizer",
        "job.yaml: exists already; name another file with --out",
        "init rows.jsonl --tokenizer tokenizer --out other.yaml",
    ),
    Mistake(
        "show nothing.yaml",
        "nothing.yaml: cannot be read (No such file or directory); give the path of a job.yaml",
        "show job.yaml",
    ),
    Mistake(
        "train rows.jsonl",
        "rows.jsonl: is a file of rows, and not a job; run raysvc init rows.jsonl --tokenizer ...",
        "init rows.jsonl --tokenizer tokenizer --out third.yaml",
    ),
    Mistake(
        "tokenize job.yaml source.path=folder",
        f"source.path: 'folder' matches no file (it is looked for as {{here}}/folder); {SUFFIXES}",
        "tokenize job.yaml source.path=*s.jsonl",
    ),
    Mistake(
        "tokenize job.yaml source.path=empty.jsonl",
        "source.path: empty.jsonl has no rows; give files with at least one row",
        "tokenize job.yaml source.path=rows.jsonl",
    ),
    Mistake(
        "tokenize job.yaml source.path=not.parquet",
        "source file '{here}/not.parquet': cannot be read: Parquet magic bytes not found in footer. Either the file is "
        "corrupted or this is not a parquet file.; check that it is complete and readable",
        None,
    ),
    Mistake(
        "tokenize job.yaml source.path=list.jsonl",
        "source: list.jsonl holds no row that can be read; line 1 of {here}/list.jsonl: broken JSON: Expecting value at character 2; write one "
        "JSON object per line; a file that is one list ends in .json",
        "tokenize job.yaml source.path=list.json max_quarantine=1",
    ),
    Mistake(
        "tokenize job.yaml source.path=[rows.jsonl,cut.jsonl]",
        f"source: 1 of 13 {QUARANTINED}broken JSON (1 row, e.g. row 12: Expecting value at character 48); "
        "raysvc show job.yaml 'source.path=[rows.jsonl,cut.jsonl]' --source-row 12 shows one, line 1 of {here}/cut.jsonl; fix "
        "these rows, or raise max_quarantine to go on without them",
        "tokenize job.yaml source.path=[rows.jsonl,cut.jsonl] max_quarantine=0.1",
    ),
    Mistake(
        "tokenize job.yaml source.path=[rows.jsonl,alpaca.jsonl]",
        f"source: 4 of 16 {QUARANTINED}no value in column 'messages' (4 rows, e.g. rows 12 and 13 and 14: the row has input, "
        "instruction, output, so it is of format alpaca: files of two formats need a source each, under mixture.sources); "
        "raysvc show job.yaml 'source.path=[rows.jsonl,alpaca.jsonl]' --source-row 12 shows one, line 1 of {here}/alpaca.jsonl; "
        "fix these rows, or raise max_quarantine to go on without them",
        "tokenize two.yaml",
    ),
    # columns
    Mistake(
        "tokenize job.yaml source.path=alpaca.jsonl",
        "source: format chat needs a column 'messages'; the rows have the columns input, instruction, output; set "
        "source.format: alpaca, which fits them; files of two formats need a source each, under mixture.sources",
        "tokenize job.yaml source.path=alpaca.jsonl source.format=alpaca",
    ),
    Mistake(
        "tokenize job.yaml source.path=odd.jsonl",
        f"source: format chat needs a column 'messages'; the rows have the columns a, q; {COLUMNS}",
        "tokenize job.yaml source.path=odd.jsonl source.format=auto source.columns.question=q source.columns.answer=a",
    ),
    Mistake(
        "init odd.jsonl --tokenizer tokenizer --out odd.yaml",
        f"source: no format fits the rows; the rows have the columns a, q; {COLUMNS}",
        "init odd.jsonl --tokenizer tokenizer --out odd.yaml source.columns.question=q source.columns.answer=a",
    ),
    Mistake(
        "init rows.jsonl --tokenizer tokenizer --out set.yaml plan.batch_size=8",
        "plan.batch_size=8: is not about columns, roles, the tokenizer or train_on; set it in set.yaml, once it is written",
        "init rows.jsonl --tokenizer tokenizer --out set.yaml",
    ),
    Mistake(
        "tokenize job.yaml source.columns.messages=talk",
        f"source: columns.messages names 'talk', which the rows do not have; the rows have the columns messages; {COLUMNS}",
        "tokenize job.yaml",
    ),
    Mistake(
        "tokenize job.yaml source.path=text.jsonl",
        f"source: 4 of 4 {QUARANTINED}broken JSON in 'messages' (4 rows, e.g. rows 0 and 1 and 2: unexpected character, "
        "expected a JSON value: line 1 column 1 (char 0)); raysvc show job.yaml source.path=text.jsonl --source-row 0 shows one, line 1 "
        "of {here}/text.jsonl; fix these rows, or raise max_quarantine to go on without them",
        None,
    ),
    Mistake(
        "tokenize job.yaml source.path=asked.jsonl",
        "source: no row is left to train on: no assistant message (4 rows); check train_on, max_length and truncation",
        "tokenize job.yaml source.path=asked.jsonl train_on=all_tokens",
    ),
    Mistake(
        "tokenize job.yaml source.path=narrator.jsonl",
        f"source: 4 of 4 {QUARANTINED}no message of the assistant, and unknown roles: narrator (4 rows, e.g. rows 0 and 1 and "
        "2: map them: source.roles: {narrator: assistant}); raysvc show job.yaml source.path=narrator.jsonl --source-row 0 shows "
        "one, line 1 of {here}/narrator.jsonl; fix these rows, or raise max_quarantine to go on without them",
        "tokenize job.yaml source.path=narrator.jsonl source.roles.narrator=assistant",
    ),
    Mistake(
        "tokenize job.yaml source.format=chatml",
        "source.format: should be 'auto', 'chat', 'alpaca', 'question_answer', 'prompt_completion', 'text', "
        "'preference', 'kto', 'stepwise', 'pretokenized' or 'prompt' (given 'chatml'); change this value",
        "tokenize job.yaml source.format=auto",
    ),
    # tokenizers
    Mistake(
        "tokenize job.yaml tokenizer=./tokeniser",
        "tokenizer: there is no folder {here}/tokeniser; give a folder with tokenizer.json, or a hub name that this "
        "machine can reach",
        "tokenize job.yaml tokenizer=./tokenizer",
    ),
    Mistake(
        "tokenize job.yaml tokenizer=folder",
        "tokenizer: {here}/folder is an empty folder; give a folder with tokenizer.json, or a hub name that this machine can "
        "reach",
        "tokenize job.yaml tokenizer=tokenizer",
    ),
    Mistake(
        "tokenize job.yaml tokenizer=no_template",
        "tokenizer: '{here}/no_template' has no chat template; set tokenizer.chat_template to a file or a text; "
        "raysvc init finds one that takes the rows",
        "tokenize job.yaml tokenizer.name=no_template tokenizer.chat_template=tokenizer/chat_template.jinja",
    ),
    Mistake(
        "tokenize job.yaml tokenizer=torn_template",
        "tokenizer.chat_template: the template does not compile (TemplateSyntaxError: unexpected '}'); fix the template",
        "tokenize job.yaml tokenizer.name=torn_template tokenizer.chat_template=tokenizer/chat_template.jinja",
    ),
    # YAML and keys
    Mistake(
        "show no_comma.yaml",
        "no_comma.yaml: is not valid YAML (line 2: expected ',' or '}', but got ':'); fix that line",
        None,
    ),
    Mistake(
        "show tab.yaml",
        "tab.yaml: is not valid YAML (line 1: found character '\\t' that cannot start any token); fix that line",
        None,
    ),
    Mistake(
        "show twice.yaml", "twice.yaml: is not valid YAML (line 6: 'plan' stands twice); fix that line", None
    ),
    Mistake("show empty.yaml", "empty.yaml: has no keys; begin with source: and tokenizer:", None),
    Mistake(
        "show no_tokenizer.yaml",
        "tokenizer: is missing; every job needs source and tokenizer",
        "show no_tokenizer.yaml tokenizer=tokenizer",
    ),
    Mistake(
        "show wrong_place.yaml",
        "batch_size: unknown key; write plan.batch_size",
        "show job.yaml plan.batch_size=4",
    ),
    Mistake(
        "plan job.yaml plan.bach_size=4",
        "plan.bach_size: unknown key; did you mean 'batch_size'?",
        "plan job.yaml plan.batch_size=4",
    ),
    Mistake(
        "plan job.yaml trainer.lr=1e-4",
        "trainer.lr: unknown key; write trainer.learning_rate",
        "plan job.yaml trainer.learning_rate=1e-4",
    ),
    Mistake(
        "plan job.yaml plan.batch_size 4",
        "override 'plan.batch_size': is neither KEY=VALUE nor a run; write plan.batch_size=64, or -c in front of a job "
        "file",
        "plan job.yaml plan.batch_size=8",
    ),
    Mistake(
        "plan job.yaml trainer.learning_rate=fast",
        "trainer.learning_rate: should be a number (given 'fast'); change this value",
        "plan job.yaml trainer.learning_rate=0.001",
    ),
    # sizes
    Mistake(
        "plan job.yaml plan.batch_size=0",
        "plan.batch_size: should be greater than or equal to 1 (given 0); change this value",
        "plan job.yaml plan.batch_size=1",
    ),
    Mistake(
        "plan job.yaml plan.mini_batch_size=32",
        "plan: mini_batch_size (32) is above batch_size (4); change this value",
        "plan job.yaml plan.mini_batch_size=4",
    ),
    Mistake(
        "plan job.yaml plan.micro_batch_tokens=5",
        "plan.micro_batch_tokens: 12 rows are over its 5 tokens (row 0 has 22); raise it, or set plan.oversize to "
        "truncate, drop or alone",
        "plan job.yaml plan.micro_batch_tokens=5 plan.oversize=alone",
    ),
    Mistake(
        "tokenize job.yaml max_length=3",
        "source: no row is left to train on: longer than max_length (12 rows); check train_on, max_length and truncation",
        "tokenize job.yaml max_length=512",
    ),
    Mistake(
        "plan job.yaml plan.layout=stream",
        "plan: layout: stream needs window, the tokens of one row; change this value",
        "plan job.yaml plan.layout=stream plan.window=64",
    ),
    # rows, steps, runs
    Mistake(
        "show job.yaml --row 9999",
        "row: there is no row 0:0:9999; the entry has 12; take the id from a row log, or from raysvc plan --step; raysvc show --source-row finds a row "
        "by its number in the source",
        "show job.yaml --row 0:0:11",
    ),
    Mistake(
        "show job.yaml --step 9999",
        "--step: 9999 is not below the 3 steps; give a smaller one",
        "show job.yaml --step 2",
    ),
    Mistake(
        "report runs/none",
        "runs/none: is no run, and none is here; name the folder of a run, or a job.yaml",
        "report job.yaml",
    ),
    Mistake(
        "plan job.yaml plan.skip_rows=none.txt",
        "plan.skip_rows: none.txt cannot be read (No such file or directory) (given 'none.txt'); change this value",
        "plan job.yaml plan.skip_rows=skip.txt",
    ),
    Mistake(
        "enrich job.yaml trainer.objective=dpo",
        "trainer.objective dpo: needs preference rows, and these are chat; choose another objective",
        None,
    ),
    # folders, stores and addresses
    Mistake(
        "tokenize job.yaml cache.root=rows.jsonl",
        "{here}/rows.jsonl: cannot be read (Not a directory); name another folder",
        "tokenize job.yaml cache.root=elsewhere",
    ),
    Mistake(
        "tokenize job.yaml cache.root=s4://bucket/cache",
        "s4://bucket/cache: cannot be opened (Protocol not known: s4); install the package, or fix the URL",
        None,
    ),
    Mistake(
        "cache info zzzz",
        "'zzzz': no entry starts with it; run raysvc cache ls, and give more digits",
        "cache ls",
    ),
    Mistake(
        "plan job.yaml 'server.name=my server'",
        "server.name: should have letters, digits, '.', '_' and '-', at most 100 of them, and begin with a letter or "
        "digit (given 'my server'); change this value",
        "plan job.yaml server.name=my-server",
    ),
    Mistake(
        "ps --address 127.0.0.1:1",
        "--address 127.0.0.1:1: nothing listens there (Connection refused); give host:port as `ray start --head` prints "
        "it, or ray://host:10001 from outside the cluster",
        None,
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, sample: dict[str, str]) -> Path:
    """A folder with twelve rows, a tokenizer, a job, and what goes wrong."""
    here = tmp_path_factory.mktemp("first")
    messages = [{"role": "user", "content": "Add 1 and 2"}, {"role": "assistant", "content": "That is 3."}]
    (here / "rows.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 12)
    (here / "list.json").write_text(json.dumps([{"messages": messages}] * 2))
    for name, text in FILES.items():
        (here / name).write_text(text)
    (here / "folder").mkdir()
    for name in ("tokenizer", "no_template", "torn_template"):
        shutil.copytree(sample["tokenizer"], here / name)
    (here / "no_template" / "chat_template.jinja").unlink()
    (here / "torn_template" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")
    return here


def typed(command: str) -> tuple[int, str]:
    """Exit code, and the last line of a command's errors."""
    words = shlex.split(command)
    if "--address" in words:  # this process may have joined a cluster
        asked = [sys.executable, "-m", "raysvc.cli", *words]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.strip().splitlines()[-1]
    result = CliRunner().invoke(app, words)
    lines = result.stderr.strip().splitlines()
    return result.exit_code, lines[-1] if lines else ""


def test_there_are_forty() -> None:
    assert len(MISTAKES) >= 40
    assert len({mistake.typed for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.typed)
def test_a_mistake_of_a_first_hour_says_what_to_do_and_that_works(
    mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAYSVC_CACHE_DIR", str(folder / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, line = typed(mistake.typed)
    assert (code, line) == (2, f"error: {mistake.says.replace('{here}', str(folder))}")
    if mistake.then is not None:
        code, line = typed(mistake.then)
        assert code == 0, line
