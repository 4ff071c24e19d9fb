"""The report foretells from lengths what collation then makes."""

import time

import numpy as np
import pytest

from raysvc.collate.info import info_of
from raysvc.collate.plan_report import in_words, plan_report, rows_of_step
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan
from raysvc.row_batch import RowBatch

ROW = RowBatch(
    np.zeros(1, np.int64),
    np.array([0, 2]),
    {"input_ids": np.zeros(2, np.int32), "loss_mask": np.zeros(2, np.uint8)},
)
SHAPES = [
    {},
    {"layout": "padded_left", "micro_batch_tokens": 200, "pad_to_multiple": 8},
    {"layout": "packed", "micro_batch_tokens": 128, "align": 4, "oversize": "truncate"},
    {"layout": "stream", "window": 32},
]


def report_of(plan, dp_size, **options):
    return plan_report(plan, dp_size, ColumnBytes.of(ROW, plan.config), **options)


LENGTHS = np.random.default_rng(0).integers(3, 90, 100)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.get("layout", "padded_right"))
def test_the_report_equals_what_is_collated(make_data, make_shards, shape):
    data = make_data(LENGTHS)
    config = PlanConfig(batch_size=24, mini_batch_size=12, **{"oversize": "alone", **shape})
    plan = Plan(config, data.lengths)
    report = report_of(plan, 3, look_ahead_steps=4)
    steps = [make_shards(data, config, 3, step=step) for step in range(plan.schedule.num_steps)]
    infos = [[info_of(mini, shards) for mini, shards in step] for step in steps]
    step_bytes = [sum(info.nbytes for info in step) for step in infos]
    tokens = [sum(int(info.lengths.sum()) for info in step) for step in infos]
    every = [info for step in infos for info in step]
    cells = sum(info.num_cells for info in every)
    assert report.sampled_steps == report.num_steps == len(steps)
    assert report.bytes_per_step == sum(step_bytes) // len(steps)
    assert report.bytes_look_ahead == max(step_bytes) * 5
    assert report.share_padding == pytest.approx(1 - sum(tokens) / cells)
    assert report.dummies == sum(info.num_dummies for info in every)
    assert report.share_dummies == pytest.approx(2 * report.dummies / cells)
    assert report.imbalance_tokens == pytest.approx(
        np.mean([max(info.rank_tokens) / np.mean(info.rank_tokens) for info in every])
    )
    assert report.tokens_per_step[0] == min(tokens)
    assert report.tokens_per_step[100] == max(tokens)
    assert sum(count for _, _, count in report.histogram) == len(steps)
    assert (report.num_rows, report.optimizer_steps) == (100, plan.schedule.optimizer_steps)


def test_packing_efficiency_is_of_the_capacity():
    plan = Plan(PlanConfig(batch_size=8, layout="packed", micro_batch_tokens=100), np.full(8, 30))
    assert report_of(plan, 1).packing_efficiency == pytest.approx(240 / 300)
    assert report_of(Plan(PlanConfig(batch_size=8), np.full(8, 30)), 1).packing_efficiency is None


def test_a_report_in_words_has_its_figures_and_no_exception_that_did_not_occur():
    told = in_words(report_of(Plan(PlanConfig(batch_size=8), np.full(80, 30)), 1))
    assert told["steps"] == "10, 10 in an epoch"
    assert told["tokens of a step"] == "240, half of the steps 240 to 240"
    assert told["padding"] == "0.00% of the cells"
    assert not [name for name in told if name.startswith("rows ") or "packs" in name]
    config = PlanConfig(
        batch_size=4, layout="packed", micro_batch_tokens=50, oversize="truncate", skip_rows=(0,), epochs=2
    )
    cut = in_words(report_of(Plan(config, np.array([10, 60, 20, 70])), 2))
    assert cut["steps"] == "2, 1 in an epoch"
    assert cut["rows cut to the budget"] == "4 in 2 sampled steps"
    assert cut["rows of skip_rows"] == "2 in 2 sampled steps"
    assert cut["filled part of the packs"].endswith("%")


def test_rows_over_the_budget_are_counted():
    config = PlanConfig(batch_size=4, micro_batch_tokens=50, oversize="truncate", skip_rows=(0,))
    report = report_of(Plan(config, np.array([10, 60, 20, 70])), 2)
    assert (report.truncated, report.skipped, report.dropped, report.alone) == (2, 1, 0, 0)


def test_the_rows_of_a_step_are_listed_with_their_place():
    plan = Plan(
        PlanConfig(batch_size=6, mini_batch_size=3, micro_batch_size=1, shuffle="none"), np.arange(1, 13)
    )
    rows = list(rows_of_step(plan, 1, 2))
    assert sorted(row.row_id for row in rows) == [6, 7, 8, 9, 10, 11]
    assert [row.length for row in rows] == [row.row_id + 1 for row in rows]
    assert {(row.mini, row.row_id) for row in rows if row.mini == 0} == {(0, 6), (0, 7), (0, 8)}
    assert rows == sorted(rows, key=lambda row: (row.mini, row.rank, row.micro))
    assert (rows[0].rank, rows[0].micro, rows[0].row_id) == (0, 0, 8)  # the longest comes first


def test_a_billion_rows_are_reported_without_a_look_at_each():
    plan = Plan(PlanConfig(batch_size=64), np.broadcast_to(np.int32(700), (10**9,)))
    start = time.perf_counter()
    report = report_of(plan, 8)
    assert report.num_steps == 15_625_000
    assert time.perf_counter() - start < 10  # 0.1 s; all steps take hours
