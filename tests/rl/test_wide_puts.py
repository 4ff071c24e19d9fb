"""Columns of several numbers a token in puts of rollouts; oracle: the arrays that were put."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.rollouts.group_rows import batch_of, taken
from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.kept.served_records import ServedRecords
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import Role, RolloutSpec, ServeSpec
from raysvc.collate.row_values import cells_of
from raysvc.errors import SourceError
from raysvc.inspect.replay_run import replay_run, save
from raysvc.job.column_dtypes import BF16, bf16_of
from raysvc.job.config import PlanConfig
from raysvc.rl.group import Group
from raysvc.rl.group_table import groups_of, late_table, table_of
from raysvc.rl.schema import Schema

DTYPES = [np.bool_, np.uint8, np.int32, np.float16, np.float32, BF16]


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    raw = rng.integers(0, 2 if dtype is np.bool_ else 100, shape)
    return bf16_of(raw) if dtype is BF16 else raw.astype(dtype)


def group(uid: str, lengths: list[int], shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Group:
    rng = np.random.default_rng(seed)
    return Group(
        uid,
        [rng.integers(3, 60, length) for length in lengths],
        [np.ones(length, np.uint8) for length in lengths],
        {"experts": [numbers(rng, (length, *shape), dtype) for length in lengths],
         "logprobs": [rng.normal(size=length).astype(np.float32) for length in lengths]},
        {"reward": rng.normal(size=len(lengths)), "state": numbers(rng, (len(lengths), 2), dtype)},
    )  # fmt: skip


@settings(max_examples=40)
@given(st.data())
def test_a_put_comes_back_as_it_was_and_as_rows_of_a_step(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    dtype = data.draw(st.sampled_from(DTYPES))
    sizes = st.lists(st.integers(1, 6), min_size=1, max_size=3)
    put = [group(uid, data.draw(sizes), shape, dtype, seed) for seed, uid in enumerate("abc")]
    table = table_of(put)
    for one, again in zip(put, groups_of(table), strict=True):
        for before, after in zip(one.tokens["experts"], again.tokens["experts"], strict=True):
            assert before.dtype == after.dtype
            assert np.array_equal(before, after)
        assert np.array_equal(one.rows["state"], again.rows["state"])
    rows = Schema(("experts",)).admit(table).rows
    batch = batch_of(rows, np.arange(rows.num_rows))
    flat = [piece for one in put for piece in one.tokens["experts"]]
    order = np.array(data.draw(st.permutations(range(len(flat)))))
    chosen = taken(batch, order)
    for piece, row in zip(chosen.wide["experts"].pieces, order.tolist(), strict=True):
        assert np.array_equal(piece, flat[row])
    assert np.array_equal(chosen.rows["state"], np.concatenate([one.rows["state"] for one in put])[order])


def test_another_shape_is_refused_by_name() -> None:
    schema = Schema()
    schema.fix(schema.admit(table_of([group("a", [3], (4, 2), np.uint8)])))
    with pytest.raises(SourceError, match=r"'experts' of uint8 \[3, 2\], other puts of uint8 \[4, 2\]"):
        schema.admit(table_of([group("b", [3], (3, 2), np.uint8)]))
    with pytest.raises(SourceError, match="'experts' of sequence 0, which has 3 tokens"):
        table_of([Group("c", [[1, 2, 3]], [[0, 1, 1]], {"experts": [np.zeros((2, 4))]})])


@pytest.mark.parametrize("dtype", [np.uint8, BF16])
def test_steps_of_rollouts_have_them_and_so_do_those_after_a_restart(tmp_path: Path, dtype: Any) -> None:
    columns = ("input_ids", "attention_mask", "position_ids", "labels", "experts", "state")
    plan = PlanConfig(batch_size=2, columns=columns, pad_values={"experts": 7}, layout="packed")
    recipe = Recipe(plan, 0)

    def stream() -> RolloutStream:
        return RolloutStream("x", RolloutSpec(max_staleness=None), recipe, str(tmp_path), {})

    put = [group("a", [3, 5], (4, 2), dtype, 1), group("b", [2, 4], (4, 2), dtype, 2)]
    first = stream()
    first.put(table_of(put))
    assert first.form(0, 0)
    truth = [piece for one in put for piece in one.tokens["experts"]]
    digests = []
    for made in (first, stream()):
        _, shards = made.make(0, (2,))
        digests.append([shard.digest() for shard in shards])
        outline = made.outline(0, 2)
        assert outline.mini_batches[0].rank_bytes == tuple(shard.nbytes for shard in shards)
        for shard in shards:
            sheet = shard.arrays["experts"].reshape(-1, 4, 2)
            for row, cell in zip(shard.row_ids.tolist(), cells_of(shard).tolist(), strict=True):
                if row >= 0:
                    assert np.array_equal(sheet[cell : cell + len(truth[row])], truth[row])
    assert digests[0] == digests[1]


def stream_of(folder: Path, columns: tuple[str, ...], **spec: Any) -> RolloutStream:
    plan = PlanConfig(
        batch_size=2, columns=("input_ids", "attention_mask", "labels", *columns), pad_values=PADS
    )
    return RolloutStream("x", RolloutSpec(max_staleness=None, **spec), Recipe(plan, 0), str(folder), {})


PADS = {"experts": 7.0, "routed": 9.0}


def lies(shard: Any, name: str, truth: list[np.ndarray]) -> bool:
    """Whether every row of a shard has its value at each token, and the pad is elsewhere."""
    sheet, used = (
        shard.arrays[name].reshape(-1, *truth[0].shape[1:]),
        np.zeros(shard.arrays["input_ids"].size, bool),
    )
    for row, cell in zip(shard.row_ids.tolist(), cells_of(shard).tolist(), strict=True):
        if row >= 0:
            here = slice(cell, cell + len(truth[row]))
            used[here] = True
            assert np.array_equal(sheet[here], truth[row])
    pad = bf16_of([PADS[name]])[0] if sheet.dtype == BF16 else PADS[name]
    return bool((sheet[~used] == pad).all())


@pytest.mark.parametrize("dtype", [np.uint8, BF16])
def test_a_role_gets_the_columns_of_several_numbers_that_it_asks_for(tmp_path: Path, dtype: Any) -> None:
    put = [group("a", [3, 5], (4, 2), dtype, 1), group("b", [2, 4], (4, 2), dtype, 2)]
    stream = stream_of(tmp_path, ("experts", "state", "logprobs"))
    stream.put(table_of(put))
    assert stream.form(0, 0)
    policy, critic = (
        Role(2, columns=("input_ids", "attention_mask", "labels", "experts")),
        Role(1, columns=("input_ids", "attention_mask", "labels", "state")),
    )
    _, shards = stream.make(0, (policy, critic))
    truth = [piece for one in put for piece in one.tokens["experts"]]
    for shard in shards[:2]:
        assert "state" not in shard.arrays
        assert lies(shard, "experts", truth)
    assert "experts" not in shards[2].arrays
    states = np.concatenate([one.rows["state"] for one in put])
    real = shards[2].row_ids >= 0
    assert np.array_equal(shards[2].arrays["state"][real], states[shards[2].row_ids[real]])
    for role, own in ((policy, shards[:2]), (critic, shards[2:])):
        outline = stream.outline(0, role)
        assert outline.mini_batches[0].rank_bytes == tuple(shard.nbytes for shard in own)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, BF16])
def test_a_column_of_several_numbers_may_arrive_late_by_uid_and_row(tmp_path: Path, dtype: Any) -> None:
    rng = np.random.default_rng(5)
    put = [group("a", [3, 5, 4], (4, 2), np.uint8, 1), group("b", [2, 4, 6], (4, 2), np.uint8, 2)]
    routed = {one.uid: [numbers(rng, (len(ids), 3, 2), dtype) for ids in one.input_ids] for one in put}
    first = stream_of(tmp_path, ("experts", "routed"), late=("routed",))
    first.put(table_of(put))
    assert not first.form(0, 0), "nothing is trained before it is whole"
    first.store.add_columns(late_table("b", {"routed": routed["b"]}))
    first.store.add_columns(late_table("a", {"routed": [routed["a"][2], routed["a"][0]]}, rows=[2, 0]))
    with pytest.raises(SourceError, match="5 values in 'routed' for the 3 tokens of row 0"):
        first.store.add_columns(late_table("a", {"routed": [routed["a"][1]]}, rows=[0]))
    with pytest.raises(SourceError, match="'routed'"):
        first.store.add_columns(late_table("a", {"routed": [np.zeros((5, 2, 2), np.uint8)]}, rows=[1]))
    second = stream_of(tmp_path, ("experts", "routed"), late=("routed",))  # it died and came back
    second.store.add_columns(late_table("a", {"routed": [routed["a"][1]]}, rows=[1]))
    assert second.form(0, 0)
    third = stream_of(tmp_path, ("experts", "routed"), late=("routed",))
    truth, experts = [*routed["a"], *routed["b"]], [piece for one in put for piece in one.tokens["experts"]]
    digests = []
    for made in (second, third):
        _, shards = made.make(0, (2,))
        digests.append([shard.digest() for shard in shards])
        assert made.outline(0, 2).mini_batches[0].rank_bytes == tuple(shard.nbytes for shard in shards)
        for shard in shards:
            assert shard.arrays["routed"].dtype == np.dtype(dtype)
            assert lies(shard, "routed", truth)
            assert lies(shard, "experts", experts)
    assert digests[0] == digests[1]


def test_a_step_of_them_is_made_again_without_its_server(tmp_path: Path) -> None:
    put = [group("a", [3, 5], (4, 2), BF16, 1), group("b", [2, 4], (4, 2), BF16, 2)]
    stream = stream_of(tmp_path / "rollouts", ("experts", "state"))
    stream.put(table_of(put))
    assert stream.form(0, 0)
    _, shards = stream.make(0, (2,))
    spec = ServeSpec(
        name="x", sources=(), plan=stream._recipe.plan, pad_token_id=0, journal=str(tmp_path),
        rollouts=RolloutSpec(max_staleness=None),
    )  # fmt: skip
    ServedRecords(str(tmp_path / "server"), {}).keep(0, spec)
    again = replay_run(str(tmp_path), 0, dp_size=2)
    assert [shard.digest() for shard in again.chosen()] == [shard.digest() for shard in shards]
    save(again.chosen(), tmp_path / "step.safetensors")
    from safetensors import safe_open

    with safe_open(tmp_path / "step.safetensors", "numpy") as saved:
        assert "mini0.rank0.experts" in saved.metadata()["bfloat16"]
        bits = saved.get_tensor("mini0.rank0.experts")
    assert np.array_equal(bits, shards[0].arrays["experts"]["bfloat16"])
