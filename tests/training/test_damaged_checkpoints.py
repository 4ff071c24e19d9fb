"""Checkpoints whose files were damaged, cut, or replaced by something that would run, and disks that are full."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from raysvc.actors.model.tensor_file import TensorFile, write_tensors
from raysvc.actors.worker.torch_worker import CausalLMWorker
from raysvc.errors import CheckpointDamaged, CheckpointTooOld, StateMismatch, StoreError
from raysvc.training.run_folder import STATE, RunFolder

from .test_export import job, run, save, trained  # noqa: F401  a fixture

FILES = ("config.json", "generation_config.json", "model-00000.safetensors", "optimizer-00000.safetensors")
FILES += ("rank-00000.json", STATE)
OF_THE_OPTIMIZER = FILES[3]


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def harms(good: bytes, marker: Path, places: int) -> Iterator[tuple[str, bytes | None]]:
    """What may stand in the place of a file; None: nothing."""
    yield "pickle", pickle.dumps(Runs(marker))
    of_torch = io.BytesIO()
    torch.save(Runs(marker), of_torch)
    yield "a file of torch", of_torch.getvalue()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data.pkl", pickle.dumps(Runs(marker)))
    yield "zip", archive.getvalue()
    yield "empty", b""
    yield "missing", None
    yield "longer", good + b"\n"
    for length in (1, 9, len(good) // 2, len(good) - 1):
        yield f"cut to {length}", good[:length]
    for number in range(places):
        at = number * (len(good) - 1) // (places - 1)
        bad = bytearray(good)
        bad[at] ^= 1 << number % 8
        yield f"bit in byte {at}", bytes(bad)


def every_damage_is_named(tmp_path: Path, worker: CausalLMWorker, job_file: Path, places: int) -> None:
    """By `raysvc export`, which reads no optimizer, and by ranks that resume, which read no state.json of their own."""
    folder = RunFolder(tmp_path / "run")
    save(folder, worker, 2)
    (checkpoint,) = folder.complete()
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(
        name for name in FILES if name != "generation_config.json" or (checkpoint / name).exists()
    )
    marker = tmp_path / "it-ran"
    for path in sorted(checkpoint.iterdir()):
        good = path.read_bytes()
        for what, bad in harms(good, marker, places):
            path.unlink(missing_ok=True)
            if bad is not None:
                path.write_bytes(bad)
            if path.name != OF_THE_OPTIMIZER and not (path.name == STATE and bad is None):
                said = run("-c", str(job_file), "--out", str(tmp_path / "out"))
                assert (said.exit_code, said.stderr.count("\n")) == (2, 1), (path.name, what, said.output)
                assert f"{path}: " in said.stderr, (path.name, what)
                assert "; restore it, or " in said.stderr
                assert not (tmp_path / "out").exists()
            if path.name != STATE:
                with pytest.raises(CheckpointDamaged) as raised:
                    worker.load_checkpoint(str(checkpoint))
                assert raised.value.where == str(path), (path.name, what)
            assert not marker.exists(), (path.name, what)
        path.write_bytes(good)
    worker.load_checkpoint(str(checkpoint))


def test_every_damage_of_every_file_is_named_and_nothing_runs(tmp_path: Path, job: Path) -> None:  # noqa: F811
    every_damage_is_named(tmp_path, trained(64), job, places=3)


@pytest.mark.slow
def test_a_changed_bit_anywhere_in_a_checkpoint_is_named(tmp_path: Path, job: Path) -> None:  # noqa: F811
    every_damage_is_named(tmp_path, trained(64), job, places=200)


def test_a_pickle_that_would_run_does_run_where_torch_reads_it(tmp_path: Path) -> None:
    """Else the test above would hold for a file that is harmless."""
    marker = tmp_path / "it-ran"
    for _, bad in list(harms(b"x" * 20, marker, 2))[:2]:
        assert bad is not None
        with contextlib.suppress(RuntimeError):  # it is none of torch, as the pickle says when it has run
            torch.load(io.BytesIO(bad), weights_only=False)
        assert marker.exists()
        marker.unlink()


def test_export_names_a_damaged_checkpoint_and_the_one_before_it(tmp_path: Path, job: Path) -> None:  # noqa: F811
    folder, worker = RunFolder(tmp_path / "run"), trained(64)
    for step in (1, 2):
        save(folder, worker, step)
    path = folder.complete()[-1] / FILES[2]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    said = run("-c", str(job), "--out", str(tmp_path / "out"))
    assert said.exit_code == 2
    assert said.stderr.strip().endswith("restore it, or export the one before: --step 1")
    assert run("-c", str(job), "--out", str(tmp_path / "out"), "--step", "1").exit_code == 0


def test_a_checkpoint_of_an_earlier_version_is_refused_unread_with_the_way_to_go_on(
    tmp_path: Path,
    job: Path,  # noqa: F811
) -> None:
    import torch.distributed.checkpoint as dcp

    folder, worker = RunFolder(tmp_path / "run").new_checkpoint(3), trained(64)
    with pytest.warns(UserWarning, match=r"torch.distributed is"):
        dcp.save({"model": worker.model.state_dict()}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(CheckpointTooOld, match=r"nothing converts it.*with a new optimizer"):
        worker.load_checkpoint(str(folder))
    (folder / STATE).write_text(json.dumps({"data": {}}, indent=1))
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "it-ran")))
    said = run("-c", str(job), "--out", str(tmp_path / "out"))
    assert (said.exit_code, said.stderr.count("\n")) == (2, 1)
    assert "raysvc export --out DIR" in said.stderr
    assert not (tmp_path / "it-ran").exists()


def test_a_checkpoint_of_another_model_is_refused_with_the_weight(tmp_path: Path) -> None:
    trained(64).save_checkpoint(str(tmp_path))
    with pytest.raises(StateMismatch, match=r"lm_head.*\(64, \d+\) there and \(65, \d+\) here"):
        trained(65).load_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["model-00000.safetensors", "optimizer-00000.safetensors", "rank-00000.json"]
)
def test_a_full_disk_in_a_checkpoint_is_one_line_with_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(StoreError) as raised:
        trained(64).save_checkpoint(str(tmp_path))
    assert raised.value.where == str(tmp_path)
    assert "No space left on device" in raised.value.what
    assert "make room" in raised.value.remedy


def test_a_damaged_byte_of_a_large_tensor_is_found_in_whatever_chunk_it_is(tmp_path: Path) -> None:
    path, tensor = tmp_path / "file", torch.arange(1 << 20, dtype=torch.int32)  # four chunks
    digests = write_tensors(path, {"a": tensor, "b": tensor[:3]})
    data = path.read_bytes()
    assert torch.equal(TensorFile(path, digests).read("a"), tensor)
    for share in (0.1, 0.3, 0.6, 0.9):
        bad = bytearray(data)
        bad[int(len(data) * share)] ^= 16
        path.write_bytes(bytes(bad))
        with pytest.raises(CheckpointDamaged, match="has damaged bytes in a"):
            TensorFile(path, digests).read("a")
        assert torch.equal(TensorFile(path, digests).read("b"), tensor[:3])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("which", ["model-00001.safetensors", STATE])
def test_a_run_with_a_damaged_newest_checkpoint_goes_on_from_the_one_before_it(
    tmp_path: Path, sample: dict[str, str], ray_session: None, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    import raysvc

    from .test_train import make_job

    undisturbed = raysvc.train(make_job(tmp_path, sample, "undisturbed", max_steps=8)).metrics
    path = make_job(tmp_path, sample, "damaged", keep_checkpoints=3)
    config = yaml.safe_load(path.read_text())
    config["trainer"]["max_steps"] = 8
    raysvc.train({**config, "trainer": {**config["trainer"], "max_steps": 6}})
    folder = RunFolder(tmp_path / "damaged")
    assert [found.step for found in folder.checkpoints()] == [4, 6]
    bad = folder.complete()[-1] / which
    data = bytearray(bad.read_bytes())
    data[-9] ^= 1
    bad.write_bytes(bytes(data))
    config["trainer"]["resume"] = "changed"
    summary = raysvc.train(config).metrics
    assert (summary["resumed_from"], summary["steps"]) == (4, 8)
    assert summary["loss_last"] == pytest.approx(undisturbed["loss_last"], rel=1e-6)
    lines = [(tmp_path / name / "rows.jsonl").read_text() for name in ("undisturbed", "damaged")]
    assert lines[0] == lines[1]
    (said,) = [record.getMessage() for record in caplog.records if "DAMAGED CHECKPOINT" in record.message]
    assert str(bad) in said
    assert "step 4" in said
    (aside,) = (tmp_path / "damaged" / "checkpoints").glob("damaged-step-*")
    assert str(aside) in said
    assert [found.step for found in folder.checkpoints()] == [4, 8]

    oldest, _ = folder.complete()
    for left in (oldest, folder.complete()[-1]):
        bad = left / which
        bad.write_bytes(bad.read_bytes()[:-1])
    config["trainer"]["max_steps"] = 9
    with pytest.raises(CheckpointDamaged, match=r"restore it, or start again with trainer.resume=false"):
        raysvc.train(config)
    assert [found.name for found in folder.complete()] == [oldest.name], "the last one is not put away"


@pytest.mark.ray
@pytest.mark.slow
def test_a_changed_digit_in_a_log_stops_the_run_that_goes_on_and_restoring_it_lets_it(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc

    from .test_train import make_job

    config = yaml.safe_load(make_job(tmp_path, sample, "run", max_steps=2).read_text())
    raysvc.train(config)
    config["trainer"] |= {"max_steps": 3, "resume": "changed"}
    for name in ("rows.jsonl", "metrics.jsonl", "served.jsonl"):
        good = (path := tmp_path / "run" / name).read_bytes()
        path.write_bytes(good.replace(b'"step":0', b'"step":1', 1))
        with pytest.raises(StateMismatch, match=rf"{name}: .*restore the file"):
            raysvc.train(config)
        assert path.read_bytes() == good.replace(b'"step":0', b'"step":1', 1)
        path.write_bytes(good)
    summary = raysvc.train(config).metrics
    assert (summary["resumed_from"], summary["steps"]) == (2, 3)


def test_a_damaged_best_checkpoint_stays_and_is_named_with_the_command_that_takes_the_newest(
    tmp_path: Path,
) -> None:
    from raysvc.errors import CheckpointDamaged
    from raysvc.training.run_folder import RunFolder
    from raysvc.training.train import _step_back

    run = RunFolder(tmp_path)
    for step in (2, 4, 6):
        run.publish(run.new_checkpoint(step), {})
    best, newest = run.complete()[1:]
    with pytest.raises(CheckpointDamaged, match=r"take the newest: raysvc export \S+ --step 6") as caught:
        _step_back(run, CheckpointDamaged.of(best / "weights", "is cut off"))
    assert str(best) in str(caught.value)
    assert [one.step for one in run.checkpoints()] == [2, 4, 6], "nothing was put away"
    _step_back(run, CheckpointDamaged.of(newest / "weights", "is cut off"))
    assert [one.step for one in run.checkpoints()] == [2, 4]
