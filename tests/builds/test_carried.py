"""Columns that go with their rows, from the source file to the worker's tensors; oracle: the rows of the file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysvc
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.actors.staging.slots import StagingOptions
from raysvc.actors.staging.staging import Staging
from raysvc.builds.job_plan import plan_config, report_of
from raysvc.client.steps import RankStep, micros_of
from raysvc.collate.row_values import cells_of
from raysvc.errors import ConfigError
from raysvc.inspect.replay_run import replay_job, save
from raysvc.inspect.row_view import columns_of_row, shard_pictures
from raysvc.job.column_dtypes import bf16_of
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job

CARRY = {
    "domain": {},
    "id": {},
    "experts": {"dtype": "uint8", "per": "token", "shape": [3, 2], "pad": 255},
    "gate": {"dtype": "bfloat16", "per": "token"},
    "emb": {"dtype": "bfloat16", "shape": [4]},
    "teacher_ids": {"dtype": "int32", "per": "token", "shape": [2], "pad": -1, "align": "next_token"},
}


def source_rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = []
    for n in range(12):
        length = int(rng.integers(2, 9))
        rows.append(
            {
                "input_ids": rng.integers(3, 50, length).tolist(),
                "loss_mask": [0] + [1] * (length - 1),
                "domain": ["math", "code, and more"][n % 2],
                "id": 100 + n,
                "experts": rng.integers(0, 200, (length, 3, 2)).tolist(),
                "gate": (rng.integers(0, 100, length) / 4).tolist(),
                "emb": rng.integers(0, 100, 4).tolist(),
                "teacher_ids": rng.integers(0, 50, (length - 1, 2)).tolist(),
                "comment": "not wanted",
            }
        )
    return rows


@pytest.fixture
def job(tmp_path: Path, sample: dict[str, str]) -> JobConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in source_rows()))
    return load_job(
        {
            "source": {"path": str(path), "format": "pretokenized", "carry": CARRY},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            "plan": {"batch_size": 6, "micro_batch_size": 2},
            "trainer": {"dp_size": 2, "run_dir": str(tmp_path / "run")},
        }
    )


def stream_of(job: JobConfig, entry: raysvc.CacheEntry) -> EntryStream:
    return EntryStream([SourceSpec(uri=str(entry.uri))], {}, Recipe(plan_config(job, entry), 0))


def test_all_that_is_carried_is_at_the_worker(job: JobConfig, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    entry, rows = raysvc.tokenize(job), source_rows()
    assert entry.report["left_out"] == ["comment"]
    _, shards = stream_of(job, entry).make(0, (2,))
    for shard in shards:
        staging = Staging(shard.rank, "cpu", StagingOptions())
        staging.put((0, 0), shard)
        staged = staging.take((0, 0), 5.0)[0].shard
        flat = {name: staged.arrays[name].flatten(0, 1) for name in ("experts", "gate", "teacher_ids")}
        assert staged.arrays["gate"].dtype == staged.arrays["emb"].dtype == torch.bfloat16
        for index, (row, cell) in enumerate(
            zip(shard.row_ids.tolist(), cells_of(shard).tolist(), strict=True)
        ):
            truth = rows[row]
            cells = slice(cell, cell + len(truth["input_ids"]))
            assert flat["experts"][cells].tolist() == truth["experts"]
            assert flat["gate"][cells].float().tolist() == truth["gate"]
            assert flat["teacher_ids"][cells].tolist() == [[-1, -1], *truth["teacher_ids"]]
            assert staged.arrays["emb"][index].float().tolist() == truth["emb"]
            assert staged.arrays["domain"][index] == truth["domain"]
            assert int(staged.arrays["id"][index]) == truth["id"]
        assert bool((flat["experts"][shard.arrays["attention_mask"].reshape(-1) == 0] == 255).all())


def test_a_rank_of_its_own_gets_the_same_tensors(job: JobConfig) -> None:
    torch = pytest.importorskip("torch")
    info, shards = stream_of(job, raysvc.tokenize(job)).make(1, (2,))
    for shard in shards:
        step = RankStep(1, 0, (shard,), info.mini_batches)
        for index, micro in enumerate(micros_of([step], "cpu")):
            whole = shard.micro(index)
            assert micro.tensors["gate"].dtype == torch.bfloat16
            assert torch.equal(micro.tensors["experts"], torch.from_numpy(whole["experts"]))
            assert micro.tensors["domain"].tolist() == whole["domain"].tolist()


def test_show_and_replay_have_them_and_the_plan_knows_their_bytes(job: JobConfig, tmp_path: Path) -> None:
    entry = raysvc.tokenize(job)
    row, truth = entry.row(5), source_rows()[5]
    assert (row["domain"], row["experts"]) == (truth["domain"], truth["experts"])
    assert columns_of_row(row)["id"] == truth["id"]
    again = replay_job(job, 0)
    [first, *_] = shard_pictures(again.chosen()[0])
    assert first.columns["id"] == 100 + first.row_id
    assert first.columns["experts"] == f"uint8 [{first.length}, 3, 2]"
    save(again.chosen(), tmp_path / "step.npz")
    with np.load(tmp_path / "step.npz") as saved:
        for shard in again.chosen():
            name = f"mini{shard.mini}.rank{shard.rank}"
            assert np.array_equal(saved[f"{name}.experts"], shard.arrays["experts"])
            assert np.array_equal(saved[f"{name}.gate"], shard.arrays["gate"])
    save(again.chosen(), tmp_path / "step.safetensors")
    sizes = [
        sum(shard.nbytes for shard in again.shards[0]),
        sum(s.nbytes for s in replay_job(job, 1).chosen()),
    ]
    assert report_of(job, entry).bytes_per_step == sum(sizes) // 2


def test_datasets_reads_the_entry(job: JobConfig) -> None:
    datasets = pytest.importorskip("datasets")
    entry = raysvc.tokenize(job)
    loaded = datasets.load_from_disk(entry.uri)
    assert loaded[3]["experts"] == source_rows()[3]["experts"]
    assert loaded[3]["domain"] == source_rows()[3]["domain"]


@pytest.mark.parametrize("layout", ["padded_left", "packed"])
def test_rows_of_a_mixture_bring_what_their_own_source_says_also_when_a_step_is_made_again(
    job: JobConfig, tmp_path: Path, layout: str
) -> None:
    rows = source_rows()
    truth = {"first": rows[:5], "second": rows[5:]}
    sources = {}
    for name, own in truth.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in own))
        sources[name] = {
            "source": {"path": str(path), "format": "pretokenized", "carry": CARRY},
            "epochs": 1.0,
        }
    mixed = load_job(
        {
            "mixture": {"sources": sources},
            "tokenizer": job.tokenizer.name,
            "cache": {"root": job.cache.root},
            "plan": {"batch_size": 6, "layout": layout},
            "trainer": {"dp_size": 2, "run_dir": str(tmp_path / "mixed")},
        }
    )
    entry, seen = raysvc.tokenize(mixed), set()
    for step in range(2):
        again = replay_job(mixed, step)
        assert again.checksum() == replay_job(mixed, step).checksum()
        for shard in again.chosen():
            sheets = {
                n: shard.arrays[n].reshape(-1, *shard.arrays[n].shape[2:])
                for n in ("experts", "gate", "teacher_ids")
            }
            for index, (row_id, cell) in enumerate(
                zip(shard.row_ids.tolist(), cells_of(shard).tolist(), strict=True)
            ):
                if row_id < 0:
                    assert (shard.arrays["domain"][index], int(shard.arrays["id"][index])) == ("", 0)
                    continue
                [(source, number)] = entry.origins([row_id])
                row = truth[source][number]
                cells = slice(cell, cell + len(row["input_ids"]))
                assert sheets["experts"][cells].tolist() == row["experts"]
                assert sheets["gate"]["bfloat16"][cells].tolist() == bf16_of(row["gate"])["bfloat16"].tolist()
                assert sheets["teacher_ids"][cells].tolist() == [[-1, -1], *row["teacher_ids"]]
                assert (
                    shard.arrays["emb"]["bfloat16"][index].tolist()
                    == bf16_of(row["emb"])["bfloat16"].tolist()
                )
                assert (shard.arrays["domain"][index], int(shard.arrays["id"][index])) == (
                    row["domain"],
                    row["id"],
                )
                seen.add((source, number))
            assert (sheets["experts"].reshape(len(sheets["experts"]), -1)[_padding(shard)] == 255).all()
    assert len(seen) == len(rows)
    save(again.chosen(), tmp_path / "step.npz")
    sizes = [sum(shard.nbytes for shard in replay_job(mixed, step).chosen()) for step in range(2)]
    assert report_of(mixed, entry).bytes_per_step == sum(sizes) // 2


def _padding(shard: Any) -> Any:
    free = np.ones(shard.arrays["input_ids"].size, bool)
    real = shard.row_ids >= 0
    for cell, length in zip(
        cells_of(shard)[real].tolist(), shard.arrays["seq_lengths"][real].tolist(), strict=True
    ):
        free[cell : cell + length] = False
    return free


def test_a_column_of_one_source_alone_is_refused_by_name(job: JobConfig, tmp_path: Path) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text(json.dumps({"input_ids": [3, 4], "loss_mask": [0, 1]}) + "\n")
    source = job.source.model_dump(exclude={"storage_options"}, exclude_none=True)
    mixed = load_job(
        {
            "mixture": {"sources": {"a": {"source": source, "weight": 1},
                                    "b": {"source": {"path": str(bare), "format": "pretokenized"}, "weight": 1}}},
            "tokenizer": job.tokenizer.name,
            "cache": {"root": job.cache.root},
        }
    )  # fmt: skip
    with pytest.raises(raysvc.errors.ConfigError, match="'domain' is carried by 1 of 2 sources"):
        plan_config(mixed, raysvc.tokenize(mixed))


NUMBERS = {
    "score": {"dtype": "float32"},
    "count": {"dtype": "int64"},
    "good": {"dtype": "bool"},
    "emb": {"dtype": "int16", "shape": [2], "pad": 0},
}


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_numbers_of_a_csv_are_those_of_json_and_a_bad_field_is_named(
    kind: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    rows = [
        {"prompt": f"p{n}", "completion": "c", "score": n / 4, "count": 2**53 + n, "good": n % 2 == 0, "emb": [n, -n]}
        for n in range(5)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / f"rows.{kind}").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter={"csv": ",", "tsv": "\t"}[kind])
        writer.writeheader()
        writer.writerows({**row, "emb": json.dumps(row["emb"])} for row in rows)
        writer.writerow(
            {"prompt": "p", "completion": "c", "score": "high", "count": 1, "good": 1, "emb": "[1, 2]"}
        )
    tables = []
    for name in ("rows.jsonl", f"rows.{kind}"):
        source = {"path": str(tmp_path / name), "carry": NUMBERS}
        entry = raysvc.tokenize(
            {"source": source, "tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path / "cache")},
             "max_quarantine": 0.5}
        )  # fmt: skip
        tables.append(entry.table().to_pylist())
    assert tables[0] == tables[1]
    assert [(row["score"], row["count"], row["good"], row["emb"]) for row in tables[1]] == [
        (row["score"], row["count"], row["good"], row["emb"]) for row in rows
    ]
    assert entry.report["row_counts"]["quarantined"] == {"carried column 'score' is not float32": 1}


def test_labels_of_a_csv_are_those_of_json(tmp_path: Path, sample: dict[str, str]) -> None:
    texts = ["true", "False", "1", "0", "TRUE"]
    rows = [
        {"prompt": f"p{n}", "completion": "c", "label": text.lower() in ("true", "1")}
        for n, text in enumerate(texts)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"p{n},c,{text}" for n, text in enumerate([*texts, "yes"])]
    (tmp_path / "rows.csv").write_text("\n".join(["prompt,completion,label", *lines]))
    entries = [
        raysvc.tokenize(
            {"source": {"path": str(tmp_path / name), "format": "kto"}, "tokenizer": sample["tokenizer"],
             "cache": {"root": str(tmp_path / "cache")}, "max_quarantine": 0.5}
        )
        for name in ("rows.jsonl", "rows.csv")
    ]  # fmt: skip
    assert entries[0].table().to_pylist() == entries[1].table().to_pylist()
    assert entries[1].table()["label"].to_pylist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert entries[1].report["row_counts"]["quarantined"] == {"'label' is neither true nor false": 1}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"dtype": "float64"}, "dtype of 'number' is int64 and float64"),
        ({"pad": 7}, "pad of 'number' is 0 and 7"),
    ],
    ids=["dtype", "pad"],
)
def test_sources_that_carry_a_column_otherwise_are_refused(
    job: JobConfig, tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    sources: dict[str, Any] = {}
    for name, column in {"a": {"dtype": "int64"}, "b": {"dtype": "int64", **changed}}.items():
        path = tmp_path / f"{name}.jsonl"  # 2^53 + 1 is no float64: its column must not become one
        path.write_text(json.dumps({"input_ids": [3, 4], "loss_mask": [0, 1], "number": 2**53 + 1}) + "\n")
        source = {"path": str(path), "format": "pretokenized", "carry": {"number": column}}
        sources[name] = {"source": source, "weight": 1}
    mixed = load_job(
        {"mixture": {"sources": sources}, "tokenizer": job.tokenizer.name, "cache": {"root": job.cache.root}}
    )
    with pytest.raises(raysvc.errors.ConfigError, match=told):
        plan_config(mixed, raysvc.tokenize(mixed))


@pytest.mark.parametrize(
    ("carry", "said"),
    [
        ("domain", r"give a list, \[domain\]"),
        ({"x": {"dtype": "float32", "shape": [10**11, 10**12]}}, "more than 16777216 numbers a value"),
        (["input_ids"], "a name that raysvc uses"),
    ],
)
def test_a_declaration_that_cannot_be_is_one_line(carry: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_job({"source": {"path": "rows.jsonl", "carry": carry}, "tokenizer": "t"})
