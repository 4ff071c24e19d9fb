"""Builds go through Ray Data, are shared, and go on where a killed one stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import raysvc
from raysvc.builds import build, lookup
from raysvc.cache.store.open import open_store
from raysvc.cache.writer import EntryWriter
from raysvc.cli.sample_data import write_rows
from raysvc.job.config import JobConfig

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No source is too small for it."""
    monkeypatch.setattr("raysvc.pipelines.local_build.CLUSTER_S", 0.0)


def sections(folder: Path, sample: dict[str, str], rows: int, slices: int) -> dict[str, Any]:
    path = write_rows(folder / "rows.jsonl", rows)
    return {
        "source": {"path": str(path), "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "workers": {"max": 2, "slice_mb": path.stat().st_size / slices / 1e6},
    }


def rows_of(entry: raysvc.CacheEntry) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = entry.table().to_pylist()
    return found


@pytest.mark.slow
def test_a_job_without_parallelism_and_one_with_many_slices_give_the_same_rows(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    job = sections(tmp_path, sample, 150, 6)
    many = raysvc.tokenize(**job, cache={"root": str(tmp_path / "many")})
    one = raysvc.tokenize(**{**job, "workers": {"max": 1}}, cache={"root": str(tmp_path / "one")})
    assert len(many.entries[0].manifest.parts) > 3
    assert len(one.entries[0].manifest.parts) == 1
    assert many.key == one.key
    assert rows_of(many) == rows_of(one)


@pytest.mark.slow
def test_a_tokenizer_and_a_template_are_found_from_the_folder_of_who_asks(
    tmp_path: Path, sample: dict[str, str], ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the processes of the cluster run elsewhere
    (tmp_path / "here").symlink_to(sample["tokenizer"])
    (tmp_path / "chat.jinja").write_text((Path(sample["tokenizer"]) / "chat_template.jinja").read_text())
    job = {**sections(tmp_path, sample, 8, 1), "tokenizer": {"name": "here", "chat_template": "chat.jinja"}}
    entry = raysvc.tokenize(**job, cache={"root": str(tmp_path / "cache")})
    monkeypatch.chdir("/")
    assert raysvc.open_entry(entry.uri)[0].text.startswith("<|im_start|>")


@pytest.mark.slow
def test_two_that_ask_at_once_share_one_build(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    job = {**sections(tmp_path, sample, 200, 4), "cache": {"root": str(tmp_path / "cache")}}
    entries: list[raysvc.CacheEntry] = []
    threads = [threading.Thread(target=lambda: entries.append(raysvc.tokenize(**job))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entries[0].uri == entries[1].uri
    parts = list(Path(entries[0].uri).glob("part-*.arrow"))
    assert len(parts) == len(entries[0].entries[0].manifest.parts), "no slice was made twice"


def test_a_builder_that_starts_late_makes_nothing_that_another_has_made(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.builds.build_plan import plan_build
    from raysvc.job.config import JobConfig
    from raysvc.pipelines import tokenize

    job = JobConfig.model_validate(sections(tmp_path, sample, 60, 3))
    store = open_store(str(tmp_path / "cache"), {}, False)
    plan = plan_build(job, store)
    writer = EntryWriter(store, plan.key, 0)
    task = tokenize.BuildTask(plan.spec, writer, {}, 0.01)
    worker = tokenize.SliceWorker([task])
    for piece in plan.source.slices:
        worker({"slice": [json.dumps([[0, piece.to_json()]])]})
    monkeypatch.setattr(tokenize, "build_graph", None)
    left = [(0, piece) for piece in plan.source.slices]
    found = tokenize.receipts_of([task], left, job.workers)
    assert sorted(receipt.slice_index for _, receipt in found) == list(range(len(plan.source.slices)))


def test_an_error_in_a_task_arrives_as_what_it_was(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    job = {**sections(tmp_path, sample, 50, 1), "cache": {"root": str(tmp_path / "cache")}}
    with pytest.raises(raysvc.errors.SourceError, match="max_length"):
        raysvc.tokenize(**job, max_length=8, truncation="error")


def test_a_miss_because_of_damage_is_told_as_that(tmp_path: Path, sample: dict[str, str]) -> None:
    job = JobConfig.model_validate(sections(tmp_path, sample, 5, 1))
    root = str(tmp_path / "cache")
    key = lookup.explain_job(job, root)["key"]
    (tmp_path / "cache" / key).mkdir(parents=True)
    (tmp_path / "cache" / key / "manifest.json").write_text("{}")
    (tmp_path / "cache" / key / "damaged.json").write_text("[]")
    assert lookup.explain_job(job, root)["reason"] == f"its entry {key[:12]} is damaged"


def test_a_root_that_only_this_process_sees_is_refused_before_anything_starts(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = sections(tmp_path, sample, 5, 1)
    with pytest.raises(raysvc.errors.StoreError, match=r"memory://x.*lives in one process"):
        raysvc.tokenize(**job, cache={"root": "memory://x"})


def test_a_source_that_changes_while_it_is_tokenized_makes_no_entry(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {**sections(tmp_path, sample, 50, 1), "cache": {"root": str(tmp_path / "cache")}}
    real = build.make_report
    monkeypatch.setattr("raysvc.pipelines.local_build.CLUSTER_S", 1e9)  # who looks is the same for both

    def late(*args: Any) -> Any:
        with open(tmp_path / "rows.jsonl", "ab") as file:
            file.write(b"\n")
        return real(*args)

    monkeypatch.setattr(build, "make_report", late)
    with pytest.raises(raysvc.errors.SourceError, match="changed while it was tokenized"):
        raysvc.tokenize(**job)
    monkeypatch.undo()
    assert raysvc.tokenize(**job).hit is False


def wait_for_receipts(root: Path, count: int, process: subprocess.Popen[bytes]) -> dict[int, Any]:
    begin = time.monotonic()
    while True:
        folders = [path.name for path in root.iterdir() if len(path.name) == 64] if root.exists() else []
        finished = EntryWriter(open_store(str(root)), folders[0]).receipts() if folders else {}
        if len(finished) >= count:
            return finished
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() - begin < 200, "no slice was finished in time"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(
    300
)  # a cluster starts twice; at a load of 45 on two cores that took more than two minutes
def test_a_killed_build_goes_on_from_its_finished_slices(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    job = {**sections(tmp_path, sample, 8000, 10), "cache": {"root": str(tmp_path / "cache")}}
    job["workers"] |= {"min": 2}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "raysvc.cli", "tokenize", "-c", str(tmp_path / "job.yaml")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=dict(os.environ)
    )
    try:
        finished = wait_for_receipts(tmp_path / "cache", 2, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    resumed = raysvc.tokenize(**job)
    names = {part.name for part in resumed.entries[0].manifest.parts}
    assert {receipt.part.name for receipt in finished.values()} <= names, "finished slices are not made again"
    calm = raysvc.tokenize(**{**job, "cache": {"root": str(tmp_path / "calm")}})
    assert resumed.table().equals(calm.table())
