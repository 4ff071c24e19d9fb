"""Training and serving while the entry is built: the list in `raysvc.builds.build_beside`, with real builds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

import raysvc
from raysvc.actors.launch import stop_server
from raysvc.api import cache_root, entry_or_build, serve_entry
from raysvc.builds import build_beside
from raysvc.builds.build_beside import BuildBeside
from raysvc.builds.find_or_build import begin
from raysvc.builds.job_plan import plan_of
from raysvc.builds.lookup import look
from raysvc.builds.places import in_cluster, in_this_process
from raysvc.cache.find import find_entry
from raysvc.cache.store.open import open_store
from raysvc.errors import ServerError, StepFailed
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.progress import silent
from raysvc.row_ids import written

from .test_windowed_job import conversations, job_file

PLAN = {"batch_size": 8, "mini_batch_size": 4, "shuffle": "window(3)", "epochs": 2, "layout": "packed"}
PLAN["micro_batch_tokens"] = 512


def windowed(folder: Path, sample: dict[str, str], name: str, root: str, /, **sections: Any) -> Path:
    rows = folder / "talk.jsonl"
    if not rows.exists():
        conversations(folder, "talk", 60, 3)
    trainer = {"dp_size": 2, "model": "tiny", "run_dir": str(folder / name), "checkpoint_every_steps": 3}
    place = folder / name
    place.mkdir(exist_ok=True)
    more = {
        "plan": PLAN,
        "server": {"name": name},
        "trainer": trainer,
        "cache": {"root": str(folder / root)},
    }
    path = job_file(folder, sample, rows, **{**more, **sections})
    return path.rename(place / "job.yaml")


def logged(folder: Path, name: str) -> tuple[list[str], list[tuple[float, int]]]:
    """Row log, and loss and tokens of every step."""
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return (folder / name / "rows.jsonl").read_text().splitlines(), [
        (one["loss"], one["tokens"]) for one in lines
    ]


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_trains_while_its_entry_is_built_and_both_are_what_they_would_be(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    ahead = windowed(tmp_path, sample, "ahead", "ahead-cache")
    built = raysvc.tokenize(load_job(ahead))
    whole = raysvc.train(ahead).metrics
    assert whole["cache"]["hit"]
    beside = raysvc.train(windowed(tmp_path, sample, "beside", "beside-cache")).metrics
    assert not beside["cache"]["hit"]
    assert logged(tmp_path, "ahead") == logged(tmp_path, "beside")
    entry = find_entry(open_store(str(tmp_path / "beside-cache")), built.key)
    assert entry is not None
    assert entry.table().equals(built.table())
    sums = [[part.checksum for part in one.manifest.parts] for one in (entry, built.entries[0])]  # type: ignore[union-attr]
    assert sums[0] == sums[1]
    hit = raysvc.train(windowed(tmp_path, sample, "hit", "beside-cache")).metrics
    assert hit["cache"]["hit"]
    assert logged(tmp_path, "hit") == logged(tmp_path, "ahead")


@pytest.mark.parametrize("position", [0.0, 0.7])
def test_the_first_slice_is_made_before_there_is_a_cluster_and_kept_by_the_build(
    tmp_path: Path, sample: dict[str, str], position: float
) -> None:
    slices = {"slice_mb": conversations(tmp_path, "talk", 60, 3).stat().st_size / 6 / 1e6}
    job = load_job(windowed(tmp_path, sample, "first", "first-cache", workers=slices))
    entry, build = entry_or_build(job, None, silent)
    assert build is not None
    plan = plan_of(job, entry)
    step = int(position * plan.schedule.num_steps)
    [first, *others] = plan.order.needs_from(plan.schedule.epoch_of(step), plan.schedule.position_of(step))[0]
    assert others
    build.make_first(job, step)
    entry.entries[0].wait_for([first])  # type: ignore[union-attr]
    assert not any(entry.entries[0].has([one]) for one in others)  # type: ignore[union-attr]
    made = entry.entries[0].parts.parts[first].name  # type: ignore[union-attr]
    build.stop()
    assert raysvc.tokenize(job).entries[0].manifest.parts[first].name == made  # type: ignore[union-attr]


start = BuildBeside.start
# of every process: a slice takes longer, and of an entry that has so many no further one is made
SLOW = """
import importlib.util, sys, time
class Slow:  # it stays: another thread that imports goes through the list, and would miss a finder
    asked = False
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "raysvc.pipelines.tokenize" or Slow.asked:
            return None
        Slow.asked = True
        found = importlib.util.find_spec(name)
        run = found.loader.exec_module
        found.loader.exec_module = lambda module: (run(module), patch(module))
        return found
