"""Rewards, lengths and staleness of a step come to the loop and to its trackers; every number is worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysvc.rl.group import Group
from raysvc.rl.group_table import groups_of, table_of
from raysvc.rl.rollout_facts import facts_of
from raysvc.row_batch import RowBatch


def batch_by_hand(trajectory: list[int] | None, reward: Any) -> RowBatch:
    """Two groups, of three rows and of one, with 2, 3, 4 and 5 tokens, of which 1, 2, 0 and 4 are trained targets."""
    masks = [[1, 1], [0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 1, 1]]  # a first token is no target
    rows = {"weight_version": np.array([3, 4, 4, 5]), "reward": reward, "box": np.zeros((4, 2))}
    if trajectory is not None:
        rows["trajectory"] = np.array(trajectory)
    mask = np.concatenate([np.array(each, np.uint8) for each in masks])
    tokens = {"input_ids": np.zeros(14, np.int32), "loss_mask": mask}
    return RowBatch(np.arange(4), np.array([0, 2, 5, 9, 14]), tokens, rows)


def test_numbers_of_rows_and_of_trajectories_are_those_of_a_hand() -> None:
    reward = np.array([1.0, 2.0, 4.0, 9.0], np.float32)
    facts = facts_of(batch_by_hand(None, reward), np.array([0, 0, 0, 1]), trained_by=5)
    assert facts.columns["trained_tokens"].tolist() == [1, 2, 0, 4]
    assert facts.metrics() == {
        "reward_mean": 4.0, "reward_min": 1.0, "reward_max": 9.0,
        "staleness_mean": 1.0, "staleness_min": 0.0, "staleness_max": 2.0,
        "length_mean": 3.5, "length_min": 2.0, "length_max": 5.0,
        "trained_tokens_mean": 1.75, "trained_tokens_min": 0.0, "trained_tokens_max": 4.0,
        "completions/mean_length": 1.75, "completions/min_length": 0.0, "completions/max_length": 4.0,
        # 1, 2 and 4 lie 7/3 from each other as torch.var counts, the only row of the other group not at all
        "reward": 4.0, "reward_std": pytest.approx((7 / 3) ** 0.5 / 2), "frac_reward_zero_std": 0.5,
    }  # fmt: skip
    by_version = facts.by_version
    assert {version: its["rows"] for version, its in by_version.items()} == {3: 1.0, 4: 2.0, 5: 1.0}
    assert (by_version[4]["reward_mean"], by_version[4]["length_max"]) == (3.0, 4.0)
    assert by_version[3]["staleness_mean"] == 2.0
    # rows 0 and 2 are turns of one trajectory, and 2 is the last one; the other group counts its own from 0
    turns = facts_of(batch_by_hand([0, 1, 0, 0], reward), np.array([0, 0, 0, 1]), trained_by=5)
    assert turns.is_last.tolist() == [False, True, True, True]
    assert turns.metrics()["reward_mean"] == 5.0
    assert turns.metrics()["length_mean"] == 3.5
    assert turns.metrics()["reward_std"] == pytest.approx(float(torch.tensor([2.0, 4.0]).std()) / 2)
    assert "reward_mean" not in turns.by_version[3], "its only row is not the last one of its trajectory"


def test_a_reward_in_bfloat16_is_a_number() -> None:
    reward = torch.tensor([0.1, -2.0, 0.0, 3.0e38], dtype=torch.bfloat16)
    (group,) = groups_of(table_of([Group("g", [[1]] * 4, [[0]] * 4, rows={"reward": reward})]))
    facts = facts_of(batch_by_hand(None, group.rows["reward"]), np.zeros(4, int), trained_by=5)
    assert facts.columns["reward"].tolist() == reward.float().tolist()
    assert facts.metrics()["reward_min"] == -2.0
    assert facts.by_version[4]["reward_mean"] == -1.0


class Recorder:
    """A tracker that keeps what it is told of steps."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def on_checkpoint(self, step: int, folder: str) -> None: ...

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None: ...


@pytest.mark.ray
@pytest.mark.parametrize("attached_as", ["driver", "rank"])
def test_trackers_get_rewards_and_staleness_with_each_commit(
    tmp_path: Path, ray_session: None, attached_as: str
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server

    plan = {"batch_size": 2, "columns": ("input_ids", "labels", "reward")}
    server = raysvc.serve_rollouts(
        f"facts-{attached_as}", run_dir=str(tmp_path / "run"), pad_token_id=0, plan=plan, num_cpus=0
    )
    own = Recorder()
    try:
        producer = raysvc.rollouts(server.name)
        for number in range(4):
            # a row that the other begins with, and travels inside it
            ids, mask = [[number, 7], [number, 7, 8, 9]], [[0, 1], [0, 0, 1, 1]]
            reward = np.full(2, number, np.float32) if number < 3 else np.array([3.0, 8.0], np.float32)
            producer.put_groups(Group(f"g{number}", ids, mask, rows={"reward": reward}))
        attached = (
            raysvc.attach_rank(server.name, rank=0) if attached_as == "rank" else raysvc.attach(server.name)
        )
        with attached as client:
            client.report_to(own, folder=tmp_path / "told")
            for step in client.steps(stop=2):
                if attached_as == "driver":
                    assert step.rollouts.columns["length"].tolist() == [2, 4, 2, 4]
                    client.commit(step.index, metrics={"reward_max": -1.0} if step.index else None)
                    client.rollouts.set_weight_version(step.index + 1)
                else:
                    client.commit(step.index)
    finally:
        stop_server(server.name)
    first, second = own.steps
    assert (first["reward_mean"], first["reward_max"], first["staleness_max"]) == (0.5, 1.0, 0.0)
    assert (second["reward_mean"], second["length_mean"]) == (3.75, 3.0)
    assert second["trained_tokens_mean"] == 1.5
    assert second["reward_max"] == (-1.0 if attached_as == "driver" else 8.0), "what the loop gives wins"
    assert second["staleness_max"] == 1.0
