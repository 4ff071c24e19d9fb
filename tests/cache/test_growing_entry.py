"""Entries that are read while they are built: the lists in `raysvc.cache.growing`, with builders that come, die and come again."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import Role, ServeSpec, SourceSpec
from raysvc.actors.server.step_maker import StepMaker
from raysvc.cache import names
from raysvc.cache.find import open_finished
from raysvc.cache.growing import slice_receipts
from raysvc.cache.growing.coming import GrowingSpec
from raysvc.cache.growing.growing_entry import GrowingEntry
from raysvc.cache.growing.slice_receipts import SliceReceipts
from raysvc.cache.key import cache_key
from raysvc.cache.store.open import open_store
from raysvc.cache.use_marker import Hold, builder, this_process
from raysvc.cache.writer import EntryWriter
from raysvc.errors import EntryError, ServerError, StepFailed
from raysvc.job.config import PlanConfig

KEY = "ab" * 32
numbers = itertools.count()
SLICES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=6)


class Source:
    """Slices of groups of so many rows, and how they are built."""

    def __init__(self, root: Path, slices: list[list[int]], kind: str = "turns") -> None:
        self.slices = [[n if kind == "turns" else min(n, 1) for n in groups] for groups in slices]
        train_on = "each_assistant_turn" if kind == "turns" else "all_tokens"
        self.recipe = {"format": "chat", "train_on": train_on, "number": next(numbers)}
        self.report = {
            "source_rows": [len(groups) for groups in slices],
            "pad_token_id": 0,
            "source_bytes": 1,
        }
        self.spec = GrowingSpec(
            key=cache_key(self.recipe),
            recipe=self.recipe,
            report=self.report,
            contents=tuple(f"content {index}" for index in range(len(slices))),
        )
        self.root = root
        self.uri = self.writer().uri

    def writer(self) -> EntryWriter:
        return EntryWriter(open_store(str(self.root)), self.spec.key, 0)

    def table(self, index: int) -> pa.Table:
        first = sum(len(groups) for groups in self.slices[:index])
        rows = [first + place for place, size in enumerate(self.slices[index]) for _ in range(size)]
        ids = [[1000 * index + place, *range(3 + (7 * row) % 5)] for place, row in enumerate(rows)]
        return pa.table(
            {
                "input_ids": pa.array(ids, pa.list_(pa.int32())),
                "loss_mask": pa.array([[1] * len(one) for one in ids], pa.list_(pa.uint8())),
                "source_row": pa.array(rows, pa.int64()),
                "domain": pa.array(
                    [None if row % 5 == 0 else "d" * (1 + (7 * row) % 11) for row in rows], pa.string()
                ),
            }
        )

    def build(self, index: int, cut_otherwise: bool = False) -> Path:
        first = sum(len(groups) for groups in self.slices[:index])
        identity = {"index": index, "first_row": first, "num_rows": len(self.slices[index])}
        meta = {"slice": {**identity, "bytes": "another" if cut_otherwise else self.spec.contents[index]}}
        table = self.table(index - 1 if cut_otherwise and index else index)
        return self.root / self.writer().folder / self.writer().write_part(index, table, meta).part.name

    def finish(self) -> None:
        writer = self.writer()
        receipts = writer.receipts(lambda receipt: receipt.meta["slice"]["bytes"] != "another")
        writer.commit([receipts[index] for index in range(len(self.slices))], self.recipe, self.report)

    def stream(self, config: PlanConfig, growing: bool) -> EntryStream:
        source = SourceSpec(uri=self.uri, coming=self.spec if growing else None)
        return EntryStream([source], {}, Recipe(config, 0))


def digests(stream: EntryStream, step: int, dp_size: int = 2) -> list[Any]:
    info, shards = stream.make(step, (dp_size,))
    return [
        info.index,
        info.epoch,
        *(mini.row_ids.tolist() for mini in info.mini_batches),
        *(s.digest() for s in shards),
    ]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_receipts, "FIRST_LOOK_S", 0.001)
    monkeypatch.setattr(slice_receipts, "MOST_LOOK_S", 0.004)


class Clock:
    """The time of who waits for slices: it passes only while they sleep, and then happens what is due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        now = [one for one in self.due if one[0] <= self.now_s]
        for one in now:
            self.due.remove(one)
            one[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slice_receipts, "time", clock)
    return clock


