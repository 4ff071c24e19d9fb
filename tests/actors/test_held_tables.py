"""Which tables of rollouts are in memory, and how they go to disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raysvc.actors.rollouts import held_tables
from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.rollouts.group_pool import Pool
from raysvc.actors.rollouts.group_rows import GroupRows
from raysvc.actors.rollouts.group_store import GroupStore
from raysvc.cache.store.fsspec_store import FsspecStore
from raysvc.cache.store.open import open_store
from raysvc.rl.group import Group
from raysvc.rl.group_table import table_of
from raysvc.rl.schema import Schema
from raysvc.rl.table_bytes import file_buffers

BATCH = 2


def groups(first: int, stop: int, tokens: int = 5) -> pa.Table:
    return table_of([Group(f"g{n}", [[n] * tokens] * 2, [[1] * tokens] * 2) for n in range(first, stop)])


def store(folder: Path) -> GroupStore:
    return GroupStore(Pool(BATCH), Schema(), Spool(str(folder)))


def first_ids(known: GroupStore, numbers: range) -> list[int]:
    return [known.rows_of((f"g{n}", 0)).column("input_ids")[0][0].as_py() for n in numbers]


@pytest.mark.parametrize("rows", [0, 1, 3000])
def test_the_buffers_of_a_table_are_the_bytes_of_an_arrow_file(rows: int) -> None:
    ids = [np.arange(1 + n % 7, dtype=np.int32) for n in range(rows)]
    whole = pa.table({"ids": pa.array(ids, pa.list_(pa.int32())), "on": pa.array([n % 2 == 0 for n in range(rows)]),
                      "uid": pa.array([f"u{n}" for n in range(rows)], pa.string())})  # fmt: skip
    for table in (whole, whole.slice(rows // 3, rows // 2), pa.concat_tables([whole, whole.slice(1)])):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        assert b"".join(file_buffers(table)) == sink.getvalue().to_pybytes()


def test_large_columns_are_written_from_where_they_lie() -> None:
    values = np.arange(1 << 20, dtype=np.int64)
    addresses = {np.frombuffer(each, np.uint8).ctypes.data for each in file_buffers(pa.table({"a": values}))}
    assert values.ctypes.data in addresses


def test_a_store_of_objects_takes_buffers_too(tmp_path: Path) -> None:
    for known in (open_store(str(tmp_path)), FsspecStore(f"memory://{tmp_path.name}")):
        known.write("groups/a", [memoryview(b"one "), memoryview(b""), memoryview(b"two")])
        assert known.read("groups/a") == b"one two"


def test_tables_leave_memory_with_the_last_group_that_needs_them(tmp_path: Path) -> None:
    known = store(tmp_path)
    known.put(groups(0, 3))  # the third one is in the next step
    assert known.form(0, 0)
    known.let_go_below(1)
    assert known.holds_tables
    known.put(groups(3, 4))
    assert known.form(1, 1)
    known.let_go_below(2)
    assert not known.holds_tables
    assert first_ids(known, range(4)) == [0, 1, 2, 3]


def test_groups_that_are_dropped_leave_memory(tmp_path: Path) -> None:
    known = store(tmp_path)
    known.put(groups(0, 2))
    known.drop(["g0"])
    assert known.holds_tables
    known.drop(["g1"])
    assert not known.holds_tables
    again = store(tmp_path)
    assert not again.holds_tables


def test_a_commit_looks_at_the_groups_of_its_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, looked = store(tmp_path), []
    known.put(groups(0, 500))
    for step in range(3):
        assert known.form(step, step)
    chunks = GroupRows.chunks.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(GroupRows, "chunks", property(lambda rows: (looked.append(rows), chunks(rows))[1]))
    known.let_go_below(2)
    assert len(looked) == 2 * BATCH
    known.let_go_below(3)
    assert len(looked) == 3 * BATCH


def test_memory_is_bounded_and_what_left_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_tables, "HELD_BYTES", 2 * groups(0, 1, 1000).nbytes)
    known = store(tmp_path)
    for number in range(8):
        known.put(groups(number, number + 1, 1000))
    for each in (known, store(tmp_path)):
        held = [n for n in range(8) if each.group((f"g{n}", 0)).pieces[0].chunk.table is not None]
        assert held == [0, 1], "the oldest are needed first"
        assert first_ids(each, range(8)) == list(range(8))
