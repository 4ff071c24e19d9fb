"""Mixtures of which some sources are followed, or all: steps wait for the rows of each, and follow from listings and seed alone."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysvc
from raysvc import row_ids
from raysvc.api import entry_or_build
from raysvc.builds.job_plan import plan_of
from raysvc.cli.plan import _steps_there
from raysvc.errors import ConfigError, RaysvcError
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.progress import silent

from .test_follow import lines, steps_of, stream_of


def mixed(
    folder: Path, sample: dict[str, str], followed: tuple[str, ...] = ("new",), **sections: Any
) -> JobConfig:
    """Two sources: `base` comes thrice as often as `new`."""
    for name, numbers in (("base", range(30)), ("new", range(100, 107))):
        (folder / name).mkdir(exist_ok=True)
        path = folder / name / "a.jsonl"
        if not path.exists():
            path.write_text(lines(*numbers))
    sources = {
        name: {
            "source": {"path": str(folder / name), "format": "chat", "follow": name in followed},
            "weight": weight,
        }
        for name, weight in (("base", 3), ("new", 1))
    }
    job = {
        "mixture": {"sources": sources},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 4, "shuffle": "window(3)", "epochs": 2},
        "server": {"name": "mixed"},
        "trainer": {"run_dir": str(folder / "run")},
        "max_quarantine": 0.5,
        **sections,
    }
    return load_job(job)


def sources_of(ids: list[int]) -> list[int]:
    return row_ids.split(np.array(ids)).source.tolist()


def test_a_run_ends_with_the_source_that_has_an_end_and_waits_for_rows_of_the_other(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = mixed(tmp_path, sample)
    schedule = plan_of(job, raysvc.tokenize(job)).schedule
    assert schedule.num_groups == 40, "30 rows of base are three quarters"
    seen = [steps_of(job)]
    assert len(seen[0]) == 7, "a row of new in every step, and it has 7"
    (tmp_path / "new" / "b.jsonl").write_text(lines(*range(200, 208)))
    seen.append(steps_of(job))
    assert len(seen[1]) == 15
    (tmp_path / "new" / "c.jsonl").write_text(lines(*range(300, 340)))
    seen.append(steps_of(job))
    assert len(seen[2]) == schedule.num_steps == 20
    for before, after in itertools.pairwise(seen):
        assert after[: len(before)] == before
    ids = [one for step, _ in seen[2] for one in step]
    base = [one for one in ids if not sources_of([one])[0]]
    assert sorted(base[:30]) == sorted(base[30:]), "twice, once in each epoch"
    new = [one for one in ids if sources_of([one])[0]]
    assert len(set(new)) == len(new) == 20, "its rows go on through the epochs"
    places = row_ids.split(np.array(new))
    assert places.slice.tolist() == sorted(places.slice.tolist()), "listing after listing"


def test_bytes_are_those_of_the_rows_in_a_finished_entry(tmp_path: Path, sample: dict[str, str]) -> None:
    job = mixed(tmp_path, sample)
    mixture = raysvc.tokenize(job)
    alone = raysvc.tokenize(
        {
            "source": {"path": str(tmp_path / "new"), "format": "chat"},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "other")},
        }
    )
    found = {}
    for step, _ in steps_of(job, mixture):
        for row in (mixture.row(one) for one in step if sources_of([one])[0]):
            found[row["source_row"]] = {name: row[name] for name in ("input_ids", "loss_mask")}
    rows = (alone.row(f"0:0:{number}") for number in range(7))
    assert found == {
        row["source_row"]: {name: row[name] for name in ("input_ids", "loss_mask")} for row in rows
    }


def test_a_build_beside_a_run_makes_what_has_an_end_and_goes_on_with_what_has_none(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = mixed(tmp_path, sample)
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    stream = stream_of(job, entry)
    try:
        for lane in build._lanes:
            where = threading.Thread(target=build._make, args=(lane, None, _here), daemon=True)
            where.start()
        made = [stream.make(step, [2])[1] for step in range(7)]
        (tmp_path / "new" / "b.jsonl").write_text(lines(*range(200, 208)))
        made += [stream.make(step, [2])[1] for step in range(7, 15)]  # waits for the rows
        assert len(build._builds[1]._done) <= 1, "receipts of earlier rounds are let go"
    finally:
        build.stop()
    assert [[shard.digest() for shard in shards] for shards in made] == [
        digests for _, digests in steps_of(job)
    ]


def _here(builds: Any, left: Any, check: Any) -> Any:
    from raysvc.builds.places import in_this_process

    return in_this_process(builds, left, check)


def test_a_mixture_of_followed_sources_has_no_end(tmp_path: Path, sample: dict[str, str]) -> None:
    job = mixed(tmp_path, sample, ("base", "new"), plan={"batch_size": 4, "shuffle": "window(3)"})
    entry = raysvc.tokenize(job)
    plan = plan_of(job, entry)
    assert plan.schedule.is_endless
    assert _steps_there(plan, entry) == len(steps_of(job)) == 7
    with pytest.raises(ConfigError, match="max_steps"):
        raysvc.train(job)
    ids = [one for step, _ in steps_of(job) for one in step]
    assert sources_of(ids).count(0) == 21
    assert len(set(ids)) == 28


def test_a_source_that_joins_later_does_not_move_earlier_steps(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    plan = {"batch_size": 4, "shuffle": "window(3)"}
    alone = mixed(tmp_path, sample, ("base", "new"), plan=plan)
    late = alone.model_dump(mode="json", exclude_unset=True)
    late["mixture"]["sources"]["new"]["from_step"] = 3
    before, after = (steps_of(job) for job in (alone, load_job(late)))
    assert before
    assert [sources_of(ids).count(1) for ids, _ in after[:5]] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"plan": {"batch_size": 4}}, r"mixture\.sources\.new\.source\.follow needs plan\.shuffle: window"),
        ({"cache": {"enabled": False}}, r"new\.source\.follow keeps its rows"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_source(
    tmp_path: Path, sample: dict[str, str], change: dict[str, Any], what: str
) -> None:
    job = mixed(tmp_path, sample).model_dump(mode="json", exclude_unset=True)
    with pytest.raises(RaysvcError, match=what):
        load_job({**job, **change})


def test_epochs_of_a_source_without_an_end_are_refused_and_shares_of_tokens_are_not(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    """The first listing of each tells what a row has; later ones change no step."""
    job = mixed(tmp_path, sample).model_dump(mode="json", exclude_unset=True)
    passed = {name: {"source": one["source"], "epochs": 1} for name, one in job["mixture"]["sources"].items()}
    with pytest.raises(
        RaysvcError, match=r"new\.source\.follow has no number of rows; give the sources weights"
    ):
        load_job({**job, "mixture": {"sources": passed}})
    job["mixture"]["by"] = "tokens"
    shared = load_job(job)
    entry, build = entry_or_build(shared, None, silent)
    assert build is not None
    plan = plan_of(shared, entry)
    build.stop()
    finished = raysvc.tokenize(shared)
    assert plan_of(shared, finished).hash == plan.hash
    before = steps_of(shared, finished)
    (tmp_path / "new" / "b.jsonl").write_text(lines(*range(2000, 2040)))
    after = steps_of(shared)
    assert len(after) > len(before) > 0
    assert after[: len(before)] == before


def test_all_followed_sources_have_one_epoch(tmp_path: Path, sample: dict[str, str]) -> None:
    with pytest.raises(RaysvcError, match=r"base\.source\.follow has no second epoch, and plan\.epochs is 2"):
        mixed(tmp_path, sample, ("base", "new"))


def test_no_slice_that_a_later_step_has_is_left_out_wherever_a_build_begins(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = mixed(tmp_path, sample)
    for number in range(12):  # listings of three rows each
        with (tmp_path / "new" / "a.jsonl").open("a") as file:
            file.write(lines(*range(200 + 3 * number, 203 + 3 * number)))
        raysvc.tokenize(job)
    plan = plan_of(job, raysvc.tokenize(job))
    later: set[tuple[int, int]] = set()
    for step in reversed(range(plan.schedule.num_steps)):
        place = row_ids.split(plan.groups_of(step))
        later |= set(zip(place.source.tolist(), place.slice.tolist(), strict=True))
        needed = plan.order.needed(plan.schedule.epoch_of(step), plan.schedule.position_of(step))
        assert later <= set(needed), step
