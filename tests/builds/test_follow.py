"""Sources that are followed: the lists in `raysvc.builds.followed_build`, `raysvc.pipelines.sources.followed` and `raysvc.cache.growing.listings`."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import raysvc
from raysvc.actors.server.entry_stream import EntryStream, streams_of
from raysvc.actors.server.spec import TRAIN, Role
from raysvc.api import serve_spec
from raysvc.builds.cache_entry import CacheEntry
from raysvc.cache.growing.followed_entry import FollowedEntry
from raysvc.cli.main import app
from raysvc.errors import EntryError, RaysvcError
from raysvc.feedback.decision import Decision
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.report.facts import gather
from tests.cache.helpers import wait_until_unused

from .test_windowed_job import run_json, runner


def lines(*numbers: int) -> str:
    """One conversation a number, which says it."""
    return "".join(
        json.dumps({"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"a {n}"}]})
        + "\n"
        for n in numbers
    )  # fmt: skip


def settle(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 60, time.time() - 60))


def job_of(folder: Path, sample: dict[str, str], **sections: Any) -> JobConfig:
    job = {
        "source": {"path": str(folder / "in"), "format": "chat", "follow": True},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 4, "shuffle": "window(3)"},
        "server": {"name": "followed"},
        "trainer": {"run_dir": str(folder / "run"), "max_steps": 5},
        "max_quarantine": 0.5,
        **sections,
    }
    return load_job(job)


def stream_of(job: JobConfig, entry: CacheEntry) -> EntryStream:
    return streams_of(serve_spec(job, entry))[TRAIN]


def steps_of(job: JobConfig, entry: CacheEntry | None = None) -> list[tuple[list[int], list[str]]]:
    """Row ids and digests of every step that is there."""
    stream = stream_of(job, raysvc.tokenize(job) if entry is None else entry)
    found = []
    while len(found) < stream.schedule.num_steps and stream.is_there(len(found)):
        info, shards = stream.make(len(found), [Role(2)])
        found.append((info.mini_batches[0].row_ids.tolist(), [shard.digest() for shard in shards]))
    return found


def texts_of(entry: CacheEntry) -> list[str]:
    assert isinstance(entry.entries[0], FollowedEntry)
    out = []
    for index, rows in enumerate(entry.entries[0].source_rows.tolist()):
        ids = [(index << 32) | row for row in range(rows)]
        out += [str(entry.tokenizer.decode(entry.rows.row(one)["input_ids"])) for one in ids]
    return out


def test_rows_that_appear_come_after_those_that_were_there_and_move_none(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.jsonl").write_text(lines(*range(9)))
    job = job_of(tmp_path, sample)
    seen = [steps_of(job)]
    assert len(seen[0]) == 2
    (folder / "a.jsonl").write_text(lines(*range(100, 107)) + '{"messages": [{"role"')
    seen.append(steps_of(job))
    with (folder / "b.jsonl").open("a") as file:
        file.write(lines(*range(9, 15)))
    seen.append(steps_of(job))
    with (folder / "a.jsonl").open("a") as file:
        file.write(': "user", "content": "q"}, {"role": "assistant", "content": "the end"}]}\n')
    seen.append(steps_of(job))
    assert [len(steps) for steps in seen] == [2, 4, 5, 5]
    for before, after in itertools.pairwise(seen):
        assert after[: len(before)] == before
    entry = raysvc.tokenize(job)
    texts = texts_of(entry)
    wanted = [*range(9), *range(100, 107), *range(9, 15)]
    assert [int(text.rpartition("a ")[2].split("<")[0]) for text in texts[:-1]] == wanted
    assert "the end" in texts[-1]


def test_text_that_is_carried_arrives_and_longer_text_in_a_later_file_changes_no_step(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()

    def rows(numbers: range, text: str) -> str:
        told = [
            {**json.loads(line), "domain": f"{text}{n}"}
            for n, line in zip(numbers, lines(*numbers).splitlines(), strict=True)
        ]
        return "".join(json.dumps(row) + "\n" for row in told)

    (folder / "a.jsonl").write_text(rows(range(8), "a"))
    source = {"path": str(folder), "format": "chat", "follow": True, "carry": ["domain"]}
    job = job_of(tmp_path, sample, source=source)
    before = steps_of(job)
    (folder / "b.jsonl").write_text(rows(range(8, 16), "much longer "))
    after = steps_of(job)
    assert (len(before), len(after)) == (2, 4)
    assert after[:2] == before
    stream = stream_of(job, raysvc.tokenize(job))
    texts = [
        text
        for step in range(4)
        for shard in stream.make(step, [Role(2)])[1]
        for text in shard.arrays["domain"].tolist()
    ]
    assert sorted(filter(None, texts)) == sorted(
        [f"a{n}" for n in range(8)] + [f"much longer {n}" for n in range(8, 16)]
    )


@pytest.mark.parametrize("seed", range(6))
def test_arrivals_restarts_and_two_who_follow_change_no_step(
    tmp_path: Path, sample: dict[str, str], seed: int
) -> None:
    """The oracle: all rows of the steps are those that were written, once each; a fresh process sees the same steps."""
    rng = random.Random(seed)
    folder = tmp_path / "in"
    folder.mkdir()
    job, other = job_of(tmp_path, sample), job_of(tmp_path, sample, workers={"slice_mb": 0.0002})
    written, seen, number = 0, [], 0
    for _ in range(6):
        for _ in range(rng.randint(1 if not written else 0, 4)):
            count = rng.randint(1, 6)
            text = lines(*range(written, written + count))
            written += count
            path = folder / f"{rng.choice('abc')}.jsonl"
            if rng.random() < 0.3:
                number += 1
                path = folder / f"{rng.choice('xy')}{number}.jsonl"
            with path.open("a") as file:
                file.write(text)
        steps = steps_of(rng.choice([job, other]))
        assert steps[: len(seen)] == seen
        seen = steps
    entry = raysvc.tokenize(job)
    numbers = [int(text.rpartition("a ")[2].split("<")[0]) for text in texts_of(entry)]
    assert sorted(numbers) == list(range(written))
    rows = [row for ids, _ in seen for row in ids]
    assert len(rows) == len(set(rows)) == written // 4 * 4
    assert steps_of(job, entry) == seen


def test_a_file_that_is_counted_and_changes_is_refused_by_name(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(1, 2, 3))
    job = job_of(tmp_path, sample)
    raysvc.tokenize(job)
    (folder / "a.jsonl").write_text(lines(1, 2, 4, 5))
    with pytest.raises(RaysvcError, match=r"a\.jsonl.*changed"):
        raysvc.tokenize(job)
    (folder / "a.jsonl").write_text(lines(1))
    with pytest.raises(RaysvcError, match=r"a\.jsonl.* are counted"):
        raysvc.tokenize(job)
    (folder / "a.jsonl").unlink()
    raysvc.tokenize(job)  # its rows are in the cache


@pytest.mark.slow  # waits until a file has not been written to for 10 s
def test_a_whole_file_counts_when_nobody_writes_to_it_and_is_refused_when_it_changes(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "in"
    folder.mkdir()

    def table(*numbers: int) -> pa.Table:
        return pa.Table.from_pylist([json.loads(line) for line in lines(*numbers).splitlines()])

    pq.write_table(table(1, 2, 3), folder / "a.parquet")
    settle(folder / "a.parquet")
    os.utime(folder)
    job = job_of(tmp_path, sample)
    first = raysvc.tokenize(job)
    pq.write_table(table(4, 5), folder / "b.parquet")
    os.utime(folder / "b.parquet", (time.time() + 3600,) * 2)  # else it counts where the next line is slow
    assert raysvc.tokenize(job).num_rows == first.num_rows == 3
    pq.write_table(table(7), folder / "a.parquet")
    with pytest.raises(RaysvcError, match=r"a\.parquet.*changed"):
        raysvc.tokenize(job)


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"plan": {"batch_size": 4}}, "needs plan.shuffle: window"),
        ({"plan": {"batch_size": 4, "shuffle": "window", "epochs": 2}}, "no second epoch"),
        ({"cache": {"enabled": False}}, "cache.enabled is false"),
        ({"cache": {"force": True}}, "cache.force is true"),
        ({"evals": {"e": {"source": {"path": "x.jsonl", "follow": True}}}}, "an eval reads all rows"),
        ({"source": {"dataset": "x", "follow": True}}, "files that appear"),
    ],
)
def test_what_a_source_without_an_end_cannot_have_is_refused(
    tmp_path: Path, sample: dict[str, str], sections: dict[str, Any], what: str
) -> None:
    with pytest.raises(RaysvcError, match=what):
        job_of(tmp_path, sample, **sections)


def test_a_run_without_max_steps_is_refused(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_of(tmp_path, sample, trainer={"run_dir": str(tmp_path / "run")})
    with pytest.raises(RaysvcError, match="max_steps"):
        raysvc.train(job)


def test_listings_that_are_gone_or_others_are_refused(tmp_path: Path, sample: dict[str, str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(*range(8)))
    job = job_of(tmp_path, sample)
    stream = stream_of(job, raysvc.tokenize(job))
    state = {"hash": stream.plan_hash}
    listings = next((tmp_path / "cache" / ".follow").iterdir())
    kept = next(listings.iterdir())
    data = kept.read_bytes()
    kept.unlink()
    with pytest.raises(EntryError, match="gone"):
        stream_of(job, CacheEntry(stream._opened().rows.entries)).is_there(5)  # type: ignore[arg-type]
    again = stream_of(job, raysvc.tokenize(job))
    assert again.plan_hash != state["hash"]
    kept.unlink()
    kept.write_bytes(data)
    assert stream_of(job, raysvc.tokenize(job)).plan_hash == state["hash"]


def test_gc_keeps_an_entry_that_is_followed_until_it_is_unused_for_long(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    from raysvc.cache.find import collect_garbage
    from raysvc.cache.store.open import open_store

    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(*range(8)))
    job = job_of(tmp_path, sample)
    before = steps_of(job)
    store = open_store(str(tmp_path / "cache"))
    parts = sorted((tmp_path / "cache").glob("*/part-*"))
    assert parts
    collect_garbage(store, older_than_s=3600, grace_s=0)
    assert sorted((tmp_path / "cache").glob("*/part-*")) == parts
    wait_until_unused(store)  # by the stream above, which is gone: a hold that ends is a sign of use
    collect_garbage(store, older_than_s=0, grace_s=0)
    assert not list((tmp_path / "cache").glob("*/part-*"))
    assert steps_of(job) == before  # from the listings, and the file


def test_steps_and_rows_of_a_source_without_an_end_can_be_shown_and_those_that_are_not_there_are_named(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    (folder / "a.jsonl").write_text(lines(1) + json.dumps({"messages": turns}) + "\n" + lines(*range(2, 8)))
    job = job_of(tmp_path, sample, train_on="each_assistant_turn")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_unset=True)))
    entry = raysvc.tokenize(job)
    assert entry.num_tokens == sum(len(entry.row(row)["input_ids"]) for row in range(10))
    assert "rows" in repr(entry)
    shown = run_json("show", "-c", str(path), "--step", "0")
    again = run_json("replay", "-c", str(path), "--step", "0")
    assert len(shown["rows"]) >= 4
    assert again["shards"]
    found = [run_json("show", "-c", str(path), "--row", str(row)) for row in range(6)]
    assert [(one["source_row"], one["turn"]) for one in found] == [
        (0, [1, 1]), (1, [1, 3]), (1, [2, 3]), (1, [3, 3]), (2, [1, 1]), (3, [1, 1]),
    ]  # fmt: skip
    for row in (10, 1 << 32, (1 << 32) + 1):
        refused = runner.invoke(app, ["show", "-c", str(path), "--row", str(row)])
        assert refused.exit_code == 2
        assert "there is no row" in refused.stderr


def test_a_report_has_the_rows_of_all_listings_and_no_plan(tmp_path: Path, sample: dict[str, str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(*range(6)))
    job = job_of(tmp_path, sample)
    raysvc.tokenize(job)
    (folder / "b.jsonl").write_text(lines(*range(6, 9)) + "{broken\n")
    facts = gather(job, raysvc.tokenize(job))
    assert facts.plan is None
    assert facts.overview["rows"] == 9
    assert len(facts.lengths["rows"]) == len(facts.trained["rows"]) == 9
    assert sum(facts.lengths["rows"]) == facts.overview["tokens"]
    said = b"".join(facts.rows.pieces[token] for token in facts.rows.ids.tolist()).decode()
    assert [text[0] for text in said.split("a ")[1:]] == [*"012345678"]
    assert facts.row_counts["rows_in"] == 10
    FeedbackLog(f"{job.run_dir}/server/feedback").add(0, Decision("x", 3, None, (), (1, 2), {}))
    (decision,) = gather(job, raysvc.tokenize(job)).decisions
    assert decision == {"step": 3, "weights": None, "skip_rows": (1, 2)}
