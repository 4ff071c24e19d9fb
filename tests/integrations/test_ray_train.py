"""A shard of Ray Train that goes on: its rows are the order of a plan, whatever the ranks, batches and deaths were."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysvc.cache.find import open_finished
from raysvc.cache.key import cache_key
from raysvc.cache.store.open import open_store
from raysvc.cache.writer import EntryWriter
from raysvc.errors import ConfigError, StateMismatch
from raysvc.integrations.ray_train import EntryData, EntryDataConfig, EntryShard, rows_of_step
from raysvc.job.carried import MARK
from raysvc.job.config import PlanConfig
from raysvc.plan.entry_plan import plan_of_entries

Written = Callable[..., str]
ROWS = 23


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows with a column of every kind, in parts of 10."""
    rng = np.random.default_rng(3)
    rows = [rng.integers(3, 99, size).tolist() for size in rng.integers(2, 9, ROWS)]
    per_token = [[0] + [1] * (len(row) - 1) for row in rows]
    halves = [np.arange(len(row)).astype(np.uint16) + 0x3F80 for row in rows]
    table = pa.table(
        {
            "input_ids": pa.array(rows, pa.list_(pa.int32())),
            "loss_mask": pa.array(per_token, pa.list_(pa.uint8())),
            "half": pa.array(halves, pa.list_(pa.uint16())),
            "experts": pa.array(
                [[[n, n + 1] for n in row] for row in rows], pa.list_(pa.list_(pa.uint8(), 2))
            ),
            "reward": pa.array(np.arange(ROWS, dtype=np.float32)),
            "domain": pa.array([f"d{number % 3}" for number in range(ROWS)]),
            "source_row": pa.array(np.arange(ROWS)),
        }
    )
    marked = table.schema.field("half").with_metadata({MARK: b"bfloat16"})
    table = table.cast(table.schema.set(table.schema.get_field_index("half"), marked))
    recipe = {"carry": {"half": {"pad": 2.0}, "experts": {"pad": 7}, "reward": {"pad": 0}}}
    writer = EntryWriter(open_store(str(tmp_path_factory.mktemp("cache"))), cache_key(recipe))
    parts = [writer.write_part(i, table.slice(10 * i, 10), {}) for i in range(3)]
    writer.commit(parts, recipe, {"pad_token_id": 5})
    return writer.uri


def order_of(uri: str, epoch: int, shuffle: str = "full", seed: int = 0) -> list[int]:
    """What a plan of one row a step has in an epoch."""
    config = PlanConfig(batch_size=1, epochs=epoch + 1, shuffle=shuffle, seed=seed)
    plan = plan_of_entries(config, [open_finished(uri)])
    return [int(plan.step(epoch * ROWS + place, 1).mini_batches[0].row_ids[0]) for place in range(ROWS)]


def shards_of(data: EntryData, ranks: int) -> list[EntryShard]:
    found = EntryDataConfig().configure({"train": data}, ranks, None, None)
    return [each["train"] for each in found]


