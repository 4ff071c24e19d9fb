"""Columns that are computed while their rows are built: the list in `raysvc.scoring.columns_beside`."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysvc
from raysvc.actors.server.entry_stream import streams_of
from raysvc.actors.server.spec import TRAIN, ServeSpec
from raysvc.api import entry_or_build, serve_spec
from raysvc.builds import build_beside
from raysvc.cache.growing.added_entry import AddedEntry
from raysvc.errors import ConfigError
from raysvc.job.job_file import load_job
from raysvc.pipelines.tokenize import receipts_here
from raysvc.progress import silent
from raysvc.row_ids import written
from raysvc.scoring.columns_beside import ColumnsBeside
from raysvc.scoring.find_or_enrich import EnrichBuild

from .test_enrich_job import pairs, save_model


@pytest.fixture
def job(tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Forty pairs in some eight slices, which are made here in place of a cluster."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(pairs(40))
    monkeypatch.setattr(build_beside, "beside", lambda workers, small_here: _here)
    return {
        "source": {"path": str(rows), "carry": ["domain"]},
        "tokenizer": sample["tokenizer"],
        "max_length": 64,
        "cache": {"root": str(tmp_path / "cache")},
        "workers": {"slice_mb": rows.stat().st_size / 8 / 1e6},
        "plan": {"batch_size": 4, "shuffle": "window(2)"},
        "trainer": {
            "model": save_model(tmp_path / "model", 512),
            "device": "cpu",
            "run_dir": str(tmp_path / "run"),
        },
        "enrich": {"ref_logprobs": {}},
    }


def _here(builds: Sequence[Any], left: Sequence[Any], check: Callable[[], None]) -> Iterator[Any]:
    for number, receipt in receipts_here([one.task() for one in builds], left):
        check()
        yield number, receipt


def begun(job: dict[str, Any]) -> tuple[raysvc.CacheEntry, ColumnsBeside]:
    entry, build = entry_or_build(load_job(job), None, silent)
    assert isinstance(build, ColumnsBeside)
    return entry, build


def digests(spec: ServeSpec) -> list[list[str]]:
    stream = streams_of(spec)[TRAIN]
    return [
        [shard.digest() for shard in stream.make(step, (2,))[1]] for step in range(stream.schedule.num_steps)
    ]


def elsewhere(job: dict[str, Any], folder: Path) -> raysvc.CacheEntry:
    """The entry of a job that waited for its rows, with columns of another cut."""
    return raysvc.enrich({**job, "cache": {"root": str(folder)}})


@pytest.mark.parametrize(
    "enrich",
    [
        {"ref_logprobs": {}},
        {"ref_logprobs": {}, "teacher": {"top_k": 3}},
        {"teacher": {"by": "domain", "top_k": 2}},
    ],
    ids=["reference", "two", "by"],
)
def test_steps_are_those_of_the_finished_entry_and_come_before_it(
    job: dict[str, Any], tmp_path: Path, enrich: dict[str, Any]
) -> None:
    model = job["trainer"]["model"]
    for each in enrich.values():
        each |= {"models": {"math": model, "code": model}} if "by" in each else {"model": model}
    job["enrich"] = enrich
    entry, build = begun(job)
    config, told = load_job(job), []
    spec = serve_spec(config, entry)
    spec = ServeSpec.model_validate_json(spec.model_dump_json())
    first = streams_of(spec)[TRAIN]
    build.start(config, 0, None, silent, told.append)
    early = [shard.digest() for shard in first.make(0, (2,))[1]]  # waits for its own slices
    build.wait()
    finished = raysvc.enrich(job)
    assert (finished.hit, finished.uri, told) == (True, entry.uri, [])
    whole = digests(serve_spec(config, finished))
    assert early == whole[0]
    assert digests(spec) == whole
    other = elsewhere(job, tmp_path / "other")
    assert other.key == finished.key
    assert finished.rows.table().equals(other.rows.table())
    (mine, its) = (one.report["added"][-1] for one in (finished, other))
    assert {name: mine[name] for name in ("columns", "targets")} == {
        name: its[name] for name in ("columns", "targets")
    }


def test_a_step_is_there_when_its_rows_have_their_columns_and_not_before(job: dict[str, Any]) -> None:
    entry, build = begun(job)
    [added] = entry.entries
    assert isinstance(added, AddedEntry)
    for index in (0, 1):
        build._builds[0].make_here(index)
    assert added.base.has([0, 1])
    assert not added.has([0])
    assert added.uri in repr(added), "and nothing is waited for"
    [(_, layer)] = build._layers
    for piece in [0]:
        [receipt] = layer._work.computed([layer.piece(piece)], added.receipts.wanted, None, lambda: None)
        assert receipt.slice_index == piece
    assert added.has([0])
    assert not added.has([1])
    again = pickle.loads(pickle.dumps(added))
    assert isinstance(again, AddedEntry)
    ids = np.arange(len(added.slice_lengths(0)))
    assert again.read(ids).tokens["ref_logprobs"].tolist() == added.read(ids).tokens["ref_logprobs"].tolist()
    build.stop()


def test_what_was_computed_before_a_stop_is_not_computed_again(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute = EnrichBuild.computed

    def some(self: EnrichBuild, pieces: Any, *rest: Any) -> Iterator[Any]:
        for receipt in compute(self, pieces, *rest):
            computed.append(receipt.slice_index)
            yield receipt
            if len(computed) == 3:
                raise KeyError("a kill")

    monkeypatch.setattr(EnrichBuild, "computed", some)
    config = load_job(job)
    _, build = begun(job)
    told: list[str] = []
    build.start(config, 0, None, silent, told.append)
    with pytest.raises(KeyError):
        build.wait()
    assert told == ["'a kill'"]
    build.stop()
    raysvc.tokenize(job)  # the rows are finished now, so the rest of the columns is waited for
    ended = raysvc.enrich(job)
    assert len(computed) == 3
    assert ended.rows.table().equals(elsewhere(job, tmp_path / "other").rows.table())
    parts = ended.entries[0].manifest.parts  # type: ignore[union-attr]
    assert len(parts) == len(ended.entries[0].source_rows), "the cut of what was there"  # type: ignore[union-attr]


def test_an_error_of_the_rows_ends_the_columns_and_one_of_the_columns_the_steps(
    job: dict[str, Any], tmp_path: Path
) -> None:
    short = save_model(tmp_path / "short", 512, max_position_embeddings=8)
    with pytest.raises(ConfigError, match="give max_length: 8"):
        entry_or_build(load_job({**job, "enrich": {"ref_logprobs": {"model": short}}}), None, silent)
    unlimited = {name: value for name, value in job.items() if name != "max_length"}
    config = load_job({**unlimited, "enrich": {"ref_logprobs": {"model": short}}})
    entry, build = entry_or_build(config, None, silent)
    assert build is not None
    told: list[str] = []
    build.start(config, 0, None, silent, told.append)
    with pytest.raises(ConfigError, match="has 8 positions, the longest row"):
        build.wait()
    assert "has 8 positions" in told[0]
    with pytest.raises(raysvc.errors.EntryError, match="has 8 positions"):
        entry.entries[0].wait_for([7])
    rows = Path(job["source"]["path"])
    rows.write_text(
        "".join(line if n % 2 else "not json\n" for n, line in enumerate(rows.read_text().splitlines(True)))
    )
    config = load_job(job)
    _, build = begun(job)
    build.start(config, 0, None, silent, told.append)
    with pytest.raises(raysvc.errors.QuarantineExceeded):
        build.wait()


def test_columns_wait_where_the_job_may_train_on_gpus_and_say_so(
    job: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = load_job({**job, "trainer": {**job["trainer"], "device": "auto"}})
    entry, build = entry_or_build(config, None, silent)
    assert build is None
    assert "ref_logprobs" in entry.row(0)
    assert any("trainer.device: cpu computes them beside it" in text for text in caplog.messages)


def columns_by_row(entry: raysvc.CacheEntry, spec: ServeSpec, steps: int) -> dict[tuple[int, int], Any]:
    """(row of the source, side of its pair) -> reference, of the rows of the first steps; each comes once."""
    stream = streams_of(spec)[TRAIN]
    found: dict[tuple[int, int], Any] = {}
    for step in range(steps):
        for mini in stream.make(step, (1,))[0].mini_batches:
            for row in (entry.row(str(one)) for one in map(written, mini.row_ids.tolist()) if one):
                key = (row["source_row"], row["chosen"])
                assert key not in found
                found[key] = row["ref_logprobs"]
    return found


def test_columns_of_a_source_that_is_followed_come_with_its_rows(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = pairs(40).splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(lines[:24]))
    job["source"] = {"path": str(folder), "follow": True, "carry": ["domain"]}
    config = load_job(job)
    entry, build = begun(job)
    spec = ServeSpec.model_validate_json(serve_spec(config, entry).model_dump_json())
    told: list[str] = []
    build.start(config, 0, None, silent, told.append)
    try:
        early = columns_by_row(entry, spec, 5)
        with (folder / "a.jsonl").open("a") as file:
            file.write("".join(lines[24:]))
        streams_of(spec)[TRAIN].make(9, (1,))  # waits for the look, the rows, and their columns
    finally:
        build.stop()
    assert told == []
    computed: list[int] = []
    compute = EnrichBuild.computed

    def seen(self: EnrichBuild, pieces: Any, *rest: Any) -> Iterator[Any]:
        computed.extend(piece.index for piece in pieces)
        return compute(self, pieces, *rest)

    monkeypatch.setattr(EnrichBuild, "computed", seen)
    entry, build = begun(job)
    build.start(config, 0, None, silent, told.append)
    try:
        later = columns_by_row(entry, serve_spec(config, entry), 10)
    finally:
        build.stop()
    assert (entry.uri, computed, told) == (build.entry.uri, [], [])
    whole = raysvc.enrich(
        {**job, "source": {"path": str(folder), "carry": ["domain"]}, "cache": {"root": str(tmp_path / "c")}}
    )
    known = {
        (row["source_row"], row["chosen"]): row["ref_logprobs"] for row in whole.rows.table().to_pylist()
    }
    assert later == known
    assert early == {key: known[key] for key in early}
    assert len(early) == 40


def test_columns_of_a_source_without_an_end_are_refused_where_all_rows_are_needed(
    job: dict[str, Any], tmp_path: Path
) -> None:
    job["source"]["follow"] = True
    with pytest.raises(
        ConfigError, match=r"source\.follow: has no end, and raysvc enrich computes columns of all rows"
    ):
        raysvc.enrich(job)
    job["trainer"]["device"] = "auto"
    with pytest.raises(
        ConfigError, match=r"source\.follow: has no end, and .*ref_logprobs.* give trainer\.device: cpu"
    ):
        entry_or_build(load_job(job), None, silent)


@pytest.mark.ray
@pytest.mark.slow
def test_workers_of_a_cluster_compute_what_is_much(
    job: dict[str, Any], tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.pipelines.local_build.CLUSTER_S", 0.0)
    config, told = load_job(job), []
    entry, build = begun(job)
    build.start(config, 0, config.workers, silent, told.append)
    build.wait()
    assert told == []
    finished = raysvc.enrich(job)
    assert (finished.hit, finished.uri) == (True, entry.uri)
    receipts = [json.loads(path.read_text()) for path in Path(entry.uri).glob("receipt-*.json")]
    assert {one["meta"]["worker"]["pid"] for one in receipts} - {os.getpid()}
    assert finished.rows.table().equals(elsewhere(job, tmp_path / "other").rows.table())
