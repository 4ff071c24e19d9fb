"""What trackers are told of a whole run, and of a loop of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ray


def make_job(folder: Path, sample: dict[str, str], name: str, **trainer: Any) -> dict[str, Any]:
    return {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 16},
        "server": {"name": name},
        "trainer": {"model": "tiny", "run_dir": str(folder / name), **trainer},
    }


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


@pytest.mark.slow
def test_a_run_and_what_continues_it_are_one_run_of_its_tracker(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc

    evals = {"valid": {"source": {"path": sample["rows"]}}}
    job = {
        **make_job(tmp_path, sample, "told", report_to="tensorboard", eval_every_steps=2, max_steps=5),
        "evals": evals,
    }
    folder = tmp_path / "told"
    asked = iter([False, False, True])
    raysvc.train(job, should_stop=lambda: next(asked))  # ends after three of five steps, as Ctrl-C does
    summary = raysvc.train(job).metrics
    assert summary["report_to"] == {"tensorboard": "ok"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name, key in {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}.items():
        told = scalars(folder, f"train/{name}")
        assert told == [(line["step"] + 1, pytest.approx(line[key], rel=1e-6)) for line in lines], name
    seen = scalars(folder, "train/num_input_tokens_seen")
    assert seen[-1][1] == sum(line["input_tokens"] for line in lines)
    evaluated = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    told = scalars(folder, "eval/valid_loss")
    assert told == [(line["step"] + 1, pytest.approx(line["loss"], rel=1e-6)) for line in evaluated]


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append((step, metrics))

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("eval", step, metrics))

    def on_checkpoint(self, step: int, folder: str) -> None:
        self.calls.append(("checkpoint", step, folder))

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None:
        self.calls.append(("end", finished))


def test_a_loop_of_ones_own_tells_its_trackers_with_its_commits(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server

    own = Recorder()
    server = raysvc.serve(make_job(tmp_path, sample, "loop"), detached=False)
    client = raysvc.attach("loop")
    reporter = client.report_to("tensorboard", own, folder=tmp_path / "loop")
    tokens = []
    for step in client:
        tokens.append(sum(int(mini.info.lengths.sum()) for mini in step.mini_batches if mini.info))
        with pytest.raises(raysvc.errors.ConfigError, match="'high' is not a number"):
            client.commit(step.index, metrics={"loss": "high"})  # type: ignore[dict-item]
        client.commit(step.index, metrics={"loss": 4.0 - step.index})
    reporter.on_eval(15, {"eval_loss": 1.0})
    client.detach()
    steps = server.schedule.num_steps
    assert scalars(tmp_path / "loop", "train/loss") == [(k + 1, 4.0 - k) for k in range(steps)]
    assert scalars(tmp_path / "loop", "train/epoch")[-1] == (steps, 1.0)
    assert scalars(tmp_path / "loop", "train/num_input_tokens_seen")[-1] == (steps, sum(tokens))
    assert [call for call in own.calls if call[0] in ("eval", "end")] == [
        ("eval", 15, {"eval_loss": 1.0}),
        ("end", True),
    ]
    assert reporter.outcome() == {"tensorboard": "ok", "Recorder": "ok"}
    stop_server("loop")


def test_ranks_above_zero_report_nothing(tmp_path: Path, sample: dict[str, str], ray_session: None) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server

    server = raysvc.serve(make_job(tmp_path, sample, "ranks"), detached=False)
    with raysvc.attach_rank("ranks", 2, rank=1, group="g") as client:
        reporter = client.report_to("tensorboard", folder=tmp_path / "ranks")
        reporter.on_step(1, {"loss": 1.0})
    assert not (tmp_path / "ranks" / "tensorboard").exists()
    stop_server("ranks")  # its handle, which keeps it, ends after that
    del server
