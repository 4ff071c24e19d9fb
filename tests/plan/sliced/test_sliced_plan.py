"""Plans over windowed entries: the lists in `sliced_rows` and `plan`, asserted with entries that count what is asked of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc import row_ids
from raysvc.errors import EntryError, PlanError, StateMismatch
from raysvc.job.config import PlanConfig
from raysvc.media.medium import PATCHES
from raysvc.plan.entry_plan import plan_of_entries
from raysvc.plan.plan import Plan
from raysvc.plan.rank_plan import deal, deal_pairs
from raysvc.plan.sliced.sliced_rows import window_of
from raysvc.plan.state import PlanState

SLICES = st.lists(
    st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=8
)  # rows of each group of each slice; 0 where the row of the source was left out
KINDS = st.sampled_from(["rows", "pairs", "turns"])
SHAPES = st.sampled_from(
    [
        {},
        {"micro_batch_size": 3},
        {"layout": "packed", "micro_batch_tokens": 256, "align": 4},
        {"layout": "padded_left", "micro_batch_tokens": 400, "pad_to_multiple": 8},
    ]
)


@dataclass
class FakeEntry:
    """Slices of groups of so many rows; remembers which slices were opened."""

    slices: list[list[int]]
    kind: str = "rows"
    key: str = "k"
    report: dict[str, Any] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    max_length: int | None = None

    media: bool = False
    listings = None

    def __post_init__(self) -> None:
        sizes = {"rows": lambda n: min(n, 1), "pairs": lambda n: 2 * min(n, 1), "turns": lambda n: n}[
            self.kind
        ]
        self.groups = [[sizes(n) for n in groups] for groups in self.slices]
        self.recipe = {
            "format": "preference" if self.kind == "pairs" else "chat",
            "train_on": "each_assistant_turn" if self.kind == "turns" else "all_assistant_messages",
            "max_length": self.max_length,
            **({"media": {}} if self.media else {}),
        }
        self.source_rows = np.array([len(groups) for groups in self.groups], np.int64)
        self.slice_starts = np.cumsum([0] + [sum(groups) for groups in self.groups])
        source_rows, self.source_row = 0, []
        for groups in self.groups:
            numbers = source_rows + np.arange(len(groups))
            self.source_row.append(np.repeat(numbers, groups).astype(np.int64))
            source_rows += len(groups)

    @property
    def num_rows(self) -> int:
        return int(self.slice_starts[-1])

    @property
    def num_groups(self) -> int:
        return sum(len(groups) for groups in self.groups)

    @property
    def columns(self) -> dict[str, str]:
        return {PATCHES: "int32"} if self.media else {}

    def has_rows_of(self, source_row: int) -> bool:
        return source_row in np.concatenate(self.source_row)

    def slice_lengths(self, index: int) -> np.ndarray:
        self.opened.append(index)
        return tokens(index, np.arange(sum(self.groups[index]))).astype(np.int32)

    def slice_values(self, name: str, index: int) -> np.ndarray:
        if name == PATCHES:
            assert self.media
            return patches(index, np.arange(sum(self.groups[index]))).astype(np.int32)
        assert name == "source_row"
        return self.source_row[index]

    def lengths(self) -> np.ndarray:
        return np.concatenate([self.slice_lengths(index) for index in range(len(self.groups))])

    def lacks(self, slices: np.ndarray, rows: np.ndarray) -> np.ndarray:
        counts = np.array([sum(groups) for groups in self.groups] + [0])
        return rows >= counts[np.minimum(slices, len(self.groups))]

    def row_values(self, name: str) -> np.ndarray:
        return np.concatenate([self.slice_values(name, index) for index in range(len(self.groups))])

    def ids_of_groups(self) -> list[tuple[int, ...]]:
        """Numbers of the rows of every group that has some."""
        found = []
        for number, groups in enumerate(self.groups):
            start = 0
            for size in groups:
                if size:
                    found.append(tuple((number << 32) + start + row for row in range(size)))
                start += size
        return found


def tokens(index: Any, row: Any) -> Any:
    """Length of a row, as everybody can compute it."""
    return 5 + (index * 31 + row * 7) % 40


def patches(index: Any, row: Any) -> Any:
    """Encoder work of a row; every third has none."""
    return (index * 13 + row * 5) % 3 * 16 * (1 + row % 7)


def groups_of_step(plan: Plan, step: int, dp_size: int = 1) -> list[list[tuple[int, ...]]]:
    """[mini-batch][group] of row ids."""
    found = []
    for mini in plan.step(step, dp_size).mini_batches:
        cuts = np.flatnonzero(np.diff(mini.group_index)) + 1
        found.append(
            [tuple(rows.tolist()) for rows in np.split(mini.row_ids, cuts)] if len(mini.row_ids) else []
        )
    return found


def config_of(draw: Any, **more: Any) -> PlanConfig:
    batch = draw(st.integers(1, 12))
    known = {
        "batch_size": batch,
        "mini_batch_size": draw(st.integers(1, batch)),
        "epochs": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 9)),
        "shuffle": f"window({draw(st.integers(1, 6))})",
    }
    return PlanConfig(**{**known, **more})


@settings(max_examples=120)
@given(SLICES, KINDS, st.data())
def test_every_group_comes_whole_and_once_an_epoch_with_its_lengths(slices, kind, data):
    entry = FakeEntry(slices, kind)
    if not entry.num_rows:
        return
    plan = plan_of_entries(config_of(data.draw), [entry])
    assert plan.schedule.num_groups == entry.num_groups
    for epoch in range(plan.schedule.epochs):
        per_epoch = plan.schedule.steps_per_epoch
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        found = [group for step in steps for mini in groups_of_step(plan, step) for group in mini]
        assert Counter(found) == Counter(entry.ids_of_groups())
        for step in steps:
            for mini in plan.step(step, 2).mini_batches:
                place = row_ids.split(mini.row_ids)
                assert mini.lengths.tolist() == tokens(place.slice, place.row).tolist()


@settings(max_examples=80)
@given(SLICES, KINDS, st.sampled_from([2, 3, 8]), SHAPES, st.data())
def test_membership_does_not_depend_on_ranks_layout_or_packing(slices, kind, dp_size, shape, data):
    entry = FakeEntry(slices, kind)
    if not entry.num_rows:
        return
    config = config_of(data.draw)
    plain = plan_of_entries(config, [entry])
    other = plan_of_entries(
        PlanConfig(**{**config.model_dump(exclude_defaults=True), **shape}), [FakeEntry(slices, kind)]
    )
    for step in range(plain.schedule.num_steps):
        assert groups_of_step(plain, step) == groups_of_step(other, step, dp_size)
    assert plain.hash == other.hash


@settings(max_examples=60)
@given(SLICES, KINDS, st.data())
def test_a_step_is_the_same_after_a_resume_on_other_ranks(slices, kind, data):
    entry = FakeEntry(slices, kind)
    if not entry.num_rows:
        return
    config = config_of(data.draw)
    plan = plan_of_entries(config, [entry])
    committed = data.draw(st.integers(-1, plan.schedule.num_steps - 2)) if plan.schedule.num_steps > 1 else -1
    state = PlanState.from_json(PlanState.of(plan, None if committed < 0 else committed).to_json())
    again = plan_of_entries(config, [FakeEntry(slices, kind)])
    state.check(again)
    for step in range(state.next_step, plan.schedule.num_steps):
        assert groups_of_step(again, step, 4) == groups_of_step(plan, step)


@settings(max_examples=60)
@given(SLICES, st.data())
def test_skipped_rows_leave_a_hole_and_nothing_else_moves(slices, data):
    entry = FakeEntry(slices, "rows")
    if not entry.num_rows:
        return
    config = config_of(data.draw)
    plan = plan_of_entries(config, [entry])
    skip = data.draw(st.sets(st.sampled_from([rows[0] for rows in entry.ids_of_groups()]), min_size=1))
    holed = plan_of_entries(config.model_copy(update={"skip_rows": tuple(skip)}), [entry])
    assert holed.hash == plan.hash
    for step in range(plan.schedule.num_steps):
        kept = [[group for group in mini if group[0] not in skip] for mini in groups_of_step(plan, step)]
        assert groups_of_step(holed, step) == kept


@settings(max_examples=60)
@given(
    st.lists(st.tuples(SLICES, st.sampled_from(["rows", "turns"]), st.booleans()), min_size=1, max_size=3),
    st.data(),
)
def test_windowed_and_full_sources_mix_by_exact_counts(sources, data):
    entries = [FakeEntry(slices, kind, key=f"k{n}") for n, (slices, kind, _) in enumerate(sources)]
    if not all(entry.num_rows for entry in entries):
        return
    shuffles = tuple("window(3)" if windowed else "full" for _, _, windowed in sources)
    if not any(windowed for _, _, windowed in sources):
        return
    counts = tuple(
        entry.num_groups if windowed else len(entry.ids_of_groups())
        for entry, (_, _, windowed) in zip(entries, sources, strict=True)
    )
    config = config_of(data.draw, shuffle="full")
    plan = plan_of_entries(config, entries, ((0, counts),), shuffles)
    found: Counter[tuple[int, ...]] = Counter()
    for step in range(plan.schedule.steps_per_epoch):
        for mini in plan.step(step, 1).mini_batches:
            place = row_ids.split(mini.row_ids)
            assert mini.lengths.tolist() == tokens(place.slice, place.row).tolist()
        found.update(group for mini in groups_of_step(plan, step, 1) for group in mini)
    wanted = [
        tuple(row + row_ids.source_base(number) for row in group)
        for number, entry in enumerate(entries)
        for group in entry.ids_of_groups()
    ]
    assert found == Counter(wanted)
    plan.rows.check(np.array([row for group in wanted for row in group], np.int64))
    other = plan_of_entries(config, entries, ((0, counts),), ("window(4)", *shuffles[1:]))
    if shuffles[0] != "window(4)":
        with pytest.raises(StateMismatch, match="mixture"):
            PlanState.of(plan, None).check(other)


def test_a_step_opens_the_slices_of_its_window_alone_and_keeps_few():
    entry = FakeEntry([[1] * 100 for _ in range(500)])
    plan = plan_of_entries(PlanConfig(batch_size=50, shuffle="window(5)"), [entry])
    assert not entry.opened
    plan.step(0, 2)
    assert len(entry.opened) <= 3
    for step in range(1, 200):
        plan.step(step, 2)
    assert (
        len(entry.opened) == len(set(entry.opened)) <= 106
    )  # 10,000 groups are 100 slices and those of a window
    entry.opened.clear()
    plan.step(700, 2)
    assert 0 < len(entry.opened) <= 6
    plan.step(1, 2)
    assert len(entry.opened) == len(set(entry.opened)) > 6, "what a window has left is not remembered"


def test_the_first_step_of_conversations_opens_one_slice():
    entry = FakeEntry(
        [[2, 1, 3] * 50 for _ in range(40)], "turns", report={"row_counts": {"rows_written": 40 * 150}}
    )
    plan = plan_of_entries(PlanConfig(batch_size=8, shuffle="window(10)"), [entry])
    assert not entry.opened
    plan.step(0, 1)
    assert len(set(entry.opened)) == 1


@settings(max_examples=60)
@given(SLICES, KINDS, st.data())
def test_a_row_of_the_source_that_is_left_out_leaves_a_hole_and_nothing_else_moves(slices, kind, data):
    """The oracle is the same source with every row kept: which row of the source comes where does not change."""
    entry, full = FakeEntry(slices, kind), FakeEntry([[max(n, 1) for n in groups] for groups in slices], kind)
    if not entry.num_rows:
        return
    config = config_of(data.draw)
    holed, plain = plan_of_entries(config, [entry]), plan_of_entries(config, [full])
    assert holed.hash == plain.hash
    assert holed.schedule == plain.schedule
    for step in range(plain.schedule.num_steps):
        for mine, whole in zip(
            holed.step(step, 2).mini_batches, plain.step(step, 2).mini_batches, strict=True
        ):
            assert np.array_equal(np.unique(mine.group_index), np.arange(mine.num_groups))
            kept = [row for row in source_rows_of(full, whole) if entry.has_rows_of(row)]
            assert list(dict.fromkeys(source_rows_of(entry, mine))) == list(dict.fromkeys(kept))


def source_rows_of(entry: FakeEntry, mini: Any) -> list[int]:
    place = row_ids.split(mini.row_ids)
    return [int(entry.source_row[n][row]) for n, row in zip(place.slice, place.row, strict=True)]


def test_rows_that_do_not_lie_where_the_slices_say_are_refused():
    entry = FakeEntry([[1, 1], [0, 2]], "turns")
    entry.source_row[1] = entry.source_row[1] + 1
    plan = plan_of_entries(PlanConfig(batch_size=4, shuffle="window(2)"), [entry])
    with pytest.raises(EntryError, match="slice 1 has rows of other places of the source than 2 to 3"):
        plan.step(0, 1)


@settings(max_examples=80)
@given(SLICES, KINDS, SHAPES, st.integers(1, 4), st.booleans(), st.data())
def test_rows_with_media_are_dealt_by_the_patches_of_their_slices(slices, kind, shape, dp_size, mixed, data):
    entry = FakeEntry(slices, kind, media=True)
    if not entry.num_rows:
        return
    config = config_of(data.draw, **shape)
    entries, others, stages = [entry], [replace(entry, media=False)], ()
    if mixed:  # beside a source without media, and one in full shuffle with media
        more = [FakeEntry([[1] * 5, [1] * 3], kind, key=key) for key in ("text", "full")]
        entries, others = [entry, more[0], replace(more[1], media=True)], [others[0], *more]
        stages = ((0, tuple(1 for _ in entries)),)
    shuffles = [None, None, "full"] if mixed else []
    plan = plan_of_entries(config, entries, stages, shuffles)
    text = plan_of_entries(config, others, stages, shuffles)
    assert plan.hash == text.hash, "media decide ranks alone"
    dealt = deal_pairs if kind == "pairs" else deal
    for step in range(plan.schedule.num_steps):
        known = zip(plan.step(step, dp_size).mini_batches, text.step(step, 1).mini_batches, strict=True)
        for mini, same in known:
            assert np.array_equal(mini.row_ids, same.row_ids)
            place = row_ids.split(mini.row_ids)
            work = np.where(place.source == 1, 0, patches(place.slice, place.row)).astype(np.int64)
            for mine, told in zip(mini.ranks, dealt(mini.lengths, dp_size, plan.rules, work), strict=True):
                assert np.array_equal(mine.rows, told.rows)
                assert mine.micro_batches == told.micro_batches


def test_another_cut_of_the_same_source_is_another_order():
    config = PlanConfig(batch_size=2, shuffle="window(2)")
    state = PlanState.of(plan_of_entries(config, [FakeEntry([[1, 1, 1], [1]])]), 0)
    with pytest.raises(StateMismatch, match="slices"):
        state.check(plan_of_entries(config, [FakeEntry([[1, 1], [1, 1]])]))
    with pytest.raises(StateMismatch, match="shuffle was 'window\\(2\\)' and is 'window\\(3\\)'"):
        state.check(
            plan_of_entries(PlanConfig(batch_size=2, shuffle="window(3)"), [FakeEntry([[1, 1, 1], [1]])])
        )


def test_the_window_follows_from_the_source_where_no_number_is_given():
    def entry(slices: int, slice_mb: int) -> FakeEntry:
        return FakeEntry([[1]] * slices, report={"source_bytes": slices * slice_mb << 20})

    assert window_of("window", entry(100, 32)) == 64
    assert window_of("window", entry(100, 128)) == 16
    assert window_of("window", entry(100, 500)) == 8
    assert window_of("window(3)", entry(100, 500)) == 3
    assert window_of("window", FakeEntry([[1]])) == 64
    plan = plan_of_entries(PlanConfig(batch_size=2, shuffle="window"), [entry(100, 128)])
    assert plan.identity["shuffle"] == "window(16)"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layout": "packed"}, "plan.micro_batch_tokens: packed with a window .*; set it, or max_length"),
        ({"skip_rows": (5,)}, "plan.skip_rows: there is no row 0:0:5; remove it"),
        ({"skip_rows": (7 << 32,)}, "plan.skip_rows: there is no row 0:7:0"),
        ({"skip_rows": (1 << 52,)}, "plan.skip_rows: there is no row 1:0:0"),
    ],
)
def test_what_a_window_cannot_do_is_refused_by_name(config, message):
    with pytest.raises(PlanError, match=message):
        plan_of_entries(
            PlanConfig(batch_size=2, shuffle="window(2)", **config), [FakeEntry([[1] * 4, [], [1]])]
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"order": "module:name"}, r"order needs all rows, and shuffle: window\(2\) has some"),
        ({"layout": "stream", "window": 8}, "stream cuts rows without regard to slices"),
    ],
)
def test_a_section_that_no_window_can_carry_out_is_refused_before_a_row_is_read(config, message):
    with pytest.raises(ValueError, match=message):
        PlanConfig(batch_size=2, shuffle="window(2)", **config)


def test_a_window_over_bare_lengths_is_refused():
    with pytest.raises(PlanError, match=r"plan.shuffle: window\(2\) needs the slices of an entry"):
        Plan(PlanConfig(shuffle="window(2)"), np.full(9, 9))


def test_packed_takes_its_capacity_from_max_length_and_a_longer_row_is_refused_where_it_comes():
    entry = FakeEntry([[1] * 40], max_length=6000)
    plan = plan_of_entries(PlanConfig(batch_size=4, shuffle="window(2)", layout="packed", align=64), [entry])
    assert plan.config.micro_batch_tokens == 6016
    tight = PlanConfig(batch_size=40, shuffle="window(2)", layout="packed", micro_batch_tokens=20)
    with pytest.raises(
        PlanError, match=r"row 0:0:\d+ has \d+ tokens, over its 20; raise it, or set plan.oversize"
    ):
        plan_of_entries(tight, [entry]).step(0, 1)
    dropped = plan_of_entries(tight.model_copy(update={"oversize": "drop"}), [entry]).step(0, 1)
    assert dropped.mini_batches[0].lengths.max() <= 20


def test_a_plan_that_is_not_windowed_has_the_identity_it_had():
    """The hash of a full shuffle is written in the states of runs that were saved before there were windows."""
    entry = FakeEntry([[1] * 30, [1] * 20])
    plan = plan_of_entries(PlanConfig(batch_size=8, mini_batch_size=4, seed=7), [entry])
    fields = "version batch_size mini_batch_size tail seed shuffle num_rows num_groups uids window entry_keys mixture"
    assert sorted(plan.identity) == sorted(fields.split())
    mixed = plan_of_entries(PlanConfig(batch_size=8), [entry, FakeEntry([[1]], key="l")], ((0, (5, 1)),))
    assert mixed.identity["mixture"] == {
        "sources": [["k", 50], ["l", 1]],
        "stages": [[0, [5, 1]]],
        "order": [0, 0],
    }


@pytest.mark.parametrize("kind", ["rows", "pairs"])
def test_rows_that_are_not_chosen_leave_holes_and_move_no_other(kind: str) -> None:
    entry = FakeEntry([[1] * 9, [1] * 4, [1] * 7], kind)
    plain = plan_of_entries(PlanConfig(batch_size=4, shuffle="window(2)"), [entry])
    groups = entry.ids_of_groups()
    kept, left = groups[::3], [group for number, group in enumerate(groups) if number % 3]
    for rows in (
        {"include": [row for group in kept for row in group]},
        {"exclude": [group[0] for group in left]},  # a pair goes as a whole
        {"include": [row for group in groups for row in group], "exclude": [group[-1] for group in left]},
    ):
        some = plan_of_entries(PlanConfig(batch_size=4, shuffle="window(2)", rows=rows), [entry])
        assert some.schedule == plain.schedule
        assert some.hash != plain.hash
        for step in range(plain.schedule.num_steps):
            expected = [[group for group in part if group in kept] for part in groups_of_step(plain, step)]
            assert groups_of_step(some, step) == expected


def test_the_identity_has_what_was_chosen_and_a_row_that_is_not_there_is_refused() -> None:
    entry = FakeEntry([[1] * 9, [1] * 4])

    def plan(**rows: Any) -> Plan:
        return plan_of_entries(PlanConfig(batch_size=4, shuffle="window(2)", rows=rows), [entry])

    assert plan(include=[3, 1, 3]).hash == plan(include=[1, 3]).hash
    assert len({plan(**rows).hash for rows in ({}, {"include": [1, 3]}, {"exclude": [1, 3]})}) == 3
    with pytest.raises(PlanError, match="no row is left"):
        plan(include=[])
    for name in ("include", "exclude"):
        with pytest.raises(PlanError, match=f"plan.rows.{name}: there is no row 0:1:4; remove it"):
            plan(**{name: ["0:1:4"]})
