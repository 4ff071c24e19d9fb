"""Columns that are computed by workers of a cluster: the same numbers, errors by name, kill -9 and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysvc
from raysvc.cache.entry import Entry
from raysvc.cache.store.open import open_store
from raysvc.errors import ConfigError
from raysvc.pipelines import row_slices

pytestmark = pytest.mark.ray


@pytest.fixture
def job(tmp_path: Path, sample: dict[str, str]) -> dict[str, Any]:
    rows = [
        {"prompt": f"{n} is:\n", "chosen": "yes " * (n % 7 + 1), "rejected": "never " * (n % 3 + 1)}
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "source": {"path": str(tmp_path / "rows.jsonl")},
        "tokenizer": sample["tokenizer"],
        "workers": {"max": 2},
        "trainer": {"objective": "dpo", "device": "cpu"},
    }


def values_of(entry: raysvc.CacheEntry) -> np.ndarray:
    return np.asarray(entry.rows.read(np.arange(entry.num_rows)).tokens["ref_logprobs"])


@pytest.fixture
def many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_slices, "LEAST_TOKENS", 400)


@pytest.fixture
def on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No entry is too small for it; after it is tokenized."""
    monkeypatch.setattr("raysvc.scoring.enrich_plan.FLOPS_PER_S", 1e-3)


@pytest.mark.slow
def test_workers_compute_what_one_process_does(
    job: dict[str, Any],
    tmp_path: Path,
    many_slices: None,
    on_a_cluster: None,
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = raysvc.enrich(job, cache={"root": str(tmp_path / "there")})
    workers = {receipt.meta["worker"]["pid"] for receipt in receipts_of(there)}
    assert os.getpid() not in workers
    monkeypatch.undo()
    here = raysvc.enrich(job, cache={"root": str(tmp_path / "here")})
    assert there.key == here.key
    assert np.abs(values_of(there) - values_of(here)).max() < 2e-6


def receipts_of(entry: raysvc.CacheEntry) -> list[Any]:
    from raysvc.cache.writer import EntryWriter

    return list(EntryWriter(entry.entries[0].store, entry.key, 0).receipts().values())


@pytest.mark.slow
def test_an_error_of_a_worker_arrives_as_what_it_was(
    job: dict[str, Any], tmp_path: Path, on_a_cluster: None, ray_session: None
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ConfigError, match=r"gives no finite log-probability for token \d+ of row \d+"):
        raysvc.enrich(
            job,
            enrich={"ref_logprobs": {"model": str(tmp_path / "nan")}},
            cache={"root": str(tmp_path / "cache")},
        )


@pytest.mark.slow
def test_two_that_ask_at_once_share_the_workers(
    job: dict[str, Any], tmp_path: Path, many_slices: None, on_a_cluster: None, ray_session: None
) -> None:
    job["cache"] = {"root": str(tmp_path / "cache")}
    raysvc.tokenize(job)
    entries: list[raysvc.CacheEntry] = []
    threads = [threading.Thread(target=lambda: entries.append(raysvc.enrich(job))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entries[0].uri == entries[1].uri
    parts = list(Path(entries[0].uri).glob("part-*.arrow"))
    assert len(parts) == len(entries[0].entries[0].manifest.parts) > 2, "no slice was computed twice"


BUILDER = """
import json, sys, time
import raysvc
from raysvc.actors.worker import score
from raysvc.pipelines import row_slices
from raysvc.scoring import enrich_plan

class Slow(score.RowScorer):
    def __call__(self, rows):
        time.sleep(0.1)
        return super().__call__(rows)

row_slices.LEAST_TOKENS, enrich_plan.FLOPS_PER_S, score.RowScorer = 100, 1e-3, Slow
raysvc.enrich(json.loads(sys.argv[1]), cache={"root": sys.argv[2]})
"""


@pytest.mark.slow
def test_a_killed_builder_loses_only_what_it_was_computing(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL half-way; the next one computes the missing slices alone, and ends with the same bytes."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    monkeypatch.setattr(row_slices, "LEAST_TOKENS", 100)
    killed, whole = str(tmp_path / "killed"), str(tmp_path / "whole")

    command = [sys.executable, "-c", BUILDER, json.dumps(job), killed]
    first = subprocess.Popen(command, env=environ, start_new_session=True)
    until = time.monotonic() + 300
    while len(list(Path(killed).glob("*/receipt-*.json"))) < 4:  # one of them is of the rows
        assert time.monotonic() < until
        assert first.poll() is None
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = {path.name for path in Path(killed).glob("*/receipt-*.json")}
    subprocess.run(command, env=environ, check=True, timeout=300)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has
    entries = [raysvc.enrich(job, cache={"root": root}) for root in (killed, whole)]
    torch.set_num_threads(threads)
    assert [one.hit for one in entries] == [True, False]
    resumed, undisturbed = (one.entries[0] for one in entries)
    assert isinstance(resumed, Entry)
    assert isinstance(undisturbed, Entry)
    assert len(resumed.manifest.parts) > 10
    assert [one.checksum for one in resumed.manifest.parts] == [
        one.checksum for one in undisturbed.manifest.parts
    ]
    there = open_store(killed).list(resumed.folder)
    assert kept <= {*there, *open_store(killed).list(resumed.folders[-1])}
    made = Counter(name.split("-")[1] for name in there if name.startswith("part-"))
    finished = {name.split("-")[1] for name in kept & set(there)}
    assert len(finished) >= 3
    assert all(made[index] == 1 for index in finished), "what was finished was not computed again"
