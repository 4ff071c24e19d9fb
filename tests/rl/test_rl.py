"""Rollouts: groups in, prompt-aligned steps out, nothing lost, nothing twice, nothing too old."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.collate.shard import read_shard
from raysvc.errors import ConfigError, FencedError, SourceError, StateMismatch, StepNotReady
from raysvc.rl.advantages import group_advantages
from raysvc.rl.group import Group
from raysvc.rl.group_table import groups_of, table_of
from tests.patience import end_servers

COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "loss_mask", "logprobs", "reward")
PLAN = {"batch_size": 4, "mini_batch_size": 2, "micro_batch_size": 3, "columns": COLUMNS}


def group(number: int, sequences: int | None = None, **fields: Any) -> Group:
    """A group of 1 to 4 sequences whose first token tells its number."""
    rng = np.random.default_rng(number)
    count = sequences or 1 + number % 4
    ids = [[number, *rng.integers(0, 9, 1 + int(rng.integers(0, 20))).tolist()] for _ in range(count)]
    return Group(
        uid=f"prompt-{number}",
        input_ids=ids,
        loss_mask=[[0] + [1] * (len(each) - 1) for each in ids],
        tokens={"logprobs": [[-0.5] * len(each) for each in ids]},
        rows={"reward": rng.random(count).astype(np.float32)},
        **fields,
    )


def test_groups_come_back_from_their_table() -> None:
    groups = [group(number, weight_version=number) for number in range(6)] + [group(2, attempt=1)]
    back = groups_of(table_of(groups))
    assert [each.key for each in back] == [each.key for each in groups]
    for was, now in zip(groups, back, strict=True):
        assert [ids.tolist() for ids in now.input_ids] == [list(ids) for ids in was.input_ids]
        assert np.allclose(now.rows["reward"], was.rows["reward"])
        assert now.weight_version == was.weight_version


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"uid": ""}, "no uid"),
        ({"input_ids": []}, "no sequence"),
        ({"input_ids": [[1], []]}, "an empty one"),
        ({"input_ids": [[1, -2], [3]]}, "negative token"),
        ({"loss_mask": [[0, 1]]}, "1 sequences in 'loss_mask'"),
        ({"loss_mask": [[0, 1], [1, 1]]}, "2 values in 'loss_mask' of sequence 1, which has 1"),
        ({"loss_mask": [[0, 2], [1]]}, "neither 0 nor 1"),
        ({"tokens": {"logprobs": [[0.0, float("nan")], [0.0]]}}, "not finite"),
        ({"rows": {"reward": [1.0]}}, "1 values in 'reward' for 2"),
        ({"rows": {"input_ids": [1.0, 2.0]}}, "two columns 'input_ids'"),
        ({"weight_version": -1}, "negative"),
    ],
)
def test_a_group_that_breaks_a_rule_is_refused_by_name(change: dict[str, Any], rule: str) -> None:
    good = {"uid": "p", "input_ids": [[1, 2], [3]], "loss_mask": [[0, 1], [1]]}
    table_of([Group(**good)])
    with pytest.raises(SourceError, match=rule):
        table_of([Group(**good), Group(**{**good, **change})])


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 4)
)
def test_advantages_are_those_of_each_group_alone_whatever_dummies_stand_between(
    rewards: list[list[float]], dummies: int
) -> None:
    flat = np.array([r for group in rewards for r in group] + [1e6] * dummies)
    index = np.array([g for g, group in enumerate(rewards) for _ in group] + [-1] * dummies)
    order = np.random.default_rng(0).permutation(len(flat))
    got = np.empty(len(flat))
    for std, lost in (("sample", 1), ("population", 0)):
        got[order] = group_advantages(flat[order], index[order], std=std)
        scales = [np.std(g, ddof=lost) if len(g) > 1 else 1.0 for g in rewards]
        pairs = zip(rewards, scales, strict=True)
        expected = [(r - np.mean(g)) / (scale + 1e-6) for g, scale in pairs for r in g]
        assert np.allclose(got, expected + [0.0] * dummies, atol=1e-6)
    alone = group_advantages(flat, index, "leave_out")
    for g, own in enumerate(rewards):
        if len(own) > 1:
            others = (sum(own) - np.array(own)) / (len(own) - 1)
            assert np.allclose(alone[index == g], np.array(own) - others)


def test_advantages_divide_by_the_deviation_of_trl_unless_another_is_named() -> None:
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl.trainer.utils")
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 2.0, 2.0])
    groups = torch.from_numpy(rewards).view(2, 4)
    of_trl = (groups - groups.mean(1, keepdim=True)) / (trl.nanstd(groups, 1, keepdim=True) + 1e-6)
    of_torch = (groups - groups.mean(1, keepdim=True)) / (torch.std(groups, 1, keepdim=True) + 1e-6)
    of_all = (groups - groups.mean(1, keepdim=True)) / (
        torch.std(groups, 1, correction=0, keepdim=True) + 1e-6
    )
    numbers = np.repeat([0, 1], 4)
    assert np.allclose(group_advantages(rewards, numbers), of_trl.flatten())
    assert np.allclose(group_advantages(rewards, numbers), of_torch.flatten())
    assert np.allclose(group_advantages(rewards, numbers, std="population"), of_all.flatten())
    assert group_advantages(np.array([5.0]), np.array([0])).tolist() == [0.0]


@pytest.mark.parametrize("how", ["group", "mean_only", "leave_out"])
def test_a_trajectory_of_many_turns_counts_as_often_as_one_of_a_single_turn(how: Any) -> None:
    rng = np.random.default_rng(5)
    groups = np.repeat([0, 1, -1], [9, 7, 2])
    trajectories = np.array([0, 0, 1, 2, 2, 2, 2, 1, 0, 3, 0, 0, 3, 1, 1, 1, 0, 0])
    final = {
        (g, t): float(rng.normal()) for g, t in set(zip(groups.tolist(), trajectories.tolist(), strict=True))
    }
    keys = list(zip(groups.tolist(), trajectories.tolist(), strict=True))
    last = {key: place for place, key in enumerate(keys)}
    # rewards before the last turn do not count
    rewards = np.array([final[key] if last[key] == place else rng.normal() for place, key in enumerate(keys)])
    got = group_advantages(rewards, groups, how, trajectories=trajectories)
    assert got[groups < 0].tolist() == [0.0, 0.0]
    for place, (g, _) in enumerate(keys[:16]):
        others = np.array([value for (h, _), value in final.items() if h == g])
        own = final[keys[place]]
        want = {
            "group": (own - others.mean()) / (others.std(ddof=1) + 1e-6),
            "mean_only": own - others.mean(),
            "leave_out": own - (others.sum() - own) / max(len(others) - 1, 1),
        }[how]
        assert np.isclose(got[place], want)
    # as a shard has them, longest first: which turn is the last one is told by the row's number alone
    shuffled = np.random.default_rng(6).permutation(len(keys))
    order = 100 + 3 * np.arange(len(keys))
    there = group_advantages(
        rewards[shuffled], groups[shuffled], how, trajectories=trajectories[shuffled], order=order[shuffled]
    )
    assert np.allclose(there, got[shuffled], rtol=0, atol=1e-12)
    alone = group_advantages(rewards[shuffled], groups[shuffled], how, order=order[shuffled])
    assert np.allclose(alone, group_advantages(rewards, groups, how)[shuffled], rtol=0, atol=1e-12)


@pytest.fixture
def rollout_server(tmp_path: Path, ray_session: None) -> Iterator[Callable[..., Any]]:
    import raysvc

    names = []

    def start(name: str, **options: Any) -> Any:
        names.append(name)
        options = {"pad_token_id": 0, "plan": PLAN, "max_staleness": None, "num_cpus": 0, **options}
        return raysvc.serve_rollouts(name, run_dir=str(tmp_path / name), **options)

    yield start
    end_servers(names)


def uids_of(step: Any) -> list[list[int]]:
    """[mini][row], the number of each row's group, in row order."""
    import ray

    out = []
    for mini in step.mini_batches:
        shards = [read_shard(value) for value in ray.get(list(mini.shards))]
        firsts = [shard.arrays["input_ids"][:, 0] for shard in shards]
        out.append(mini.restore(firsts).tolist())
    return out