def patch(module):
    build = module.build_slice
    def slow(task, *arguments):
        time.sleep(0.3)
        while sum(one.startswith("receipt-") for one in task.writer.store.list(task.writer.folder)) >= MOST:
            time.sleep(0.1)
        return build(task, *arguments)
    module.build_slice = slow
sys.meta_path.insert(0, Slow)
"""

KILLED = """
import os, signal, sys
import ray, raysvc
from raysvc.actors.launch import find_server
from raysvc.pipelines.shared_build import NAMESPACE
steps = []
def stop():
    steps.append(1)
    if sys.argv[2] == "trainer":
        if len(steps) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return False
    if len(steps) == 4:
        ray.kill(find_server("killed"), no_restart=False)
    if len(steps) == 6:
        for one in ray.util.list_named_actors(all_namespaces=True):
            if one["namespace"] == NAMESPACE:
                ray.kill(ray.get_actor(one["name"], namespace=NAMESPACE))
                print("killed the builder")
    return False
print(raysvc.train(sys.argv[1], should_stop=stop).metrics["stalls"]["by_cause"])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_kills_of_trainer_server_and_builder_change_no_step(
    tmp_path: Path, sample: dict[str, str], shared: bool
) -> None:
    """Of 100 slices 60 are made at most, however slow the steps are: 26 of them are for the 24 that are trained.

    A private entry of a trainer that was killed is lost to the next one, which begins another with the same rows.
    """
    rows = conversations(tmp_path, "talk", 4000, 1)
    plan = {"batch_size": 40, "shuffle": "window(2)", "epochs": 1}
    trainer = {
        "dp_size": 1,
        "model": "tiny",
        "checkpoint_every_steps": 4,
        "max_steps": 24,
        "lr_schedule": "cosine",
    }
    slices = {"slice_mb": rows.stat().st_size / 100 / 1e6}

    def job(name: str) -> Path:
        own = {**trainer, "run_dir": str(tmp_path / name)}
        root = {"root": str(tmp_path / "killed-cache"), "enabled": shared or name == "ahead"}
        sections = {"plan": plan, "workers": slices, "trainer": own, "cache": root}
        return windowed(tmp_path, sample, name, "killed-cache", **sections)

    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW.replace("MOST", "60"))
    environment = {
        **os.environ,
        "RAY_ADDRESS": "local",
        "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
    }

    def run(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(job("killed")), what]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)

    died = run("trainer")
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert list((tmp_path / "killed-cache").glob("*/receipt-*")), "steps were trained without rows"
    assert not list((tmp_path / "killed-cache").glob("*/manifest.json")), "the build should be in its middle"
    went_on = run("others")
    assert went_on.returncode == 0, went_on.stderr
    assert "killed the builder" in went_on.stdout
    entry = raysvc.tokenize(load_job(job("ahead")))  # goes on with what the runs have built
    assert len(entry.entries[0].manifest.parts) > 90  # type: ignore[union-attr]
    plan = plan_of(load_job(job("ahead")), entry)
    lines = [json.loads(line) for line in logged(tmp_path, "killed")[0]]
    assert [(line["step"], line["mini"]) for line in lines] == [(step, 0) for step in range(24)]
    for line in lines:
        assert line["row_ids"] == list(
            map(written, plan.step(line["step"], 1).mini_batches[0].row_ids.tolist())
        )


