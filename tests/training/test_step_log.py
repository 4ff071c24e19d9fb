"""Logs of a run: the list in `raysvc.training.step_log`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.errors import FolderHeld, FolderLost, StateMismatch, StoreError
from raysvc.training.run_folder import RunFolder
from raysvc.training.run_log import refuse_rows_that_differ
from raysvc.training.step_log import StepLog, lines_of


def rows_log(path: Path, steps: int, minis: int = 2) -> list[dict[str, int]]:
    """A log of so many steps; returns its lines."""
    lines = [{"step": step, "mini": mini} for step in range(steps) for mini in range(minis)]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return lines


def go_on(path: Path, step: int) -> None:
    StepLog(path, step, every_step=True).close()


def test_a_resume_keeps_the_lines_below_its_step_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = rows_log(path, 5)
    with path.open("a") as file:
        file.write('{"step":5,"mini":0}\n{"step":5,"mi')  # killed while it wrote
    log = StepLog(path, 4, every_step=True)
    log.append({"step": 4, "mini": 0})
    log.close()
    assert list(lines_of(path)) == [*lines[:8], {"step": 4, "mini": 0}]


@given(cut=st.integers(0, 3 * 2 * 20), start=st.integers(0, 3))
def test_a_log_that_was_cut_anywhere_goes_on_whole_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: int, start: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    lines = rows_log(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    there = whole[:cut].count(b"\n")
    try:
        go_on(path, start)
    except StateMismatch:
        assert there < 2 * start, "it was refused, and nothing is missing"
        assert path.read_bytes() == whole[:cut], "it was changed"
    else:
        assert there >= 2 * start - 1
        if there >= 2 * start:
            assert list(lines_of(path)) == lines[: 2 * start]


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (slice(2, 4), "goes from step 0 to step 2"),  # a step
        (slice(2, 3), "goes from step 0 to step 1 without"),  # its first half
        (slice(6, 8), "lacks step 3, and the checkpoint has 4"),
        (slice(0, 2), "goes from step -1 to step 1|without"),
    ],
)
def test_a_hole_below_the_checkpoint_is_refused_by_name(tmp_path: Path, lost: slice, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows_log(path, 4)
    kept = path.read_text().splitlines(keepends=True)
    del kept[lost]
    path.write_text("".join(kept))
    with pytest.raises(StateMismatch, match=rf"rows\.jsonl: ({said}).*restore the file"):
        go_on(path, 4)


def test_a_row_log_that_lacks_the_last_mini_batch_of_a_step_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    rows_log(run.rows, 3)
    run.metrics.write_text("".join(json.dumps({"step": step, "minis": 2}) + "\n" for step in range(3)))
    refuse_rows_that_differ(run)
    run.rows.write_text("".join(run.rows.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(StateMismatch, match=r"rows\.jsonl: has 1 lines of step 2, and metrics\.jsonl says 2"):
        refuse_rows_that_differ(run)


def test_a_log_that_is_not_there_is_a_hole_too(tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match="is not there, and the checkpoint has 3 steps"):
        go_on(tmp_path / "rows.jsonl", 3)
    StepLog(tmp_path / "evals.jsonl", 3).close()


@pytest.mark.parametrize(
    "damage", [b"\0" * 19 + b"\n", b'{"step":1,"mi\n', b"[1]\n", b'{"step":"x"}\n', b"\xff\n"]
)
def test_a_damaged_line_is_refused_by_name_below_the_checkpoint_and_dropped_above_it(
    tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = rows_log(path, 4)
    kept = path.read_bytes().splitlines(keepends=True)
    kept[3] = damage
    path.write_bytes(b"".join(kept))
    with pytest.raises(StateMismatch, match=r"rows\.jsonl: has a damaged line 4; restore"):
        list(lines_of(path))
    with pytest.raises(StateMismatch, match=r"rows\.jsonl: (has a torn line of step 1|lacks step)"):
        go_on(path, 3)
    go_on(path, 1)
    assert list(lines_of(path)) == lines[:2]


def test_a_torn_line_of_an_eval_below_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evals.jsonl"
    path.write_text('{"step":1,"eval":"a"}\n{"step":3,"ev')
    with pytest.raises(StateMismatch, match="torn line of step 3, and the checkpoint has 4"):
        StepLog(path, 4)
    StepLog(path, 3).close()
    assert [line["step"] for line in lines_of(path)] == [1]


def test_a_process_that_slept_writes_into_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sleeper = StepLog(path, 0, every_step=True)
    sleeper.append({"step": 0, "mini": 0})
    successor = StepLog(path, 1, every_step=True)
    sleeper.append({"step": 1, "mini": 0, "by": "sleeper"})
    successor.append({"step": 1, "mini": 0, "by": "successor"})
    sleeper.append({"step": 2, "mini": 0, "by": "sleeper"})
    assert [line.get("by") for line in lines_of(path)] == [None, "successor"]
    sleeper.close()
    successor.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_said_with_its_file_and_the_log_goes_on_when_there_is_room(small_disk: Path) -> None:
    path = small_disk / "rows.jsonl"
    (ballast := small_disk / "ballast").write_bytes(b"x" * 40_000)
    log, written = StepLog(path, 0, every_step=True), 0

    def fill() -> None:
        nonlocal written
        while written < 2000:
            log.append({"step": written, "row_ids": list(range(50))})
            written += 1

    with pytest.raises(StoreError, match=r"rows\.jsonl: cannot be written .*No space left.*make room"):
        fill()
    log.close()
    ballast.unlink()
    again = StepLog(path, written, every_step=True)
    again.append({"step": written})
    again.close()
    assert [line["step"] for line in lines_of(path)] == list(range(written + 1))


def test_who_trains_in_a_folder_that_was_taken_or_moved_publishes_and_prunes_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with run.held():
        kept = run.new_checkpoint(1)
        run.publish(kept, {"n": 1})
        late = run.new_checkpoint(2)
        run.path.rename(tmp_path / "moved")
        successor = RunFolder(tmp_path / "run")
        with successor.held():
            shutil.copytree(tmp_path / "moved" / "checkpoints", run.path / "checkpoints")
            for change in (
                lambda: run.publish(late, {"n": 2}),
                lambda: run.prune(1),
                lambda: run.write_summary({}),
            ):
                with pytest.raises(FolderLost, match=r"run: trainer 'run'.*moved or deleted, or another"):
                    change()
            assert [checkpoint.folder for checkpoint in successor.checkpoints()] == [kept]
            assert late.exists()
            assert not (run.path / "summary.json").exists()
            with pytest.raises(FolderHeld), RunFolder(tmp_path / "run").held():
                pass
            successor.prune(1)
            assert not late.exists()


def test_a_checkpoint_whose_state_is_there_is_not_written_over(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    folder = run.new_checkpoint(1)
    run.publish(folder, {"by": "first"})
    with pytest.raises(StoreError, match="File exists"):
        run.publish(folder, {"by": "second"})
    assert [checkpoint.state for checkpoint in run.checkpoints()] == [{"by": "first"}]
    assert os.listdir(folder).count("state.json") == 1