@pytest.mark.ray
def test_steps_form_of_whole_groups_as_they_come_and_outputs_return_in_row_order(
    rollout_server: Callable[..., Any],
) -> None:
    import ray

    import raysvc

    rollout_server("steps", plan={**PLAN, "update_epochs": 2})
    producer = raysvc.rollouts("steps")
    with raysvc.attach("steps", roles={"policy": 2, "critic": 3}, look_ahead_steps=1) as client:
        late = threading.Timer(0.3, lambda: producer.put_groups([group(n) for n in (3, 4, 5, 6, 7)]))
        assert client.rollouts.put_groups([group(n) for n in range(3)])[:2] == (3, 0)
        late.start()
        steps = []
        for step in client.steps(stop=2):
            steps.append(uids_of(step))
            assert len(step.mini_batches) == 2
            assert len(list(step.optimizer_steps())) == 4
            rows_of = dict(zip(step.mini_batches, steps[-1], strict=True))
            for mini in step.mini_batches:
                assert mini.info.denominators.groups == 2
                for role in ("policy", "critic"):
                    rewards = [
                        read_shard(value).arrays["reward"] for value in ray.get(list(mini.by_role[role]))
                    ]
                    expected = [group(n).rows["reward"] for n in dict.fromkeys(rows_of[mini])]
                    assert np.array_equal(mini.restore(rewards, role), np.concatenate(expected))
            client.commit(step.index)
        late.join()
    expected = [[n for n in pair for _ in range(1 + n % 4)] for pair in ((0, 1), (2, 3), (4, 5), (6, 7))]
    assert [mini for step in steps for mini in step] == expected


