"""A stream of prompts through a server that is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.errors import ConfigError, PromptsEnded
from raysvc.rl.group import Group
from tests.patience import end_servers


@pytest.fixture
def prompts_of(tmp_path: Path, sample: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """A job of so many prompts, each with its answer."""

    def make(count: int, **plan: Any) -> dict[str, Any]:
        rows = tmp_path / "prompts.jsonl"
        lines = [
            {"prompt": [{"role": "user", "content": f"What is {n} plus {n}?"}], "answer": str(2 * n)}
            for n in range(count)
        ]
        rows.write_text("\n".join(map(json.dumps, lines)))
        return {
            "source": {"path": str(rows), "format": "prompt", "carry": ["answer"]},
            "tokenizer": {"name": sample["tokenizer"]},
            "cache": {"root": str(tmp_path / "cache")},
            "plan": plan,
        }

    return make


@pytest.fixture
def started(tmp_path: Path, ray_session: None) -> Iterator[Callable[..., Any]]:
    import raysvc

    names = []

    def start(name: str, **options: Any) -> Any:
        names.append(name)
        plan = {"batch_size": 4, "columns": ("input_ids", "labels", "reward")}
        fixed = {"run_dir": str(tmp_path / name), "pad_token_id": 0, "plan": plan, "num_cpus": 0}
        return raysvc.serve_rollouts(name, **{**fixed, **options})

    yield start
    end_servers(names)


def sampled(prompt: Any) -> Group:
    """Two answers; the reward says whether they are right."""
    answers = [[*prompt.input_ids.tolist(), 5, 6], [*prompt.input_ids.tolist(), 7]]
    length = len(prompt.input_ids)
    masks = [[0] * length + [1] * (len(each) - length) for each in answers]
    reward = np.array([float(prompt.columns["answer"]), 0.0], np.float32)
    return prompt.group(answers, masks, rows={"reward": reward})


@pytest.mark.ray
def test_producers_only_loop_over_prompts_and_every_epoch_is_trained(
    prompts_of: Callable[..., Any], started: Callable[..., Any]
) -> None:
    import ray

    import raysvc
    from raysvc.collate.shard import read_shard

    started("stream", prompts=prompts_of(10, epochs=2, seed=3))
    epochs: list[tuple[int, str]] = []

    def produce() -> None:
        producer = raysvc.rollouts("stream")
        for prompt in producer.prompts():
            epochs.append((prompt.epoch, prompt.columns["answer"]))
            producer.put_groups(sampled(prompt))

    threads = [threading.Thread(target=produce) for _ in range(2)]
    for thread in threads:
        thread.start()
    rewards: list[float] = []
    kills = 0
    with raysvc.attach("stream", dp_size=1) as client:
        for step in client.steps():  # ends with the prompts
            for mini in step.mini_batches:
                shard = read_shard(ray.get(mini.shards[0]))
                rewards += [float(each) for each in shard.arrays["reward"] if each]
            client.commit(step.index)
            client.rollouts.set_weight_version(step.index + 1)
            if step.index in (0, 2):
                os.kill(raysvc.rollouts("stream")._call("stats", "control")["pid"], signal.SIGKILL)
                kills += 1
    assert kills == 2
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "it hears that the prompts have ended"
    answers = [float(2 * n) for n in range(10) if n]
    assert sorted(rewards) == sorted([*answers, *answers])
    assert sorted(epochs) == sorted((epoch, str(2 * n)) for epoch in (0, 1) for n in range(10))
    facts = raysvc.rollouts("stream").stats()["prompts"]
    assert facts == {"handed_out": 20, "of": 20, "under_way": 0, "to_hand_out_again": 0, "lost": {}}


@pytest.mark.ray
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_the_last_step_of_a_stream_is_short_or_left_out_and_a_server_without_prompts_hands_out_none(
    prompts_of: Callable[..., Any], started: Callable[..., Any], tail: str
) -> None:
    import ray

    import raysvc
    from raysvc.collate.shard import read_shard

    plan = {"batch_size": 4, "columns": ("input_ids", "labels", "reward"), "tail": tail}
    started("short", prompts=prompts_of(7), plan=plan)
    producer = raysvc.rollouts("short")
    rewards: list[list[float]] = []
    asked = producer.prompts(at_once=2)
    with raysvc.attach("short", dp_size=2, look_ahead_steps=0) as client:
        thread = threading.Thread(target=lambda: [producer.put_groups(sampled(prompt)) for prompt in asked])
        thread.start()
        for step in client.steps():
            shards = [read_shard(ray.get(ref)) for mini in step.mini_batches for ref in mini.shards]
            rewards.append(sorted(float(each) for shard in shards for each in shard.arrays["reward"] if each))
            client.commit(step.index)
            client.rollouts.set_weight_version(step.index + 1)
        thread.join(100)
    trained = sorted(reward for step in rewards for reward in step)  # that of prompt 0 is 0
    if tail == "pad":
        assert len(rewards) == 2
        assert trained == [2.0 * n for n in range(1, 7)]
    else:
        assert len(rewards) == 1
        assert len(trained) in (3, 4)
    assert "3 of the 4 groups of step 0 are left" in str(PromptsEnded("short", 0, 3, 4))
    started("plain")
    with pytest.raises(ConfigError, match="hands out no prompts"):
        next(raysvc.rollouts("plain").prompts())


@pytest.mark.ray
def test_a_step_whose_rows_are_all_gone_passes_and_the_next_one_is_trained(
    prompts_of: Callable[..., Any], started: Callable[..., Any], tmp_path: Path
) -> None:
    import ray

    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.collate.shard import read_shard

    job = prompts_of(8, shuffle="none")
    started("spoilt", prompts=job)
    producer = raysvc.rollouts("spoilt")
    with pytest.raises(ConfigError, match=r"hands out the prompts; loop over producer\.prompts"):
        producer.reserve(["mine"])
    for prompt in producer.prompts():
        producer.put_groups(sampled(prompt))
    rewards: list[list[float]] = []
    with raysvc.attach("spoilt", dp_size=1) as client:
        steps = client.steps()
        for number in range(2):
            next(steps)
            client.commit(number)
        for path in sorted((tmp_path / "spoilt" / "server" / "rollouts" / "groups").iterdir())[:4]:
            path.unlink()
        os.kill(producer._call("stats", "control")["pid"], signal.SIGKILL)
        client.rewind(0)
        for step in client.steps():
            shards = [read_shard(ray.get(mini.shards[0])) for mini in step.mini_batches]
            rewards.append(sorted(float(each) for shard in shards for each in shard.arrays["reward"] if each))
            client.commit(step.index)
    assert rewards == [[], [8.0, 10.0, 12.0, 14.0]]
    assert len(producer.stats()["quarantined"]) == 4
    assert producer.stats()["trained"] == 4
    stop_server("spoilt")
    with pytest.raises(ConfigError, match="others than those that were handed out"):
        started("spoilt", prompts=prompts_of(9))


@pytest.mark.ray
def test_prompts_are_read_with_the_credentials_of_their_job_and_nobody_keeps_these(
    prompts_of: Callable[..., Any], started: Callable[..., Any], s3_server: Any, tmp_path: Path
) -> None:
    import raysvc
    from raysvc.actors.server.kept.served_records import served_line
    from raysvc.actors.server.spec import ServeSpec

    options = {**s3_server.options, "config_kwargs": {"user_agent_extra": "hidden-thing"}}
    job = prompts_of(3, shuffle="window(2)")
    job["cache"] = {"root": f"s3://raysvc-tests/{uuid.uuid4().hex}", "storage_options": options}
    started("s3", prompts=job)  # its run folder is local, and needs no options
    producer = raysvc.rollouts("s3")
    assert next(producer.prompts(at_once=3)).columns["answer"] in ("0", "2", "4")
    text, _ = producer._call("spec_json", "control")
    spec = ServeSpec.model_validate_json(text)
    assert "hidden-thing" in text, "the server itself needs them"
    assert "hidden-thing" not in json.dumps(served_line(0, 1, spec))
    assert "hidden-thing" not in repr(spec)
    other = spec.model_copy(
        update={"rollouts": spec.rollouts and spec.rollouts.model_copy(update={"wait_s": 1.0})}
    )
    assert "hidden-thing" not in str(spec.difference(other))
    kept = [
        each.read_text() for each in (tmp_path / "s3").rglob("*") if each.is_file() and each.suffix == ".json"
    ]
    assert kept
    assert not any("hidden-thing" in each for each in kept)


@pytest.mark.ray
def test_a_step_is_made_again_where_the_entry_of_its_prompts_is_gone(
    prompts_of: Callable[..., Any], started: Callable[..., Any], tmp_path: Path
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.inspect.replay_run import replay_run

    started("gone", prompts=prompts_of(4))
    producer = raysvc.rollouts("gone")
    for prompt in producer.prompts():
        producer.put_groups(sampled(prompt))
    with raysvc.attach("gone", dp_size=1) as client:
        for step in client.steps():
            client.commit(step.index)
    stop_server("gone")
    shutil.rmtree(tmp_path / "cache")
    [shard] = replay_run(str(tmp_path / "gone"), 0, dp_size=1).chosen()
    assert len(shard.row_ids) == 8


def test_what_would_be_left_unread_is_refused_before_anything_starts(prompts_of: Callable[..., Any]) -> None:
    import raysvc

    fixed = {"run_dir": "unused", "pad_token_id": 0, "plan": {"batch_size": 2}}
    for name, value in (
        ("on_stale", "pace"),
        ("on_stale", "reissue"),
        ("max_prompt_s", 5.0),
        ("max_attempts", 1),
    ):
        with pytest.raises(
            ConfigError, match=rf"serve_rollouts\({name}.*\): is about prompts, and there are none"
        ):
            raysvc.serve_rollouts("refused", **fixed, **{name: value})
    job = prompts_of(3)
    job["source"]["follow"] = True
    job["plan"] = {"shuffle": "window"}
    with pytest.raises(ConfigError, match=r"source\.follow"):
        raysvc.serve_rollouts("refused", **fixed, prompts=job)
    with pytest.raises(ConfigError, match=r"plan\.order"):
        raysvc.serve_rollouts("refused", **fixed, prompts={**prompts_of(3), "plan": {"order": "here:f"}})
