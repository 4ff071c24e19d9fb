"""Weights go from the trainer to producers, outlive it, and come again after a rewind."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from raysvc.actors.rollouts.weight_readers import WeightReaders
from raysvc.errors import ConfigError, ServerError
from raysvc.rl.weights import blob_of, read_blob, remove_older, run_of, tensors_of, write_blob
from tests.patience import end_servers


def state(value: float) -> dict[str, torch.Tensor]:
    shared = torch.full((4, 3), value, dtype=torch.bfloat16)
    return {"head": shared, "embed": shared, "bias": torch.arange(6.0).view(2, 3).T, "step": torch.tensor(7)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_a_state_dict_comes_back_with_its_types_and_tied_or_transposed_tensors() -> None:
    assert same(tensors_of(blob_of(state(1.5))), state(1.5))
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(tensors_of(blob_of(model.state_dict())))
    with pytest.raises(ConfigError, match=r"publish\(state_dict\): has 'lr' of type float"):
        blob_of({"lr": 0.1})


def test_a_run_keeps_its_newest_two_files_those_in_use_and_what_others_wrote(tmp_path: Path) -> None:
    folder, run, other = str(tmp_path), run_of("file:///runs/a/server"), run_of("file:///runs/b/server")
    (tmp_path / "model.safetensors").write_bytes(b"theirs")
    theirs = [write_blob(folder, other, version, b"b%d" % version) for version in (1, 2, 3)]
    ours = []
    for version in (5, 6, 7, 2):
        ours.append(write_blob(folder, run, version, b"%d" % version))
        remove_older(folder, run, in_use=[ours[0][1]])
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"model.safetensors", *(name for _, name in (*theirs, ours[0], *ours[2:]))}
    assert [read_blob(*each) for each in ours[-2:]] == [b"7", b"2"], (
        "after a rewind the lower version is newer"
    )
    remove_older(folder, run, in_use=[])
    with pytest.raises(FileNotFoundError):
        read_blob(*ours[0])
    assert [read_blob(*each) for each in theirs] == [b"b1", b"b2", b"b3"]


def test_a_file_is_in_use_while_a_living_producer_reads_it() -> None:
    clock, living = [0.0], {"p", "q"}
    readers = WeightReaders(ttl_s=60.0, now_s=lambda: clock[0])
    in_use = lambda: readers.in_use(living.__contains__)  # noqa: E731
    readers.begin("r1", "p", lambda: (1, ["/w", "one"]))
    assert in_use() is None, "who was reading before the server started is not known"
    clock[0] = 61.0
    readers.begin("r2", "q", lambda: (1, ["/w", "one"]))
    readers.begin("r3", "q", lambda: (2, ["/w", "two"]))
    readers.begin("r4", "q", lambda: (3, [object(), "by reference"]))
    assert readers.begin("r5", "q", lambda: None) is None
    assert in_use() == ["one", "two"]
    readers.end("r3")
    readers.end("r1")
    readers.end("r1")
    assert in_use() == ["one"], "the other producer reads it still"
    living.remove("q")
    assert in_use() == []


@pytest.fixture
def started(tmp_path: Path, ray_session: None) -> Iterator[Callable[..., Any]]:
    import raysvc

    names = []

    def start(name: str, **options: Any) -> Any:
        names.append(name)
        plan = {"batch_size": 1, "columns": ("input_ids", "labels")}
        return raysvc.serve_rollouts(
            name, run_dir=str(tmp_path / name), pad_token_id=0, plan=plan, num_cpus=0, **options
        )

    yield start
    end_servers(names)


@pytest.mark.ray
def test_producers_get_what_was_published_last_also_when_its_trainer_is_gone(
    started: Callable[..., Any],
) -> None:
    import ray

    import raysvc

    started("weights")
    producer = raysvc.rollouts("weights")
    assert producer.weights(wait_s=0) is None

    @ray.remote(num_cpus=0, max_calls=1)
    def train() -> None:
        with raysvc.attach("weights", dp_size=1, takeover=True) as client:
            client.rollouts.publish(1, state(1.0))

    ray.get(train.remote())
    first = producer.weights()
    assert first is not None
    assert first.version == 1
    assert same(first.tensors, state(1.0))
    assert producer.weights(after=1, wait_s=0) is None
    assert producer.stats()["weight_version"] == 1
    with raysvc.attach("weights", dp_size=1, takeover=True) as client:
        client.rewind(0)  # a new timeline begins, and its weights are others of an old version
        client.rollouts.publish(0, state(2.0)) if producer.stats()[
            "weight_version"
        ] == 0 else client.rollouts.publish(1, state(2.0))
        again = producer.weights(after=None, wait_s=0)
        assert again is not None
        assert same(again.tensors, state(2.0))
        with pytest.raises(ConfigError, match="is below"):
            client.rollouts.publish(0, state(3.0))


@pytest.mark.ray
def test_weights_in_a_folder_are_known_after_a_kill_of_the_server(
    tmp_path: Path, started: Callable[..., Any]
) -> None:
    import raysvc

    started("kept")
    producer = raysvc.rollouts("kept")
    with raysvc.attach("kept", dp_size=1) as client:
        client.rollouts.publish(1, state(1.0), folder=str(tmp_path / "weights"))
        os.kill(producer._call("stats", "control")["pid"], signal.SIGKILL)
        found = producer.weights()
        assert found is not None
        assert found.version == 1
        assert same(found.tensors, state(1.0))
        shutil.move(tmp_path / "weights", tmp_path / "elsewhere")  # as on a node that does not see it
        with pytest.raises(
            ServerError, match="is not seen by this process; publish to a folder that all see"
        ):
            producer.weights()
        client.rollouts.publish(
            2, state(2.0)
        )  # by reference: what lay in the folder is not the newest any more
        os.kill(producer._call("stats", "control")["pid"], signal.SIGKILL)
        assert producer.weights(wait_s=0) is None


@pytest.mark.ray
@pytest.mark.parametrize("where", ["object store", "folder"])
def test_weights_that_are_published_after_a_rewind_come_though_their_version_is_the_same(
    tmp_path: Path, started: Callable[..., Any], where: str
) -> None:
    import raysvc

    started("back")
    folder = str(tmp_path / "weights") if where == "folder" else None
    producer, other = raysvc.rollouts("back"), raysvc.rollouts("back")
    with raysvc.attach("back", dp_size=1) as client:
        client.rollouts.publish(1, state(1.0), folder=folder)
        first = producer.weights()
        assert first is not None
        assert same(first.tensors, state(1.0))
        client.rewind(0)
        client.rollouts.publish(1, state(2.0), folder=folder)
        again = producer.weights(after=1, wait_s=0)
        assert again is not None
        assert (again.version, same(again.tensors, state(2.0))) == (1, True)
        assert producer.weights(after=1, wait_s=0) is None
        assert other.weights(after=1, wait_s=0) is None, "it had them from elsewhere, and goes by the version"


@pytest.mark.ray
def test_no_file_is_removed_that_a_producer_is_reading(
    tmp_path: Path, started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import raysvc
    from raysvc.client.rl import rollouts

    ttl_s, folder = 4.0, str(tmp_path / "weights")
    started("slow", producer_ttl_s=ttl_s)
    begin_s = time.monotonic()
    producer, opened, go_on = raysvc.rollouts("slow"), threading.Event(), threading.Event()

    def read_slowly(where: str, name: str) -> bytes:
        opened.set()
        assert go_on.wait(60.0)
        return read_blob(where, name)

    with raysvc.attach("slow", dp_size=1) as client:
        client.rollouts.publish(1, state(1.0), folder=folder)
        monkeypatch.setattr(rollouts, "read_blob", read_slowly)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(producer.weights)
            assert opened.wait(60.0)
            time.sleep(
                max(0.0, begin_s + 1.5 * ttl_s - time.monotonic())
            )  # longer than any sign of life counts
            for value in (2.0, 3.0, 4.0):
                client.rollouts.publish(1, state(value), folder=folder)
            assert len(list((tmp_path / "weights").iterdir())) == 3, (
                "the newest two, and the one that is read"
            )
            go_on.set()
            assert same(found.result().tensors, state(1.0))
        client.rollouts.publish(1, state(5.0), folder=folder)
        assert len(list((tmp_path / "weights").iterdir())) == 2
