"""Weights go from the trainer to producers, outlive it, and come again after a rewind."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysvc.errors import ConfigError, ServerError
from raysvc.rl.weights import blob_of, read_blob, tensors_of, write_blob


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


def test_a_folder_holds_the_newest_two_and_nothing_of_others(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"theirs")
    paths = [write_blob(str(tmp_path), version, b"%d" % version) for version in (5, 6, 7, 2)]
    assert {each.name for each in tmp_path.iterdir()} == {
        "model.safetensors",
        *(name for _, name in paths[-2:]),
    }
    assert [read_blob(*each) for each in paths[-2:]] == [b"7", b"2"], (
        "after a rewind the lower version is newer"
    )
    with pytest.raises(FileNotFoundError):
        read_blob(*paths[0])


@pytest.fixture
def started(tmp_path: Path, ray_session: None) -> Iterator[Callable[..., Any]]:
    import raysvc
    from raysvc.actors.launch import server_names, stop_server

    names = []

    def start(name: str) -> Any:
        names.append(name)
        plan = {"batch_size": 1, "columns": ("input_ids", "labels")}
        return raysvc.serve_rollouts(
            name, run_dir=str(tmp_path / name), pad_token_id=0, plan=plan, num_cpus=0
        )

    yield start
    for name in set(names) & set(server_names()):
        stop_server(name)


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
            client.publish(1, state(1.0))

    ray.get(train.remote())
    first = producer.weights()
    assert first is not None
    assert first.version == 1
    assert same(first.tensors, state(1.0))
    assert producer.weights(after=1, wait_s=0) is None
    assert producer.stats()["weight_version"] == 1
    with raysvc.attach("weights", dp_size=1, takeover=True) as client:
        client.rewind(0)  # a new timeline begins, and its weights are others of an old version
        client.publish(0, state(2.0)) if producer.stats()["weight_version"] == 0 else client.publish(
            1, state(2.0)
        )
        again = producer.weights(after=None, wait_s=0)
        assert again is not None
        assert same(again.tensors, state(2.0))
        with pytest.raises(ConfigError, match="is below"):
            client.publish(0, state(3.0))


@pytest.mark.ray
def test_weights_in_a_folder_are_known_after_a_kill_of_the_server(
    tmp_path: Path, started: Callable[..., Any]
) -> None:
    import raysvc

    started("kept")
    producer = raysvc.rollouts("kept")
    with raysvc.attach("kept", dp_size=1) as client:
        client.publish(1, state(1.0), folder=str(tmp_path / "weights"))
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
        client.publish(2, state(2.0))  # by reference: what lay in the folder is not the newest any more
        os.kill(producer._call("stats", "control")["pid"], signal.SIGKILL)
        assert producer.weights(wait_s=0) is None