def taken(shards: list[EntryShard], batches: int | None, **options: Any) -> list[int]:
    """Ids of rows in the order of the epoch, of so many batches of every rank; None: of the rest of it."""
    loops = [iter(shard.iter_torch_batches(**options)) for shard in shards]
    found: list[int] = []
    while batches is None or batches > 0:
        step = [next(loop, None) for loop in loops]
        if step[0] is None:
            assert step == [None] * len(shards), "all ranks end together"
            break
        sizes = [len(batch["row_id"]) for batch in step if batch]
        assert min(sizes) >= 1, "a rank has a row"
        assert max(sizes) - min(sizes) <= 1, "batches of one size, a row more or less"
        found += [row for batch in step if batch for row in batch["row_id"].tolist()]
        batches = None if batches is None else batches - 1
    for loop in loops:
        loop.close()  # type: ignore[attr-defined]
    assert len({json.dumps(shard.state_dict()) for shard in shards}) == 1, "ranks say the same"
    return found


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3)), max_size=4),
    st.integers(0, 3), st.integers(1, 3), st.integers(1, 5),
)  # fmt: skip
def test_whoever_goes_on_has_exactly_the_rows_that_are_left(
    uri: str, lives: list[tuple[int, int, int]], prefetch: int, ranks: int, size: int
) -> None:
    data, state, found = EntryData(uri), None, {0: [], 1: []}  # type: ignore[var-annotated]
    for life in (*((*one, False) for one in lives), (ranks, size, None, True)):
        shards = shards_of(data, life[0])
        for shard in shards if state else ():
            shard.load_state_dict(json.loads(json.dumps(state)))
        if shards[0].epoch > 0:
            return  # an early life came to the end
        found[0] += taken(shards, life[2], batch_size=life[1], prefetch_batches=prefetch)
        state = shards[0].state_dict()
    expected = order_of(uri, 0)
    assert found[0] == expected[: len(found[0])]
    assert len(expected) - len(found[0]) < ranks
    assert taken(shards, None, batch_size=size) == order_of(uri, 1)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 9))
def test_every_rank_has_a_row_in_every_step_of_an_epoch(rows: int, size: int, ranks: int) -> None:
    steps, left = [], rows
    while left >= ranks:
        steps.append(rows_of_step(left, size, ranks))
        left -= steps[-1]
    assert left == (rows if rows < ranks else 0)
    whole = size * ranks
    assert len(steps) == (0 if rows < ranks else rows // whole if size == 1 else -(-rows // whole))
    assert all(ranks <= step <= size * ranks + (size == 1) * (ranks - 1) for step in steps)
    assert steps[:-2] == [size * ranks] * len(steps[:-2]), "only the last two are not full"


def test_a_local_shuffle_is_one_of_blocks_and_without_any_the_rows_lie_as_they_are(uri: str) -> None:
    [shard] = shards_of(EntryData(uri, shuffle="none"), 1)
    assert taken([shard], None, batch_size=4) == open_finished(uri).row_ids().tolist()
    local = {"local_shuffle_buffer_size": 6, "local_shuffle_seed": 9}
    first = taken([shard], 2, batch_size=4, **local)
    assert first == order_of(uri, 1, "block(6)", 9)[:8]
    state = shard.state_dict()
    [again] = shards_of(EntryData(uri, shuffle="none"), 1)
    again.load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"in the middle of an epoch of .*block\(6\)"):
        again.iter_torch_batches(batch_size=4)
    assert first + taken([again], None, batch_size=3, **local) == order_of(uri, 1, "block(6)", 9)


def test_a_batch_is_the_rows_padded_on_the_right(uri: str) -> None:
    [shard] = shards_of(EntryData(uri), 1)
    entry = open_finished(uri)
    for batch in shard.iter_torch_batches(batch_size=5, device="cpu"):
        rows = [entry.row(row) for row in batch["row_id"].tolist()]
        width = max(len(row["input_ids"]) for row in rows)
        assert batch["input_ids"].dtype == torch.int32
        assert batch["half"].dtype == torch.bfloat16
        for line, row in enumerate(rows):
            rest = width - len(row["input_ids"])
            assert batch["input_ids"][line].tolist() == row["input_ids"] + [5] * rest
            assert batch["attention_mask"][line].tolist() == [1] * (width - rest) + [0] * rest
            labels = [
                one if mask else -100 for one, mask in zip(row["input_ids"], row["loss_mask"], strict=True)
            ]
            assert batch["labels"][line].tolist() == labels + [-100] * rest
            assert batch["experts"][line].tolist() == [[n, n + 1] for n in row["input_ids"]] + [[7, 7]] * rest
            halves = torch.tensor([0x3F80 + n for n in range(width - rest)], dtype=torch.int16)
            assert batch["half"][line].tolist() == halves.view(torch.bfloat16).tolist() + [2.0] * rest
            assert (batch["reward"][line].item(), batch["domain"][line]) == (row["reward"], row["domain"])


