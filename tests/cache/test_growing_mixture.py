"""Mixtures whose entries are read while they are built: as `test_growing_entry`, with several sources at once."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc import row_ids
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import MixtureSpec, SourceSpec
from raysvc.cache.find import open_finished
from raysvc.cache.growing import slice_receipts
from raysvc.errors import EntryError
from raysvc.job.config import PlanConfig
from raysvc.plan.state import PlanState

from .test_growing_entry import SLICES, Clock, Source, digests


class Mixed:
    """Sources in one stream; `shuffles` that are "full" are built before."""

    def __init__(self, sources: list[Source], shuffles: list[str], stages: Any) -> None:
        self.sources, self.shuffles = sources, shuffles
        self.spec = MixtureSpec(
            names=tuple("abc"[: len(sources)]),
            stages=stages,
            shuffles=tuple(shuffles),
        )
        for one in sources:
            if one not in self.growing:
                build_all(one)

    @property
    def growing(self) -> list[Source]:
        return [one for one, shuffle in zip(self.sources, self.shuffles, strict=True) if shuffle != "full"]

    def stream(self, config: PlanConfig, growing: bool) -> EntryStream:
        coming = {one.uri: one.spec for one in self.growing} if growing else {}
        sources = [SourceSpec(uri=one.uri, coming=coming.get(one.uri)) for one in self.sources]
        return EntryStream(sources, {}, Recipe(config, 0), self.spec)


def build_all(source: Source) -> None:
    for index in range(len(source.slices)):
        source.build(index)
    source.finish()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_receipts, "FIRST_LOOK_S", 0.001)
    monkeypatch.setattr(slice_receipts, "MOST_LOOK_S", 0.004)


@settings(max_examples=12)
@given(st.lists(SLICES, min_size=2, max_size=3), st.sampled_from(["rows", "turns"]), st.data())
def test_steps_of_a_mixture_that_grows_are_those_of_the_finished_one(
    tmp_path_factory: Any, sources_slices, kind, data
) -> None:
    """Builders of several sources work in any order and leave parts of other cuts; servers die; ranks change; rows are skipped."""
    if not all(any(n for groups in slices for n in groups) for slices in sources_slices):
        return
    root = tmp_path_factory.mktemp("mixed")
    windows = st.integers(1, 4).map(lambda w: f"window({w})")
    shuffles = [data.draw(windows), *(data.draw(windows | st.just("full")) for _ in sources_slices[1:])]
    sources = [Source(root, slices, kind) for slices in sources_slices]
    batch = data.draw(st.integers(1, 6))
    layout = data.draw(st.sampled_from([{}, {"layout": "packed", "micro_batch_tokens": 64, "align": 4}]))
    config = PlanConfig(
        batch_size=batch,
        mini_batch_size=data.draw(st.integers(1, batch)),
        epochs=2,
        seed=data.draw(st.integers(0, 9)),
        **layout,
    )
    counts = [tuple(data.draw(st.integers(0, 6)) for _ in sources) for _ in range(2)]
    if not all(map(sum, counts)):
        return
    stages = [(0, counts[0]), (data.draw(st.integers(1, 9)), counts[1])]
    mixed = Mixed(sources, shuffles, stages[: data.draw(st.integers(1, 2))])
    jobs = [(one, index) for one in mixed.growing for index in range(len(one.slices))]
    order = data.draw(st.permutations(jobs))
    pauses = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.003]), min_size=len(order), max_size=len(order)))
    ends = data.draw(st.sets(st.integers(0, len(sources))))  # sources that are finished while steps are made

    def work() -> None:
        for (source, index), pause in zip(order, pauses, strict=True):
            time.sleep(pause)
            if pause:
                source.build(index, cut_otherwise=True)
            source.build(index)
        for number, source in enumerate(mixed.growing):
            if number in ends:
                source.finish()

    builder = threading.Thread(target=work)
    builder.start()
    stream, found = mixed.stream(config, growing=True), []
    ranks = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    for step in range(stream.schedule.num_steps):
        if data.draw(st.integers(0, 9)) == 0:
            before = stream
            stream = mixed.stream(config, growing=True)  # the server died
            stream.check(PlanState.of(before._opened().plan, step - 1 if step else None).to_json())
        found.append(digests(stream, step, ranks[step % len(ranks)]))
    builder.join()
    for number, source in enumerate(mixed.growing):
        if number not in ends:
            source.finish()
    finished = mixed.stream(config, growing=False)
    assert finished.identity == stream.identity
    assert finished.plan_hash == stream.plan_hash
    assert finished.schedule == stream.schedule
    steps = range(finished.schedule.num_steps)
    assert [digests(finished, step, ranks[step % len(ranks)]) for step in steps] == found
    ids = [row for info in found for mini in info[2:] if isinstance(mini, list) for row in mini]
    if ids:  # a run that leaves one of them out, in the middle of its builds or after them
        skipping = config.model_copy(update={"skip_rows": (data.draw(st.sampled_from(ids)),)})
        streams = [mixed.stream(skipping, growing) for growing in (True, False)]
        for step in steps:
            assert digests(streams[0], step) == digests(streams[1], step)


def test_a_step_waits_for_its_own_slices_of_each_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_receipts, "time", clock := Clock())
    sources = [Source(tmp_path, [[1] * 4] * 3) for _ in range(2)]
    mixed = Mixed(sources, ["window(1)"] * 2, [(0, (12, 12))])
    stream = mixed.stream(PlanConfig(batch_size=4), growing=True)
    for one in sources:
        one.build(2)
    opened = stream._opened()
    needs = [
        sorted({(place.source, place.slice) for place in zip_places(opened, step)})
        for step in range(stream.schedule.num_steps)
    ]
    there = {(0, 2), (1, 2)}
    assert [stream.is_there(step) for step in range(len(needs))] == [set(one) <= there for one in needs]
    step = next(step for step, need in enumerate(needs) if not set(need) <= there)
    missing = [one for one in needs[step] if one not in there]
    clock.due += [(0.2, partial(sources[number].build, index)) for number, index in missing]
    assert 0.2 <= stream.wait_for(step) <= 0.2 + slice_receipts.MOST_LOOK_S
    assert stream.is_there(step)


def zip_places(opened: Any, step: int) -> list[row_ids.SlicedPlace]:
    place = row_ids.split(opened.plan.groups_of(step))
    return [row_ids.SlicedPlace(*one) for one in zip(*(part.tolist() for part in place), strict=True)]


def test_a_failed_build_ends_the_wait_for_every_source(tmp_path: Path) -> None:
    sources = [Source(tmp_path, [[1] * 4] * 2) for _ in range(2)]
    mixed = Mixed(sources, ["window(1)"] * 2, [(0, (4, 4))])
    stream = mixed.stream(PlanConfig(batch_size=4), growing=True)
    build_all(sources[0])
    threading.Timer(0.1, stream.end_build, ("source b has too many quarantined rows",)).start()
    with pytest.raises(EntryError, match="its build has failed: source b has too many quarantined rows"):
        stream.make(0, (1,))


def test_positions_in_entries_that_grow_are_apart(tmp_path: Path) -> None:
    """Read by their numbers, rows of all sources are those of the finished entries."""
    sources = [Source(tmp_path, [[1, 2], [3]], "turns"), Source(tmp_path, [[2], [1, 1]], "turns")]
    mixed = Mixed(sources, ["window(1)"] * 2, [(0, (3, 3))])
    for one in sources:
        for index in (1, 0):
            one.build(index)
    stream = mixed.stream(PlanConfig(batch_size=6), growing=True)
    info, shards = stream.make(0, (1,))
    [mini] = info.mini_batches
    for one in sources:
        one.finish()
    tables = [open_finished(one.uri).table().to_pylist() for one in sources]
    wanted = sorted(row["input_ids"] for table in tables for row in table)
    shard = shards[0]
    lengths = shard.arrays["seq_lengths"].tolist()
    found = [
        shard.arrays["input_ids"][n, : lengths[n]].tolist() for n, row in enumerate(shard.row_ids) if row >= 0
    ]
    assert len(mini.row_ids) == len(wanted)
    assert sorted(found) == wanted
