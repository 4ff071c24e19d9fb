"""The rows that `each_assistant_turn` makes of one conversation are a group of the plan, wherever the plan is made."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysvc
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.builds.job_plan import plan_config, plan_of
from raysvc.builds.mixed_job import mixture_spec
from raysvc.errors import PlanError
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.plan.plan import Plan

TURNS = (3, 1, 2, 5, 1, 4, 2)


def write(path: Path, turns: tuple[int, ...]) -> dict[str, Any]:
    lines = []
    for number, count in enumerate(turns):
        pair = [
            {"role": "user", "content": f"say {number}"},
            {"role": "assistant", "content": f"word {number}"},
        ]
        lines.append(json.dumps({"messages": pair * count}))
    path.write_text("\n".join(lines))
    return {"path": str(path), "format": "chat"}


def job_of(folder: Path, tokenizer: str, **options: Any) -> JobConfig:
    sections = {
        "tokenizer": tokenizer,
        "train_on": "each_assistant_turn",
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 4, "mini_batch_size": 2, "tail": "pad"},
    }
    if "mixture" not in options:
        sections["source"] = write(folder / "rows.jsonl", TURNS)
    return load_job(JobConfig.model_validate({**sections, **options}))


def conversations(plan: Plan, entry: raysvc.CacheEntry) -> list[list[list[tuple[str, int]]]]:
    """Origin of every row of every mini-batch of every step."""
    return [
        [entry.origins(mini.row_ids.tolist()) for mini in plan.step(step, 2).mini_batches]
        for step in range(plan.schedule.num_steps)
    ]


def test_a_conversation_is_whole_in_one_mini_batch_and_counts_once(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = job_of(tmp_path, sample["tokenizer"])
    entry = raysvc.tokenize(job)
    assert entry.num_rows == sum(TURNS)
    steps = conversations(plan_of(job, entry), entry)
    whole = [[sorted({number for _, number in mini}) for mini in step] for step in steps]
    assert [[len(mini) for mini in step] for step in whole] == [[2, 2], [2, 1]]
    for step in steps:
        for mini in step:
            numbers = [number for _, number in mini]
            assert all(numbers.count(number) == TURNS[number] for number in numbers)
    assert sorted(number for step in whole for mini in step for number in mini) == list(range(len(TURNS)))


def test_a_server_follows_the_plan_that_is_shown(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_of(tmp_path, sample["tokenizer"])
    entry = raysvc.tokenize(job)
    shown = plan_of(job, entry)
    stream = EntryStream([SourceSpec(uri=str(entry.uri))], {}, Recipe(plan_config(job), 0))
    assert stream.identity == shown.identity
    assert stream.schedule.num_groups == len(TURNS)
    lengths = entry.rows.lengths()
    assert Plan(plan_config(job), lengths, entry_keys=[entry.key]).hash != shown.hash


def test_other_entries_keep_their_plan(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_of(tmp_path, sample["tokenizer"], train_on="all_assistant_messages")
    entry = raysvc.tokenize(job)
    alone = Plan(plan_config(job), entry.rows.lengths(), entry_keys=[entry.key])
    assert plan_of(job, entry).identity == alone.identity
    assert alone.identity["uids"] == ""


def test_a_mixture_counts_conversations_of_each_source(tmp_path: Path, sample: dict[str, str]) -> None:
    other = (2, 2, 6)
    sources = {
        "a": {"source": write(tmp_path / "a.jsonl", TURNS), "epochs": 1},
        "b": {"source": write(tmp_path / "b.jsonl", other), "epochs": 2},
    }
    job = job_of(tmp_path, sample["tokenizer"], mixture={"sources": sources})
    entry = raysvc.tokenize(job)
    spec = mixture_spec(job, entry.entries)
    assert spec is not None
    assert spec.stages == ((0, (len(TURNS), 2 * len(other))),)
    shown = plan_of(job, entry)
    sources = [SourceSpec(uri=one.uri) for one in entry.entries]
    assert EntryStream(sources, {}, Recipe(plan_config(job), 0), spec).identity == shown.identity
    turns = {("a", number): count for number, count in enumerate(TURNS)}
    turns |= {("b", number): count for number, count in enumerate(other)}
    for step in conversations(shown, entry):
        for mini in step:
            assert all(mini.count(origin) % turns[origin] == 0 for origin in mini)
    rows = np.concatenate([shown.step(k, 1).mini_batches[i].row_ids for k in range(4) for i in range(2)
                           if i < len(shown.step(k, 1).mini_batches)])  # fmt: skip
    assert Counter(rows.tolist()) == Counter(entry.row_ids().tolist()) + Counter(
        entry.row_ids()[sum(TURNS) :].tolist()
    )


def test_windows_over_turns_are_refused(tmp_path: Path, sample: dict[str, str]) -> None:
    plan = {"batch_size": 2, "layout": "stream", "window": 16}
    job = job_of(tmp_path, sample["tokenizer"], plan=plan)
    with pytest.raises(PlanError, match="stream cuts rows without regard to groups"):
        plan_of(job, raysvc.tokenize(job))
