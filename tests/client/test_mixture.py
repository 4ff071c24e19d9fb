"""A job over several sources: exact shares, one stream, a source that joins later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysvc
from raysvc.builds.cache_entry import open_served
from raysvc.builds.job_plan import plan_of
from raysvc.builds.mixed_job import mixture_spec, never_trained, stages_of
from raysvc.cache.find import open_finished
from raysvc.cache.rows import Rows
from raysvc.errors import ConfigError, PlanError, StateMismatch
from raysvc.inspect.lineage import lineage
from raysvc.inspect.replay_run import replay_job
from raysvc.inspect.row_view import shard_pictures
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.plan.state import PlanState
from raysvc.row_ids import parse, written


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests here: a source has the same entry wherever its file lies."""
    return str(tmp_path_factory.mktemp("cache"))


def job_of(
    tmp_path: Path, cache_root: str, sample: dict[str, str], shares: dict[str, dict[str, Any]], **plan: Any
) -> JobConfig:
    """A mixture of slices of the sample: a has 40 rows, b 60, c 20."""
    rows = Path(sample["rows"]).read_text().splitlines(keepends=True)
    sources = {}
    for name, (start, stop) in {"a": (0, 40), "b": (40, 100), "c": (100, 120)}.items():
        if name in shares:
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(rows[start:stop]))
            sources[name] = {"source": {"path": str(path), "format": "chat"}, **shares[name]}
    return load_job(
        {
            "mixture": {"sources": sources},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": cache_root},
            "plan": {"batch_size": 10, "mini_batch_size": 5, "epochs": 2, **plan},
        }
    )


def steps_of(job: JobConfig, entry: Any) -> list[np.ndarray]:
    """The source of each row, step by step."""
    plan = plan_of(job, entry)
    return [
        entry.rows.places(np.concatenate([mini.row_ids for mini in plan.step(step, 1).mini_batches]))[0]
        for step in range(plan.schedule.num_steps)
    ]


def test_sources_come_by_weight_and_each_is_tokenized_once(
    tmp_path: Path, cache_root: str, sample: dict[str, str], ray_session: None
) -> None:
    job = job_of(tmp_path, cache_root, sample, {"a": {"weight": 2}, "b": {"weight": 1}})
    entry = raysvc.tokenize(job)
    assert (entry.num_rows, raysvc.tokenize(job).hit) == (100, True)
    assert entry.report["row_counts"]["rows_written"] == 100
    alone = raysvc.tokenize(
        job.model_copy(update={"source": job.mixture.sources["b"].source, "mixture": None})
    )
    assert alone.hit
    assert entry.row("1:0:0")["input_ids"] == alone.row(0)["input_ids"]
    sources = np.concatenate(steps_of(job, entry))
    assert np.bincount(sources).tolist() == [80, 40]  # all of a twice, half of b in each of two epochs


def test_a_source_whose_share_is_too_small_for_a_row_is_named(
    tmp_path: Path, cache_root: str, sample: dict[str, str], ray_session: None
) -> None:
    shares: dict[str, Any] = {"a": {"weight": 100}, "b": {"weight": 1}, "c": {"weight": 0}}
    job = job_of(tmp_path, cache_root, sample, shares)
    entry = raysvc.tokenize(job)
    assert set(np.concatenate(steps_of(job, entry)).tolist()) == {0}
    assert never_trained(job, stages_of(job, entry.entries)) == ["b"]
    job = job_of(tmp_path, cache_root, sample, {**shares, "b": {"weight": 2}})
    assert never_trained(job, stages_of(job, entry.entries)) == []


def test_tokens_can_be_what_weights_share(
    tmp_path: Path, cache_root: str, sample: dict[str, str], ray_session: None
) -> None:
    job = job_of(tmp_path, cache_root, sample, {"a": {"weight": 1}, "b": {"weight": 1}})
    job = job.model_copy(update={"mixture": job.mixture.model_copy(update={"by": "tokens"})})
    entry = raysvc.tokenize(job)
    lengths = entry.rows.lengths()
    per_row = [lengths[:40].mean(), lengths[40:].mean()]
    counts = mixture_spec(job, entry.entries).stages[0][1]
    tokens = [count * mean for count, mean in zip(counts, per_row, strict=True)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.05)


