"""Columns of every type, with the extremes of each, through every consumer in every layout; oracle: the rows of the file."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

import raysvc
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import Role, SourceSpec
from raysvc.actors.staging.slots import StagingOptions
from raysvc.actors.staging.staging import Staging
from raysvc.builds.job_plan import plan_config
from raysvc.client.steps import RankStep, micros_of
from raysvc.collate.row_values import cells_of
from raysvc.collate.shard import Shard, read_shard
from raysvc.inspect.replay_run import replay_job
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
EXTREMES: dict[str, list[Any]] = {
    "bool": [True, False],
    **{name: [int(np.iinfo(name).min), int(np.iinfo(name).max), 1] for name in INTEGERS},
    "float16": [65504.0, -0.5, 2.0**-24],
    "bfloat16": [2.0**127, -0.5, 2.0**-126],
    "float32": [float(np.finfo(np.float32).max), -0.5, 2.0**-149],
    "float64": [1.7e308, 0.1, 5e-324],
}
PLANS: dict[str, dict[str, Any]] = {
    "padded_right": {"micro_batch_size": 2},
    "padded_left": {"micro_batch_size": 2},
    "packed": {"micro_batch_tokens": 24, "align": 4},
}
SHAPES = {"row": [2], "token": [2, 2], "one": []}  # end of a column's name -> shape of a value


def per_token(name: str) -> bool:
    return not name.endswith("_row")


def source_rows() -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(0), []
    for number in range(8):
        length = int(rng.integers(2, 9))
        row: dict[str, Any] = {"input_ids": rng.integers(3, 50, length).tolist()}
        row["loss_mask"] = [0] + [1] * (length - 1)
        row["word"] = "é" * number
        for dtype, values in EXTREMES.items():
            for end, shape in SHAPES.items():
                name = f"{dtype}_{end}"
                whole = [*([length] if per_token(name) else []), *shape]
                picked = rng.integers(0, len(values), int(np.prod(whole)))
                flat = np.array([values[one] for one in picked.tolist()], object)
                row[name] = flat.reshape(whole).tolist()
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, sample: dict[str, str]) -> JobConfig:
    folder = tmp_path_factory.mktemp("types")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in source_rows()))
    carry: dict[str, Any] = {"word": {"dtype": "string"}}
    for dtype in EXTREMES:
        for end, shape in SHAPES.items():
            name = f"{dtype}_{end}"
            carry[name] = {
                "dtype": dtype,
                "shape": shape,
                "pad": 1,
                "per": "token" if per_token(name) else "row",
            }
    return load_job(
        {
            "source": {"path": str(folder / "rows.jsonl"), "format": "pretokenized", "carry": carry},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(folder / "cache")},
            "plan": {"batch_size": 8},
            "trainer": {"dp_size": 2, "run_dir": str(folder / "run")},
        }
    )  # fmt: skip


def plain(value: Any) -> Any:
    """Numbers of an array or a tensor as Python's, without rounding."""
    if hasattr(value, "detach"):
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).tolist()
    if value.dtype.names:  # bfloat16: the upper half of a float32
        return (value["bfloat16"].astype(np.uint32) << 16).view(np.float32).tolist()
    return value.tolist()


def check_rows(shard: Shard, arrays: Any) -> set[int]:
    """All values of all real rows are those of the file; returns the rows."""
    rows, seen = source_rows(), set()
    flat = {
        name: arrays[name].reshape((-1, *arrays[name].shape[2:]))
        for name in rows[0]
        if "_" in name and per_token(name) and name not in ("input_ids", "loss_mask")
    }
    for place, (row, cell) in enumerate(zip(shard.row_ids.tolist(), cells_of(shard).tolist(), strict=True)):
        if row < 0:
            continue
        truth = rows[row]
        here = slice(cell, cell + len(truth["input_ids"]))
        assert str(arrays["word"][place]) == truth["word"]
        for name in flat:
            assert plain(flat[name][here]) == truth[name], (name, row)
        for dtype in EXTREMES:
            assert plain(arrays[f"{dtype}_row"][place]) == truth[f"{dtype}_row"], (dtype, row)
        seen.add(row)
    return seen


@pytest.mark.parametrize("layout", PLANS)
def test_values_of_every_type_are_whole_at_every_consumer(base: JobConfig, layout: str) -> None:
    torch = pytest.importorskip("torch")
    plan = base.plan.model_copy(update={"layout": layout, **PLANS[layout]})
    job = base.model_copy(update={"plan": plan})
    entry = raysvc.tokenize(job)
    assert entry.report["row_counts"]["quarantined"] == {}
    for number, truth in enumerate(source_rows()):  # the cache, and what `show` shows
        row = entry.row(number)
        bits = np.dtype([("bfloat16", np.uint16)])
        halves = {name: plain(np.array(row[name], bits)) for name in truth if name.startswith("bfloat16")}
        assert {name: row[name] for name in truth} | halves == truth
    stream = EntryStream([SourceSpec(uri=str(entry.uri))], {}, Recipe(plan_config(job, entry), 0))
    info, shards = stream.make(0, (2,))
    assert stream.outline(0, Role(2)).mini_batches[0].rank_bytes == tuple(one.nbytes for one in shards)
    assert [one.digest() for one in replay_job(job, 0).chosen()] == [one.digest() for one in shards]
    seen: set[int] = set()
    for shard in shards:
        seen |= check_rows(shard, shard.arrays)
        sent = read_shard(pickle.loads(pickle.dumps(shard.to_wire())))
        assert sent.digest() == shard.digest()
        staging = Staging(shard.rank, "cpu", StagingOptions())
        staging.put((0, 0), sent)
        staged = staging.take((0, 0), 5.0)[0].shard
        check_rows(shard, staged.arrays)
        for dtype in EXTREMES:
            assert staged.arrays[f"{dtype}_token"].dtype == getattr(torch, dtype)
        step = RankStep(0, 0, (shard,), info.mini_batches)
        for index, micro in enumerate(micros_of([step], "cpu")):
            for name, array in shard.micro(index).items():
                if name.endswith(("_row", "_token", "_one")):
                    assert plain(micro.tensors[name]) == plain(array), name
    assert seen == set(range(8))
