"""Every `raysvc cache` command on a root that needs storage options: from a job file, and as options."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc.cache.store import retry
from raysvc.cache.store.fsspec_store import FsspecStore
from raysvc.cli.main import app

from .helpers import RECIPE, build, make_slices
from .servers import S3, proxy

TABLES = make_slices()
ROWS = sum(table.num_rows for table in TABLES)
ROW_IDS = [row for table in TABLES for row in table["source_row"].to_pylist()]
COMMANDS = [
    ["ls"],
    ["info", "KEY"],
    ["explain", "KEY", "KEY"],
    ["verify", "KEY"],
    ["gc"],
    ["gc", "--dry-run"],
]


@dataclass(frozen=True)
class Root:
    """A root on S3 with one entry, and two ways to name it."""

    store: FsspecStore
    key: str
    ways: dict[str, list[str]]
    folder: Path

    def command(self, way: str, *words: str) -> list[str]:
        given = [self.key[:12] if word == "KEY" else word for word in words]
        return ["cache", *given, *self.ways[way]]


def job_file(path: Path, root: str, options: dict[str, str], **sections: Any) -> Path:
    cache = {"root": root, "storage_options": options}
    source = {"source": {"path": "rows.jsonl"}, "tokenizer": "a/tokenizer"}
    path.write_text(yaml.safe_dump({**source, **sections, "cache": cache}))
    return path


@pytest.fixture
def root(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    store = s3.store("commands-")
    job = job_file(tmp_path / "job.yaml", store.url, s3.options)
    options = [word for name, value in s3.options.items() for word in ("--storage-option", f"{name}={value}")]
    ways = {"job": ["-c", str(job)], "options": ["--root", store.url, *options]}
    return Root(store, build(store, TABLES).key, ways, tmp_path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.stdout


def run_json(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json").splitlines()[-1]))


def wait_for_no_use(root: Root) -> None:
    """A thread ends the mark of a command that has read the entry."""
    until = time.monotonic() + 60.0
    while any(name.startswith("use-") for name in root.store.list(root.key)):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["job", "options"])
def test_every_command_reaches_a_root_that_needs_options(root: Root, way: str) -> None:
    (listed,) = run_json(*root.command(way, "ls"))["entries"]
    assert (listed["key"], listed["state"]) == (root.key, "finished")
    assert run_json(*root.command(way, "info", "KEY"))["rows"] == ROWS
    assert run_json(*root.command(way, "verify", "KEY"))["problems"] == []
    assert run_json(*root.command(way, "gc", "--dry-run"))["removals"] == []
    files = run_json(*root.command(way, "export", "KEY", "--to", str(root.folder / "rows")))["files"]
    assert [row for file in files for row in pq.read_table(file)["source_row"].to_pylist()] == ROW_IDS
    wait_for_no_use(root)
    removed = run_json(*root.command(way, "gc", "--days", "0", "--grace-hours", "0"))["removals"]
    assert {one["action"] for one in removed if one["folder"] == root.key} == {"removed", "marked"}
    assert run_json(*root.command(way, "ls"))["entries"] == []


def test_two_entries_are_compared_on_such_a_root(root: Root) -> None:
    other = build(root.store, recipe=RECIPE | {"format_version": 2}).key
    for way in root.ways:
        (found,) = run_json(*root.command(way, "explain", "KEY", other))["differences"]
        assert found["path"] == "format_version"


def test_a_job_is_explained_by_its_own_root_or_by_the_one_that_is_given(
    root: Root, s3: S3, sample: dict[str, str]
) -> None:
    sections = {"source": {"path": sample["rows"], "format": "chat"}, "tokenizer": sample["tokenizer"]}
    job = job_file(root.folder / "real.yaml", root.store.url, s3.options, **sections)
    raysvc.tokenize(job)
    assert run_json("cache", "explain", "-c", str(job))["hit"] is True
    elsewhere = s3.store("empty-").url
    assert run_json("cache", "explain", "-c", str(job), "--root", elsewhere)["hit"] is False
    bare = job_file(root.folder / "bare.yaml", "elsewhere", {}, **sections)
    assert run_json("cache", "explain", "-c", str(bare), *root.ways["options"])["hit"] is True


@pytest.mark.parametrize("words", [["ls"], ["gc"], ["info", "KEY"], ["explain", "-c"]], ids=" ".join)
def test_a_dead_root_is_one_line_and_soon(
    sample: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """The server takes connections and never answers; the limit itself is ten seconds."""
    assert retry.FIRST_ANSWER_S == 10.0
    monkeypatch.setattr(retry.first_answer, "__defaults__", (0.5,))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        sections = {"source": {"path": sample["rows"], "format": "chat"}, "tokenizer": sample["tokenizer"]}
        job = job_file(
            tmp_path / "job.yaml",
            f"s3://dead-{server.getsockname()[1]}/root",
            {"key": "a", "secret": "SECRET", "endpoint_url": address},
            **sections,
        )
        words = [word for word in words if word != "-c"]
        begin = time.monotonic()
        result = CliRunner().invoke(app, ["cache", *words, "-c", str(job)])
    assert time.monotonic() - begin < 30  # a minute and more without the limit
    assert result.exit_code == 2
    assert "did not answer" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "SECRET" not in result.output


def test_a_refused_key_is_one_line_without_the_secret(root: Root, s3: S3) -> None:
    with proxy(s3) as server:
        assert server.proxy is not None
        server.proxy.status, server.proxy.fail = 403, 100
        options = {**server.options, "secret": "SECRET"}
        job = job_file(root.folder / "refused.yaml", root.store.url, options)
        for words in COMMANDS:
            result = CliRunner().invoke(app, [*root.command("job", *words)[:-1], str(job)])
            assert result.exit_code == 2, words
            assert "access is refused" in result.stderr, words
            assert result.stderr.count("\n") == 1, words
            assert "SECRET" not in result.output


@pytest.mark.parametrize("option", ["endpoint_url", "=x"])
def test_an_option_without_a_name_or_value_is_refused(root: Root, option: str) -> None:
    result = CliRunner().invoke(app, ["cache", "ls", "--root", root.store.url, "--storage-option", option])
    assert result.exit_code == 2
    assert "KEY=VALUE" in result.stderr


def test_the_whole_name_of_an_entry_names_it_beside_its_rebuild(root: Root) -> None:
    build(root.store, TABLES, generation=1)
    assert run_json(*root.command("job", "info", root.key))["uri"] == f"{root.store.url}/{root.key}"
    assert run_json(*root.command("job", "info", f"{root.key}.1"))["uri"] == f"{root.store.url}/{root.key}.1"
    result = CliRunner().invoke(app, root.command("job", "info", "KEY"))
    assert result.exit_code == 2
    assert "2 entries start with it" in result.stderr
