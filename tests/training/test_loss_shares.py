"""Losses by source and by length: sums that add up, and in a whole run those of one forward a row."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysvc.builds.cache_entry import CacheEntry
from raysvc.collate.row_values import RowValues
from raysvc.inspect.why import why
from raysvc.training.loss_shares import LossShares, length_bucket


def reported(rows: dict[int, tuple[int, float, int]]) -> Any:
    """A rank's report of row -> (length, nats, targets)."""
    lengths, nll, targets = (np.array(each) for each in zip(*rows.values(), strict=True))
    return SimpleNamespace(
        rows=RowValues(np.array(list(rows)), lengths, {}, {"loss": nll, "targets": targets})
    )


def mixture(*num_rows: int) -> CacheEntry:
    entries: Any = [SimpleNamespace(slice_starts=[0, count], key=str(count)) for count in num_rows]
    return CacheEntry(tuple(entries), sources=tuple("abc"[: len(num_rows)]))


def test_every_row_counts_once_in_its_source_and_in_its_bucket() -> None:
    ranks = [
        [reported({0: (64, 1.0, 10), (1 << 52) + 1: (65, 2.0, 5)})],
        [reported({1 << 52: (1, 4.0, 1), 3: (128, 8.0, 0)})],
    ]
    found = LossShares(mixture(4, 3)).of(ranks)
    assert found["by_source"] == {"a": [9.0, 10], "b": [6.0, 6]}
    assert found["by_length"] == {"1": [4.0, 1], "64": [1.0, 10], "128": [10.0, 5]}


def test_a_worker_that_does_not_say_leaves_the_figures_out() -> None:
    silent: Any = SimpleNamespace(rows=None)
    assert LossShares(mixture(4, 3)).of([[silent]]) == {}


def test_a_bucket_ends_at_a_power_of_two() -> None:
    assert length_bucket(np.array([1, 2, 3, 64, 65, 4096, 4097])).tolist() == [1, 2, 4, 64, 128, 4096, 8192]


@pytest.mark.ray
@pytest.mark.slow
def test_in_a_run_on_two_ranks_they_are_those_of_one_forward_a_row(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import torch

    import raysvc
    from raysvc.actors.model.load_model import tiny_model
    from raysvc.cli.sample_data import write_rows

    other = write_rows(tmp_path / "other.jsonl", 48)
    sources = {"first": sample["rows"], "second": str(other)}
    job = {
        "mixture": {
            "sources": {name: {"source": {"path": path}, "epochs": 1} for name, path in sources.items()}
        },
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 24, "mini_batch_size": 12, "layout": "packed"},
        "server": {"name": "shares"},
        # the weights stay as they are
        "trainer": {"dp_size": 2, "learning_rate": 1e-30, "run_dir": str(tmp_path / "run"), "max_steps": 3},
    }
    raysvc.train(job)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]

    entry = raysvc.tokenize(job)
    torch.manual_seed(0)
    lm = tiny_model(int(entry.report["vocab_size"])).eval()
    by_source: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    by_length: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    by_step: dict[int, list[float]] = defaultdict(lambda: [0.0, 0])
    by_row: dict[int, dict[str, tuple[str, float]]] = defaultdict(dict)
    for step, row_id in ((line["step"], row) for line in trained for row in line["row_ids"]):
        row = entry.row(row_id)
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logs = lm(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        mask = torch.tensor(row["loss_mask"][1:]).bool()
        nats = -float(logs.gather(1, ids[0, 1:, None])[mask].sum())
        bucket = next(str(1 << k) for k in range(30) if 1 << k >= ids.shape[1])
        for shares, name in ((by_source, entry.origins([row_id])[0][0]), (by_length, bucket)):
            shares[name][0] += nats
            shares[name][1] += int(mask.sum())
        by_row[step][row_id] = entry.origins([row_id])[0][0], pytest.approx(nats / int(mask.sum()), rel=1e-4)
        by_step[step][0] += nats
        by_step[step][1] += int(mask.sum())
    for line in lines:
        nats, count = by_step[line["step"]]
        assert line["minis"] == 2
        assert line["loss"] == pytest.approx(nats / count, rel=1e-5)
        asked, _ = why(str(tmp_path / "run"), line["step"])
        assert {row.row_id: (row.source, row.loss) for row in asked.rows} == by_row[line["step"]]
        assert {group.name for group in asked.sources} == {"first", "second"}
    for key, expected in (("by_source", by_source), ("by_length", by_length)):
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for line in lines:
            for name, (nats, count) in line[key].items():
                found[name][0] += nats
                found[name][1] += count
        assert set(found) == set(expected)
        for name, (nats, count) in expected.items():
            assert found[name] == [pytest.approx(nats, rel=1e-4), count], name
