"""What a run says of a step of several mini-batches."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysvc.builds.cache_entry import CacheEntry
from raysvc.collate.shard import Denominators
from raysvc.errors import FolderLost, StateMismatch
from raysvc.job.trainer_config import Reduction
from raysvc.progress import silent
from raysvc.trackers.reporter import NO_TRACKERS, Reporter
from raysvc.trackers.stalls import StepTimes
from raysvc.training.loss_shares import LossShares
from raysvc.training.run_folder import Checkpoint, RunFolder
from raysvc.training.run_log import RunLog, write_summary

LOSSES = ([1.0, 2.0, 3.0], [10.0])  # of the targets of two mini-batches
ROWS = ([[1.0], [2.0, 3.0]], [[10.0]])  # the same by row


def mini(losses: list[float], num_rows: int) -> Any:
    info = SimpleNamespace(
        row_ids=np.arange(num_rows),
        lengths=np.ones(num_rows, int),
        num_cells=8,
        denominators=Denominators(tokens=len(losses), rows=num_rows, groups=num_rows),
    )
    return SimpleNamespace(info=info)


@pytest.mark.parametrize(
    ("reduction", "parts", "expected"),
    [
        ("token_mean", [np.mean(part) for part in LOSSES], np.mean(np.concatenate(LOSSES))),
        (
            "sequence_mean",
            [np.mean([np.mean(row) for row in part]) for part in ROWS],
            np.mean([np.mean(row) for part in ROWS for row in part]),
        ),
    ],
)
def test_the_loss_of_a_step_is_that_of_its_mini_batches_as_one(
    tmp_path: Path, reduction: Reduction, parts: list[float], expected: float
) -> None:
    minis = [mini(losses, len(rows)) for losses, rows in zip(LOSSES, ROWS, strict=True)]
    step: Any = SimpleNamespace(index=0, epoch=0, optimizer_steps=lambda: minis)
    reported = [
        SimpleNamespace(loss=part / 2, grad_norm=0.0, metrics={"lr": 0.1}, timing={}, rows=None)
        for part in parts
    ]
    books = RunLog(
        RunFolder(tmp_path),
        None,
        1,
        silent,
        NO_TRACKERS,
        1,
        LossShares(CacheEntry(())),
        reduction,  # type: ignore[arg-type]
    )
    results: Any = [reported, reported]  # two ranks with half of it each
    books.step(step, results, 1.0, StepTimes(0, 0.0, 0.0, 0.0, 0.0, "file"))
    books.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] == pytest.approx(expected)


def test_what_a_loss_says_of_itself_is_written_and_reported_with_its_unit(tmp_path: Path) -> None:
    told: list[dict[str, float]] = []

    class Told:
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            told.append(metrics)

    books = RunLog(
        RunFolder(tmp_path),
        None,
        1,
        silent,
        Told(),
        1,
        LossShares(CacheEntry(())),
        "group_mean",
        "pairs",  # type: ignore[arg-type]
    )
    minis = [mini([1.0] * 4, 4), mini([1.0] * 12, 12)]
    for one, groups in zip(minis, (2, 6), strict=True):
        one.info.denominators = Denominators(tokens=4, rows=2 * groups, groups=groups)
    step: Any = SimpleNamespace(index=0, epoch=0, optimizer_steps=lambda: minis)
    of_minis = [{"rewards/accuracies": 0.5, "max_reward": 7.0, "lr": 0.1, "grad_norm": 1.0},
                {"rewards/accuracies": 0.25, "max_reward": 3.0, "lr": 0.1, "grad_norm": 1.0}]  # fmt: skip
    rank = [SimpleNamespace(loss=0.5, grad_norm=1.0, metrics=each, timing={}, rows=None) for each in of_minis]
    other = [SimpleNamespace(loss=0.0, grad_norm=1.0, metrics={**each, "rewards/accuracies": 0.0}, timing={}, rows=None)
             for each in of_minis]  # fmt: skip
    books.step(step, [rank, other], 1.0, StepTimes(0, 0.0, 0.0, 0.0, 0.0, "file"))
    books.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    expected = (2 * 0.5 + 6 * 0.25) / 8
    assert (line["rewards/accuracies"], line["max_reward"], line["pairs"]) == (expected, 7.0, 8)
    assert (told[0]["rewards/accuracies"], told[0]["max_reward"]) == (expected, 7.0)
    entry: Any = SimpleNamespace(facts={}, report={}, entries=())
    assert write_summary(RunFolder(tmp_path), entry, {}, 1, None, 1.0)["pairs"] == 8


def test_a_trainer_that_wakes_after_its_successor_came_logs_and_reports_nothing(tmp_path: Path) -> None:
    """Not a step, not an eval, not a checkpoint, not an end: the successor goes on in the same run of each tracker."""
    told: list[str] = []

    class Told:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: told.append(name)

    sleeper, successor = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    reporter = Reporter({"one": Told()})  # type: ignore[dict-item]
    with sleeper.held():
        books = RunLog(sleeper, None, 3, silent, reporter, 1, LossShares(CacheEntry(())), "token_mean")
        one = mini([1.0], 1)
        rank = [SimpleNamespace(loss=1.0, grad_norm=0.0, metrics={"lr": 0.1}, timing={}, rows=None)]
        times = StepTimes(0, 0.0, 0.0, 0.0, 0.0, "file")

        def train(number: int) -> None:
            step: Any = SimpleNamespace(index=number, epoch=0, optimizer_steps=lambda: [one])
            books.step(step, [rank], 1.0, times)  # type: ignore[list-item]

        train(0)
        for path in (sleeper.path / "owners").iterdir():  # as another machine sees it after 30 s of silence
            path.unlink()
        with successor.held():
            before = {path: path.read_bytes() for path in sleeper.path.glob("*.jsonl")}
            for change in (
                lambda: train(1),
                lambda: books.evals(
                    1, [{"eval": "a", "loss": 1.0, "bits_per_byte": 1.0, "eval_s": 1.0, "rows": 1}]
                ),
                lambda: books.checkpoint(1, tmp_path),
                lambda: write_summary(sleeper, CacheEntry(()), {}, 1, None, 1.0, reporter=reporter),
            ):
                with pytest.raises(FolderLost):
                    change()
            assert {path: path.read_bytes() for path in sleeper.path.glob("*.jsonl")} == before
    books.close()
    reporter.leave()
    assert reporter.outcome() == {"one": "ok"}
    assert told == ["on_step"]


def logs_of(folder: RunFolder, checkpoint: Checkpoint | None, reporter: Any = NO_TRACKERS) -> RunLog:
    return RunLog(folder, checkpoint, 9, silent, reporter, 1, LossShares(CacheEntry(())), "token_mean")


def train(books: RunLog, steps: range) -> None:
    one = mini([1.0], 3)
    rank: Any = [SimpleNamespace(loss=1.0, grad_norm=0.0, metrics={"lr": 0.1}, timing={}, rows=None)]
    for number in steps:
        step: Any = SimpleNamespace(index=number, epoch=0, optimizer_steps=lambda: [one])
        books.step(step, [rank], 1.0, StepTimes(0, 0.0, 0.0, 0.0, 0.0, "file"))
        books.evals(number, [{"eval": "a", "loss": 1.0, "bits_per_byte": 1.0, "eval_s": 1.0, "rows": 1}])


def saved(folder: RunFolder, books: RunLog, step: int) -> Checkpoint:
    folder.publish(folder.new_checkpoint(step), {"data": {}, **books.to_state()})
    newest = folder.newest()
    assert newest is not None
    return newest


def test_a_resume_goes_on_with_the_logs_and_the_tokens_of_its_checkpoint(tmp_path: Path) -> None:
    told: list[float] = []

    class Told:
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            told.append(metrics["num_input_tokens_seen"])

        def on_eval(self, step: int, metrics: dict[str, float]) -> None:
            pass

    whole, killed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    for folder, lives in ((whole, [(0, 6)]), (killed, [(0, 4), (2, 6)])):
        checkpoint = None
        for begin, stop in lives:
            books = logs_of(folder, checkpoint, Told())
            books.served({"step": begin}) if begin == 0 else None
            train(books, range(begin, 2))
            checkpoint = saved(folder, books, 2) if begin == 0 else checkpoint
            train(books, range(max(begin, 2), stop))
            books.close()  # the steps 2 and 3 have no checkpoint
    for path in whole.path.glob("*.jsonl"):
        assert (killed.path / path.name).read_bytes() == path.read_bytes()
    assert told == [3 * steps for steps in (*range(1, 7), *range(1, 5), *range(3, 7))]


@pytest.mark.parametrize("name", ["rows.jsonl", "metrics.jsonl", "evals.jsonl", "served.jsonl"])
def test_a_changed_digit_or_an_older_copy_of_any_log_stops_a_resume_and_its_readers(
    tmp_path: Path, name: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    books = logs_of(folder, None)
    path = folder.path / name
    books.served({"step": 0})
    train(books, range(2))
    before = path.read_bytes()
    books.served({"step": 2})
    train(books, range(2, 4))
    checkpoint = saved(folder, books, 4)
    train(books, range(4, 5))
    books.close()
    good = path.read_bytes()
    at = good.index(b'"step":0') + len('"step":')
    for bad in (good[:at] + b"1" + good[at + 1 :], before, None):
        path.unlink() if bad is None else path.write_bytes(bad)
        with pytest.raises(StateMismatch, match=rf"{name}: .*(damaged|of the|not there).*restore the file"):
            logs_of(folder, checkpoint)
        with pytest.raises(StateMismatch, match=rf"{name}: "):
            list(folder.lines(path))
    path.write_bytes(good)
    assert sum(1 for _ in folder.lines(path)) == good.count(b"\n")
    logs_of(folder, checkpoint).close()


def test_a_checkpoint_of_before_the_digests_is_refused_by_name_and_its_logs_are_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    books = logs_of(folder, None)
    train(books, range(2))
    books.close()
    folder.publish(folder.new_checkpoint(2), {"data": {}})
    assert len(list(folder.lines(folder.metrics))) == 2
    with pytest.raises(
        StateMismatch, match=r"step-00000002\.\w+: was made by an earlier raysvc.*resume=false"
    ):
        logs_of(folder, folder.newest())
    assert len(list(folder.lines(folder.metrics))) == 2