def test_a_source_joins_later_and_the_steps_before_stay(
    tmp_path: Path, cache_root: str, sample: dict[str, str], ray_session: None
) -> None:
    before = job_of(tmp_path, cache_root, sample, {"a": {"epochs": 1}, "b": {"epochs": 1}})
    after = job_of(
        tmp_path,
        cache_root,
        sample,
        {"a": {"epochs": 1}, "b": {"epochs": 1}, "c": {"epochs": 1, "from_step": 6}},
    )
    old, new = raysvc.tokenize(before), raysvc.tokenize(after)
    was, is_ = steps_of(before, old), steps_of(after, new)
    assert [step.tolist() for step in is_[:6]] == [step.tolist() for step in was[:6]]
    assert any(2 in step for step in is_[6:])
    assert not any(2 in step for step in is_[:6])
    plan = plan_of(after, new)
    PlanState.of(plan_of(before, old), 5).check(plan)  # nothing of c was due yet
    with pytest.raises(StateMismatch, match="mixture"):
        PlanState.of(plan_of(before, old), 6).check(plan)


@pytest.mark.slow
def test_a_mixture_trains_every_row_as_often_as_its_source_says(
    tmp_path: Path, cache_root: str, sample: dict[str, str], ray_session: None
) -> None:
    job = job_of(tmp_path, cache_root, sample, {"a": {"epochs": 2}, "b": {"epochs": 0.5}}, epochs=1)
    run = tmp_path / "run"
    job = load_job(job, server={"name": "mixed"}, trainer={"dp_size": 2, "run_dir": str(run)})
    assert raysvc.train(job).metrics["steps"] == 11
    rows = [
        row for line in (run / "rows.jsonl").read_text().splitlines() for row in json.loads(line)["row_ids"]
    ]
    times = np.array([rows.count(written(row)) for row in raysvc.tokenize(job).row_ids().tolist()])
    again = replay_job(job, 3)
    assert again.recorded
    lines = lineage(
        [one for shard in again.chosen() for one in shard_pictures(shard, None)],
        3,
        again.schedule,
        open_served(again.spec),
    )
    assert sorted(line.row_id for line in lines if line.row_id is not None) == sorted(rows[30:40])
    assert all(
        line.source == ("a" if line.row_id.startswith("0:") else "b")
        for line in lines
        if line.row_id is not None
    )
    assert (times[:40] == 2).all()
    assert sorted(times[40:].tolist()) == [0] * 30 + [1] * 30


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": {"weight": 1}, "b": {"epochs": 1}}, "every source a weight, or every source epochs"),
        ({"a": {}}, "every source a weight, or every source epochs"),
        ({"a": {"weight": 1, "from_step": 3}}, "no source with a weight above 0 begins at step 0"),
        ({"a": {"weight": 0}}, "no source with a weight above 0 begins at step 0"),
        ({"a": {"weight": -1}}, "mixture.sources.a.weight"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, cache_root: str, sample: dict[str, str], shares: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job_of(tmp_path, cache_root, sample, shares)


def test_a_job_has_a_source_or_a_mixture_and_survives_a_round_trip(
    tmp_path: Path, cache_root: str, sample: dict[str, str]
) -> None:
    job = job_of(tmp_path, cache_root, sample, {"a": {"weight": 1}, "b": {"weight": 1}})
    assert JobConfig.model_validate(job.model_dump()) == job
    assert job.source == job.mixture.sources["a"].source
    with pytest.raises(ConfigError, match="source or mixture, not both"):
        load_job(job, source={"path": ("other.jsonl",)})


def test_a_source_that_stands_twice_is_refused(
    tmp_path: Path, cache_root: str, sample: dict[str, str], ray_session: None
) -> None:
    job = job_of(tmp_path, cache_root, sample, {"a": {"weight": 1}, "b": {"weight": 1}})
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    with pytest.raises(PlanError, match="'a' and 'b' have the same rows; keep one of them"):
        plan_of(job, raysvc.tokenize(job))


def test_joined_entries_give_every_row_as_its_own_entry_does(tmp_path: Path, entry: Any) -> None:
    entries = [open_finished(entry(count, seed=count, per_part=4)) for count in (7, 1, 12)]
    joined = Rows(entries)
    ids = joined.row_ids()[[19, 0, 7, 8, 8, 6, 12]]
    batch = joined.read(ids)
    assert batch.row_ids.tolist() == ids.tolist()
    for place, row_id in enumerate(ids.tolist()):
        number, local = (int(values[0]) for values in joined.places(np.array([row_id])))
        alone = entries[number].row(local)
        span = slice(batch.offsets[place], batch.offsets[place + 1])
        assert (
            batch.tokens["input_ids"][span].tolist() == alone["input_ids"] == joined.row(row_id)["input_ids"]
        )
        assert batch.rows["source_row"][place] == alone["source_row"]
    assert joined.lengths().tolist() == [len(joined.row(row)["input_ids"]) for row in joined.row_ids()]
    assert joined.table().num_rows == joined.num_rows == 20
    assert len(joined.read(np.array([], np.int64))) == 0
    with pytest.raises(IndexError, match="no row 3:0:0"):
        joined.read(np.array([parse("3:0:0")]))