@pytest.mark.ray
def test_ranks_that_each_attach_get_the_groups_of_a_step_once_and_commit_it(
    rollout_server: Callable[..., Any],
) -> None:
    import raysvc

    rollout_server("ranks")
    producer = raysvc.rollouts("ranks")
    ranks = [
        raysvc.attach_rank("ranks", dp_size=2, rank=rank, group="g", look_ahead_steps=2) for rank in (0, 1)
    ]
    streams = [rank.steps(stop=3) for rank in ranks]
    for number in range(3):
        producer.put_groups([group(n) for n in range(4 * number, 4 * number + 4)])
        steps = [next(stream) for stream in streams]
        assert steps[0].infos[0].denominators.groups == 2
        firsts = [
            first
            for step in steps
            for shard in step.shards
            for first, row in zip(shard.arrays["input_ids"][:, 0], shard.row_ids, strict=True)
            if row >= 0
        ]
        assert sorted(firsts) == [n for n in range(4 * number, 4 * number + 4) for _ in range(1 + n % 4)]
        for rank, step in zip(ranks, steps, strict=True):
            rank.commit(step.index)
    for rank in ranks:
        rank.detach()
    with raysvc.attach("ranks", takeover=True) as client:
        assert client.next_step == 3


@pytest.mark.ray
def test_a_killed_server_loses_no_acknowledged_group_and_repeats_its_steps(
    rollout_server: Callable[..., Any], streams: Any
) -> None:
    import ray

    import raysvc

    handle = rollout_server("killed-rl")
    producer = raysvc.rollouts("killed-rl")
    ref = ray.put([group(n) for n in range(4, 7)])
    assert producer.put_groups([group(n) for n in range(4)])[:2] == (4, 0)
    assert producer.put_groups(ref)[:2] == (3, 0)
    producer.drop(["prompt-6"])

    def kill() -> None:
        stats = ray.get(handle.actor.stats.options(concurrency_group="control").remote())
        os.kill(stats["pid"], signal.SIGKILL)

    with raysvc.attach("killed-rl", look_ahead_steps=1) as client:
        first = streams.opened(client.fetch(0))
        kill()
        assert producer.put_groups([group(n) for n in (0, 4, 6, 7, 8)])[:2] == (2, 3), (
            "a dropped group stays away"
        )
        assert streams.opened(client.fetch(0)) == first
        client.commit(0)
        (step,) = list(client.steps(stop=2))
        assert [set(mini) for mini in uids_of(step)] == [{4, 5}, {7, 8}]
        state = json.loads(json.dumps(client.state_dict()))
        kill()
        client.load_state_dict(state)
        assert streams.opened(client.fetch(0)) == first, "the membership was written before it was handed out"
        foreign = {
            **state,
            "plan": {**state["plan"], "identity": {**state["plan"]["identity"], "batch_size": 9}},
        }
        with pytest.raises(StateMismatch, match="batch_size was 9 and is 4"):
            client.load_state_dict(foreign)
    assert producer.stats()["sequences"] == sum(1 + n % 4 for n in range(9))


