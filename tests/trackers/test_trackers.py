"""Trackers, offline: what was told is read back by each package's own reader, or from its file."""

from __future__ import annotations

import json
import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from raysvc.errors import ConfigError
from raysvc.trackers.known_trackers import CLASSES, check_installed
from raysvc.trackers.reporter import Reporter, open_reporter
from raysvc.trackers.tracker import tracked_run, under_headings, without_secrets

STEPS = {1: {"loss": 3.5, "learning_rate": 1e-3}, 2: {"loss": 2.5, "learning_rate": 5e-4}}
EVAL = {"eval_valid_loss": 2.25}
CONFIG = {
    "plan": {"seed": 7},
    "cache": {"root": "s3://user:secret@host/x", "storage_options": {"key": "secret"}},
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    yield
    if "wandb" in sys.modules:  # its settings are read once, and its service is a process
        sys.modules["wandb"].teardown()


def report(
    name: str, folder: Path, steps: Mapping[int, Mapping[str, float]], *, done: int = 0, end: bool
) -> str:
    """Tell a tracker of some steps; returns the id of the run."""
    run = tracked_run(folder, "a run", CONFIG, done)
    reporter = open_reporter([name], run)
    for step, metrics in steps.items():
        reporter.on_step(step, metrics)
    reporter.on_eval(max(steps), EVAL)
    reporter.on_checkpoint(max(steps), "/runs/a/checkpoints/step-2")
    reporter.on_end({"train_loss": 3.0} if end else {}, finished=end)
    assert reporter.outcome() == {name: "ok"}
    return run.id


def test_names_are_those_that_hfs_trainer_shows() -> None:
    from transformers.integrations.integration_utils import rewrite_logs

    logs = {
        "loss": 1.0,
        "grad_norm": 2.0,
        "epoch": 0.5,
        "eval_loss": 1.0,
        "eval_valid_loss": 3.0,
        "train_loss": 4.0,
    }
    assert under_headings(logs) == rewrite_logs(logs)


def test_tensorboards_own_reader_finds_every_number_and_a_run_that_goes_on_replaces_its_last_steps(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report("tensorboard", tmp_path, {**STEPS, 3: {"loss": 9.0}}, end=False)
    # killed after step 3, its checkpoint is of step 2
    report("tensorboard", tmp_path, {3: {"loss": 1.5}}, done=2, end=True)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(1, 3.5), (2, 2.5), (3, 1.5)]
    assert found.Scalars("eval/valid_loss")[-1].value == 2.25
    assert [round(event.value, 6) for event in found.Scalars("train/learning_rate")] == [1e-3, 5e-4]


@pytest.mark.parametrize("store", ["file", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_mlflow_has_the_run_once_with_its_metrics_and_params(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    from mlflow import MlflowClient

    if store == "file":
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    report("mlflow", tmp_path, STEPS, end=False)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("raysvc").experiment_id
    assert [run.info.status for run in client.search_runs([experiment])] == ["KILLED"]
    report("mlflow", tmp_path, {3: {"loss": 1.5}}, done=2, end=True)
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 3.5),
        (2, 2.5),
        (3, 1.5),
    ]
    assert run.data.metrics["eval_valid_loss"] == 2.25
    assert run.data.params == {"plan.seed": "7", "cache.root": "s3://***@host/x"}
    assert run.data.tags["checkpoint"] == "/runs/a/checkpoints/step-2"


def test_trackio_has_one_run_in_its_database(tmp_path: Path) -> None:
    # in a process of its own: the package reads TRACKIO_DIR when it is imported
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_trackers as t; from pathlib import Path;"
        "t.report('trackio', Path(sys.argv[2]), t.STEPS, end=False);"
        "t.report('trackio', Path(sys.argv[2]), {3: {'loss': 1.5}}, done=2, end=True)"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
    connection.close()
    assert len({name for name, _, _ in rows}) == 1
    assert [(step, "train/loss" in json.loads(text)) for _, step, text in rows] == [
        (1, True),
        (2, True),
        (2, False),
        (3, True),
        (3, False),
    ]


def wandb_history(folder: Path) -> list[dict[str, str]]:
    """Items of the history in the offline files of a folder, in order, read by the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
                }
                found.append({"run": path.stem, **items})
    return found


def leveldb_records(data: bytes) -> list[bytes]:
    """Blocks of 32 KiB after a header of 7 bytes in the first; a record is checksum (4), length (2), kind (1), bytes."""
    found, open_, at = [], b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body = data[at + 7 : at + 7 + length]
        at += 7 + length
        open_ = body if kind in (1, 2) else open_ + body
        if kind in (1, 4):
            found.append(open_)
    return found


def test_wandb_writes_its_offline_file_and_goes_on_under_the_same_id(tmp_path: Path) -> None:
    import wandb

    one = report("wandb", tmp_path, STEPS, end=False)
    wandb.teardown()  # as the end of a process does: its service writes behind
    two = report("wandb", tmp_path, {3: {"loss": 1.5}}, done=2, end=True)
    wandb.teardown()
    assert one == two
    history = wandb_history(tmp_path)
    assert {line["run"] for line in history} == {f"run-{one}"}
    losses = [
        (int(line["train/global_step"]), float(line["train/loss"]))
        for line in history
        if "train/loss" in line
    ]
    assert losses == [(1, 3.5), (2, 2.5), (3, 1.5)]
    assert [line["eval/valid_loss"] for line in history if "eval/valid_loss" in line] == ["2.25", "2.25"]


def test_wandb_disabled_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    report("wandb", tmp_path, STEPS, end=True)
    assert wandb_history(tmp_path) == []


class Recorder:
    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails_at = fails_at

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("step", step, metrics))
        if step == self._fails_at:
            raise ConnectionError("no route to host\nand more lines")

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("eval", step, metrics))

    def on_checkpoint(self, step: int, folder: str) -> None:
        self.calls.append(("checkpoint", step, folder))

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None:
        self.calls.append(("end", metrics, finished))


def test_a_tracker_that_raises_is_told_nothing_more_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Recorder(fails_at=2), Recorder()
    reporter = Reporter({"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            reporter.on_step(step, {"loss": 1.0})
        reporter.on_end({}, finished=True)
        reporter.on_end({}, finished=False)
        reporter.on_step(4, {})
    assert [call[1] for call in bad.calls] == [1, 2]
    assert [call[0] for call in good.calls] == ["step", "step", "step", "end"]
    assert reporter.outcome() == {
        "bad": "failed in on_step after step 2: ConnectionError: no route to host",
        "good": "ok",
    }
    assert len(caplog.records) == 1


def test_a_tracker_that_hangs_costs_the_caller_nothing_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raysvc.trackers.reporter.CLOSE_TIMEOUT_S", 0.05)
    go_on = threading.Event()

    class Hangs(Recorder):
        def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
            go_on.wait(60)

    reporter = Reporter({"slow": Hangs()})
    reporter.on_step(1, {})  # returns
    reporter.on_end({}, finished=True)
    go_on.set()
    assert reporter.outcome()["slow"].startswith("did not end")


def test_what_is_missing_or_unknown_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # what a run of wandb leaves in a folder is not the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"wandb is not installed; pip install 'raysvc\[wandb\]'"):
        check_installed(["wandb"])
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord'; give one of wandb, tensorboard"):
        check_installed(["tensorbord"])


def test_a_tracker_that_cannot_be_opened_closes_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    first = Recorder()
    with pytest.raises(ConfigError, match=r"mlflow: .*leave mlflow out"):
        open_reporter([first, "mlflow"], tracked_run(tmp_path))
    assert first.calls == [("end", {}, False)]


def test_every_tracker_has_an_extra_of_its_name() -> None:
    import tomllib

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(CLASSES) <= set(extras)


def test_no_secret_reaches_a_tracker() -> None:
    assert "secret" not in repr(without_secrets(CONFIG))
