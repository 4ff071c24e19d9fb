"""A user's mistakes: one line, exit code 2, no traceback."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from raysvc.builds.build_report import _of_each_reason
from raysvc.cli.main import app
from raysvc.cluster import connect
from raysvc.errors import AddressError

runner = CliRunner()


def job_file(folder: Path, **sections: object) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({"cache": {"root": str(folder / "cache")}, **sections}))
    return path


def mistake(*arguments: str) -> str:
    """Run a command that must fail as a user's mistake; returns its one line."""
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 2, (result.exit_code, result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "; " in lines[0], "the line ends with what to do"
    return lines[0]


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere.yaml" in mistake("train", "-c", str(tmp_path / "nowhere.yaml"))


def test_a_ray_of_this_machine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    calls: list[str] = []

    def late(**_: object) -> None:
        calls.append("init")
        raise Exception("The current node timed out during startup. GCS has become overloaded.\nMore.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    with pytest.raises(
        AddressError, match=r"^Ray: did not start on this machine: The current node timed out"
    ):
        connect()
    assert calls == ["init", "shutdown", "init", "shutdown", "init"], "a busy machine is asked three times"


@pytest.mark.parametrize("command", ["show", "report", "train"])
def test_a_folder_in_the_place_of_a_job(tmp_path: Path, command: str) -> None:
    line = mistake(command, str(tmp_path))
    assert f"{tmp_path}: is a folder" in line
    assert "write -c job.yaml" in line.split("; ")[-1]


@pytest.mark.parametrize("text", [b"tokenizer: {date: 2024-13-45}", b"\xff\xfe: 1"], ids=["day", "bytes"])
def test_a_job_file_with_a_value_that_yaml_cannot_read(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text)
    assert "job.yaml: is not valid YAML" in mistake("plan", "-c", str(path))


def test_an_override_with_a_day_that_no_month_has(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_file(
        tmp_path,
        source={"path": sample["rows"]},
        tokenizer={"name": sample["tokenizer"], "date": "2024-01-01"},
    )
    assert "tokenizer.date" in mistake("plan", "-c", str(job), "tokenizer.date=2024-13-45")


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_file(
        tmp_path, source={"path": sample["rows"]}, tokenizer=sample["tokenizer"], plan={"bach_size": 4}
    )
    line = mistake("train", "-c", str(job))
    assert "plan.bach_size" in line
    assert "batch_size" in line.split("; ")[1]


def test_an_override_with_a_wrong_value_names_field_and_value(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_file(tmp_path, source={"path": sample["rows"]}, tokenizer=sample["tokenizer"])
    line = mistake("tokenize", "-c", str(job), "plan.batch_size=0")
    assert "plan.batch_size" in line
    assert "given 0" in line


def test_a_source_file_that_is_not_there(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_file(tmp_path, source={"path": str(tmp_path / "none.jsonl")}, tokenizer=sample["tokenizer"])
    assert "none.jsonl" in mistake("tokenize", "-c", str(job))


def test_a_relative_path_is_named_with_the_folder_that_was_looked_in(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    job = job_file(tmp_path, source={"path": "rows.jsonl"}, tokenizer=sample["tokenizer"])
    assert f"looked for as {tmp_path}/elsewhere/rows.jsonl" in mistake("tokenize", "-c", str(job))


def test_packed_lines_of_a_window_without_a_capacity_are_refused_before_a_row_is_read(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    for sections in (
        {"plan": {"layout": "packed", "shuffle": "window"}, "source": {"path": "none.jsonl"}},
        {
            "plan": {"layout": "packed"},
            "mixture": {"sources": {"a": {"source": {"path": "n.jsonl"}, "weight": 1, "shuffle": "window"}}},
        },
    ):
        line = mistake("tokenize", "-c", str(job_file(tmp_path, tokenizer=sample["tokenizer"], **sections)))
        assert "shuffle: window has to know its capacity before the rows; give max_length" in line


@pytest.mark.parametrize("words", [["show", "--html", "x"], ["report", "--html=x"], ["export", "-o", "x"]])
def test_an_option_that_other_tools_have_is_met_by_the_one_that_is_meant(words: list[str]) -> None:
    done = runner.invoke(app, words)
    assert done.exit_code == 2
    assert f"No such option: {words[1][:6].removesuffix('=')}; write --out PATH." in done.stderr


def test_a_folder_without_rows(tmp_path: Path, sample: dict[str, str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.md").write_text("no rows here")
    job = job_file(tmp_path, source={"path": str(tmp_path / "data")}, tokenizer=sample["tokenizer"])
    assert "matches no file" in mistake("tokenize", "-c", str(job))


def test_a_file_of_blank_lines_has_no_rows(tmp_path: Path, sample: dict[str, str]) -> None:
    (tmp_path / "blank.jsonl").write_text("\n\n  \n")
    job = job_file(tmp_path, source={"path": str(tmp_path / "blank.jsonl")}, tokenizer=sample["tokenizer"])
    assert "row" in mistake("tokenize", "-c", str(job))


def test_a_wrong_column_names_those_that_are_there(tmp_path: Path, sample: dict[str, str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"mesages": [], "id": 1}) + "\n")
    source = {"path": str(tmp_path / "rows.jsonl"), "format": "chat"}
    line = mistake("tokenize", "-c", str(job_file(tmp_path, source=source, tokenizer=sample["tokenizer"])))
    assert "mesages" in line


def test_a_tokenizer_that_is_not_there(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_file(tmp_path, source={"path": sample["rows"]}, tokenizer=str(tmp_path / "no-tokenizer"))
    assert "no-tokenizer" in mistake("tokenize", "-c", str(job))


def test_a_tokenizer_without_a_chat_template(tmp_path: Path, sample: dict[str, str]) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(sample["tokenizer"], folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    job = job_file(tmp_path, source={"path": sample["rows"]}, tokenizer=str(folder))
    assert "chat template" in mistake("tokenize", "-c", str(job))


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, sample: dict[str, str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    source, cache = {"path": sample["rows"]}, {"root": str(tmp_path / "file" / "cache")}
    job = job_file(tmp_path, source=source, tokenizer=sample["tokenizer"], cache=cache)
    assert str(tmp_path / "file") in mistake("tokenize", "-c", str(job))


@pytest.mark.ray
def test_a_name_that_is_served_with_another_spec_says_the_difference(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server

    job = job_file(
        tmp_path,
        source={"path": sample["rows"]},
        tokenizer=sample["tokenizer"],
        server={"name": "taken"},
        trainer={"run_dir": str(tmp_path / "run")},
    )
    server = raysvc.serve(job)
    try:
        line = mistake("train", "-c", str(job), "plan.batch_size=8")
        assert "batch_size (32 -> 8)" in line
        assert server.name in line
    finally:
        stop_server("taken")


@pytest.mark.ray
def test_a_broken_line_and_a_bad_row_are_set_aside_and_stop_nothing(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc

    good = Path(sample["rows"]).read_text().splitlines()
    rows = [*good[:100], '{"messages": [', *good[100:200], '{"messages": 7}', *good[200:]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    entry = raysvc.tokenize(
        source={"path": str(tmp_path / "rows.jsonl"), "format": "chat"},
        tokenizer=sample["tokenizer"],
        cache={"root": str(tmp_path / "cache")},
        max_quarantine=0.05,
    )
    row_counts = entry.report["row_counts"]
    assert (row_counts["rows_in"], row_counts["rows_written"]) == (242, 240)
    assert sum(row_counts["quarantined"].values()) == 2
    assert {example["source_row"] for example in entry.report["examples"]} == {100, 201}
    html, row = entry._repr_html_(), entry.row(3)
    assert "<summary>2 of 2 quarantined rows</summary>" in html
    assert all(f">{example['source_row']}</td>" in html for example in entry.report["examples"])
    assert "".join(text for text, _ in row.spans) == entry[3].text
    shown = (
        re.sub(r"</?(mark|span)[^>]*>", "", row._repr_html_()),
        [
            re.sub(r"</?span[^>]*>", "", one)
            for one in re.findall("<mark>(.*?)</mark>", row._repr_html_(), re.DOTALL)
        ],
    )
    assert escape(entry[3].text) in shown[0]
    assert "".join(shown[1]) == "".join(escape(text) for text, trained in row.spans if trained) != ""
    assert "<span style='color:#2f6fde'>&lt;|im_end|&gt;</span>" in row._repr_html_()
    first = html.partition("<summary>First rows</summary>")[2]
    assert re.findall(r"<div>row (\S+), ", first) == ["0:0:0", "0:0:1", "0:0:2"]
    assert escape(entry[0].text)[:40] in re.sub(r"</?(mark|span)[^>]*>", "", first)
    assert pickle.loads(pickle.dumps(row)) == dict(row)
    assert [len(entry), len(list(entry))] == [240, 240]
    assert [one["source_row"] for one in entry] == entry.table()["source_row"].to_pylist()
    assert dict(entry[-1]) == dict(entry[239])
    for beyond in (240, -241):
        with pytest.raises(IndexError, match=f"no row {beyond} of 240 rows"):
            entry[beyond]
    with pytest.raises(TypeError):
        entry["0"]  # type: ignore[index]


def test_examples_are_kept_evenly_of_all_reasons_in_their_order() -> None:
    rows = [{"source_row": n, "reason": "rare" if n in (70, 90) else "common"} for n in range(100)]
    kept = [one["source_row"] for one in _of_each_reason(rows, 5)]
    assert kept == [0, 1, 2, 70, 90]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_said_at_once(address: str) -> None:
    code = f"""
import time, ray
from raysvc.cluster import _join
begin = time.monotonic()
try:
    _join({address!r})
finally:
    print(time.monotonic() - begin)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert f"--address {address}: nothing listens there" in done.stderr
    assert float(done.stdout) < 30


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.gz", "rows.json", "rows.parquet", "rows.arrow"])
def test_a_source_file_that_was_cut_short_is_named(tmp_path: Path, sample: dict[str, str], name: str) -> None:
    whole = Path(sample["rows"]).read_bytes()
    data = gzip.compress(whole)[:-200] if name.endswith("gz") else b"[" + whole[:500]
    (tmp_path / name).write_bytes(data)
    job = job_file(tmp_path, source={"path": str(tmp_path / name)}, tokenizer=sample["tokenizer"])
    assert name in mistake("tokenize", "-c", str(job))


def test_a_job_may_be_named_without_an_option_but_only_one(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_file(tmp_path, source={"path": sample["rows"]}, tokenizer=sample["tokenizer"])
    assert "plan.batch_size" in mistake("tokenize", str(job), "plan.batch_size=0")
    assert "there is another job" in mistake("tokenize", "-c", str(job), "other.yaml")


HUB_IS_GONE = """
import json, os, socket, sys
import transformers.models.auto.tokenization_auto  # once for all
asked = []
def nobody(*_, **__):
    asked.append(1)
    raise socket.gaierror(-2, "Name or service not known")
socket.getaddrinfo = nobody
from raysvc.cli.__main__ import main
for words, out in json.loads(sys.argv[1]):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv, code = ["raysvc", *words], 0
    try:
        main()
    except SystemExit as left:
        code = left.code
    sys.stderr.flush()
    print(json.dumps([code, len(asked)]), flush=True)
    os._exit(0)
"""


def test_an_unknown_hub_name_is_said_at_once_where_the_hub_does_not_answer(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    """Three commands, each in a fork of one process: most of their time is the import of `transformers`."""
    job = str(job_file(tmp_path, source={"path": sample["rows"]}, tokenizer=sample["tokenizer"]))
    commands = [
        ("tokenize", job, "tokenizer=nobody/nothing"),
        ("train", job, "trainer.model=nobody/nothing"),
        ("tokenize", job, "source={path: [], dataset: nobody/nothing}"),
    ]
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    told = [tmp_path / str(number) for number in range(len(commands))]
    asked = json.dumps([(words, str(out)) for words, out in zip(commands, told, strict=True)])
    done = subprocess.run(
        [sys.executable, "-c", HUB_IS_GONE, asked],
        capture_output=True, text=True, check=True, timeout=100, env=env,
    )  # fmt: skip
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(facts) == len(commands), done.stderr
    for words, out, (code, times) in zip(commands, told, facts, strict=True):
        error = out.read_text()
        assert code == 2, (words, error)
        assert "nobody/nothing" in error.splitlines()[-1]
        assert "Retry" not in error
        assert "Traceback" not in error
        assert times <= 2, f"the hub is not asked again and again: {words}"


def test_what_a_file_system_refuses_is_one_line(tmp_path: Path, sample: dict[str, str]) -> None:
    import errno

    from raysvc.cli.common import edge

    for number in (errno.EACCES, errno.ENOSPC, errno.ENOTDIR, errno.EISDIR, errno.EROFS):

        @edge
        def command(number: int = number) -> None:
            raise OSError(number, os.strerror(number), "/there/rows.jsonl")

        with pytest.raises(typer.Exit) as ended:
            command()
        assert ended.value.exit_code == 2

    @edge
    def broken() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with pytest.raises(ConnectionResetError):
        broken()


def test_a_run_folder_that_is_a_file_is_one_line(tmp_path: Path, sample: dict[str, str]) -> None:
    (tmp_path / "file").write_text("")
    job = job_file(tmp_path, source={"path": sample["rows"]}, tokenizer=sample["tokenizer"])
    line = mistake("train", str(job), f"trainer.run_dir={tmp_path}/file/run")
    assert f"{tmp_path}/file" in line
    assert "not a directory" in line.lower()


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, sample: dict[str, str]) -> None:
    (tmp_path / "file").write_text("")
    job = job_file(tmp_path, source={"path": sample["rows"]}, tokenizer=sample["tokenizer"])
    for page in (tmp_path, tmp_path / "file" / "page.html"):
        assert mistake("report", str(job), "--out", str(page)).startswith(f"error: {tmp_path}")
    line = mistake("report", str(job), "--out", "/proc/nowhere/page.html")  # nobody makes a folder there
    assert (
        line == "error: /proc/nowhere: cannot be used (No such file or directory); name a place that exists"
    )
    assert not (tmp_path / "cache").exists()  # said before the rows were read