@pytest.mark.ray
def test_no_row_is_trained_too_old_and_capacity_comes_back_also_after_a_restart(
    rollout_server: Callable[..., Any],
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server

    rollout_server("stale", max_staleness=1, wait_s=0.2)
    producer = raysvc.rollouts("stale")
    uids = [f"prompt-{n}" for n in range(12)]
    assert producer.reserve(uids) == uids[:8]
    producer.put_groups([group(n) for n in range(6)])
    with raysvc.attach("stale", look_ahead_steps=0) as client:
        for step in client.steps(stop=1):
            assert step.weight_versions == (0, 0)
            client.commit(step.index)
        client.rollouts.set_weight_version(1)
        facts = producer.stats()
        assert (facts["ready"], facts["reserved"], facts["capacity"]) == (2, 2, 4)
        with pytest.raises(StepNotReady, match="2 of the 4 groups of step 1"):
            next(client.steps(stop=2))
        producer.release(["prompt-6"])
        producer.put_groups([group(n, weight_version=1) for n in (7, 8)])
        for step in client.steps(stop=2):
            assert step.weight_versions == (0, 1)
            client.commit(step.index)
        put = producer.put_groups([group(9, weight_version=0), group(10, weight_version=1)])
        assert put == (1, 0, {"prompt-9": "stale", "prompt-10": "new"})
        client.rollouts.set_weight_version(2)
        facts = producer.stats()
        assert (facts["stale"], facts["evicted"], facts["ready"], facts["capacity"]) == (1, 0, 1, 7)
        with pytest.raises(ConfigError, match="1 is below 2"):
            client.rollouts.set_weight_version(1)
    stop_server("stale")
    rollout_server("stale", max_staleness=1, wait_s=0.2)
    with raysvc.attach("stale") as client:
        assert client.next_step == 2
        facts = producer_facts("stale")
        assert (facts["weight_version"], facts["trained"], facts["capacity"]) == (2, 8, 7)
    fence = client.lease.fence
    with pytest.raises(FencedError):
        raysvc.rollouts("stale")._call("set_weight_version", "lease", fence, 3)


def producer_facts(name: str) -> dict[str, Any]:
    import raysvc

    facts: dict[str, Any] = raysvc.rollouts(name).stats()
    return facts


@pytest.mark.ray
def test_look_ahead_of_rollouts_keeps_to_its_bytes_also_for_steps_that_form_later(
    rollout_server: Callable[..., Any],
) -> None:
    import raysvc

    rollout_server("bytes")
    producer = raysvc.rollouts("bytes")
    producer.put_groups([group(n, sequences=2) for n in range(12)])
    for ranks in (False, True):
        attach = partial(raysvc.attach_rank, rank=0, group="g") if ranks else raysvc.attach
        with attach("bytes", look_ahead_steps=4, look_ahead_bytes=10**6) as client:
            client.rewind(0)
            steps = client.steps()
            next(steps)
            assert client.stats().outstanding == 2, "three steps can be formed"
            sizes = [client.outline(step).nbytes for step in range(3)]
            assert client.stats().outstanding_bytes == sum(sizes[1:])
    limit = int(1.5 * max(sizes))
    with raysvc.attach("bytes", look_ahead_steps=4, look_ahead_bytes=limit) as client:
        for step in client.steps(stop=8):
            stats = client.stats()
            assert stats.outstanding_bytes <= limit
            assert stats.outstanding == (0 if step.index in (2, 7) else 1), "one fits, and is known to fit"
            client.commit(step.index)
            if step.index == 2:  # more come while nothing is outstanding
                producer.put_groups([group(n, sequences=2) for n in range(12, 32)])


@pytest.mark.ray
def test_what_no_checkpoint_goes_back_to_can_be_forgotten_and_a_killed_server_knows_it(
    rollout_server: Callable[..., Any], tmp_path: Path, streams: Any
) -> None:
    import ray

    import raysvc
    from raysvc.errors import StepOutOfOrder

    handle = rollout_server("forget")
    spool = tmp_path / "forget" / "server" / "rollouts" / "groups"
    producer = raysvc.rollouts("forget")
    for n in range(20):
        producer.put_groups([group(n)])
    with raysvc.attach("forget", look_ahead_steps=1) as client:
        old = client.state_dict()
        kept = {}
        for step in client.steps(stop=4):
            kept[step.index] = streams.opened(step)
            client.commit(step.index)
        with pytest.raises(StepOutOfOrder, match="at most 4"):
            client.rollouts.delete_before(5)
        assert client.rollouts.delete_before(2) == 8 + 2
        assert len(list(spool.iterdir())) == 12
        stats = ray.get(handle.actor.stats.options(concurrency_group="control").remote())
        os.kill(stats["pid"], signal.SIGKILL)
        for ask in (lambda: client.load_state_dict(old), lambda: client.rewind(1)):
            with pytest.raises(StepOutOfOrder, match="a step from 2 on"):
                ask()
        client.rewind(2)
        assert streams.take(client, stop=4) == {step: kept[step] for step in (2, 3)}
        assert producer.put_groups([group(0), group(20)])[:2] == (1, 1)
    facts = producer.stats()
    assert (facts["trained"], facts["ready"]) == (16, 5)
    assert facts["sequences"] == sum(1 + n % 4 for n in range(21))


def shared_data() -> Path:
    root = Path(os.environ.get("RAYSVC_SHARED", Path(__file__).parents[3] / "shared"))
    return root / "data" / "tau_airline_rollouts.jsonl"


@pytest.mark.ray
@pytest.mark.skipif(not shared_data().exists(), reason="no tau_airline_rollouts.jsonl in RAYSVC_SHARED")
def test_real_multi_turn_rollouts_become_the_same_optimizer_steps_however_many_turns(
    rollout_server: Callable[..., Any],
) -> None:
    import ray

    import raysvc

    lines = [json.loads(line) for line in shared_data().read_text().splitlines()]
    by_uid: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_uid.setdefault(line["uid"], []).append(line)
    groups = []
    for uid, trials in by_uid.items():
        ids, masks, rewards = [], [], []
        for trial in trials:  # a sequence per assistant turn, as bytes: what comes before it is context
            text = b""
            for message in trial["messages"]:
                content = str(message.get("content") or message.get("tool_calls")).encode()[:200]
                if message["role"] == "assistant":
                    ids.append(list(text[-300:] + content))
                    masks.append([0] * len(text[-300:]) + [1] * len(content))
                    rewards.append(trial["reward"])
                text += content
        groups.append(Group(uid, ids, masks, rows={"reward": np.array(rewards, np.float32)}))
    plan = {"batch_size": 5, "mini_batch_size": 2, "layout": "packed", "micro_batch_tokens": 4096,
            "columns": ("input_ids", "labels", "position_ids", "reward")}  # fmt: skip
    rollout_server("tau", plan=plan)
    raysvc.rollouts("tau").put_groups(groups)
    rows, tokens = 0, 0
    with raysvc.attach("tau", dp_size=2) as client:
        for step in client.steps(stop=5):
            assert len(step.mini_batches) == 3, "5 prompts, 2 at a time, whatever their turns"
            for mini in step.mini_batches:
                rows += mini.info.denominators.rows  # also of those that travel inside a later turn
                tokens += mini.info.denominators.tokens
                shards = [read_shard(value) for value in ray.get(list(mini.shards))]
                restored = mini.restore([shard.arrays["reward"] for shard in shards])
                assert len(restored) == len(mini.info.row_ids)
            client.commit(step.index)
    assert rows == sum(len(each.input_ids) for each in groups)
    assert tokens == sum(sum(mask[1:]) for each in groups for mask in each.loss_mask)
