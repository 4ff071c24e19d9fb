"""Logs of a run: the list in `raysvc.training.step_log`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import FolderHeld, FolderLost, StateMismatch, StoreError
from raysvc.training.run_folder import RunFolder
from raysvc.training.step_log import NOTHING, Extent, StepLog, lines_of


def written(log: StepLog, steps: range, minis: int = 2) -> list[dict[str, int]]:
    """Append so many steps; returns their lines."""
    lines = [{"step": step, "mini": mini} for step in steps for mini in range(minis)]
    for line in lines:
        log.append(line)
    return lines


def bytes_of(lines: list[dict[str, int]]) -> bytes:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def test_a_resume_keeps_what_the_checkpoint_counted_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    log = StepLog(path)
    lines = written(log, range(4))
    kept = log.extent
    assert kept == (len(bytes_of(lines)), xxhash.xxh3_128_hexdigest(bytes_of(lines)))
    written(log, range(4, 5))
    log.close()
    with path.open("a") as file:
        file.write('{"step":5,"mini":0}\n{"step":5,"mi')  # killed while it wrote
    log = StepLog(path, kept)
    lines += written(log, range(4, 6))
    log.close()
    assert path.read_bytes() == bytes_of(lines)
    assert log.extent == (len(bytes_of(lines)), xxhash.xxh3_128_hexdigest(bytes_of(lines)))
    assert list(lines_of(path, log.extent)) == lines


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a digit": lambda data: data.replace(b'"step":1', b'"step":3', 1),
    "a bit of the last line end": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut by a byte": lambda data: data[:-1],
    "cut by a line": lambda data: b"".join(data.splitlines(keepends=True)[:-1]),
    "a hole": lambda data: b"".join(data.splitlines(keepends=True)[:2] + data.splitlines(keepends=True)[4:]),
    "a line twice": lambda data: data.splitlines(keepends=True)[0] + data,
    "empty": lambda data: b"",
    "gone": lambda data: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_log_that_is_not_what_was_written_below_the_checkpoint_is_refused_by_name_and_left_as_it_is(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "rows.jsonl"
    log = StepLog(path)
    older, _ = (written(log, range(1)), log.sync())
    first, _ = log.extent, written(log, range(1, 4))
    log.close()
    good, bad = path.read_bytes(), DAMAGES[damage](path.read_bytes())
    path.unlink() if bad is None else path.write_bytes(bad)
    for reading in (lambda: StepLog(path, log.extent), lambda: list(lines_of(path, log.extent))):
        with pytest.raises(
            StateMismatch, match=r"rows\.jsonl: (has \d+ of the|is damaged|is not there).*restore the file"
        ):
            reading()
        assert [each.read_bytes() for each in tmp_path.iterdir()] == [bad][: bad is not None]
    if bad is not None and bad.startswith(bytes_of(older)):
        StepLog(path, first).close()  # what a checkpoint before it counted is whole
        assert path.read_bytes() == bytes_of(older)
    path.write_bytes(good)
    StepLog(path, log.extent).close()


@given(
    lives=st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 60), st.integers(0, 9)),
        min_size=1,
        max_size=5,
    ),
    damaged=st.integers(0, 10_000),
    bit=st.integers(0, 7),
)
@settings(deadline=None)
def test_random_lives_of_a_log_end_as_one_undisturbed_and_any_bit_below_the_checkpoint_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    lives: list[tuple[list[int], int, int]],
    damaged: int,
    bit: int,
) -> None:
    """A life resumes at any checkpoint there is, saves several, and is killed anywhere in what it wrote after the last."""
    path = tmp_path_factory.mktemp("lives") / "rows.jsonl"
    saved: list[tuple[Extent, list[dict[str, int]]]] = [(NOTHING, [])]
    for saves, torn, back in lives:
        del saved[len(saved) - back % len(saved) :]  # a later checkpoint was damaged, and put away
        kept, lines = saved[-1]
        log, lines = StepLog(path, kept), list(lines)
        for steps in saves:
            begin = lines[-1]["step"] + 1 if lines else 0
            lines += written(log, range(begin, begin + steps))
            assert log.extent == (len(bytes_of(lines)), xxhash.xxh3_128_hexdigest(bytes_of(lines)))
            saved.append((log.extent, list(lines)))
        covered = path.stat().st_size
        written(log, range(100, 103))
        log.close()
        os.truncate(path, min(covered + torn, path.stat().st_size))
    kept, lines = saved[-1]
    assert path.read_bytes().startswith(bytes_of(lines))
    if kept.num_bytes:
        data = bytearray(path.read_bytes())
        data[damaged % kept.num_bytes] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(StateMismatch, match=r"rows\.jsonl: is damaged"):
            StepLog(path, kept)
        assert path.read_bytes() == data
        data[damaged % kept.num_bytes] ^= 1 << bit
        path.write_bytes(data)
    StepLog(path, kept).close()
    assert path.read_bytes() == bytes_of(lines)
    assert os.listdir(path.parent) == ["rows.jsonl"], "a draft was left"


def test_a_resume_reads_a_large_log_once_and_never_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    log = StepLog(path)
    for step in range(300):
        log.append({"step": step, "row_ids": "x" * 100_000})
    log.close()

    def read_bytes() -> int:
        return int(
            Path("/proc/self/io").read_text().split()[1]
        )  # rchar: what all reads of this process asked for

    tracemalloc.start()
    before = read_bytes()
    StepLog(path, log.extent).close()
    read, (_, most) = read_bytes() - before, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert log.extent.num_bytes <= read < 1.1 * log.extent.num_bytes
    assert most < 0.2 * log.extent.num_bytes


@pytest.mark.parametrize(
    "damage", [b"\0" * 19 + b"\n", b'{"step":1,"mi\n', b"[1]\n", b'{"step":"x"}\n', b"\xff\n"]
)
def test_a_reader_passes_over_a_torn_end_and_names_a_damaged_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [{"step": step} for step in range(4)]
    path.write_bytes(bytes_of(lines) + b'{"step":4')
    assert list(lines_of(path)) == lines
    kept = path.read_bytes().splitlines(keepends=True)
    kept[3] = damage
    path.write_bytes(b"".join(kept))
    with pytest.raises(StateMismatch, match=r"rows\.jsonl: has a damaged line 4; restore"):
        list(lines_of(path))


def test_a_process_that_slept_writes_into_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    sleeper = StepLog(path)
    sleeper.append({"step": 0, "mini": 0})
    successor = StepLog(path, sleeper.extent)
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
    log, count, kept = StepLog(path), 0, NOTHING

    def fill() -> None:
        nonlocal count, kept
        while count < 2000:
            log.append({"step": count, "row_ids": list(range(50))})
            count, kept = count + 1, log.extent

    with pytest.raises(StoreError, match=r"rows\.jsonl: cannot be written .*No space left.*make room"):
        fill()
    log.close()
    assert log.extent == (path.stat().st_size, xxhash.xxh3_128_hexdigest(path.read_bytes())), (
        "the torn line counts"
    )
    ballast.unlink()
    again = StepLog(path, kept)
    again.append({"step": count})
    again.close()
    assert [line["step"] for line in lines_of(path, again.extent)] == list(range(count + 1))


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