@settings(max_examples=15)
@given(SLICES, st.sampled_from(["rows", "turns"]), st.data())
def test_steps_of_a_growing_entry_are_those_of_the_finished_one(
    tmp_path_factory: Any, slices, kind, data
) -> None:
    """Builders work in any order, die, repeat slices, and leave parts of another cut; servers die and come back."""
    if not any(min(n, 1) for groups in slices for n in groups):
        return
    source = Source(tmp_path_factory.mktemp("growing"), slices, kind)
    batch = data.draw(st.integers(1, 6))
    more = {"columns": (*PlanConfig(batch_size=1).columns, "domain")} if data.draw(st.booleans()) else {}
    config = PlanConfig(
        **more,
        batch_size=batch,
        mini_batch_size=data.draw(st.integers(1, batch)),
        epochs=2,
        seed=data.draw(st.integers(0, 9)),
        shuffle=f"window({data.draw(st.integers(1, 4))})",
    )
    order = data.draw(st.permutations(range(len(slices))))
    again = data.draw(st.lists(st.sampled_from(order), max_size=2))
    pauses = data.draw(
        st.lists(st.sampled_from([0.0, 0.0, 0.003]), min_size=len(order) + 2, max_size=len(order) + 2)
    )
    ends = data.draw(st.booleans())  # while the steps are made

    def work() -> None:
        for index, pause in zip([*order, *again], pauses, strict=False):
            time.sleep(pause)
            if pause:
                source.build(index, cut_otherwise=True)
            source.build(index)
        if ends:
            source.finish()

    builder = threading.Thread(target=work)
    builder.start()
    stream, found = source.stream(config, growing=True), []
    for step in range(stream.schedule.num_steps):
        if data.draw(st.integers(0, 9)) == 0:
            stream = source.stream(config, growing=True)  # the server died
        found.append(digests(stream, step))
        made = sum(shard.nbytes for shard in stream.make(step, (2,))[1])
        assert stream.outline(step, 2).nbytes == made  # however wide its texts are
    builder.join()
    if not ends:
        source.finish()
    finished = source.stream(config, growing=False)
    assert finished.plan_hash == stream.plan_hash
    assert finished.identity == stream.identity
    assert finished.schedule == stream.schedule
    assert [digests(finished, step) for step in range(finished.schedule.num_steps)] == found


def test_texts_are_whole_and_as_wide_as_the_longest_of_their_mini_batch(tmp_path: Path) -> None:
    source = Source(tmp_path, [[1] * 5, [1] * 5])
    for index in range(2):
        source.build(index)
    columns = (*PlanConfig(batch_size=1).columns, "domain")
    stream = source.stream(PlanConfig(batch_size=3, shuffle="window(2)", columns=columns), growing=True)
    truth = [row or "" for index in range(2) for row in source.table(index)["domain"].to_pylist()]
    widths = set()
    for step in range(stream.schedule.num_steps):
        for dp_size in (1, 2):
            info, shards = stream.make(step, (dp_size,))
            [mini] = info.mini_batches
            wanted = {row: truth[5 * (row >> 32) + row % (1 << 32)] for row in mini.row_ids.tolist()}
            width = max(map(len, wanted.values()))
            for shard in shards:
                texts = shard.arrays["domain"]
                assert texts.dtype == f"<U{width}"
                found = {
                    row: text
                    for row, text in zip(shard.row_ids.tolist(), texts.tolist(), strict=True)
                    if row >= 0
                }
                assert found.items() <= wanted.items()
            widths.add(width)
    assert len(widths) > 1


def test_a_step_waits_for_its_own_slices_and_says_how_long(tmp_path: Path, clock: Clock) -> None:
    source = Source(tmp_path, [[1] * 8] * 6)
    config = PlanConfig(batch_size=4, shuffle="window(1)")
    source.build(5)
    stream = source.stream(config, growing=True)
    finished_order = stream._opened().plan.order.needs_from(0, 0)[0].tolist()
    first = finished_order[0]
    assert stream.is_there(0) == (first == 5)
    assert first != 5
    clock.due.append((0.3, lambda: source.build(first)))
    info, _ = stream.make(0, (1,))
    assert 0.3 <= info.build_s <= 0.3 + slice_receipts.MOST_LOOK_S
    assert stream.is_there(0)
    assert stream.make(1, (1,))[0].build_s == 0
    last = stream.schedule.num_steps - 1
    assert stream.is_there(last) == (finished_order[-1] == 5)


def test_a_step_whose_rows_were_all_left_out_waits_for_no_other_slice(tmp_path: Path) -> None:
    source = Source(tmp_path, [[1] * 4, [0] * 4, [1] * 4])
    stream = source.stream(PlanConfig(batch_size=4, shuffle="window(1)"), growing=True)
    for index in (1, 2):
        source.build(index)
    order = stream._opened().plan.order.needs_from(0, 0)[0].tolist()
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(stream.make(order.index(1), (1,))), daemon=True)
    thread.start()
    thread.join(60.0)
    [(info, _)] = made
    assert [mini.row_ids.tolist() for mini in info.mini_batches] == [[]]
    source.build(0)


