"""A plan of some rows is that of an entry which has no others; which ones they are is in its identity."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.cache.find import open_finished
from raysvc.errors import PlanError, StateMismatch
from raysvc.job.config import PlanConfig
from raysvc.plan.entry_plan import chosen_entries, plan_of_entries, weighted_counts
from raysvc.plan.plan import Plan
from raysvc.plan.state import PlanState
from raysvc.row_ids import RowPlaces, written


@dataclass
class Rows:
    """An entry of three slices, as far as a plan asks."""

    source_row: np.ndarray
    recipe: dict[str, Any]
    key: str = "k" * 64
    columns = ("source_row",)
    listings = None

    @property
    def num_rows(self) -> int:
        return len(self.source_row)

    @property
    def slice_starts(self) -> np.ndarray:
        return np.array([0, 5, 5, self.num_rows])

    @property
    def num_tokens(self) -> int:
        return int(self.lengths().sum())

    def places(self) -> list[tuple[int, int]]:
        """Slice and row in it, of each row."""
        bounds = self.slice_starts
        return [(at, row) for at in range(len(bounds) - 1) for row in range(bounds[at + 1] - bounds[at])]

    def lengths(self) -> np.ndarray:
        return (self.source_row * 3 % 17 + 1).astype(np.int32)

    def row_values(self, name: str) -> np.ndarray:
        return {"source_row": self.source_row}[name]


def plan_of(entry: Rows, **config: Any) -> Plan:
    return plan_of_entries(PlanConfig(**{"batch_size": 4, "epochs": 2, **config}), [entry])


def steps_of(plan: Plan) -> list[list[int]]:
    steps = range(plan.schedule.num_steps)
    return [
        np.concatenate([mini.row_ids for mini in plan.step(step, 2).mini_batches]).tolist() for step in steps
    ]


ALL = Rows(np.arange(30), {})
IDS = RowPlaces([ALL.slice_starts]).ids_of(np.arange(30)).tolist()
KEPT = [1, 4, 5, 8, 9, 10, 17, 22, 29]


@pytest.mark.parametrize("shuffle", ["full", "none", "block(3)"])
def test_it_is_the_plan_of_an_entry_with_these_rows_alone(shuffle: str) -> None:
    rows = {"include": [IDS[at] for at in (*KEPT, 3)], "exclude": [written(IDS[3])]}
    some = steps_of(plan_of(ALL, shuffle=shuffle, rows=rows))
    few = Plan(PlanConfig(batch_size=4, epochs=2, shuffle=shuffle), ALL.lengths()[KEPT])
    assert some == [[IDS[KEPT[place]] for place in step] for step in steps_of(few)]
    assert [len(step) for step in some] == [4, 4, 1, 4, 4, 1], "no holes"
    lengths = plan_of(ALL, shuffle=shuffle, rows=rows).rows.lengths_of(np.array([IDS[22]]))
    assert lengths.tolist() == [ALL.lengths()[22]]


def test_which_rows_is_in_the_identity_and_how_they_were_written_is_not() -> None:
    kept = [IDS[at] for at in KEPT]
    one = plan_of(ALL, rows={"include": kept})
    assert plan_of(ALL, rows={"include": [*reversed(kept), kept[0]]}).hash == one.hash
    assert plan_of(ALL, rows={"exclude": [each for each in IDS if each not in kept]}).hash == one.hash
    other = plan_of(ALL, rows={"include": [*kept[:-1], IDS[0]]})
    with pytest.raises(StateMismatch, match="chosen was"):
        PlanState.of(one, 1).check(other)
    assert "chosen" not in plan_of(ALL).identity


def test_a_conversation_stays_together_and_a_pair_is_taken_whole() -> None:
    turns = Rows(np.repeat(np.arange(15), 2), {"train_on": "each_assistant_turn"})
    kept = [IDS[at] for at in (0, 1, 3, 6, 7, 20)]
    plan = plan_of(turns, batch_size=2, shuffle="none", epochs=1, rows={"include": kept})
    assert steps_of(plan) == [kept[:3], kept[3:]]
    pairs = Rows(np.repeat(np.arange(15), 2), {"format": "preference"})
    plan = plan_of(pairs, batch_size=2, shuffle="none", epochs=1, rows={"include": kept})
    assert steps_of(plan) == [[*kept[:2], *kept[3:5]]]


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_a_mixture_of_chosen_rows_is_that_of_entries_which_have_no_others(by: str) -> None:
    other = Rows(np.arange(40, 60), {}, key="m" * 64)
    entries, places = [ALL, other], RowPlaces([ALL.slice_starts, other.slice_starts])
    ids = places.ids_of(np.arange(50)).tolist()
    kept = [*KEPT, *(30 + at for at in (0, 2, 3, 9, 12, 13, 19))]
    few = [Rows(ALL.source_row[KEPT], {}), Rows(other.source_row[[0, 2, 3, 9, 12, 13, 19]], {}, key="m" * 64)]
    chosen = PlanConfig(batch_size=4, epochs=2, rows={"include": [ids[at] for at in kept]})
    plain = PlanConfig(batch_size=4, epochs=2)
    counts = weighted_counts(few, [2, 1], by, ["full", "full"])
    assert weighted_counts(chosen_entries(chosen, entries), [2, 1], by, ["full", "full"]) == counts
    some, alone = (
        plan_of_entries(config, which, ((0, counts),)) for config, which in ((chosen, entries), (plain, few))
    )
    theirs = RowPlaces([one.slice_starts for one in few]).positions_of
    assert steps_of(some) == [[ids[kept[at]] for at in theirs(np.array(step))] for step in steps_of(alone)]
    assert some.identity["chosen"]
    assert some.schedule == alone.schedule


def test_an_order_of_the_user_sees_the_chosen_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import raysvc.job.named_function as named

    seen: dict[str, list[int]] = {}

    def longest_first(epoch: int, rows: Any) -> np.ndarray:
        seen["source_row"] = rows.column("source_row").tolist()
        return np.argsort(-rows.lengths, kind="stable")

    monkeypatch.setattr(named, "function_of", lambda *_: longest_first)
    plan = plan_of(ALL, order="mine:longest_first", epochs=1, rows={"include": [IDS[at] for at in KEPT]})
    by_length = sorted(KEPT, key=lambda at: -int(ALL.lengths()[at]))
    assert [*itertools.chain(*steps_of(plan))] == [IDS[at] for at in by_length]
    assert seen["source_row"] == KEPT


def test_what_cannot_be_chosen_is_refused() -> None:
    for rows, match in [
        ({"include": ["0:1:0"]}, "plan.rows.include: there is no row 0:1:0"),
        ({"exclude": ["1:0:0"]}, "plan.rows.exclude: there is no row 1:0:0"),
        ({"exclude": IDS}, "no row is left"),
        ({"include": []}, "no row is left"),
    ]:
        with pytest.raises(PlanError, match=match):
            plan_of(ALL, rows=rows)
    other = Rows(np.arange(8), {}, key="m" * 64)
    config = PlanConfig(
        batch_size=4, rows={"exclude": [f"1:{number}:{row}" for number, row in other.places()]}
    )
    with pytest.raises(PlanError, match="no row of source 1 is left"):
        plan_of_entries(config, [ALL, other], ((0, (1, 1)),))
    with pytest.raises(PlanError, match="not among the chosen"):
        plan_of(ALL, rows={"include": IDS[:3]}, skip_rows=[IDS[4]])


def test_a_list_is_read_from_what_ray_data_writes(tmp_path: Path, entry: Callable[..., str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    found = open_finished(entry(20, per_part=8))
    kept = [int(one) for one in found.row_ids()[[2, 9, 17]]]
    (tmp_path / "parquet").mkdir()
    for number, ids in enumerate((kept[:1], kept[1:])):
        parquet.write_table(pa.table({"row_id": ids}), tmp_path / "parquet" / f"{number}.parquet")
    (tmp_path / "parquet" / "_SUCCESS").write_text("")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "0.json").write_text("".join(json.dumps({"row_id": one}) + "\n" for one in kept))
    for folder in ("parquet", "json"):
        config = PlanConfig(batch_size=2, rows={"include": str(tmp_path / folder)})
        assert config.rows is not None
        assert config.rows.include == tuple(kept)
        plan = plan_of_entries(config, [found])
        assert sorted(itertools.chain(*steps_of(plan))) == kept
    parquet.write_table(pa.table({"other": [1]}), tmp_path / "parquet" / "2.parquet")
    with pytest.raises(ValueError, match="no column row_id"):
        PlanConfig(rows={"include": str(tmp_path / "parquet")})
