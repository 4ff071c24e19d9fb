"""The whole service: rows in, a trained model and its logs out."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysvc.progress import Tick
from raysvc.row_ids import parse

pytestmark = pytest.mark.ray


def make_job(folder: Path, sample: dict[str, str], name: str, **trainer: Any) -> Path:
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 16, "mini_batch_size": 8, "epochs": 2, "micro_batch_tokens": 1024},
        "server": {"name": name},
        "trainer": {
            "dp_size": 2,
            "model": "tiny",
            "learning_rate": 3.0e-3,
            "run_dir": str(folder / name),
            "checkpoint_every_steps": 4,
            **trainer,
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_a_run_trains_every_row_once_an_epoch_and_its_loss_falls(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc

    summary = raysvc.train(make_job(tmp_path, sample, "whole")).metrics
    assert summary["steps"] == 30
    assert summary["optimizer_steps"] == 60
    assert summary["rows"] == 480
    assert summary["loss_last"] < 0.8 * summary["loss_first"]
    assert summary["cache"]["hit"] is False
    assert summary["resumed_from"] is None
    assert json.loads((tmp_path / "whole" / "summary.json").read_text()) == summary
    rows = [json.loads(line) for line in (tmp_path / "whole" / "rows.jsonl").read_text().splitlines()]
    for epoch in (0, 1):
        assert sorted(
            parse(row) for line in rows if line["epoch"] == epoch for row in line["row_ids"]
        ) == list(range(240))


def test_columns_without_those_that_the_trainer_reads_are_refused_before_a_row_is_read(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    import raysvc
    from raysvc.errors import ConfigError

    job = make_job(tmp_path, sample, "columns")
    with pytest.raises(ConfigError, match=r"plan\.columns: lacks position_ids, labels, attention_mask, and"):
        raysvc.train(job, plan={"columns": ["input_ids"]})
    with pytest.raises(ConfigError, match=r"lacks labels, and"):
        raysvc.train(
            job,
            plan={"layout": "packed", "micro_batch_tokens": 512, "columns": ["input_ids", "position_ids"]},
        )
    assert not (tmp_path / "cache").exists()


def test_a_run_in_a_folder_where_another_one_trains_is_refused_and_changes_nothing(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.errors import FolderHeld
    from raysvc.training.run_folder import RunFolder

    job = make_job(tmp_path, sample, "twice")
    with RunFolder(tmp_path / "twice").held(), pytest.raises(FolderHeld, match="belongs to trainer 'twice'"):
        raysvc.train(job)
    assert [path.name for path in (tmp_path / "twice").iterdir()] == ["owners"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_second_run_hits_the_cache_and_a_finished_run_is_not_run_again(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc

    job = make_job(tmp_path, sample, "twice", max_steps=2)
    first = raysvc.train(job).metrics
    again = raysvc.train(job).metrics
    assert (again["cache"]["hit"], again["cache"]["key"]) == (True, first["cache"]["key"])
    assert again["resumed_from"] == again["steps"] == 2
    assert again["tokens_per_s"] == first["tokens_per_s"] > 0
    assert json.loads((tmp_path / "twice" / "summary.json").read_text()) == first
    by_the_ranks = (tmp_path / "twice" / "model" / "model.safetensors").read_bytes()
    assert first["model"] == str(tmp_path / "twice" / "model")
    shutil.rmtree(first["model"])
    assert raysvc.train(job).metrics == again
    assert (tmp_path / "twice" / "model" / "model.safetensors").read_bytes() == by_the_ranks
    with pytest.raises(raysvc.errors.StateMismatch, match=r"plan\.batch_size was 16 and is 8"):
        raysvc.train(job, plan={"batch_size": 8})
    assert json.loads((tmp_path / "twice" / "summary.json").read_text()) == first
    again = raysvc.train(job, trainer={"resume": False}).metrics
    assert again["resumed_from"] is None
    assert (tmp_path / "twice.1" / "summary.json").exists()
    shutil.rmtree(tmp_path / "twice" / "checkpoints")
    seen: list[Tick] = []
    raysvc.train(job, progress=seen.append)
    assert [tick.done for tick in seen if "is trained again" in tick.unit] == [0]


@pytest.mark.slow
def test_the_driver_never_opens_a_shard(
    tmp_path: Path, sample: dict[str, str], ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    import raysvc
    from raysvc.actors.launch import stop_server

    real_get = ray.get

    def get(refs: object, **options: object) -> object:
        values = real_get(refs, **options)
        for value in values if isinstance(refs, list) else [values]:
            if isinstance(value, tuple) and len(value) == 2 and "raysvc.shard" in str(value[0]):
                raise AssertionError("a shard was opened in the driver")
        return values

    monkeypatch.setattr(ray, "get", get)
    job = make_job(tmp_path, sample, "shut", max_steps=3)
    assert raysvc.train(job).metrics["steps"] == 3

    # the trap does spring: opening one by hand in this process fails
    server = raysvc.serve(job, name="trap")
    with raysvc.attach(server.name, dp_size=2) as client:
        step = next(iter(client))
        with pytest.raises(Exception, match="opened in the driver"):
            ray.get(step.mini_batches[0].shards[0])
    stop_server("trap")


def plain_loss_and_bits(uri: str, seed: int) -> tuple[float, float]:
    """Nats a target and bits a byte of all rows of an entry, by a fresh tiny model and nothing of the project's maths."""
    import torch

    import raysvc
    from raysvc.actors.model.load_model import tiny_model

    entry = raysvc.open_entry(uri)
    torch.manual_seed(seed)
    lm = tiny_model(int(entry.report["vocab_size"])).eval()
    nats, text_nats, targets, text = 0.0, 0.0, 0, 0
    for row_id in entry.row_ids():
        row = entry.row(row_id)
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logs = lm(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        for place, (token, trained) in enumerate(zip(row["input_ids"], row["loss_mask"], strict=True)):
            if not trained or place == 0:
                continue
            nll, is_text = -float(logs[place - 1, token]), token not in entry.tokenizer.all_special_ids
            nats, targets = nats + nll, targets + 1
            text_nats += nll * is_text
        trained_text = "".join(part for part, trained in entry.row(row_id).spans if trained)
        for special in entry.tokenizer.all_special_tokens:
            trained_text = trained_text.replace(special, "")
        text += len(trained_text.encode())
    return nats / targets, text_nats / math.log(2) / text


@pytest.mark.slow
def test_a_run_with_evals_and_a_schedule_goes_on_like_one_without_evals_on_other_ranks(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.cli.sample_data import write_rows
    from raysvc.training.run_folder import RunFolder

    valid, peak = (
        {"path": str(write_rows(tmp_path / "valid.jsonl", 13))},
        1e-30,
    )  # the weights stay as they are
    trainer = {"max_steps": 5, "checkpoint_every_steps": 2, "keep_checkpoints": 9, "learning_rate": peak}
    trainer |= {"lr_schedule": "linear", "warmup_steps": 3}
    job = yaml.safe_load(make_job(tmp_path, sample, "run", dp_size=1, **trainer).read_text())
    ticks: list[Tick] = []
    watched = {**job, "evals": {"valid": {"source": valid, "batch_size": 5}}}
    watched["trainer"] = {**job["trainer"], "eval_every_steps": 2}
    summary = raysvc.train(watched, progress=ticks.append).metrics

    folder = RunFolder(tmp_path / "run")
    evals = list(folder.lines(folder.evals))
    assert [line["step"] for line in evals] == [1, 3, 4]
    assert summary["evals"]["valid"] == evals[-1]
    assert [tick.done for tick in ticks if tick.phase == "eval valid"] == [1, 2, 3] * 3
    loss, bits = plain_loss_and_bits(raysvc.tokenize({**job, "source": valid}).uri, seed=0)
    for line in evals:
        assert line["rows"] == 13
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
        assert line["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    rows, metrics = folder.rows.read_bytes(), list(folder.lines(folder.metrics))
    # 10 optimizer steps, two a step, of which the log has the last
    expected = [2 / 3, 1.0, *(1 - (step - 3) / 7 for step in (5, 7, 9))]
    assert [line["lr"] / peak for line in metrics] == pytest.approx(expected, rel=1e-12)

    for checkpoint in folder.checkpoints():
        if checkpoint.step > 2:
            (checkpoint.folder / "state.json").unlink()
    again = raysvc.train(make_job(tmp_path, sample, "run", dp_size=2, **trainer)).metrics
    assert again["resumed_from"] == 2
    assert folder.rows.read_bytes() == rows
    assert [line["step"] for line in folder.lines(folder.evals)] == [1]
    for old, new in zip(metrics, folder.lines(folder.metrics), strict=True):
        assert new["lr"] == old["lr"]
        assert new["loss"] == pytest.approx(old["loss"], rel=1e-5)


def start(job: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raysvc.cli", "train", "-c", str(job), "--json", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )


KILLED = """
import os, signal, sys
import raysvc
steps = []
def stop():
    steps.append(1)
    if len(steps) == 7:  # past the checkpoint of step 4
        os.kill(os.getpid(), signal.SIGKILL)
    return False
raysvc.train(sys.argv[1], should_stop=stop)
"""


@pytest.mark.slow
def test_a_run_killed_in_the_middle_goes_on_and_ends_like_one_that_was_not(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc

    undisturbed = raysvc.train(make_job(tmp_path, sample, "calm", max_steps=12)).metrics
    job = make_job(tmp_path, sample, "killed", max_steps=12)
    command, environment = [sys.executable, "-c", KILLED, str(job)], {**os.environ, "RAY_ADDRESS": "local"}
    died = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    assert (tmp_path / "killed" / "rows.jsonl").read_bytes().count(b"\n") > 8
    summary = raysvc.train(job).metrics
    assert summary["resumed_from"] == 4
    assert (tmp_path / "killed" / "rows.jsonl").read_bytes() == (
        tmp_path / "calm" / "rows.jsonl"
    ).read_bytes()
    for name in ("steps", "optimizer_steps", "rows", "tokens_trained", "loss_first"):
        assert summary[name] == undisturbed[name]
    assert summary["loss_last"] == pytest.approx(undisturbed["loss_last"], rel=1e-5)


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
from tests.patience import wait_longer_for_nodes

wait_longer_for_nodes()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 * 2**20})
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
def test_the_same_job_runs_on_a_cluster_of_several_nodes(tmp_path: Path, sample: dict[str, str]) -> None:
    job = make_job(tmp_path, sample, "cluster", max_steps=2, cpus_per_worker=1)
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert cluster.stdout is not None
    try:
        address = cluster.stdout.readline().strip()
        out, err = start(job, "--address", address, "server.num_cpus=1").communicate(timeout=500)
    finally:
        cluster.communicate(input="")
    summary = json.loads(out.splitlines()[-1]) if out else {}
    assert summary.get("steps") == 2, err[-3000:]
    run = tmp_path / "cluster"
    begin = err.splitlines().index(f"[start] cluster={address} done") + 1
    assert err.splitlines()[begin : begin + 2] == [
        f"watch it: raysvc top --address {address}; as a page: raysvc top --web --address {address}",
        f"look at it, also while it runs: raysvc report {run}; raysvc show {run} --step 0",
    ]