def test_who_waits_is_told_that_the_build_failed_and_what_is_there_is_served(tmp_path: Path) -> None:
    source = Source(tmp_path, [[1] * 4] * 3)
    stream = source.stream(PlanConfig(batch_size=4, shuffle="window(1)"), growing=True)
    threading.Timer(0.2, stream.end_build, ("too many rows were quarantined",)).start()
    with pytest.raises(EntryError, match="its build has failed: too many rows were quarantined"):
        _ = stream.schedule
    stream.end_build("")
    threading.Timer(0.3, source.build, (0,)).start()
    assert stream.schedule.num_steps == 3
    stream.end_build("again")
    for index in range(3):
        source.build(index)
    assert stream.make(0, (1,))[0].index == 0


def test_sizes_and_peeks_never_wait_and_a_step_that_will_not_come_is_refused(tmp_path: Path) -> None:
    source = Source(tmp_path, [[1] * 4] * 3)
    spec = ServeSpec(
        name="s", sources=[SourceSpec(uri=source.uri, coming=source.spec)], plan=PlanConfig(batch_size=4, shuffle="window(1)"), pad_token_id=0, journal=None,
    )  # fmt: skip
    stream = source.stream(spec.plan, growing=True)
    maker = StepMaker(spec, {"": stream})
    source.build(0)
    there = [index == 0 for index in stream._opened().plan.order.needs_from(0, 0)[0]]
    sizes = maker.sizes(0, 3, (Role(1),), "")
    assert [size is not None for size in sizes] == there
    missing = there.index(False)
    with pytest.raises(ServerError, match=f"has not all rows of step {missing} yet: .*; ask again later"):
        maker.outline(missing, 1, "")
    assert maker.outline(there.index(True), 1, "").nbytes == sizes[there.index(True)]
    stream.end_build("gone")
    with pytest.raises(StepFailed, match="its build has failed: gone"):
        maker.admit(missing, "")
    assert maker.admit(there.index(True), "") == there.index(True)


def test_a_damaged_part_that_was_made_again_is_passed_over(tmp_path: Path) -> None:
    source = Source(tmp_path, [[1] * 4])
    for _ in range(3):  # the first name may come first or not
        path = source.build(0)
        path.chmod(0o600)
        path.write_bytes(bytes(path.stat().st_size))
    source.build(0)
    assert digests(source.stream(PlanConfig(batch_size=4, shuffle="window(1)"), growing=True), 0)


def test_an_entry_that_was_finished_from_another_cut_is_refused(tmp_path: Path) -> None:
    source, other = Source(tmp_path, [[1, 1, 1, 1]]), Source(tmp_path, [[1, 1], [1, 1]])
    stream = source.stream(PlanConfig(batch_size=2, shuffle="window(1)"), growing=True)
    other.spec, other.recipe = source.spec.model_copy(update={"contents": ("a", "b")}), source.recipe
    thread = threading.Timer(0.1, lambda: [other.build(0), other.build(1), other.finish()])
    thread.start()
    with pytest.raises(
        EntryError, match=r"cut the source into other slices; give both jobs the same workers\.slice_mb"
    ):
        stream.make(0, (1,))
    thread.join()


def test_a_server_that_starts_after_an_entry_was_finished_from_another_cut_refuses_it_too(
    tmp_path: Path,
) -> None:
    source, other = Source(tmp_path, [[1, 1, 1, 1]]), Source(tmp_path, [[1, 1], [1, 1]])
    stream = source.stream(PlanConfig(batch_size=2, shuffle="window(1)"), growing=True)
    other.spec, other.recipe = source.spec.model_copy(update={"contents": ("a", "b")}), source.recipe
    for index in (0, 1):
        other.build(index)
    other.finish()
    with pytest.raises(EntryError, match="cut the source into other slices"):
        _ = stream.schedule


def receipts_of(source: Source) -> SliceReceipts:
    return SliceReceipts(
        open_store(str(source.root)),
        source.writer().folder,
        source.report["source_rows"],
        source.spec.contents,
    )