def test_columns_types_and_short_batches_are_as_asked_for(uri: str) -> None:
    [shard] = shards_of(EntryData(uri, columns=["reward", "input_ids"]), 1)
    batches = list(shard.iter_torch_batches(batch_size=10, drop_last=True, dtypes={"reward": torch.float64}))
    assert [len(one["row_id"]) for one in batches] == [10, 10]
    assert {name: one.dtype for name, one in batches[0].items()} == {
        "row_id": torch.int64, "reward": torch.float64, "input_ids": torch.int32, "attention_mask": torch.uint8,
    }  # fmt: skip
    assert shard.epoch == 1


def test_a_collate_fn_gets_what_its_class_of_ray_data_says(uri: str) -> None:
    from ray.data.collate_fn import ArrowBatchCollateFn, NumpyBatchCollateFn, PandasBatchCollateFn

    def first(base: type) -> Any:
        class Collate(base):  # type: ignore[misc]
            def __call__(self, batch: Any) -> Any:
                return batch

        [shard] = shards_of(EntryData(uri, shuffle="none"), 1)
        collate: Any = Collate()
        return next(iter(shard.iter_torch_batches(batch_size=12, collate_fn=collate)))

    table = open_finished(uri).table().slice(0, 12)
    arrow = first(ArrowBatchCollateFn)
    assert arrow.drop_columns(["row_id"]).select(table.column_names).equals(table)
    arrays = first(NumpyBatchCollateFn)
    assert [one.tolist() for one in arrays["input_ids"]] == table.column("input_ids").to_pylist()
    assert [one.tolist() for one in arrays["half"]] == table.column("half").to_pylist()
    assert [one.tolist() for one in arrays["experts"]] == table.column("experts").to_pylist()
    assert arrays["domain"].tolist() == table.column("domain").to_pylist()
    assert first(PandasBatchCollateFn)["reward"].tolist() == table.column("reward").to_pylist()
    [shard] = shards_of(EntryData(uri), 1)
    moved = next(
        iter(shard.iter_torch_batches(batch_size=2, collate_fn=lambda _: {"a": torch.ones(1)}, device="meta"))
    )
    assert moved["a"].device.type == "meta"


def test_what_cannot_be_is_refused(uri: str, entry: Written) -> None:
    [shard] = shards_of(EntryData(uri), 1)
    for wrong in (
        {"batch_size": 0}, {"prefetch_batches": -1}, {"dtypes": torch.int64, "collate_fn": len},
        {"local_shuffle_buffer_size": 0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            shard.iter_torch_batches(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="window"):
        EntryShard(EntryData(uri, shuffle="window")).iter_torch_batches()
    with pytest.raises(ConfigError, match=r"num_workers.* 24 for 23 rows"):
        EntryShard(EntryData(uri), 0, ROWS + 1).iter_torch_batches()
    with pytest.raises(ConfigError, match="no column 'nothing'"):
        next(iter(EntryShard(EntryData(uri, columns=["nothing"])).iter_torch_batches()))
    with pytest.raises(ConfigError, match="no column 'nothing'"):
        next(iter(shard.iter_torch_batches(dtypes={"nothing": torch.int64})))
    for state in (None, {}, {"version": 99}):
        with pytest.raises(StateMismatch, match="not the state"):
            shard.load_state_dict(state)  # type: ignore[arg-type]
    other = EntryShard(EntryData(entry(4))).state_dict()
    with pytest.raises(StateMismatch, match="belongs to the entry"):
        shard.load_state_dict(other)
    loop = iter(shard.iter_torch_batches(batch_size=4))
    next(loop)
    shard.load_state_dict(shard.state_dict())
    with pytest.raises(StateMismatch, match="begin a loop after it"):
        next(loop)
