"""Which rows are held out: by prompt, for ever, and never in two places."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import raysvc
from raysvc.api import serve_spec
from raysvc.builds.build_beside import known_at_the_end
from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.job_plan import plan_of, report_of, untrained_rows
from raysvc.cache.entry import Entry
from raysvc.errors import PlanError
from raysvc.evals.held_rows import ONE_IN, HeldOut, evaluated_rows, held_masks
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.training.run_identity import identity_of

SHARE = 0.3


def chat(number: int) -> dict[str, Any]:
    """One of several answers to one of 40 questions."""
    question, answer = f"What is {number % 40} and one?", f"It is {number % 40 + 1}, as {number} says."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def pair(number: int) -> dict[str, Any]:
    answers = {
        side: [{"role": "assistant", "content": f"{side} {number}"}] for side in ("chosen", "rejected")
    }
    return {"prompt": chat(number)["messages"][:1], **answers}


def conversation(number: int) -> dict[str, Any]:
    return {"messages": chat(number)["messages"] + chat(number + 7)["messages"]}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


def job_of(folder: Path, sample: dict[str, str], source: dict[str, Any], **more: Any) -> JobConfig:
    given: dict[str, Any] = {
        "source": source,
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 8},
        "evals": {"held": {"share": SHARE}},
    }
    return load_job({**given, **more})


def held_mask(entry: Entry, share: float) -> Any:
    return held_masks(HeldOut("held", "share", share), [entry])[0]


def trained_ids(job: JobConfig, entry: CacheEntry) -> list[int]:
    plan = plan_of(job, entry)
    steps = [plan.step(step, 1) for step in range(plan.schedule.num_steps)]
    return sorted(row for step in steps for mini in step.mini_batches for row in mini.row_ids.tolist())


def sides(job: JobConfig) -> dict[int, bool]:
    """Row of the source -> whether it is held out."""
    entry = raysvc.tokenize(job)
    return dict(
        zip(
            entry.entries[0].row_values("source_row").tolist(),
            held_mask(entry.entries[0], SHARE).tolist(),
            strict=True,
        )
    )


def test_the_side_of_a_row_is_the_stated_hash_of_its_prompt(tmp_path: Path, sample: dict[str, str]) -> None:
    entry = raysvc.tokenize(job_of(tmp_path, sample, write(tmp_path / "a.jsonl", [*map(chat, range(120))])))
    mask = held_mask(entry.entries[0], SHARE)
    for row_id, held in zip(entry.row_ids().tolist(), mask.tolist(), strict=True):
        row = entry.row(row_id)
        prompt = row["input_ids"][: row["loss_mask"].index(1)]
        assert 1 < len(prompt) < len(row["input_ids"])
        key = hashlib.sha256(struct.pack(f"<{len(prompt)}i", *prompt)).hexdigest()
        assert held == (int(key[:16], 16) / 2**64 < SHARE)
    assert 0 < mask.sum() < len(mask)


def test_rows_that_are_appended_and_another_order_leave_every_row_on_its_side(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    rows = [chat(number) for number in range(90)]
    before = sides(job_of(tmp_path, sample, write(tmp_path / "a.jsonl", rows)))
    order = np.random.default_rng(0).permutation(130)
    grown = [([*rows, *map(chat, range(300, 340))])[place] for place in order]
    after = sides(job_of(tmp_path, sample, write(tmp_path / "b.jsonl", grown)))
    assert {int(order[place]): held for place, held in after.items() if order[place] < 90} == before
    by_question: dict[int, set[bool]] = {}
    for number, held in before.items():
        by_question.setdefault(number % 40, set()).add(held)
    assert all(len(found) == 1 for found in by_question.values())
    assert len({*before.values()}) == 2


def test_a_larger_share_holds_out_what_a_smaller_one_does(tmp_path: Path, sample: dict[str, str]) -> None:
    entry = raysvc.tokenize(job_of(tmp_path, sample, write(tmp_path / "a.jsonl", [*map(chat, range(80))])))
    some, more = (held_mask(entry.entries[0], share) for share in (0.2, 0.6))
    assert (some <= more).all()
    assert some.sum() < more.sum()


def test_plain_text_is_held_out_by_the_whole_row(tmp_path: Path, sample: dict[str, str]) -> None:
    texts = [{"text": f"row {number} of some text"} for number in range(60)]
    source = {**write(tmp_path / "a.jsonl", texts), "format": "text"}
    job = job_of(tmp_path, sample, source, train_on="all_tokens")
    entry = raysvc.tokenize(job)
    ids = [
        struct.pack(f"<{len(row)}i", *row)
        for row in (entry.row(one)["input_ids"] for one in entry.row_ids().tolist())
    ]
    told = [int.from_bytes(hashlib.sha256(one).digest()[:8], "big") < SHARE * 2**64 for one in ids]
    assert held_mask(entry.entries[0], SHARE).tolist() == told
    assert len({*told}) == 2


@pytest.mark.parametrize(
    ("make", "more"),
    [(pair, {}), (conversation, {"train_on": "each_assistant_turn"})],
    ids=["pairs", "turns"],
)
def test_the_rows_of_a_group_are_on_one_side(
    tmp_path: Path, sample: dict[str, str], make: Any, more: dict[str, Any]
) -> None:
    job = job_of(tmp_path, sample, write(tmp_path / "a.jsonl", [*map(make, range(60))]), **more)
    entry = raysvc.tokenize(job)
    mask, rows = held_mask(entry.entries[0], SHARE), entry.entries[0].row_values("source_row")
    assert len(mask) == 120
    assert 0 < mask.sum() < 120
    assert all(len({*mask[rows == number].tolist()}) == 1 for number in range(60))
    report = report_of(job, entry)
    assert report.held_rows == mask.sum() == 2 * report.held_groups
    assert report.num_groups + report.held_groups == 60


@pytest.mark.parametrize("plan", [{}, {"shuffle": "window(1)"}, {"layout": "packed", "shuffle": "none"}])
def test_trained_and_evaluated_rows_are_disjoint_and_all_there_are(
    tmp_path: Path, sample: dict[str, str], plan: dict[str, Any]
) -> None:
    source = write(tmp_path / "a.jsonl", [*map(chat, range(100))])
    job = job_of(tmp_path, sample, source, plan={"batch_size": 8, "micro_batch_tokens": 512, **plan})
    entry = raysvc.tokenize(job)
    evaluated = list(evaluated_rows(job, entry.entries))
    assert sorted(trained_ids(job, entry) + evaluated) == list(range(100))
    spec = serve_spec(job, entry)
    assert sorted(spec.evals["held"].rows) == evaluated
    assert spec.plan == serve_spec(job, entry, evals=()).plan, "a replay without evals trains the same rows"
    assert identity_of(job, entry)["evals.held.share"] == SHARE


def untrained_of(job: JobConfig) -> tuple[dict[int, str], list[int], set[int]]:
    """What is told of untrained rows, the lengths of all, and the rows that steps of the plan train."""
    entry = raysvc.tokenize(job)
    told = untrained_rows(job, entry, entry.row_ids(), entry.rows.lengths())
    return told, entry.rows.lengths().tolist(), set(trained_ids(job, entry))


def test_rows_that_no_step_trains_are_told_with_the_reason(tmp_path: Path, sample: dict[str, str]) -> None:
    rows = [*map(chat, range(100))]
    rows[17]["messages"][1]["content"] *= 20
    source = write(tmp_path / "a.jsonl", rows)
    plan = {
        "batch_size": 8,
        "micro_batch_tokens": 100,
        "oversize": "drop",
        "skip_rows": [3],
        "rows": {"exclude": [4, 5]},
    }
    told, lengths, trained = untrained_of(job_of(tmp_path, sample, source, plan=plan))
    assert lengths[17] > 100 > sorted(lengths)[-2]
    assert trained.isdisjoint(told)
    assert trained | told.keys() == set(range(100))
    held = {row for row, why in told.items() if why == "held out for the eval held"}
    assert 10 < len(held) < 60
    own = {
        17: "longer than the 100 tokens of a micro-batch",
        3: "in plan.skip_rows",
        4: "excluded by plan.rows",
        5: "excluded by plan.rows",
    }
    assert {row: why for row, why in told.items() if row not in held} == {
        row: why for row, why in own.items() if row not in held
    }
    some = job_of(tmp_path, sample, source, plan={"batch_size": 2, "rows": {"include": [1, 2, 8]}}, evals={})
    told, _, trained = untrained_of(some)
    assert trained == {1, 2, 8}
    assert told == dict.fromkeys(set(range(100)) - trained, "not in plan.rows")


def test_of_a_mixture_one_prompt_is_on_one_side_in_all_sources(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    asked = job_of(tmp_path, sample, write(tmp_path / "q.jsonl", [*map(chat, range(40))]))
    trained_questions = np.flatnonzero(~held_mask(raysvc.tokenize(asked).entries[0], 0.25)).tolist()
    names = {"a": range(60), "b": range(40, 100), "c": trained_questions[:3]}
    sources = {
        name: {"source": write(tmp_path / f"{name}.jsonl", [*map(chat, rows)]), "epochs": 1}
        for name, rows in names.items()
    }
    job = load_job(
        mixture={"sources": sources},
        tokenizer=sample["tokenizer"],
        cache={"root": str(tmp_path / "cache")},
        plan={"batch_size": 8},
        evals={"held": {"share": 0.25}},
    )
    entry = raysvc.tokenize(job)
    evaluated, trained = set(evaluated_rows(job, entry.entries)), set(trained_ids(job, entry))
    assert not evaluated & trained
    assert evaluated | trained == set(entry.row_ids().tolist())
    questions = [{entry.row(row).text.partition("?")[0] for row in side} for side in (evaluated, trained)]
    assert not questions[0] & questions[1]
    lacking = [
        name
        for name, mask in zip(names, (held_mask(one, 0.25) for one in entry.entries), strict=True)
        if not mask.any()
    ]
    assert lacking == ["c"], "an eval over a source that holds out nothing is one of the others"
    from raysvc.actors.server.entry_stream import streams_of

    stream = streams_of(serve_spec(job, entry).model_copy(update={"journal": ""}))["held"]
    seen = [
        row
        for step in range(stream.schedule.num_steps)
        for row in stream.make(step, (1,))[0].mini_batches[0].row_ids.tolist()
    ]
    assert sorted(seen) == sorted(evaluated)


def test_rows_that_the_plan_leaves_out_are_not_evaluated_either(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    source = write(tmp_path / "a.jsonl", [*map(chat, range(100))])
    held = evaluated_rows(job := job_of(tmp_path, sample, source), raysvc.tokenize(job).entries)
    plan = {"batch_size": 8, "rows": {"include": list(range(90)), "exclude": [held[0]]}}
    some = job_of(tmp_path, sample, source, plan=plan)
    assert list(evaluated_rows(some, raysvc.tokenize(some).entries)) == [row for row in held[1:] if row < 90]
    none = job_of(tmp_path, sample, source, plan={"batch_size": 8, "rows": {"exclude": list(held)}})
    with pytest.raises(PlanError, match=r"evals\.held\.share: holds out none of the rows of plan\.rows"):
        evaluated_rows(none, raysvc.tokenize(none).entries)


@pytest.mark.parametrize(
    ("share", "told"), [(1e-9, r"1e-09 holds out none of 40 rows"), (0.99999999, "leaves no row to train")]
)
def test_a_share_that_splits_nothing_is_refused_by_name(
    tmp_path: Path, sample: dict[str, str], share: float, told: str
) -> None:
    source = write(tmp_path / "a.jsonl", [*map(chat, range(40))])
    job = job_of(tmp_path, sample, source, evals={"held": {"share": share}})
    with pytest.raises(PlanError, match=rf"^evals\.held\.share: .*{told}"):
        plan_of(job, raysvc.tokenize(job))


@pytest.mark.parametrize(
    ("evals", "more", "told"),
    [
        ({"a": {}}, {}, "give one of source, share and rows"),
        ({"a": {"share": 0.1, "source": {"path": "x"}}}, {}, "give one of"),
        ({"a": {"share": 0.1, "rows": 5}}, {}, "give one of"),
        ({"a": {"rows": 0}}, {}, "greater than or equal to 1"),
        ({"a": {"rows": 5}, "b": {"share": 0.2}}, {}, r"evals\.b\.share: evals\.a holds out rows already"),
        ({"a": {"share": 1.0}}, {}, "less than 1"),
        (
            {"a": {"share": 0.1}, "b": {"share": 0.2}},
            {},
            r"evals\.b\.share: evals\.a holds out rows already",
        ),
        (
            {"a": {"share": 0.1}},
            {"source": {"path": "x", "follow": True}, "plan": {"shuffle": "window"}},
            r"evals\.a\.share: is of all rows of the sources, and one that is followed has no end",
        ),
    ],
)
def test_what_no_share_can_be_of_is_refused(evals: dict[str, Any], more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        JobConfig.model_validate({"source": {"path": "x"}, "tokenizer": "t", "evals": evals, **more})


def chosen_by_hand(entry: Entry, rows: int) -> list[bool]:
    """The rule of `rows` in plain Python, for rows that are groups."""
    held: set[int] = set()
    count, numbers = 0, []
    for table in entry.part_tables():
        for row in table.select(["input_ids", "loss_mask"]).to_pylist():
            prompt = row["input_ids"][: row["loss_mask"].index(1)]
            digest = hashlib.sha256(struct.pack(f"<{len(prompt)}i", *prompt)).hexdigest()
            numbers.append(int(digest[:16], 16))
    for number in numbers:
        if count < rows and number < 2**64 / ONE_IN:
            held.add(number)
            count += 1
    return [number in held for number in numbers]


@pytest.mark.parametrize("seed", range(3))
def test_a_number_of_rows_is_held_out_of_a_source_that_grows_and_no_row_changes_its_side(
    tmp_path: Path, sample: dict[str, str], seed: int
) -> None:
    """Rows that are appended have prompts of earlier rows too."""
    draw = np.random.default_rng(seed)
    rows = [chat(number) for number in draw.integers(0, 100, 300).tolist()]
    for number, row in enumerate(rows):
        row["messages"][0]["content"] += f" Of {number % 3}?"
    before: dict[int, bool] = {}
    for size in (120, 121, 190, 300):
        source = write(tmp_path / f"{size}.jsonl", rows[:size])
        job = job_of(tmp_path, sample, source, evals={"held": {"rows": 12}})
        entry = raysvc.tokenize(job)
        evaluated = set(evaluated_rows(job, entry.entries))
        sides = {row: row in evaluated for row in range(size)}
        assert sides.items() >= before.items()
        assert list(sides.values()) == chosen_by_hand(entry.entries[0], 12)
        asked = [
            {rows[row]["messages"][0]["content"] for row in side}
            for side in (evaluated, trained_ids(job, entry))
        ]
        assert not asked[0] & asked[1]
        assert len(evaluated) >= 12
        assert identity_of(job, entry)["evals.held.rows"] == 12
        before = sides


def test_rows_are_held_out_of_each_source_and_of_whole_pairs(tmp_path: Path, sample: dict[str, str]) -> None:
    sources = {
        name: {"source": write(tmp_path / f"{name}.jsonl", [*map(pair, some)]), "epochs": 1}
        for name, some in {"a": range(40), "b": range(20, 40)}.items()
    }
    job = load_job(
        mixture={"sources": sources},
        tokenizer=sample["tokenizer"],
        cache={"root": str(tmp_path / "cache")},
        plan={"batch_size": 8},
        evals={"held": {"rows": 3}},
    )
    entry = raysvc.tokenize(job)
    first, second = held_masks(HeldOut("held", "rows", 3), entry.entries)
    assert first[::2].tolist() == first[1::2].tolist(), "the rows of a pair are on one side"
    assert first[40:].tolist() == second.tolist(), "a prompt is on one side in both sources"
    assert min(first.sum(), second.sum()) >= 4, "two pairs of each"
    report = report_of(job, entry)
    assert report.held_rows == first.sum() + second.sum() == 2 * report.held_groups


def test_more_rows_than_a_source_can_hold_out_are_refused_with_a_number_that_works(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    source = write(tmp_path / "a.jsonl", [*map(chat, range(40))])
    job = job_of(tmp_path, sample, source, evals={"held": {"rows": 500}})
    with pytest.raises(PlanError, match=r"^evals\.held\.rows: 500 rows cannot be held out") as refused:
        plan_of(job, raysvc.tokenize(job))
    most = int(refused.value.remedy.split()[3].rstrip(","))
    job = job_of(tmp_path, sample, source, evals={"held": {"rows": most}})
    assert len(evaluated_rows(job, raysvc.tokenize(job).entries)) == most


@pytest.mark.parametrize("evals", [{"held": {"share": SHARE}}, {"held": {"rows": 5}}, {}])
def test_what_trl_trains_and_evaluates_is_what_the_plan_does(
    tmp_path: Path, sample: dict[str, str], evals: dict[str, Any]
) -> None:
    from raysvc.integrations.trl import trained_and_held

    source = write(tmp_path / "a.jsonl", [*map(chat, range(120))])
    plan = {"batch_size": 8, "rows": {"exclude": [0, 1]}}
    given = job_of(tmp_path, sample, source, plan=plan, evals=evals)
    job = job_of(tmp_path, sample, source, plan=plan, evals=evals or {"held": {"share": 0.05}})
    entry = raysvc.tokenize(job)
    wanted = trained_ids(job, entry), evaluated_rows(job, entry.entries)
    for half, ids in zip(trained_and_held(given), wanted, strict=True):
        assert [row["input_ids"] for row in half] == [entry.row(one)["input_ids"] for one in ids]


def test_a_share_waits_for_all_rows_and_another_share_is_another_run(
    sample: dict[str, str], tmp_path: Path
) -> None:
    job = job_of(tmp_path, sample, {"path": sample["rows"]})
    assert known_at_the_end(job) == "evals.held.share needs the prompts of all rows"
    other = job_of(tmp_path, sample, {"path": sample["rows"]}, evals={"held": {"share": 0.1}})
    assert job.run_dir != other.run_dir
