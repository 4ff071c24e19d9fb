"""Mixtures that are trained and served while their entries are built: the list in `raysvc.builds.build_beside`, with several sources."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raysvc
from raysvc import row_ids
from raysvc.actors.server.entry_stream import streams_of
from raysvc.actors.server.spec import TRAIN
from raysvc.api import entry_or_build, serve_spec
from raysvc.builds import build_beside
from raysvc.builds.build_beside import BuildBeside
from raysvc.builds.job_plan import plan_of
from raysvc.cache.growing.growing_entry import GrowingEntry
from raysvc.errors import QuarantineExceeded, SourceError
from raysvc.feedback.decision import decision_of
from raysvc.feedback.request import Request
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.pipelines.tokenize import receipts_here
from raysvc.plan.entry_plan import sampled_slices
from raysvc.progress import Tick, silent
from raysvc.row_ids import written

from .test_build_beside import KILLED, SLOW, logged, windowed
from .test_windowed_job import conversations

ROWS = {"talk": (60, 3), "tale": (40, 2), "song": (12, 1)}
SHARES: dict[str, dict[str, Any]] = {
    "talk": {"weight": 2},
    "tale": {"weight": 1},
    "song": {"weight": 1, "shuffle": "full"},
}
PLAN = {"batch_size": 8, "mini_batch_size": 4, "shuffle": "window(2)", "epochs": 2, "layout": "packed"}
PLAN["micro_batch_tokens"] = 512


def mixed(folder: Path, sample: dict[str, str], name: str, cache: str, **sections: Any) -> Path:
    """A job file of three sources; in full shuffle is the last."""
    sources = {}
    for source, (count, turns) in ROWS.items():
        path = folder / f"{source}.jsonl"
        if not path.exists():
            conversations(folder, source, count, turns)
        sources[source] = {"source": {"path": str(path), "format": "chat"}, **SHARES[source]}
    trainer = {"dp_size": 2, "model": "tiny", "run_dir": str(folder / name), "checkpoint_every_steps": 3}
    job = {
        "mixture": {"sources": sources},
        "tokenizer": sample["tokenizer"],
        "train_on": "each_assistant_turn",
        "cache": {"root": str(folder / cache)},
        "workers": {"slice_mb": (folder / "talk.jsonl").stat().st_size / 7 / 1e6},
        "plan": PLAN,
        "server": {"name": name},
        "trainer": trainer,
        **sections,
    }
    place = folder / name
    place.mkdir(exist_ok=True)
    path = place / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def checksums(job: JobConfig) -> list[list[str]]:
    """Of the parts of each source's entry, which are there."""
    entry = raysvc.tokenize(job)
    assert entry.hit
    return [[part.checksum for part in one.manifest.parts] for one in entry.entries]  # type: ignore[union-attr]


class Builder:
    """Makes slices in this process, in place of the builder of a cluster, and dies when it is told to."""

    def __init__(self) -> None:
        self.dies_after = 10**9
        self.made: list[tuple[str, int]] = []

    def receipts(
        self, builds: Sequence[Any], left: Sequence[Any], check: Callable[[], None]
    ) -> Iterator[Any]:
        for number, receipt in receipts_here([one.task() for one in builds], left):
            check()
            self.made.append((builds[number].name, receipt.slice_index))
            if len(self.made) > self.dies_after:
                raise KeyboardInterrupt
            yield number, receipt


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    builder = Builder()
    monkeypatch.setattr(build_beside, "beside", lambda workers, small_here: builder.receipts)
    monkeypatch.setattr(os, "nice", lambda more: 0)
    return builder


def build_now(build: BuildBeside, job: JobConfig, step: int) -> None:
    """The whole build, in this thread."""
    [lane] = build._lanes
    build._make(lane, build._order(job, step), build_beside.beside(None, small_here=False))


def test_sources_with_a_window_grow_and_those_in_full_shuffle_are_there(
    tmp_path: Path, sample: dict[str, str], builder: Builder
) -> None:
    job = load_job(mixed(tmp_path, sample, "grows", "grows-cache"))
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    kinds = [isinstance(one, GrowingEntry) for one in entry.entries]  # type: ignore[union-attr]
    assert kinds == [True, True, False]
    plan = plan_of(job, entry)
    build_now(build, job, 0)
    again, none = entry_or_build(job, None, silent)
    assert none is None
    assert again.hit
    finished = plan_of(job, again)
    assert finished.identity == plan.identity
    assert finished.hash == plan.hash
    told, grown = again, entry
    for step in range(plan.schedule.num_steps):
        for mine, its in zip(
            plan.step(step, 2).mini_batches, finished.step(step, 2).mini_batches, strict=True
        ):
            assert mine.row_ids.tolist() == its.row_ids.tolist()
            assert told.sources_of(its.row_ids) == grown.sources_of(its.row_ids)


