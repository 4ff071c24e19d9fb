"""A Ray Dataset as a source: the rows, ids and masks of files, whatever blocks, workers and deaths there were."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raysvc
from raysvc.builds.cache_entry import CacheEntry
from raysvc.cache.entry import Entry
from raysvc.errors import ConfigError, SourceError
from raysvc.job.job_file import load_job
from raysvc.pipelines.ray_data import ray_rows
from raysvc.pipelines.ray_data.ray_rows import read_slice, rows_of_slice
from raysvc.progress import Tick
from raysvc.row_ids import MOST_SLICES

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Ray Data
]
Build = Callable[..., CacheEntry]
ROWS = 240


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_rows, "MOST_ROWS", 32)


@pytest.fixture
def build(tmp_path: Path, sample: dict[str, str], ray_session: None) -> Build:
    """Tokenizes a source, into a cache of the test's own."""

    def make(source: Any, **sections: Any) -> CacheEntry:
        job = {
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            "max_quarantine": 1,
        }
        return raysvc.tokenize({**job, **sections}, source=source)

    return make


@pytest.fixture
def rows(sample: dict[str, str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(sample["rows"]).read_text().splitlines()]


def dataset(rows: list[dict[str, Any]], blocks: int) -> Any:
    import ray.data

    return ray.data.from_items(rows, override_num_blocks=blocks)


def parts_of(entry: CacheEntry) -> list[str]:
    [one] = entry.entries
    assert isinstance(one, Entry)
    return [part.name for part in one.parts.parts]


def test_rows_ids_and_masks_are_those_of_the_file_and_the_key_is_of_the_rows(
    build: Build, rows: list[dict[str, Any]], sample: dict[str, str]
) -> None:
    expected = build({"path": sample["rows"]})
    one = build(dataset(rows, 1), workers={"max": 1})
    again = build(dataset(rows, 9).materialize(), workers={"max": 4}, cache={"root": one.uri + "-2"})
    for found in (one, again):
        assert found.table().equals(expected.table())
        assert len(parts_of(found)) == 8
        assert found.report["row_counts"] == expected.report["row_counts"]
    assert (one.hit, again.hit, one.key) == (False, False, again.key)
    assert build(dataset(rows, 5)).hit, "the same rows, in other blocks"
    assert not build(dataset(rows[::-1], 5)).hit, "the order counts"
    assert one.report["paths"] == ["a Ray Dataset"]


def test_a_dataset_runs_once_and_a_hit_by_version_reads_the_first_row_alone(
    build: Build, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    def note(row: dict[str, Any]) -> dict[str, Any]:
        with (tmp_path / "seen").open("a") as file:
            file.write("x")
        return row

    data = dataset(rows, 60).map(note)
    first = build({"ray": data, "version": "snapshot 7"})
    assert (tmp_path / "seen").stat().st_size < 1.5 * ROWS, "one pass, and what the first row needs"
    (tmp_path / "seen").unlink()
    assert build({"ray": data, "version": "snapshot 7"}).hit
    assert (tmp_path / "seen").stat().st_size < ROWS / 2
    assert build({"ray": data, "version": "snapshot 8"}).key != first.key
    (tmp_path / "seen").unlink()
    assert build(data).table().equals(first.table())
    assert (tmp_path / "seen").stat().st_size < 1.5 * ROWS, "without a version it runs once, too"


def test_a_killed_worker_loses_nothing(
    build: Build, rows: list[dict[str, Any]], sample: dict[str, str], tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill(tick: Tick) -> None:
        receipts = sorted((tmp_path / "kill").glob("*/receipt-*.json"))
        if receipts and not killed:
            worker = json.loads(receipts[-1].read_text())["meta"]["worker"]["pid"]
            with suppress(ProcessLookupError):  # it has ended: then another one, at the next tick
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        import time

        time.sleep(0.1 if row["n"] < 20 else 0.01)  # the last blocks are read first
        return row

    expected = build({"path": sample["rows"]})
    job = {"tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path / "kill")}, "workers": {"max": 2}}
    numbered = [{**row, "n": number} for number, row in enumerate(rows)]
    source = {"ray": dataset(numbered, 24).map(slow), "version": "1"}
    found = raysvc.tokenize(job, source=source, progress=kill)
    assert killed
    assert found.table().equals(expected.table())


def test_what_died_goes_on_and_does_not_tokenize_again(
    build: Build,
    rows: list[dict[str, Any]],
    sample: dict[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Died(BaseException):
        pass

    def die(tick: Tick) -> None:
        if tick.done >= 100:
            raise Died

    job = {"tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path / "dies")}}
    source = {"ray": dataset(rows, 12), "version": "1"}
    with pytest.raises(Died):
        raysvc.tokenize(job, source=source, progress=die)
    receipts = [json.loads(path.read_text()) for path in (tmp_path / "dies").glob("*/receipt-*.json")]
    finished = {one["part"]["name"] for one in receipts}  # a part that has no receipt yet is written again
    assert finished
    with caplog.at_level(logging.WARNING):
        found = raysvc.tokenize(job, source=source)
    assert finished <= set(parts_of(found)) | _twice(finished)
    assert found.table().equals(build({"path": sample["rows"]}).table())
    assert "not deterministic" not in caplog.text


def _twice(names: set[str]) -> set[str]:
    """Parts of one slice that two actors wrote before the build died; one of them counts."""
    by_slice: dict[str, list[str]] = {}
    for name in sorted(names):
        by_slice.setdefault(name.split("-")[1], []).append(name)
    return {name for same in by_slice.values() if len(same) > 1 for name in same}


def test_a_dataset_that_is_not_deterministic_is_noticed(
    build: Build,
    rows: list[dict[str, Any]],
    sample: dict[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def other(row: dict[str, Any]) -> dict[str, Any]:
        content = f"{os.getpid()} {np.random.default_rng().integers(1 << 40)}"
        return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}

    unnamed = build(dataset(rows, 4).map(other))
    assert unnamed.num_rows == ROWS, "it runs once, so the rows are those that name the entry"

    class Died(BaseException):
        pass

    def die(tick: Tick) -> None:
        if tick.done:
            raise Died

    job = {"tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path / "dies")}}
    source = {"ray": dataset(rows, 4).map(other), "version": "1"}
    with pytest.raises(Died):
        raysvc.tokenize(job, source=source, progress=die)
    with caplog.at_level(logging.WARNING):
        found = raysvc.tokenize(job, source=source)
    assert "the Dataset is not deterministic" in caplog.text
    assert found.num_rows == ROWS


def test_a_job_names_a_function_of_its_working_directory(
    build: Build, sample: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_rows.py").write_text(
        "import ray.data\n\n\ndef first(path, n):\n    return ray.data.read_json(path, file_extensions=None).limit(n)\n\n\n"
        "def broken():\n    raise KeyError('no table')\n\n\ndef three():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path / "mine")
    args = {"path": sample["rows"], "n": 50}
    (tmp_path / "job.yaml").write_text(
        json.dumps(
            {
                "source": {"ray": "my_rows:first", "args": args, "version": "1"},
                "tokenizer": sample["tokenizer"],
            }
        )
    )
    cache = {"root": str(tmp_path / "cache")}
    found = raysvc.tokenize(tmp_path / "job.yaml", cache=cache)
    whole = build({"path": sample["rows"]})
    assert found.table().equals(whole.table().slice(0, 50))
    assert raysvc.tokenize(tmp_path / "job.yaml", cache=cache).hit
    with pytest.raises(ConfigError, match=r"broken raised KeyError: 'no table' \(my_rows.py, line 9\)"):
        build({"ray": "my_rows:broken"})
    with pytest.raises(SourceError, match="returned int"):
        build({"ray": "my_rows:three"})
    with pytest.raises(ConfigError, match="cannot be imported"):
        build({"ray": "no_such_module:rows"})


def test_what_no_row_can_have_is_a_clear_error(build: Build, rows: list[dict[str, Any]]) -> None:
    import ray.data

    with pytest.raises(SourceError, match="has no row"):
        build(dataset(rows, 2).filter(lambda row: False))
    with pytest.raises(SourceError, match="columns"):
        build(dataset([{"x": 1, "y": 2}] * 40, 2))
    with pytest.raises(SourceError, match="column 'thing' holds Python objects"):
        build(dataset([{**row, "thing": object()} for row in rows[:40]], 2))
    with pytest.raises(SourceError, match=r"its Dataset failed: .*incompatible types"):
        build(ray.data.from_items([{"text": "a"}] * 20).union(ray.data.from_items([{"text": 1}] * 20)))

    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("the table is gone")

    with pytest.raises(SourceError, match="its Dataset failed: ValueError: the table is gone"):
        build(dataset(rows, 2).map(fails))
    bad = [*rows[:50], {"messages": [{"role": "nobody", "content": "?"}]}, *rows[50:80]]
    found = build(dataset(bad, 3))
    counts = found.report["row_counts"]
    assert (counts["rows_in"], sum(counts["quarantined"].values())) == (81, 1)
    endless = pa.table({"__raysvc_id": [MOST_SLICES << 33], "text": ["a"]})
    with pytest.raises(SourceError, match="maybe it has no end"):
        read_slice(endless, 32)


def test_a_config_that_cannot_be_is_refused(sample: dict[str, str], ray_session: None) -> None:
    import ray.data

    data = ray.data.range(3)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ({"ray": data, "path": "rows.jsonl"}, {}, "exactly one"),
        ({"ray": "not a name"}, {}, "package.module:function"),
        ({"ray": 3}, {}, "package.module:function"),
        ({"path": "rows.jsonl", "version": "1"}, {}, "version is for ray"),
        ({"ray": data, "args": {"n": 1}}, {}, "args are those"),
        ({"ray": data, "split": "train"}, {}, "select rows"),
        ({"ray": data, "follow": True}, {}, "follow is for files"),
        ({"ray": data}, {"plan": {"shuffle": "window"}}, "a Ray Dataset has none"),
    ]
    for source, sections, match in wrong:
        with pytest.raises(ConfigError, match=match):
            load_job({"tokenizer": sample["tokenizer"], "source": source, **sections})
    job = load_job({"tokenizer": sample["tokenizer"]}, source=data)
    assert job.source.ray is data
    assert job.model_dump(mode="json")["source"]["ray"] == "a Ray Dataset"


def test_the_size_of_a_slice_follows_from_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_rows, "MOST_ROWS", 2048)
    assert rows_of_slice({"text": "a"}) == 2048
    assert rows_of_slice({"text": "a" * 100_000}) == 64
    assert rows_of_slice({"text": "a" * 100_000_000}) == 16


def formats() -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        }
        for name, properties in (("a", {"x": {"type": "string"}}), ("b", {}))
    ]
    talk = [turn("user", "hi there"), turn("assistant", "hello")]
    yield "tools", [{"messages": talk, "tools": tools[: 1 + n % 2]} for n in range(40)], {}
    yield "preference", [{"prompt": f"p{n}", "chosen": "good", "rejected": "bad"} for n in range(40)], {}
    yield "kto", [{"prompt": f"p{n}", "completion": "good", "label": n % 3 > 0} for n in range(40)], {}
    yield "text", [{"text": f"some text {n}"} for n in range(40)], {"train_on": "all_tokens"}
    carried = {
        "carry": {
            "logprobs": {"dtype": "float32", "per": "token"},
            "grid": {"dtype": "int32", "shape": [2, 2]},
        }
    }
    ids = [[5 + n % 7, 6, 7, 8][: 2 + n % 3] for n in range(40)]
    yield (
        "pretokenized",
        [
            {
                "input_ids": one,
                "loss_mask": [0] + [1] * (len(one) - 1),
                "logprobs": [0.5] * len(one),
                "grid": [[n, 1], [2, 3]],
            }
            for n, one in enumerate(ids)
        ],
        {"source": carried},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "sections"), formats(), ids=lambda one: one if isinstance(one, str) else ""
)
def test_every_format_is_read_as_from_a_file(
    build: Build, name: str, rows: list[dict[str, Any]], sections: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, rest = sections.get("source", {}), {key: one for key, one in sections.items() if key != "source"}
    expected = build({"path": str(tmp_path / "rows.jsonl"), **source}, **rest)
    found = build({"ray": dataset(rows, 3), **source}, **rest)
    assert found.num_rows == expected.num_rows > 0
    assert found.table().equals(expected.table())
    if name == "pretokenized":  # arrays of numpy come as tensors of Ray Data
        tensors = [{**row, "grid": np.array(row["grid"])} for row in rows]
        assert build({"ray": dataset(tensors, 3), **source}, **rest).table().equals(expected.table())


def parquet(rows: list[dict[str, Any]], folder: Path) -> Any:
    import pyarrow.parquet
    import ray.data

    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return ray.data.read_parquet(str(folder / "rows.parquet"))


def sql(rows: list[dict[str, Any]], folder: Path) -> Any:
    import ray.data

    with sqlite3.connect(folder / "rows.db") as base:
        base.execute("create table talks (number integer, messages text)")
        base.executemany(
            "insert into talks values (?, ?)",
            [(n, json.dumps(row["messages"])) for n, row in enumerate(rows)],
        )
    path = str(folder / "rows.db")
    found = ray.data.read_sql("select messages from talks order by number", lambda: sqlite3.connect(path))
    return found.map(lambda row: {"messages": json.loads(row["messages"])})


def pandas(rows: list[dict[str, Any]], folder: Path) -> Any:
    import pandas as pd
    import ray.data

    return ray.data.from_pandas(pd.DataFrame(rows))


def huggingface(rows: list[dict[str, Any]], folder: Path) -> Any:
    import datasets
    import ray.data

    return ray.data.from_huggingface(datasets.Dataset.from_list(rows))


def webdataset(rows: list[dict[str, Any]], folder: Path) -> Any:
    pytest.importorskip("webdataset")
    import ray.data

    with tarfile.open(folder / "rows.tar", "w") as tar:
        for number, row in enumerate(rows):
            data = json.dumps(row).encode()
            member = tarfile.TarInfo(f"{number:05}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    found = ray.data.read_webdataset(str(folder / "rows.tar"))
    return found.map(lambda row: {"messages": row["json"]["messages"]})


def lance(rows: list[dict[str, Any]], folder: Path) -> Any:
    module = pytest.importorskip("lance")
    import ray.data

    module.write_dataset(pa.Table.from_pylist(rows), str(folder / "rows.lance"))
    return ray.data.read_lance(str(folder / "rows.lance"))


def delta(rows: list[dict[str, Any]], folder: Path) -> Any:
    module = pytest.importorskip("deltalake")
    import ray.data

    module.write_deltalake(str(folder / "delta"), pa.Table.from_pylist(rows))
    return ray.data.read_delta(str(folder / "delta"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("read", [parquet, sql, pandas, huggingface, webdataset, lance, delta])
def test_what_ray_data_reads_offline_is_a_source(
    build: Build, read: Callable[..., Any], rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    plain = [{"messages": row["messages"]} for row in rows[:60]]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    expected = build({"path": str(tmp_path / "plain.jsonl")}).table()
    assert build({"ray": read(plain, tmp_path), "version": "1"}).table().equals(expected)


def test_a_dataset_is_served_and_a_mixture_takes_one_beside_files(
    build: Build, rows: list[dict[str, Any]], sample: dict[str, str], tmp_path: Path
) -> None:
    job = {
        "tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 16, "shuffle": "none"}, "trainer": {"run_dir": str(tmp_path / "run")},
    }  # fmt: skip
    server = raysvc.serve(job, source=dataset(rows[:64], 3), name="from-ray", detached=False)
    assert server.num_rows == 64
    with raysvc.attach_rank("from-ray", rank=0) as client:
        step = next(iter(client.steps(stop=1)))
    assert step.shards[0].row_ids.tolist() != []
    mixture = {
        "sources": {
            "ray": {"source": {"ray": dataset(rows[:64], 4), "version": "2"}, "weight": 1},
            "files": {"source": {"path": sample["rows"]}, "weight": 1},
        }
    }
    mixed = raysvc.tokenize({**job, "mixture": mixture})
    assert [one.num_rows for one in mixed.entries] == [64, ROWS]
    assert mixed.sources == ("ray", "files")
