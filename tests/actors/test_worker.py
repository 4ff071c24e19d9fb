"""The shipped worker on real ranks: steps, learning rate, clipping, checkpoints, outputs, evaluation, timing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysvc.actors.staging.staging import StagingOptions
from raysvc.actors.worker import checkpoint
from raysvc.actors.worker.losses import PolicyLoss
from raysvc.actors.worker.lr_schedule import LearningRate
from raysvc.actors.worker.timer import PARTS
from raysvc.collate.row_values import RowValues, in_order
from raysvc.collate.shard import Shard
from raysvc.training.run_folder import RunFolder

from .ranks import VOCAB, DoubleWorker, Ranks, tiny_spec
from .reference import distance
from .shards import minis_of, random_rows

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
PLAN = {"batch_size": 12, "mini_batch_size": 4, "shuffle": "none", "oversize": "alone"}
RATE = LearningRate(peak=1e-2, warmup_steps=2, total_steps=9, decay="cosine", floor=0.1)


def shards_of(rows: Any, dp_size: int, **plan: Any) -> list[list[Shard]]:
    """Shards of every mini-batch of the first step, by rank."""
    minis = minis_of(rows, {**PLAN, **plan}, dp_size)
    return [[shards[rank] for _, shards, _ in minis] for rank in range(dp_size)]


def stage(worker: Any, shards: list[Shard], step: int = 0) -> list[tuple[int, int]]:
    """Stage in a thread of its own, as Ray does: the ring may be full until the first are taken."""
    keys = [(step, index) for index in range(len(shards))]

    def put() -> None:
        for key, shard in zip(keys, shards, strict=True):
            worker.stage(key, shard)

    threading.Thread(target=put, daemon=True).start()
    return keys


def weights_of(worker: Any) -> dict[str, np.ndarray]:
    """The whole model, on rank 0."""
    full = checkpoint.full_weights(worker.model)
    return {name: weight.double().numpy().copy() for name, weight in full.items()}


def train(worker: Any, shards: list[Shard]) -> tuple[list[Any], dict[str, np.ndarray]]:
    """One optimizer step for each shard; results and weights."""
    return worker.train_step(stage(worker, shards)), weights_of(worker)


def train_save(worker: Any, shards: list[Shard], folder: str) -> tuple[Any, float, Any]:
    """Train, save, and go on undisturbed: weights as saved, a random number, weights after."""
    before = train(worker, shards)[1]
    worker.save_checkpoint(folder)
    return before, float(torch.rand(())), train(worker, shards)[1]


def load_train(
    worker: Any, folder: str, shards: list[Shard]
) -> tuple[dict[str, np.ndarray], float, Any, Any]:
    """Load, then train on: weights as loaded, a random number, and the results and weights after."""
    worker.load_checkpoint(folder)
    loaded, number = weights_of(worker), float(torch.rand(()))
    return loaded, number, *train(worker, shards)


def test_weights_and_rates_of_steps_do_not_depend_on_ranks_turns_packing_or_strategy(ranks: Ranks) -> None:
    rows = random_rows(12, seed=21)
    ways = [
        (1, {"micro_batch_size": 4}, {}),
        (2, {"layout": "packed", "micro_batch_tokens": 30}, {}),
        (3, {"micro_batch_tokens": 26}, {"strategy": "fsdp"}),
        (3, {"micro_batch_size": 1}, {}),
    ]
    seen = []
    for dp_size, plan, changes in ways:
        spec = tiny_spec(schedule=RATE, max_grad_norm=0.05, **changes)
        results = ranks.run(spec, train, [(mine,) for mine in shards_of(rows, dp_size, **plan)])
        minis = results[0][0]
        seen.append(
            (
                results[0][1],
                [mini.metrics["lr"] for mini in minis],
                [mini.grad_norm for mini in minis],
                [sum(rank[0][index].loss for rank in results) for index in range(3)],
            )
        )
    weights, rates, norms, losses = seen[0]
    assert rates == [RATE.at(0), RATE.at(1), RATE.at(2)]
    assert min(norms) > 0.05  # so every step was clipped
    for other in seen[1:]:
        assert other[1] == rates
        assert other[2] == pytest.approx(norms, rel=1e-5)
        assert other[3] == pytest.approx(losses, rel=1e-5)
        assert distance(other[0], weights) < 1e-6


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("ddp", ((2, "ddp"), (3, "fsdp"), (1, "ddp"))), ("fsdp", ((2, "fsdp"), (1, "ddp"), (3, "ddp")))],
)
def test_a_checkpoint_goes_on_exactly_with_other_ranks_and_another_strategy(
    ranks: Ranks, tmp_path: Path, saved_by: str, loaded_by: tuple[tuple[int, str], ...]
) -> None:
    rows = random_rows(12, seed=22)
    run = RunFolder(tmp_path)
    spec = tiny_spec(schedule=RATE, strategy=saved_by)
    folder = run.new_checkpoint(1)
    saved = ranks.run(spec, train_save, [(mine, str(folder)) for mine in shards_of(rows, 2)])
    assert run.newest() is None  # no checkpoint before it is published
    run.publish(folder, {"data": {"frontier": 1}})
    newest = run.newest()
    assert newest is not None
    assert newest.state == {"data": {"frontier": 1}}
    assert json.loads((folder / "rank-00000.json").read_text())["optimizer_steps"] == 3

    after = []
    for dp_size, strategy in loaded_by:
        results = ranks.run(
            tiny_spec(schedule=RATE, seed=5, strategy=strategy),
            load_train,
            [(str(folder), mine) for mine in shards_of(rows, dp_size)],
        )
        loaded, _, minis, weights = results[0]
        assert distance(loaded, saved[0][0]) < 1e-12
        assert [rank[1] for rank in results][:2] == [rank[1] for rank in saved][:dp_size]
        assert [mini.metrics["lr"] for mini in minis] == [RATE.at(step) for step in (3, 4, 5)]
        after.append(weights)
    for weights in after:  # as if nothing had happened: moments of Adam and all
        assert distance(weights, saved[0][2]) < 1e-6


def save_train(worker: Any, shards: list[Shard], folder: str) -> Any:
    """Save before the first step, then train: weights after."""
    worker.save_checkpoint(folder)
    return train(worker, shards)[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_before_the_first_step_of_several_ranks_changes_no_later_one(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    mine = shards_of(random_rows(12, seed=22), 2)
    spec, folder = tiny_spec(schedule=RATE, strategy=strategy), str(RunFolder(tmp_path).new_checkpoint(0))
    never_saved = ranks.run(spec, train, [(shards,) for shards in mine])[0][1]
    saved = ranks.run(spec, save_train, [(shards, folder) for shards in mine])[0]
    *_, loaded = ranks.run(spec, load_train, [(folder, shards) for shards in mine])[0]
    assert distance(saved, never_saved) < 1e-12
    assert distance(loaded, never_saved) < 1e-12


def test_only_the_newest_checkpoints_stay_and_a_torn_one_goes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        run.publish(run.new_checkpoint(step), {})
    run.new_checkpoint(4)
    run.prune(2)
    assert [found.step for found in run.checkpoints()] == [2, 3]
    assert len(os.listdir(tmp_path / "checkpoints")) == 2


def test_a_run_killed_at_any_point_of_saving_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).with_name("saving.py")
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    *deaths, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(deaths) == 5
    for death in deaths:
        assert death["status"] == -signal.SIGKILL, (death, done.stderr[-2000:])
        assert death["there"] == death["frontiers"] == death["expected"], death
    assert end == {"left": [4, 5], "folders": 2}


def save_and_copy(worker: Any, shards: list[Shard], folder: str) -> Any:
    """Train a little, export for another group and for transformers."""
    train(worker, shards)
    worker.save_hf_model(folder)
    exported = worker.export_weights()
    outputs = []
    for shard in shards:
        worker.stage((9, shard.mini), shard)
        outputs.append(worker.forward((9, shard.mini)))
    return exported, outputs


def take_over(worker: Any, exported: Any, shards: list[Shard]) -> list[RowValues]:
    """Outputs with the weights of another group."""
    worker.import_weights(exported)
    outputs = []
    for shard in shards:
        worker.stage((9, shard.mini), shard)
        outputs.append(worker.forward((9, shard.mini)))
    return outputs


def test_weights_move_to_another_group_and_to_transformers(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = random_rows(12, seed=23)
    shards = shards_of(rows, 2, layout="packed", micro_batch_tokens=30)
    policy = ranks.run(tiny_spec(strategy="fsdp"), save_and_copy, [(mine, str(tmp_path)) for mine in shards])
    exported = policy[0][0]
    assert policy[1][0] is None
    reference = ranks.run(
        tiny_spec(role="reference", seed=7), take_over, [(exported, mine) for mine in shards_of(rows, 1)]
    )
    lm = AutoModelForCausalLM.from_pretrained(tmp_path).double()
    for mini in range(3):
        ids = np.arange(4 * mini, 4 * mini + 4)
        ours = in_order([rank[1][mini] for rank in policy], ids)
        theirs = in_order([reference[0][mini]], ids)
        assert ours.tokens["logprobs"] == pytest.approx(theirs.tokens["logprobs"], rel=1e-5)
        for number, row in enumerate(ids.tolist()):
            here = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
            tokens = torch.tensor(rows.tokens["input_ids"][here].astype(np.int64))
            with torch.no_grad():
                logs = lm(input_ids=tokens[None]).logits[0].log_softmax(-1)
            expected = np.append(0.0, logs[:-1].gather(1, tokens[1:, None])[:, 0].numpy())
            expected *= rows.tokens["loss_mask"][here]
            expected[0] = 0.0
            assert ours.row(number, "logprobs") == pytest.approx(expected, rel=1e-4, abs=1e-6)


def save_shares(worker: Any, shards: list[Shard], folder: str) -> dict[str, np.ndarray]:
    """Train a little, and write a checkpoint."""
    train(worker, shards)
    worker.save_checkpoint(folder)
    return weights_of(worker)


def test_a_checkpoint_of_several_ranks_is_exported_without_any(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from raysvc.actors.model.hf_model import export_checkpoint

    shards = shards_of(random_rows(12, seed=27), 2, layout="packed", micro_batch_tokens=30)
    (tmp_path / "saved").mkdir()
    arguments = [(mine, str(tmp_path / "saved")) for mine in shards]
    expected = ranks.run(tiny_spec(strategy="fsdp"), save_shares, arguments)[0]
    export_checkpoint(tmp_path / "saved", tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = {f"lm.{name}": weight.numpy() for name, weight in lm.state_dict().items()}
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == np.float64 for name in found)
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def evaluate(worker: Any, shards: list[Shard]) -> list[RowValues]:
    """Bits and bytes of every mini-batch, each staged before the one before is asked for."""
    worker.set_token_bytes(np.arange(VOCAB) % 5)
    return [worker.evaluate(key) for key in stage(worker, shards)]


def test_evaluation_counts_nats_targets_and_bytes_of_every_row(ranks: Ranks) -> None:
    rows = random_rows(12, seed=24)
    for dp_size, plan in (
        (1, {"layout": "padded_left"}),
        (3, {"layout": "packed", "micro_batch_tokens": 30}),
    ):
        results = ranks.run(tiny_spec(), evaluate, [(mine,) for mine in shards_of(rows, dp_size, **plan)])
        for mini in range(3):
            ids = np.arange(4 * mini, 4 * mini + 4)
            out = in_order([rank[mini] for rank in results], ids)
            for number, row in enumerate(ids.tolist()):
                here = slice(int(rows.offsets[row]) + 1, int(rows.offsets[row + 1]))
                targets = rows.tokens["input_ids"][here][rows.tokens["loss_mask"][here] > 0]
                assert out.rows["targets"][number] == len(targets)
                assert out.rows["text_bytes"][number] == (targets % 5).sum()
                assert out.rows["nll"][number] == pytest.approx(len(targets) * math.log(VOCAB), rel=0.1)
                text = np.count_nonzero(targets % 5)  # the others are no text: not in bits per byte
                assert out.rows["text_nll"][number] == pytest.approx(text * math.log(VOCAB), rel=0.1)


def test_an_eval_leaves_no_trace_and_runs_without_dropout() -> None:
    (shards,) = shards_of(random_rows(12, seed=26), 1)
    seen = []
    for evaluating in (True, False):
        worker = DoubleWorker(0, 1, "cpu", tiny_spec().model_dump_json())
        worker.setup("")
        torch.manual_seed(3)
        for module in worker.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        weights = []
        for index, shard in enumerate(shards):
            if evaluating:
                twice = [worker.evaluate(key) for key in stage(worker, [shard, shard], step=-1 - index)]
                assert twice[0].rows["nll"].tolist() == twice[1].rows["nll"].tolist()
            weights.append(train(worker, [shard])[1])
        seen.append(weights)
    for with_eval, without in zip(*seen, strict=True):
        assert distance(with_eval, without) == 0.0


def turns(seed: int, trials: int = 3) -> tuple[Any, list[str], list[str], list[bool]]:
    """Rows that are turns of trajectories: 1 to 4 turns, so many trajectories a prompt, 5 prompts."""
    rng = np.random.default_rng(seed)
    uids, names, last = [], [], []
    for prompt in range(5):
        for trial in range(trials):
            count = int(rng.integers(1, 5))
            uids += [f"prompt-{prompt}"] * count
            names += [f"{prompt}/{trial}"] * count
            last += [False] * (count - 1) + [True]
    return random_rows(len(uids), seed=seed), uids, names, last


def advantages_of(rows: Any, uids: list[str], names: list[str], last: list[bool], rewards: Any) -> RowValues:
    """A trajectory's reward less its prompt's mean, at every token of all its turns."""
    final = np.flatnonzero(last)
    end_of = {names[row]: row for row in final}
    ends = [end_of[name] for name in names]
    mean = {uid: np.mean([rewards[row] for row in final if uids[row] == uid]) for uid in set(uids)}
    per_row = np.array([rewards[end] - mean[uid] for end, uid in zip(ends, uids, strict=True)])
    lengths = rows.lengths.astype(np.int64)
    return RowValues(rows.row_ids, lengths, {"advantages": np.repeat(per_row, lengths).astype(np.float32)})


def rl_step(worker: Any, shards: list[Shard], columns: RowValues) -> Any:
    """Old log-probabilities, then one optimizer step per mini-batch, as an algorithm would."""
    from dataclasses import replace

    out = []
    for shard in shards:
        worker.stage((0, shard.mini), shard)
        old = worker.forward((0, shard.mini))
        mine = columns.pick(np.searchsorted(columns.row_ids, old.row_ids))
        extra = replace(
            mine,
            tokens={
                **mine.tokens,
                "old_logprobs": old.tokens["logprobs"],
                "ref_logprobs": old.tokens["logprobs"],
            },
        )
        worker.stage((1, shard.mini), shard, extra)
        metrics = worker.forward_backward((1, shard.mini), PolicyLoss(kl_coef=0.1, entropy_coef=0.01))
        out.append({**metrics, **worker.optim_step()})
    return out, weights_of(worker)


def run_turns(ranks: Ranks, rows: Any, uids: list[str], columns: RowValues, plan: dict[str, Any]) -> None:
    """The same steps, rates and weights for any number of ranks."""
    seen = []
    for dp_size in (1, 2, 3):
        minis = minis_of(rows, plan, dp_size, uids=uids)
        shards = [[parts[rank] for _, parts, _ in minis] for rank in range(dp_size)]
        results = ranks.run(tiny_spec(schedule=RATE), rl_step, [(mine, columns) for mine in shards])
        steps = results[0][0]
        assert [step["optimizer_step"] for step in steps] == [index + 1 for index in range(len(minis))]
        losses = [sum(rank[0][index]["loss"] for rank in results) for index in range(len(minis))]
        assert np.isfinite(losses).all()
        seen.append((losses, [step["lr"] for step in steps], results[0][1]))
    for losses, rates, weights in seen[1:]:
        assert losses == pytest.approx(seen[0][0], rel=1e-4, abs=1e-7)
        assert rates == seen[0][1]
        assert distance(weights, seen[0][2]) < 1e-5


def test_step_wise_rollouts_train_alike_on_any_number_of_ranks(ranks: Ranks) -> None:
    rows, uids, names, last = turns(31)
    rewards = np.random.default_rng(1).integers(0, 2, len(uids)).astype(float)
    columns = advantages_of(rows, uids, names, last, rewards)
    plan = {
        "batch_size": 5,
        "mini_batch_size": 2,
        "micro_batch_tokens": 40,
        "layout": "packed",
        "tail": "pad",
    }
    run_turns(ranks, rows, uids, columns, plan)


def test_step_wise_rollouts_train_alike_on_more_ranks_than_rows(ranks: Ranks) -> None:
    rows, uids, *_ = turns(31, trials=1)
    counts = {uid: uids.count(uid) for uid in uids}
    assert min(counts.values()) == 1  # a mini-batch of one row, others of two to four
    advantages = {"advantages": rows.tokens["advantages"]}
    columns = RowValues(rows.row_ids, rows.lengths.astype(np.int64), advantages)
    plan = {"batch_size": 5, "mini_batch_size": 1, "micro_batch_tokens": 40, "layout": "packed"}
    run_turns(ranks, rows, uids, columns, plan)


def test_rollouts_of_an_agent_train_alike_on_any_number_of_ranks(ranks: Ranks) -> None:
    from raysvc.row_batch import RowBatch

    shared = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared"))
    path = shared / "data" / "tau_airline_rollouts.jsonl"
    if not path.exists():
        pytest.skip(f"no rollouts at {path}")
    uids, names, last, rewards, ids, mask, lengths = [], [], [], [], [], [], []
    for line in path.read_text().splitlines()[:16]:  # 4 prompts of 4 trials
        rollout = json.loads(line)
        said = [i for i, message in enumerate(rollout["messages"]) if message["role"] == "assistant"]
        for number, turn in enumerate(said[:6]):
            before = str(rollout["messages"][max(0, turn - 1)].get("content"))[-40:].encode()
            answer = str(rollout["messages"][turn].get("content")).encode()[:60] or b"-"
            tokens = [3 + byte % (VOCAB - 3) for byte in before + answer]
            ids += tokens
            mask += [0] * len(before) + [1] * len(answer)
            lengths.append(len(tokens))
            uids.append(rollout["uid"])
            names.append(f"{rollout['uid']}/{rollout['trial']}")
            last.append(number + 1 == len(said[:6]))
            rewards.append(float(rollout["reward"]))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens_of = {"input_ids": np.array(ids, np.int32), "loss_mask": np.array(mask, np.uint8)}
    rows = RowBatch(np.arange(len(lengths), dtype=np.int64), offsets, tokens_of, {})
    columns = advantages_of(rows, uids, names, last, np.array(rewards))
    plan = {"batch_size": 4, "mini_batch_size": 2, "micro_batch_tokens": 400, "layout": "padded_right"}
    run_turns(ranks, rows, uids, columns, plan)


def test_timing_is_off_by_default_and_sums_up_to_the_step_when_on() -> None:
    (shards,) = shards_of(random_rows(12, seed=25), 1)
    plain, timed = (
        DoubleWorker(0, 1, "cpu", tiny_spec(staging=StagingOptions(timing=timing)).model_dump_json())
        for timing in (False, True)
    )

    def in_parts(mini: Any) -> float:
        return sum(mini.timing[part] for part in ("forward", "backward", "clip", "optimizer"))

    results = []
    for worker in (plain, timed):
        worker.setup("")
        worker.evaluate(*stage(worker, shards[:1], step=-1))
        results.append(train(worker, shards))
    assert results[1][0][0].timing["eval"] > 0  # of the evaluation before it
    assert results[1][0][1].timing["eval"] == 0
    assert all(mini.timing == {} for mini in results[0][0])
    for mini in results[1][0]:
        assert tuple(mini.timing) == PARTS
        assert min(mini.timing[part] for part in ("copy", "forward", "backward", "clip", "optimizer")) > 0
        assert in_parts(mini) <= mini.compute_s
    assert any(in_parts(mini) > 0.5 * mini.compute_s for mini in results[1][0]), "hardly anything is left out"
    assert distance(results[1][1], results[0][1]) == 0  # timing changes no byte


def test_the_learning_rate_is_a_function_of_the_optimizer_step() -> None:
    rates = [RATE.at(step) for step in range(12)]
    assert rates[:3] == [0.005, 0.01, 0.01]
    assert rates[2:10] == sorted(rates[2:10], reverse=True)
    assert rates[9] == rates[11] == pytest.approx(0.001)
    assert LearningRate(peak=2.0).at(100) == 2.0
    linear = LearningRate(peak=1.0, total_steps=4, decay="linear")
    assert [linear.at(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