def test_who_waits_long_says_for_what_and_how_far_the_build_is(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(tmp_path, [[1] * 4] * 3)
    source.build(1)
    receipts = receipts_of(source)
    assert receipts.has([1])
    clock.due.append((12.0, lambda: source.build(2)))
    assert receipts.wait_for([1, 2]) == pytest.approx(12.0, abs=0.01)
    told = [said.getMessage() for said in caplog.records if said.name == slice_receipts.log.name]
    since = ["5", "10"]
    assert [text.partition(" finished=1/3; if none")[0] for text in told] == [
        f"waiting for=slices 1, 2 of={source.writer().folder} since={each}s" for each in since
    ]


def test_receipts_and_parts_that_are_damaged_or_gone_are_passed_over(tmp_path: Path) -> None:
    source = Source(tmp_path, [[1] * 4] * 2)
    folder = source.root / source.writer().folder
    first = source.build(0)
    (receipt,) = (path for path in folder.iterdir() if names.RECEIPT.fullmatch(path.name))
    receipt.chmod(0o600)
    whole = receipt.read_bytes()
    receipt.write_bytes(whole[: len(whole) // 2])
    receipts = receipts_of(source)
    assert not receipts.has([0])
    receipt.write_bytes(whole)
    again = source.build(0)
    first.unlink()  # of two that fit, one has lost its part
    assert receipts.has([0])
    assert receipts.part(0).name == again.name
    receipts = receipts_of(source)
    again.unlink()
    assert not receipts.has([0])


def test_a_first_row_is_that_of_the_first_slice_that_has_rows(tmp_path: Path) -> None:
    source = Source(tmp_path, [[0, 0], [1, 1], [1]])
    entry = GrowingEntry(open_store(str(tmp_path)), source.writer().folder, source.spec)
    assert entry.num_rows == 5
    assert not entry.is_finished()
    assert not entry.has([0, 1])
    source.build(0)
    builder = threading.Timer(0.05, source.build, (2,))
    builder.start()
    assert entry.first_row() == 2 << 32
    builder.join()
    source.build(1)
    assert entry.first_row() == 2 << 32  # what was found is not looked for again
    assert entry.has([0, 1, 2])
    assert entry.num_tokens == sum(len(ids) for n in range(3) for ids in source.table(n)["input_ids"])
    assert len(entry.parts.parts) == 3
    with pytest.raises(IndexError):
        entry.parts.parts[3]


def test_once_an_entry_is_finished_its_manifest_names_the_parts_and_the_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(tmp_path, [[1] * 2] * 3)
    entry = GrowingEntry(open_store(str(tmp_path)), source.writer().folder, source.spec)
    early = source.build(1)
    assert entry.has([1])
    for index in (0, 2):
        source.build(index)
    source.finish()
    assert entry.is_finished()
    assert entry.wait_for([0]) >= 0
    manifest = open_finished(source.uri).manifest
    assert entry.columns == manifest.columns
    assert list(entry.parts.parts[:]) == list(manifest.parts)
    assert entry.parts.parts[1].name == early.name
    monkeypatch.setattr(type(entry.store), "list", lambda *_: pytest.fail("the folder was looked at"))
    entry.receipts._look([0, 1, 2])


@pytest.mark.parametrize("who", ["nobody", "a reader", "a builder that was killed long ago"])
def test_a_wait_for_builders_that_are_gone_ends_with_an_error(tmp_path, monkeypatch, who):
    monkeypatch.setattr(slice_receipts, "GIVE_UP_S", 0.2)
    store = open_store(str(tmp_path))
    store.write(f"{KEY}/receipt", b"")
    if who != "nobody":
        owner = this_process() if who == "a reader" else builder()
        held = Hold(store, KEY, owner)
        marker = next(tmp_path.glob(f"{KEY}/use-*"))
        if who != "a reader":
            os.utime(marker, (time.time() - 4000, time.time() - 4000))
    with pytest.raises(EntryError, match="no builder holds it: its builders are gone; run the job again"):
        SliceReceipts(store, KEY, [3], ["x"]).wait_for([0])
    if who != "nobody":
        held.release()


def test_a_wait_goes_on_while_a_builder_holds_the_entry(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(slice_receipts, "GIVE_UP_S", 0.1)
    asked: list[bool] = []
    real = slice_receipts.is_being_built
    monkeypatch.setattr(slice_receipts, "is_being_built", lambda *a: asked.append(real(*a)) or asked[-1])
    store = open_store(str(tmp_path))
    receipts = SliceReceipts(store, KEY, [3], ["x"])
    with Hold(store, KEY, builder()):
        clock.due.append((1.0, lambda: receipts.fail("ended by the test")))
        with pytest.raises(EntryError, match="ended by the test"):
            receipts.wait_for([0])
    assert len(asked) == 9
    assert all(asked)
