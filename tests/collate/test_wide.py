"""Columns of several numbers a token or row, through plan and collation; oracle: a loop that pads, cuts and packs lists."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.collate.geometry import geometry_of
from raysvc.collate.row_values import cells_of
from raysvc.collate.shard import Shard
from raysvc.collate.shard_bytes import ColumnBytes, bytes_by_rank
from raysvc.collate.text_columns import of_fixed_width
from raysvc.job.column_dtypes import BF16, bf16_of, numpy_dtype
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan
from raysvc.row_batch import RowBatch, WideRows

DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32"]
PLANS: list[dict[str, Any]] = [
    {"layout": "padded_right", "micro_batch_size": 2},
    {"layout": "padded_left", "micro_batch_size": 3, "pad_to_multiple": 4},
    {"layout": "padded_right", "micro_batch_tokens": 16, "oversize": "truncate"},
    {"layout": "packed", "micro_batch_tokens": 16, "align": 4, "oversize": "truncate"},
    {"layout": "packed", "micro_batch_tokens": 24, "oversize": "drop"},
    {"layout": "stream", "window": 7},
]

LAYOUTS = ("padded_right", "padded_left", "packed")


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    raw = rng.integers(0, 2 if dtype == "bool" else 100, shape)
    return bf16_of(raw) if dtype == "bfloat16" else raw.astype(numpy_dtype(dtype))


def rows_of(rng: np.random.Generator, lengths: list[int], shape: tuple[int, ...], dtype: str) -> RowBatch:
    total = sum(lengths)
    pieces = [numbers(rng, (length, *shape), dtype) for length in lengths]
    return RowBatch(
        np.arange(len(lengths)),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        {
            "input_ids": rng.integers(3, 60, total).astype(np.int32),
            "loss_mask": np.ones(total, np.uint8),
            "half": numbers(rng, (total,), "bfloat16"),
        },
        {"vector": numbers(rng, (len(lengths), 3), dtype)},
        {"wide": WideRows(numpy_dtype(dtype), shape, pieces)},
    )


def picked(batch: RowBatch, row_ids: np.ndarray) -> RowBatch:
    """Rows as a cache gives them."""
    spans = [(int(batch.offsets[row]), int(batch.offsets[row + 1])) for row in row_ids.tolist()]
    wide = batch.wide["wide"]
    return RowBatch(
        row_ids,
        np.concatenate([[0], np.cumsum([b - a for a, b in spans])]).astype(np.int64),
        {name: np.concatenate([values[:0], *(values[a:b] for a, b in spans)]) for name, values in batch.tokens.items()},
        {name: values[row_ids] for name, values in batch.rows.items()},
        {"wide": replace(wide, pieces=[wide.pieces[row] for row in row_ids.tolist()])},
    )  # fmt: skip


COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "wide", "half", "vector")


def shards_of(batch: RowBatch, config: PlanConfig, dp_size: int, pads: dict[str, Any]) -> Any:
    plan = Plan(config, batch.lengths)
    for step in range(plan.schedule.num_steps):
        for number, mini in enumerate(plan.step(step, dp_size).mini_batches):
            shards = collate_mini_batch(
                picked(batch, mini.row_ids), mini, CollateSpec(step=step, mini_index=number, layout=config.layout,
                pad_token_id=1, columns=COLUMNS, pad_to_multiple=config.pad_to_multiple, align=config.align,
                pad_values=pads)
            )  # fmt: skip
            yield mini, shards


@settings(max_examples=60)
@given(st.data())
def test_every_value_lies_at_its_token_and_the_pad_elsewhere(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=9))
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    dtype, plan = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(PLANS))
    dp_size, pad = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1))
    batch = rows_of(np.random.default_rng(len(lengths)), lengths, shape, dtype)
    config = PlanConfig(batch_size=len(lengths), mini_batch_size=max(1, len(lengths) // 2), **plan)
    padded = bf16_of([pad])[0] if dtype == "bfloat16" else np.array(pad).astype(numpy_dtype(dtype))
    for mini, shards in shards_of(batch, config, dp_size, {"wide": pad, "vector": pad}):
        starts = dict(zip(mini.row_ids.tolist(), mini.starts.tolist(), strict=True))
        for shard in shards:
            check_shard(shard, batch, starts, shape, padded, config.layout == "stream")


def check_shard(
    shard: Shard, batch: RowBatch, starts: dict[int, int], shape: tuple[int, ...], pad: Any, windows: bool
) -> None:
    sheet, ids = shard.arrays["wide"], shard.arrays["input_ids"]
    assert sheet.shape == (*ids.shape, *shape)
    expected = np.full((ids.size, *shape), pad, sheet.dtype)
    half = np.zeros(ids.size, BF16)
    for index, (row, cell) in enumerate(zip(shard.row_ids.tolist(), cells_of(shard).tolist(), strict=True)):
        if row < 0:
            assert (shard.arrays["vector"][index] == pad).all()
            continue
        assert np.array_equal(shard.arrays["vector"][index], batch.rows["vector"][row])
        if windows:
            continue  # a row may begin in several windows; see below
        for offset in range(int(shard.arrays["seq_lengths"][index])):
            token = starts[row] + offset
            expected[cell + offset] = batch.wide["wide"].pieces[row][token]
            half[cell + offset] = batch.tokens["half"][batch.offsets[row] + token]
    if not windows:
        assert np.array_equal(sheet.reshape(ids.size, *shape), expected)
        assert np.array_equal(shard.arrays["half"].reshape(-1), half)
    for index in range(len(shard.micro_batches)):
        micro = shard.micro(index)
        assert micro["wide"].shape == (*micro["input_ids"].shape, *shape)
        assert micro["vector"].shape == (len(micro["seq_lengths"]), 3)


@settings(max_examples=120)
@given(st.data())
def test_a_column_of_any_type_keeps_its_bits_and_its_pads_are_the_bits_of_the_pad(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
    dtype, layout = data.draw(st.sampled_from([*DTYPES, "float64"])), data.draw(st.sampled_from(LAYOUTS))
    kind, rng = numpy_dtype(dtype), np.random.default_rng(len(lengths))
    total = sum(lengths)
    raw = rng.integers(0, 256, total * kind.itemsize, np.uint8).view(
        kind
    )  # NaNs and negative zeros among them
    values = numbers(rng, (total,), dtype) if dtype == "bool" else raw
    pads = [0, 1] if dtype in ("bool", "uint8", "int16", "int64") else [0, -1.5, float("nan")]
    pad = data.draw(st.sampled_from(pads))
    batch = RowBatch(
        np.arange(len(lengths)), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        {"input_ids": np.zeros(total, np.int32), "loss_mask": np.ones(total, np.uint8), "own": values}, {},
    )  # fmt: skip
    config = PlanConfig(batch_size=len(lengths), shuffle="none", micro_batch_tokens=40, layout=layout)
    [mini] = Plan(config, batch.lengths).step(0, data.draw(st.integers(1, 4))).mini_batches
    shards = collate_mini_batch(
        batch, mini, CollateSpec(step=0, mini_index=0, layout=layout, pad_token_id=1, columns=("input_ids", "own"),
        pad_values={"own": pad}, align=data.draw(st.sampled_from([1, 4])), pad_to_multiple=data.draw(st.sampled_from([1, 16])))
    )  # fmt: skip
    for shard in shards:
        own = shard.arrays["own"]
        expected = np.full(own.size, bf16_of([pad])[0] if dtype == "bfloat16" else pad, own.dtype)
        for row, cell in zip(shard.row_ids.tolist(), cells_of(shard).tolist(), strict=True):
            if row >= 0:
                expected[cell : cell + lengths[row]] = values[batch.offsets[row] : batch.offsets[row + 1]]
        assert own.tobytes() == expected.tobytes()


def test_windows_of_a_stream_cut_all_columns_alike() -> None:
    batch = rows_of(np.random.default_rng(0), [9, 5, 14], (2,), "uint8")
    flat = np.concatenate(batch.wide["wide"].pieces)
    config = PlanConfig(batch_size=4, layout="stream", window=7, shuffle="none", tail="pad")
    found = []
    for _, [shard] in shards_of(batch, config, 1, {}):
        cells, lengths = cells_of(shard).tolist(), shard.arrays["seq_lengths"].tolist()
        sheet = shard.arrays["wide"].reshape(-1, 2)
        pieces = [sheet[cell : cell + n] for cell, n in zip(cells, lengths, strict=True)]
        found += [piece for piece, row in zip(pieces, shard.row_ids.tolist(), strict=True) if row >= 0]
    assert np.array_equal(np.concatenate(found), flat)


@pytest.mark.parametrize("plan", PLANS, ids=[f"{one['layout']}-{n}" for n, one in enumerate(PLANS)])
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "int64"])
def test_the_plan_alone_tells_the_bytes(plan: dict[str, Any], dtype: str) -> None:
    batch = rows_of(np.random.default_rng(1), [3, 9, 12, 2, 7], (4, 2), dtype)
    config = PlanConfig(batch_size=5, columns=COLUMNS, **plan)
    known = ColumnBytes.of(picked(batch, np.arange(1)), config)
    for mini, shards in shards_of(batch, config, 2, {}):
        geometry = geometry_of(mini.ranks, mini.lengths, config.layout, config.pad_to_multiple, config.align)
        assert bytes_by_rank(geometry, known).tolist() == [shard.nbytes for shard in shards]


def test_a_mini_batch_without_a_row_has_its_columns_all_the_same() -> None:
    batch = rows_of(np.random.default_rng(1), [3, 4], (4, 2), "uint8")
    config = PlanConfig(batch_size=2, skip_rows=(0, 1))
    [(_, shards)] = shards_of(batch, config, 1, {"wide": 9})
    assert (shards[0].arrays["wide"] == 9).all()
    assert shards[0].arrays["wide"].shape[2:] == (4, 2)


def test_text_is_of_one_width_and_whole() -> None:
    batch = rows_of(np.random.default_rng(1), [3, 4], (1,), "uint8")
    texts = np.array(["math", None], object)
    fixed = of_fixed_width(replace(batch, rows={**batch.rows, "domain": texts}), {"domain": 7})
    assert fixed.rows["domain"].tolist() == ["math", ""]
    assert fixed.rows["domain"].itemsize == 7 * 4
    assert prod(fixed.rows["domain"].shape) == 2