@pytest.mark.ray
@pytest.mark.slow
def test_a_build_that_fails_ends_the_run_with_its_own_error(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    conversations(tmp_path, "talk", 60, 3)
    rows = tmp_path / "talk.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text("".join(line + "\n" if n % 2 else "not json\n" for n, line in enumerate(lines)))
    with pytest.raises(raysvc.errors.QuarantineExceeded):
        raysvc.train(windowed(tmp_path, sample, "bad", "bad-cache"))


@pytest.mark.ray
def test_a_server_answers_while_its_entry_is_built_and_says_what_a_finished_one_says(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    job = windowed(tmp_path, sample, "served", "served-cache")
    handle = raysvc.serve(job)
    try:
        assert handle.build is not None
        with raysvc.attach("served", dp_size=2) as client:
            rows = [
                [mini.info.row_ids.tolist() for mini in step.mini_batches if mini.info] for step in client
            ]
        handle.build.wait()
    finally:
        stop_server("served")
    again = raysvc.serve(job)
    try:
        assert again.build is None
        assert again.schedule == handle.schedule
        with raysvc.attach("served", dp_size=1) as client:
            client.rewind(0)
            assert rows == [
                [mini.info.row_ids.tolist() for mini in step.mini_batches if mini.info] for step in client
            ]
    finally:
        stop_server("served")


@pytest.mark.ray
def test_a_server_that_was_told_of_a_failed_build_waits_for_the_next_one(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    rows = conversations(tmp_path, "talk", 60, 3)
    slices = {"slice_mb": rows.stat().st_size / 6 / 1e6}
    job = load_job(windowed(tmp_path, sample, "again", "again-cache", workers=slices))
    entry, failed = entry_or_build(job, None, silent)
    assert failed is not None
    try:
        failed.make_first(job, 0)
        handle = serve_entry(job, entry, detached=True)
        failed.stop()
        ray.get(handle.actor.end_build.options(concurrency_group="control").remote("the disk is full"))
        with raysvc.attach("again", dp_size=1) as client, pytest.raises(StepFailed, match="the disk is full"):
            list(client)
        next_one = raysvc.serve(job)
        with raysvc.attach("again", dp_size=1) as client:
            client.rewind(0)
            assert len(list(client)) == handle.schedule.num_steps
        assert next_one.build is not None
        next_one.build.wait()
    finally:
        stop_server("again")


@pytest.mark.ray
def test_a_server_that_is_refused_leaves_no_build_behind(
    tmp_path: Path, sample: dict[str, str], serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("refused", 20)
    begun: list[BuildBeside] = []

    def begin_here(build: BuildBeside, *arguments: Any) -> None:
        begun.append(build)
        start(build, *arguments)

    def slow(workers: Any, **options: Any) -> Any:
        def make(*arguments: Any) -> Any:
            for made in in_this_process(*arguments):
                yield made
                assert begun[0]._stopping.wait(100), "nobody stops it"

        return make

    monkeypatch.setattr(BuildBeside, "start", begin_here)
    monkeypatch.setattr(build_beside, "beside", slow)
    with pytest.raises(ServerError, match="is already served"):
        raysvc.serve(windowed(tmp_path, sample, "refused", "refused-cache"))
    [build] = begun
    build.wait()
    assert not list((tmp_path / "refused-cache").glob("*/manifest.json"))
    assert not list((tmp_path / "refused-cache").glob("*/use-*")), "nobody builds"


@pytest.mark.ray
@pytest.mark.slow
def test_who_cuts_a_source_otherwise_does_not_take_slices_of_the_build_that_runs(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    size_mb = conversations(tmp_path, "talk", 60, 1).stat().st_size / 1e6

    def job(name: str, count: int) -> JobConfig:
        workers = {"slice_mb": size_mb / count, "min": 2, "max": 2}
        return load_job(windowed(tmp_path, sample, name, "cuts-cache", workers=workers))

    found = look(job("fine", 6), cache_root(job("fine", 6)))
    build = begin(found)
    slices = found.plan.source.slices
    with build.hold:
        build.start()
        running = in_cluster(None)([build], [(0, piece) for piece in slices], lambda: None)
        _, first = next(running)
        entry = raysvc.tokenize(job("coarse", 3))
        assert entry.rows.table()["source_row"].to_pylist() == list(range(60))
        assert entry.entries[0].source_rows.tolist() == [
            part.num_rows for part in entry.entries[0].manifest.parts
        ]  # type: ignore[union-attr]
        assert sorted(one.slice_index for one in (first, *(receipt for _, receipt in running))) == list(
            range(len(slices))
        )