def test_one_that_is_there_is_used_and_only_the_others_are_built(
    tmp_path: Path, sample: dict[str, str], builder: Builder
) -> None:
    job = load_job(mixed(tmp_path, sample, "some", "some-cache"))
    alone = raysvc.tokenize(
        job.model_copy(update={"source": job.mixture.sources["talk"].source, "mixture": None})  # type: ignore[union-attr]
    )
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    assert not entry.hit
    assert entry.entries[0].uri == alone.uri  # type: ignore[union-attr]
    build_now(build, job, 0)
    assert {name for name, _ in builder.made} == {"tale"}  # the one that was missing
    assert "talk: same" in entry.reason


@pytest.mark.parametrize(
    "sections",
    [{"source": {"carry": {"domain": {}}}}, {"cache": {"enabled": False}}],
    ids=["text", "private"],
)
def test_carried_text_and_an_entry_of_ones_own_are_not_waited_for(
    tmp_path: Path, sample: dict[str, str], builder: Builder, sections: dict[str, Any]
) -> None:
    path = windowed(tmp_path, sample, "own", "own-cache")
    data = yaml.safe_load(path.read_text())
    rows = Path(data["source"]["path"])
    lines = [
        {**json.loads(line), "domain": "d" * (n % 7)} for n, line in enumerate(rows.read_text().splitlines())
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for section, keys in sections.items():
        data[section].update(keys)
    job = load_job(data)
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    spec = serve_spec(job, entry)
    assert [one.uri for one in spec.sources if one.coming] == [entry.uri]
    build_now(build, job, 0)
    growing, finished = (streams_of(one)[TRAIN] for one in (spec, spec.model_copy(update={"growing": {}})))
    ahead = raysvc.tokenize(job)
    assert (ahead.uri == entry.uri) == job.cache.enabled
    built_ahead = streams_of(serve_spec(job, ahead))[TRAIN]
    for step in range(growing.schedule.num_steps):
        made = [
            [shard.digest() for shard in one.make(step, (2,))[1]] for one in (growing, finished, built_ahead)
        ]
        assert made[0] == made[1] == made[2]


def test_private_entries_have_the_plan_of_shared_ones_also_while_they_grow(
    tmp_path: Path, sample: dict[str, str], builder: Builder
) -> None:
    path = mixed(tmp_path, sample, "private", "private-cache")
    shared = load_job(path)
    private = load_job(path, cache={"root": shared.cache.root, "enabled": False})
    grows, build = entry_or_build(private, None, silent)
    assert build is not None
    plans = [plan_of(job, raysvc.tokenize(job)) for job in (shared, private)]
    assert plan_of(private, grows).identity == plans[0].identity == plans[1].identity
    for step in range(plans[0].schedule.num_steps):
        groups = [plan.groups_of(step).tolist() for plan in plans]
        assert groups[0] == groups[1]


def test_a_private_entry_that_was_killed_is_built_anew_and_its_steps_go_on(
    tmp_path: Path, sample: dict[str, str], builder: Builder
) -> None:
    job = load_job(
        windowed(tmp_path, sample, "own", "own-cache", cache={"root": str(tmp_path / "c"), "enabled": False})
    )
    made: list[tuple[str, Any, list[list[str]]]] = []
    for dies_after in (5, 10**9):
        entry, build = entry_or_build(job, None, silent)
        assert build is not None
        builder.dies_after, builder.made = dies_after, []
        with contextlib.suppress(KeyboardInterrupt):
            build_now(build, job, 0)
        build.stop()
        stream = streams_of(serve_spec(job, entry))[TRAIN]
        there = itertools.takewhile(stream.is_there, range(stream.schedule.num_steps))
        digests = [[shard.digest() for shard in stream.make(step, (2,))[1]] for step in there]
        made.append((entry.uri, plan_of(job, entry).identity, digests))
    (dead, was, before), (alive, now, after) = made
    assert dead != alive, "nobody finds what is private"
    assert was == now
    assert 0 < len(before) < len(after)
    assert after[: len(before)] == before


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says since it was asked last of sources that the first step waits for."""
    said = [text for text in caplog.messages if text.startswith("the first step waits")]
    caplog.clear()
    return said


@pytest.mark.parametrize("by", ["tokens", "epochs"])
def test_shares_of_tokens_and_epochs_wait_for_no_source_with_a_window(
    tmp_path: Path, sample: dict[str, str], by: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = mixed(tmp_path, sample, by, f"{by}-cache")
    data = yaml.safe_load(path.read_text())
    if by == "tokens":
        data["mixture"]["by"] = "tokens"
    else:
        for each in data["mixture"]["sources"].values():
            each["epochs"] = each.pop("weight")
    _, build = entry_or_build(load_job(data), None, silent)
    assert build is not None
    build.stop()
    assert waits(caplog) == ["the first step waits until all of source 'song' is tokenized: it has no window"]


def test_shares_of_tokens_follow_from_a_sample_and_steps_are_those_of_finished_entries(
    tmp_path: Path, sample: dict[str, str], builder: Builder
) -> None:
    data = yaml.safe_load(mixed(tmp_path, sample, "tokens", "tokens-cache").read_text())
    data["mixture"]["by"] = "tokens"
    job = load_job(data)
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    talk, tale, song = entry.entries
    assert len(talk.source_rows) > len(sampled_slices(talk)) == 4 == len(sampled_slices(tale))
    assert [talk.has([index]) for index in range(len(talk.source_rows))].count(True) == 4, "the sample alone"
    spec = serve_spec(job, entry)
    build_now(build, job, 0)
    finished = raysvc.tokenize(job)
    assert finished.hit
    ahead = serve_spec(job, finished)
    assert spec.mixture == ahead.mixture
    growing, whole = (streams_of(one)[TRAIN] for one in (spec, ahead))
    for step in range(growing.schedule.num_steps):
        made = [[shard.digest() for shard in one.make(step, (2,))[1]] for one in (growing, whole)]
        assert made[0] == made[1]
    assert spec.mixture is not None
    [(_, counts)] = spec.mixture.stages
    tokens_of_a_group = [
        one.num_tokens / groups for one, groups in zip(finished.entries, (60, 40, song.num_rows), strict=True)
    ]
    shares = [count * each for count, each in zip(counts, tokens_of_a_group, strict=True)]
    assert shares[0] / shares[1] == pytest.approx(2, rel=0.15)
    assert shares[2] / shares[1] == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_a_decision_on_entries_that_grow_is_that_on_finished_ones(
    tmp_path: Path, sample: dict[str, str], builder: Builder, by: str
) -> None:
    """A driver's, and that of `mixture.adapt`: the sources get other weights, and rows are left out that nobody has tokenized yet."""
    data = yaml.safe_load(mixed(tmp_path, sample, "decides", "decides-cache").read_text())
    data["mixture"]["by"] = by
    job = load_job(data)
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    for one in build._builds:
        one.make_here(0)  # it tells the columns
    spec = serve_spec(job, entry)
    growing = streams_of(spec)[TRAIN]
    late = next(index for index in range(7) if not entry.entries[0].has([index]))
    asked = Request("x", 3, {"talk": 1, "tale": 3, "song": 0}, (row_ids.parse(f"0:{late}:1"),))
    decision = decision_of(asked, 3, *growing.decides())
    growing.follow([decision])
    build_now(build, job, 0)
    finished = streams_of(serve_spec(job, raysvc.tokenize(job)))[TRAIN]
    undecided = [[shard.digest() for shard in finished.make(step, (2,))[1]] for step in range(6)]
    again = decision_of(asked, 3, *finished.decides())
    assert again == decision
    finished.follow([again])
    made = [
        [[shard.digest() for shard in one.make(step, (2,))[1]] for step in range(6)]
        for one in (growing, finished)
    ]
    assert made[0] == made[1]
    assert made[1][:3] == undecided[:3]
    assert made[1][3:] != undecided[3:]


def test_a_sample_is_made_once_and_what_is_wrong_with_it_names_the_source(
    tmp_path: Path, sample: dict[str, str], builder: Builder
) -> None:
    data = yaml.safe_load(mixed(tmp_path, sample, "again", "again-cache").read_text())
    data["mixture"]["by"] = "tokens"
    _, build = entry_or_build(load_job(data), None, silent)
    assert build is not None
    build.stop()
    made = sorted((tmp_path / "again-cache").glob("*/part-*"))
    _, build = entry_or_build(load_job(data), None, silent)
    assert build is not None
    build.stop()
    assert sorted((tmp_path / "again-cache").glob("*/part-*")) == made
    del data["mixture"]["sources"]["song"]
    bad = load_job({**data, "max_length": 8, "truncation": "error"})
    with pytest.raises(SourceError, match=r"^mixture\.sources\.(talk|tale)\.source:[0-9]+: "):
        entry_or_build(bad, None, silent)


def test_columns_that_a_model_computes_wait_for_the_entry_and_say_so(
    tmp_path: Path, sample: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"enrich": {"ref_logprobs": {"model": "tiny"}}}
    monkeypatch.setattr("raysvc.scoring.job_columns.with_columns", lambda job, entry, *more: entry)
    entry, build = entry_or_build(
        load_job(windowed(tmp_path, sample, "scored", "cache", **model)), None, silent
    )
    assert (build, entry.rows.num_rows > 0) == (None, True)
    why = "a model computes ref_logprobs of all rows where the job trains (trainer.device: cpu computes them beside it)"
    assert waits(caplog) == [f"the first step waits until all of the source is tokenized: {why}"]
    entry_or_build(
        load_job(windowed(tmp_path, sample, "full", "other", plan={"batch_size": 8})), None, silent
    )
    assert not waits(caplog), "nobody asked for a window"


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 20), st.lists(st.integers(0, 9), max_size=3), st.randoms(use_true_random=False))
def test_a_build_that_was_killed_goes_on_and_its_entries_are_those_of_a_build_ahead(
    tmp_path_factory: Any,
    sample: dict[str, str],
    builder: Builder,
    step: int,
    deaths: list[int],
    chance: random.Random,
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    beside, ahead = (load_job(mixed(folder, sample, name, name)) for name in ("beside", "ahead"))
    made: list[tuple[str, int]] = []
    for death in [*deaths, 10**9]:
        builder.dies_after, builder.made = death, []
        _, build = entry_or_build(beside, None, silent)
        if build is None:
            break
        try:
            if chance.random() < 0.5:
                number, index = build._order(beside, step)[0]
                build._builds[number].make_here(index)
            build_now(build, beside, step)
        except KeyboardInterrupt:
            pass
        build.stop()
        made += builder.made
    assert len(made) == len(set(made)), "a finished slice was made again"
    raysvc.tokenize(ahead)
    assert checksums(beside) == checksums(ahead)


@pytest.mark.parametrize("step", [0, 9, 17])
def test_slices_are_made_as_the_stream_needs_them_and_a_first_one_of_each_source_before(
    tmp_path: Path, sample: dict[str, str], step: int
) -> None:
    job = load_job(mixed(tmp_path, sample, "order", "order-cache"))
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    order, plan = build._order(job, step), plan_of(job, entry)
    build.stop()
    slices = {(number, index) for number in (0, 1) for index in range(len(entry.entries[number].source_rows))}  # type: ignore[union-attr]
    assert len(order) == len(set(order)) == len(slices)
    assert set(order) == slices
    assert {number for number, _ in order[:2]} == {0, 1}
    first_need: dict[tuple[int, int], int] = {}
    for one in range(step, plan.schedule.num_steps):
        place = row_ids.split(plan.groups_of(one))
        for need in zip(place.source.tolist(), place.slice.tolist(), strict=True):
            first_need.setdefault(need, one)
    needs = [first_need[one] for one in order[2:] if one in first_need]
    # the order is right to within some positions; over 180 seeds and steps two of the 12 steps were the most
    assert all(earlier <= later + 3 for earlier, later in pairwise(needs)), needs


def test_a_source_with_too_many_bad_rows_is_named(
    tmp_path: Path, sample: dict[str, str], builder: Builder
) -> None:
    path = mixed(tmp_path, sample, "bad", "bad-cache")
    rows = tmp_path / "tale.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text("".join(line + "\n" if n % 2 else "not json\n" for n, line in enumerate(lines)))
    job, told = load_job(path), []
    with pytest.raises(QuarantineExceeded, match=r"^mixture\.sources\.tale\.source: 20 of 40 rows"):
        raysvc.tokenize(job)
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    build.start(job, 0, None, silent, told.append)
    with pytest.raises(QuarantineExceeded, match=r"^mixture\.sources\.tale\.source: 20 of 40 rows"):
        build.wait()
    assert told[0].startswith("mixture.sources.tale.source: 20 of 40 rows")
    assert entry.hit is False


def test_what_a_slice_raises_names_the_source(
    tmp_path: Path, sample: dict[str, str], builder: Builder
) -> None:
    job = load_job(mixed(tmp_path, sample, "long", "long", max_length=8, truncation="error"))
    with pytest.raises(
        SourceError, match=r"^mixture\.sources\.song\.source:0: the row has .* max_length is 8"
    ):
        entry_or_build(job, None, silent)  # the one in full shuffle
    sources = {name: each for name, each in job.mixture.sources.items() if name != "song"}  # type: ignore[union-attr]
    job = job.model_copy(update={"mixture": job.mixture.model_copy(update={"sources": sources})})  # type: ignore[union-attr]
    _, build = entry_or_build(job, None, silent)
    assert build is not None
    build.start(job, 0, None, silent, lambda why: None)
    with pytest.raises(SourceError, match=r"^mixture\.sources\.(talk|tale)\.source:[0-9]+: "):
        build.wait()


def test_a_build_of_two_tells_one_progress(tmp_path: Path, sample: dict[str, str], builder: Builder) -> None:
    job = load_job(mixed(tmp_path, sample, "told", "told-cache"))
    _, build = entry_or_build(job, None, silent)
    assert build is not None
    ticks: list[Tick] = []
    build.start(job, 0, None, ticks.append, lambda why: None)
    build.wait()
    assert {tick.total for tick in ticks} == {100}
    assert [tick.done for tick in ticks] == sorted(tick.done for tick in ticks)
    assert [tick.final for tick in ticks].count(True) == 1
    assert (ticks[-1].final, ticks[-1].done, ticks[-1].facts["sources"]) == (True, 100, "2/2")


@pytest.mark.ray
@pytest.mark.slow
def test_a_mixture_trains_while_its_entries_are_built_and_all_is_what_it_would_be(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    ahead = mixed(tmp_path, sample, "ahead", "ahead-cache")
    raysvc.tokenize(load_job(ahead))
    whole = raysvc.train(ahead).metrics
    assert whole["cache"]["hit"]
    path = mixed(tmp_path, sample, "beside", "beside-cache")
    beside = raysvc.train(path).metrics
    assert not beside["cache"]["hit"]
    assert beside["steps"] == whole["steps"]
    assert logged(tmp_path, "ahead") == logged(tmp_path, "beside")
    assert checksums(load_job(ahead)) == checksums(load_job(path))


@pytest.mark.ray
@pytest.mark.slow
def test_workers_of_a_cluster_make_slices_of_all_sources(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    pool = {"min": 2, "max": 2, "slice_mb": 0.001}
    job, ahead = (load_job(mixed(tmp_path, sample, name, name, workers=pool)) for name in ("pool", "ahead"))
    _, build = entry_or_build(job, None, silent)
    assert build is not None
    build.start(job, 0, job.workers, silent, lambda why: None)
    build.wait()
    raysvc.tokenize(ahead, workers={"min": 1})
    assert checksums(job) == checksums(ahead)


@pytest.mark.slow
def test_kills_of_trainer_server_and_builder_change_no_step_of_a_mixture(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    """Of 40 slices of two sources neither has all when 24 steps are trained, however slow these are: they need 13 and 7."""
    for name, count in (
        ("talk", 1200),
        ("tale", 400),
        ("song", 250),
    ):  # a quarter of the stream is of the last one
        conversations(tmp_path, name, count, 1)
    plan = {"batch_size": 40, "shuffle": "window(2)", "epochs": 1}
    trainer = {
        "dp_size": 1,
        "model": "tiny",
        "checkpoint_every_steps": 4,
        "max_steps": 24,
        "lr_schedule": "cosine",
    }
    slices = {"slice_mb": (tmp_path / "talk.jsonl").stat().st_size / 30 / 1e6}

    def job(name: str) -> Path:
        own = {**trainer, "run_dir": str(tmp_path / name)}
        return mixed(tmp_path, sample, name, "killed-cache", plan=plan, workers=slices, trainer=own)

    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW.replace("MOST", "15"))
    path = f"{site}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": path}

    def run(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(job("killed")), what]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)

    died = run("trainer")
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert len(list((tmp_path / "killed-cache").glob("*/manifest.json"))) == 1, (
        "the source in full shuffle alone"
    )
    went_on = run("others")
    assert went_on.returncode == 0, went_on.stderr
    assert "killed the builder" in went_on.stdout
    entry = raysvc.tokenize(load_job(job("ahead")))  # goes on with what the runs have built
    plan_ahead = plan_of(load_job(job("ahead")), entry)
    lines = [json.loads(line) for line in logged(tmp_path, "killed")[0]]
    assert [(line["step"], line["mini"]) for line in lines] == [(step, 0) for step in range(24)]
    for line in lines:
        assert line["row_ids"] == list(
            map(written, plan_ahead.step(line["step"], 1).mini_batches[0].row_ids.tolist())
        )
