"""A step of GRPO with a critic, through `WorkerDispatch`, on real torch workers in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raysvc.actors.dispatch.dispatch import WorkerDispatch, WorkerGroup
from raysvc.actors.worker.losses import PolicyLoss, ValueLoss
from raysvc.client.batch_client import MiniBatch
from raysvc.collate.row_values import RowValues

from .ranks import tiny_spec
from .shards import minis_of, random_rows

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SIZES = {"policy": 2, "ref": 1, "critic": 1}


@pytest.fixture(scope="module")
def dispatch(ray_session: None) -> Iterator[WorkerDispatch]:
    """A policy of two ranks, a reference of other weights that shares its devices, a critic of its own."""
    specs = {
        "policy": tiny_spec(),
        "ref": tiny_spec(role="reference", seed=7),
        "critic": tiny_spec(role="critic", seed=9),
    }
    groups = {name: WorkerGroup.start(spec, SIZES[name], "cpu", 0) for name, spec in specs.items()}
    made = WorkerDispatch(groups, colocated=[{"policy", "ref"}])
    for pending in [made.init_model_async(name) for name in groups]:
        pending.result()
    yield made
    made.shutdown()


def mini_batches() -> list[MiniBatch]:
    """Two mini-batches as a client with roles gives them: rows of three groups, packed."""
    import ray

    plan = {"batch_size": 6, "mini_batch_size": 3, "layout": "packed", "micro_batch_tokens": 30}
    made = {name: minis_of(random_rows(6, seed=41), plan, size) for name, size in SIZES.items()}
    minis = []
    for index, (_, shards, info) in enumerate(made["policy"]):
        by_role = {name: tuple(ray.put(shard) for shard in minis[index][1]) for name, minis in made.items()}
        assert len(shards) == SIZES["policy"]
        minis.append(MiniBatch(by_role["policy"], info, by_role))
    return minis


def columns_of(old: RowValues, ref: RowValues, values: RowValues) -> RowValues:
    """What the losses look at: each row's advantage over the others, and what was predicted before the step."""
    rewards = np.repeat(np.linspace(-1.0, 1.0, len(old.row_ids)), old.lengths).astype(np.float32)
    tokens = {
        "advantages": rewards,
        "returns": rewards + values.tokens["values"],
        "old_values": values.tokens["values"],
        "old_logprobs": old.tokens["logprobs"],
        "ref_logprobs": ref.tokens["logprobs"],
    }
    return replace(old, tokens=tokens, rows={})


def logprobs(dispatch: WorkerDispatch, name: str, minis: list[MiniBatch]) -> Any:
    """Of all mini-batches; each is asked for before any is waited for."""
    pending = [dispatch.forward_async(name, mini) for mini in minis]
    return np.concatenate([one.result().tokens["logprobs"] for one in pending])


def test_a_policy_learns_beside_reference_and_critic_and_gives_its_weights_to_the_reference(
    dispatch: WorkerDispatch,
) -> None:
    minis = mini_batches()
    first = logprobs(dispatch, "policy", minis)
    assert np.abs(first - logprobs(dispatch, "ref", minis)).max() > 1e-3
    for number, mini in enumerate(minis):
        asked = [dispatch.forward_async(name, mini) for name in ("policy", "ref", "critic")]
        columns = columns_of(*(one.result() for one in asked))
        loss = PolicyLoss(kl_coef=0.1, entropy_coef=0.01)
        learning = [
            dispatch.forward_backward_async("policy", mini, loss, columns=columns),
            dispatch.forward_backward_async("critic", mini, ValueLoss(), columns=columns),
        ]
        policy, critic = (one.result() for one in learning)
        assert policy["ratio_max"] == pytest.approx(1.0, abs=1e-4)  # nothing moved since `old`
        assert policy["kl"] > 1e-4
        assert policy["entropy"] > 1.0
        assert critic["loss"] > 1e-3
        for name in ("policy", "critic"):
            stepped = dispatch.optim_step(name)
            assert stepped["optimizer_step"] == number + 1
            assert stepped["grad_norm"] > 0
    learned = logprobs(dispatch, "policy", minis)
    assert np.abs(learned - first).max() > 1e-3

    dispatch.sync_weights("policy", "ref")
    assert logprobs(dispatch, "ref", minis) == pytest.approx(logprobs(dispatch, "policy", minis), abs=1e-5)
    assert logprobs(dispatch, "policy", minis) == pytest.approx(learned, abs=1e-6)  # it kept its own
