"""The format of a shard as docs/wire.md has it, and a reader that has only numpy."""

import importlib.util
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raysvc.collate.shard import read_shard
from raysvc.errors import ConfigError
from raysvc.job.column_dtypes import BF16
from raysvc.job.config import PlanConfig

ROOT = Path(__file__).parents[2]
READER = ROOT / "examples" / "read_shard.py"
COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "loss_mask")
SHAPES = [
    {"layout": "padded_right", "micro_batch_size": 3},
    {"layout": "padded_left", "micro_batch_size": 5},
    {"layout": "packed", "micro_batch_tokens": 64},
    {"layout": "stream", "window": 32},
]


@pytest.fixture(params=SHAPES, ids=lambda shape: shape["layout"])
def shards(request, make_data, make_shards):
    data = make_data(np.random.default_rng(0).integers(3, 60, 41))
    config = PlanConfig(batch_size=8 if "window" in request.param else 41, **request.param)
    return make_shards(data, config, 3)[0][1]


def the_reader():
    spec = importlib.util.spec_from_file_location("foreign_reader", READER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_travels_is_plain_and_comes_back_without_a_copy(shards):
    for shard in shards:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(shard.to_wire(), protocol=5, buffer_callback=buffers.append)
        assert b"raysvc.collate" not in head
        assert sum(len(buffer.raw()) for buffer in buffers) == shard.nbytes, (
            "no array is in the pickle itself"
        )
        frozen = [bytes(buffer.raw()) for buffer in buffers]  # read-only memory, as an object store gives it
        back = read_shard(pickle.loads(head, buffers=frozen))
        assert back.digest() == shard.digest()
        for name in (
            "step",
            "mini",
            "rank",
            "layout",
            "denominators",
            "micro_batches",
            "row_vectors",
            "pad_token_id",
        ):
            assert getattr(back, name) == getattr(shard, name)
        for array in (*back.arrays.values(), back.row_ids):
            assert not array.flags.writeable
            assert any(np.shares_memory(array, np.frombuffer(b, np.uint8)) for b in frozen if b)


def test_the_page_names_every_array_with_its_type_and_axes(shards):
    rows = re.findall(r"^\| (`.+?) \| (\w+) `\[(.+?)\]` \|", (ROOT / "docs" / "wire.md").read_text(), re.M)
    page = {name: (dtype, axes) for names, dtype, axes in rows for name in re.findall(r"`(\w+)`", names)}
    for shard in shards:
        header, arrays = shard.to_wire()
        lines, width = arrays["input_ids"].shape
        sizes = {"B": lines, "W": width, "S": len(shard.row_ids)}
        for name, array in arrays.items():
            dtype, axes = page[name]
            assert str(array.dtype) == dtype, name
            shape = [
                sum(sizes.get(term) or int(term) for term in axis.split(" + ")) for axis in axes.split(", ")
            ]
            assert list(array.shape) == shape, name
            assert array.flags.c_contiguous
        assert list(json.loads(header)) == list(
            json.loads(re.search(r"```json\n(.+?)```", (ROOT / "docs" / "wire.md").read_text(), re.S)[1])
        )


def test_the_reader_to_copy_sees_the_micro_batches_that_we_see(shards):
    for shard in shards:
        theirs = the_reader().read_shard(shard.to_wire())
        assert (theirs.step, theirs.rank, theirs.denominators["tokens"]) == (
            shard.step, shard.rank, shard.denominators.tokens,
        )  # fmt: skip
        for index, micro in enumerate(theirs.micro_batches()):
            ours = shard.micro(index)
            assert list(micro) == list(ours)
            assert all(np.array_equal(micro[name], ours[name]) for name in ours)
        assert index + 1 == len(shard.micro_batches)


def test_the_reader_runs_where_raysvc_cannot_be_imported(shards, tmp_path):
    assert len(READER.read_text().splitlines()) <= 100
    (tmp_path / "shard.pickle").write_bytes(pickle.dumps(shards[0].to_wire(), protocol=5))
    code = f"""
import pickle, sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "raysvc":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {str(READER.parent)!r})
from read_shard import read_shard
shard = read_shard(pickle.load(open({str(tmp_path / "shard.pickle")!r}, "rb")))
print(sum(int((micro["labels"] != -100).sum()) for micro in shard.micro_batches()), sorted(shard.row_ids.tolist()))
try:
    import raysvc
except ImportError:
    print("no raysvc")
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    targets = int((shards[0].arrays["labels"] != -100).sum())
    assert done.stdout.splitlines() == [f"{targets} {sorted(shards[0].row_ids.tolist())}", "no raysvc"]


def test_other_versions_and_other_things_are_refused(shards):
    header, arrays = shards[0].to_wire()
    later = (header.replace('"version": 1', '"version": 2'), arrays)
    with pytest.raises(ConfigError, match="wire version 2"):
        read_shard(later)
    with pytest.raises(ValueError, match=r"raysvc\.shard 2"):
        the_reader().read_shard(later)
    for wrong in (None, 3, ("{}", arrays), ("no json", arrays), {"input_ids": arrays["input_ids"]}):
        with pytest.raises(ConfigError, match="no shard of a server"):
            read_shard(wrong)


def test_bfloat16_needs_no_class_of_ours():
    assert b"raysvc" not in pickle.dumps(np.zeros(3, BF16), protocol=5)


@pytest.mark.ray
def test_a_ray_worker_without_raysvc_trains_from_the_refs(ray_session, serve, entry):
    import ray

    import raysvc

    class Foreign:
        def __init__(self, source: str) -> None:
            import sys

            class Refuse:
                def find_spec(self, name, *_):
                    if name.split(".")[0] == "raysvc":
                        raise ImportError(name)

            for name in [name for name in sys.modules if name.split(".")[0] == "raysvc"]:
                del sys.modules[name]
            sys.meta_path.insert(0, Refuse())
            self.names: dict = {}
            exec(source, self.names)

        def rows(self, value) -> tuple:
            import sys

            shard = self.names["read_shard"](value)
            here = any(name.split(".")[0] == "raysvc" for name in sys.modules)
            return shard.row_ids.tolist(), int(shard.arrays["input_ids"].sum()), here

    serve("foreign", plan={"batch_size": 8, "mini_batch_size": 8, "micro_batch_size": 2})
    workers = [ray.remote(Foreign).options(num_cpus=0.1).remote(READER.read_text()) for _ in range(2)]
    seen = []
    with raysvc.attach("foreign", dp_size=2) as client:
        for step in client.steps(stop=2):
            refs = step.mini_batches[0].shards
            answers = ray.get([worker.rows.remote(ref) for worker, ref in zip(workers, refs, strict=True)])
            ours = [read_shard(value) for value in ray.get(list(refs))]
            assert [(s.row_ids.tolist(), int(s.arrays["input_ids"].sum()), False) for s in ours] == answers
            seen += [row for rows, _, _ in answers for row in rows if row >= 0]
            client.commit(step.index)
    assert len(set(seen)) == len(seen) == 16
