"""A run folder belongs to one job: the list in `raysvc.training.run_identity`."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raysvc.builds.cache_entry import open_entry
from raysvc.cache.local.sealed import opened
from raysvc.cache.store.open import absolute
from raysvc.errors import ConfigError, FolderHeld, StateMismatch
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.training import run_identity
from raysvc.training.run_folder import RunFolder
from raysvc.training.run_identity import FILE, claim, identity_of


def job_of(**trainer: Any) -> JobConfig:
    plan = trainer.pop("plan", {})
    return load_job(
        source={"path": "rows.jsonl"}, tokenizer="t", plan={"batch_size": 8, **plan}, trainer=trainer
    )


@pytest.fixture
def identity(entry: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    def of(num_rows: int = 40, seed: int = 0, **trainer: Any) -> dict[str, Any]:
        return identity_of(job_of(**trainer), open_entry(entry(num_rows, seed=seed)))

    return of


CHANGES = [
    ({"num_rows": 48}, r"plan.entry_keys was .*plan.num_rows was 40 and is 48"),
    ({"seed": 1}, r"plan.entry_keys was \['[0-9a-f]{16}'\] and is \['[0-9a-f]{16}'\]"),
    ({"plan": {"batch_size": 4}}, r"plan.batch_size was 8 and is 4"),
    ({"plan": {"seed": 5}}, r"plan.seed was 0 and is 5"),
    ({"model": "other/model"}, r"trainer.model was 'tiny' and is 'other/model'"),
    ({"precision": "bf16"}, r"trainer.precision was 'fp32' and is 'bf16'"),
]
GROWN = [
    ({"learning_rate": 0.5}, r"trainer.learning_rate was 0.0001 and is 0.5"),
    ({"max_steps": 9}, r"trainer.max_steps was None and is 9"),
    ({"plan": {"epochs": 7}}, r"plan.epochs was 1 and is 7"),
]


@pytest.mark.parametrize(("change", "named"), [*CHANGES, *GROWN])
def test_another_job_is_refused_with_the_fields_that_differ_and_nothing_is_rewritten(
    tmp_path: Path, identity: Callable[..., dict[str, Any]], change: dict[str, Any], named: str
) -> None:
    claim(tmp_path / "run", identity(), has_checkpoint=False, changed=False)
    before = (tmp_path / "run" / FILE).read_bytes()
    with pytest.raises(StateMismatch, match=named):
        claim(tmp_path / "run", identity(**change), has_checkpoint=True, changed=False)
    assert (tmp_path / "run" / FILE).read_bytes() == before


@pytest.mark.parametrize(("change", "named"), GROWN)
def test_a_rate_or_length_may_change_where_the_user_says_so(
    tmp_path: Path, identity: Callable[..., dict[str, Any]], change: dict[str, Any], named: str
) -> None:
    claim(tmp_path, identity(), has_checkpoint=False, changed=False)
    with pytest.raises(StateMismatch, match=r"trainer\.resume=changed"):
        claim(tmp_path, identity(**change), has_checkpoint=True, changed=False)
    claim(tmp_path, identity(**change), has_checkpoint=True, changed=True)
    assert opened((tmp_path / FILE).read_bytes()) == identity(**change)


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_other_rows_order_or_model_are_refused_whatever_the_user_says(
    tmp_path: Path, identity: Callable[..., dict[str, Any]], change: dict[str, Any], named: str
) -> None:
    claim(tmp_path, identity(), has_checkpoint=False, changed=False)
    with pytest.raises(StateMismatch, match=named):
        claim(tmp_path, identity(**change), has_checkpoint=True, changed=True)


@pytest.mark.parametrize("before", [None, 48, "damaged"])
def test_of_processes_that_begin_in_one_folder_at_the_same_time_one_wins(
    tmp_path: Path, identity: Callable[..., dict[str, Any]], before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before == "damaged":
        (tmp_path / FILE).write_text("{")
    elif before is not None:
        claim(tmp_path, identity(num_rows=before), has_checkpoint=False, changed=False)
    jobs = [identity(seed=seed) for seed in range(8)]
    all_have_read, found = threading.Barrier(len(jobs)), run_identity._found

    def read_together(folder: Path) -> bytes | None:
        content = found(folder)
        all_have_read.wait(30)
        return content

    monkeypatch.setattr(run_identity, "_found", read_together)

    def begin(job: dict[str, Any]) -> bool:
        try:
            claim(tmp_path, job, has_checkpoint=False, changed=False)
        except StateMismatch as error:
            return "another process began a run in it just now" not in str(error)
        return True

    with ThreadPoolExecutor(len(jobs)) as pool:
        won = list(pool.map(begin, jobs))
    assert won.count(True) <= 1
    if before is None:
        assert won.count(True) == 1
    if any(won):
        assert opened((tmp_path / FILE).read_bytes()) == jobs[won.index(True)]


@pytest.mark.parametrize("world", [{"dp_size": 4}, {"plan": {"micro_batch_size": 2}}, {"device": "cpu"}])
def test_ranks_devices_and_micro_batches_may_change(
    tmp_path: Path, identity: Callable[..., dict[str, Any]], world: dict[str, Any]
) -> None:
    claim(tmp_path, identity(), has_checkpoint=False, changed=False)
    claim(tmp_path, identity(**world), has_checkpoint=True, changed=False)


@pytest.mark.parametrize("damage", ["", "[1, 2]", "{"])
def test_checkpoints_of_no_known_job_are_refused(
    tmp_path: Path, identity: Callable[..., dict[str, Any]], damage: str
) -> None:
    (tmp_path / FILE).write_text(damage)
    with pytest.raises(StateMismatch, match="says of which job"):
        claim(tmp_path, identity(), has_checkpoint=True, changed=False)


def test_the_default_folder_is_the_jobs_own() -> None:
    folder = job_of().run_dir
    assert folder.startswith("runs/default-")
    assert job_of(dp_size=4, max_steps=3, resume=False).run_dir == folder
    assert job_of(plan={"micro_batch_size": 2, "epochs": 3}).run_dir == folder
    assert (
        len({folder, job_of(model="m").run_dir, job_of(plan={"seed": 1}).run_dir, job_of(seed=2).run_dir})
        == 4
    )
    assert job_of(run_dir="mine").run_dir == "mine"


def test_a_relative_path_in_the_folder_of_a_submitted_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"runs/a.*temporary folder of a submitted job.*RAYSVC_CACHE_DIR"):
        absolute("runs/a")
    assert absolute("/shared/cache") == "/shared/cache"
    assert absolute("s3://bucket/cache") == "s3://bucket/cache"


HOLDER = """
import sys, time
from raysvc.training.run_folder import RunFolder
with RunFolder(sys.argv[1]).held():
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_do_not_train_in_one_folder_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        for enter in (folder.held().__enter__, folder.set_aside):
            with pytest.raises(
                FolderHeld, match=rf"belongs to trainer 'run' \(process {holder.pid} .*wait until"
            ):
                enter()
    finally:
        holder.kill()
        holder.wait()
    with folder.held():
        assert folder.path.is_dir()
    assert folder.set_aside() == tmp_path / "run.1"


def test_keys_of_entries_alone_are_shortened() -> None:
    names = ["a name of more than sixteen letters", "a name of more than sixteen words"]
    assert run_identity._short("trainer.names", names) == repr(names)
    assert run_identity._short("plan.entry_keys", ["0123456789abcdef0123"]) == "['0123456789abcdef']"
