"""Turns that continue one another are one row, and the loss and its gradient are those of a row per turn.

The reference has one row in a forward pass, in float64, and the formulas as their papers have them; nothing of the project's merging,
collation, weights or losses is used there.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import RolloutSpec
from raysvc.actors.worker.losses import PolicyLoss, Targets
from raysvc.collate.loss_weights import sequence_weights, token_weights
from raysvc.errors import ConfigError, SourceError
from raysvc.job.config import PlanConfig
from raysvc.rl.advantages import group_advantages
from raysvc.rl.group import Group
from raysvc.rl.group_table import groups_of, table_of
from raysvc.rl.turns import TurnRows, Turns, find_turns

SHARED = Path(os.environ.get("RAYSVC_SHARED", Path(__file__).parents[3] / "shared"))
REDUCTIONS = ("token_mean", "sequence_mean", "trajectory_mean", "group_mean", "prompt_mean", "constant")
COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "advantages", "old_logprobs")
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"micro_batch_size": 2},
    "packed": {"layout": "packed", "micro_batch_tokens": 64},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tiny(nn.Module):
    """Attention over ids, positions and what a column says of the tokens before, in float64."""

    def __init__(self, vocab: int = 32, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(vocab, 8), nn.Embedding(16384, 8)
        self.expert = nn.Embedding(8, 8) if reads else None
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, vocab)
        self.double()

    def forward(self, ids: Tensor, places: Tensor, segments: Tensor, experts: Tensor | None = None) -> Tensor:
        """[B, W, V], log-probabilities of the next token."""
        x = self.token(ids) + self.place(places)
        if self.expert is not None and experts is not None:
            x = x + self.expert(experts).sum(-2)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        width = ids.shape[1]
        seen = (segments[:, :, None] == segments[:, None, :]) & torch.ones(width, width).tril().bool()
        scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(~seen, -1e30)
        return self.out(torch.tanh(x + torch.softmax(scores, -1) @ v)).log_softmax(-1)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def by_row(model: Tiny, groups: Sequence[Group], reduction: str) -> Tensor:
    """The clipped loss of PPO, a row in a forward pass, averaged as the definition of each mean reads."""
    per_row: list[tuple[int, tuple[int, int], Tensor]] = []  # group, trajectory, losses of its targets
    for number, group in enumerate(groups):
        for row, (ids, mask) in enumerate(zip(group.input_ids, group.loss_mask, strict=True)):
            row_ids = torch.tensor(np.asarray(ids, np.int64))[None]
            where = np.flatnonzero(np.asarray(mask))
            where = where[where > 0]
            experts = group.tokens.get("experts")
            read = None if experts is None else torch.tensor(np.asarray(experts[row], np.int64))[None]
            logprobs = model(row_ids, torch.arange(len(ids))[None], torch.ones_like(row_ids), read)[0]
            now = logprobs[where - 1, row_ids[0, where]]
            advantage, old = (
                torch.tensor(np.asarray(group.tokens[name][row], np.float32)[where].astype(np.float64))
                for name in ("advantages", "old_logprobs")
            )
            ratio = (now - old).exp()
            losses = -torch.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
            own = -1 - row if group.trajectory is None else int(group.trajectory[row])
            per_row.append((number, (number, own), losses))
    mean = lambda each: each.mean() if len(each) else each.sum()  # noqa: E731
    pooled = lambda key: [  # noqa: E731
        torch.cat([each[2] for each in per_row if each[key] == name])
        for name in dict.fromkeys(each[key] for each in per_row)
    ]
    rows_of = [[mean(each[2]) for each in per_row if each[0] == number] for number in range(len(groups))]
    return {
        "token_mean": lambda: mean(torch.cat([each[2] for each in per_row])),
        "sequence_mean": lambda: sum(mean(each[2]) for each in per_row) / len(per_row),
        "trajectory_mean": lambda: sum(map(mean, pooled(1))) / len(pooled(1)),
        "group_mean": lambda: sum(sum(own) / len(own) for own in rows_of) / len(groups),
        "prompt_mean": lambda: sum(map(mean, pooled(0))) / len(groups),
        "constant": lambda: sum(each[2].sum() for each in per_row) / len(per_row) / 9.0,
    }[reduction]()


def served(tmp_path: Path, groups: Sequence[Group], **options: Any) -> RolloutStream:
    """A stream with one formed step of all these groups."""
    spec = {name: options.pop(name) for name in ("rows", "model_reads") if name in options}
    plan = PlanConfig(batch_size=len(groups), **{"columns": COLUMNS, **options})
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    stream = RolloutStream("turns", RolloutSpec(max_staleness=None, **spec), Recipe(plan, 1), str(folder), {})
    stream.put(table_of(groups))
    assert stream.form(0, 0)
    return stream


def as_served(model: Tiny, stream: RolloutStream, dp_size: int, reduction: Any) -> Tensor:
    """What a reducer that averages over ranks leaves."""
    _, shards = stream.make(0, (dp_size,))
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for shard in shards:
        for number in range(len(shard.micro_batches)):
            arrays = shard.micro(number)
            ids, places, labels = (
                torch.tensor(arrays[name].astype(np.int64))
                for name in ("input_ids", "position_ids", "labels")
            )
            segments = torch.tensor(arrays.get("segment_ids", arrays["attention_mask"]).astype(np.int64))
            experts = torch.tensor(arrays["experts"].astype(np.int64)) if "experts" in arrays else None
            logprobs = model(ids, places, segments, experts)[:, :-1]
            there = labels[:, 1:] != -100
            now = logprobs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0][there]
            weights = token_weights(
                arrays, shard.denominators, reduction, dp_size=dp_size, constant=9.0, dtype=np.float64
            )
            columns = {
                name: torch.tensor(arrays[name][:, 1:].astype(np.float64))[there]
                for name in ("advantages", "old_logprobs")
            }
            targets = Targets(torch.tensor(weights[:, 1:])[there], columns, logprobs=now)
            loss = PolicyLoss()(targets).total + 0.0 * logprobs.sum()
            total += gradient(model, loss)
    return total / dp_size


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / max(float(other.norm()), 1e-12))


def random_group(rng: np.random.Generator, uid: str, *, reads: bool, trajectories: bool) -> Group:
    """Some trajectories of some turns: a history is repeated, drifts, is branched from, or a row comes twice."""
    prompt = rng.integers(2, 30, rng.integers(1, 5)).tolist()
    rows: list[tuple[list[int], list[int], int]] = []
    for trajectory in range(int(rng.integers(1, 4))):
        history = list(prompt)
        for _ in range(int(rng.integers(1, 5))):
            answer = rng.integers(2, 30, rng.integers(0, 5)).tolist()
            rows.append((history + answer, [0] * len(history) + [1] * len(answer), trajectory))
            history = history + answer + rng.integers(2, 30, rng.integers(0, 4)).tolist()
            event = rng.random()
            if event < 0.15:  # tokenized again
                history[int(rng.integers(0, len(history)))] = 31
            elif event < 0.3:  # back to an earlier turn
                history = list(rows[int(rng.integers(0, len(rows)))][0])
            elif event < 0.4:
                rows.append((rows[-1][0], rows[-1][1], trajectory))
            elif event < 0.5:  # trains what an earlier turn trains, too
                rows.append((history, [0] * len(prompt) + [1] * (len(history) - len(prompt)), trajectory))
    ids = [row[0] for row in rows]
    tokens: dict[str, Any] = {
        "advantages": [rng.normal(size=len(each)).astype(np.float32) for each in ids],
        "old_logprobs": [rng.normal(-3.4, 0.1, len(each)).astype(np.float32) for each in ids],
    }
    if reads:  # as an engine gives them: the same for the same prefix, mostly
        tokens["experts"] = [
            np.array(
                [[(7 * t + n) % 8, (t + n + int(rng.random() < 0.02)) % 8] for n, t in enumerate(each)],
                np.uint8,
            )
            for each in ids
        ]
    numbers = [row[2] for row in rows] if trajectories else None
    return Group(uid, ids, [row[1] for row in rows], tokens=tokens, trajectory=numbers)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), dp_size=st.integers(1, 3), layout=st.sampled_from(sorted(LAYOUTS)),
       reads=st.booleans(), trajectories=st.booleans())  # fmt: skip
def test_loss_gradients_of_merged_turns_are_those_of_a_row_per_turn(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    dp_size: int,
    layout: str,
    reads: bool,
    trajectories: bool,
) -> None:
    rng = np.random.default_rng(seed)
    groups = [random_group(rng, f"g{n}", reads=reads, trajectories=trajectories) for n in range(3)]
    model = Tiny(reads=reads)
    columns = (*COLUMNS, "experts") if reads else COLUMNS
    stream = served(tmp_path_factory.mktemp("spool"), groups, columns=columns, **LAYOUTS[layout])
    [mini] = stream.make(0, (1,))[0].mini_batches
    assert mini.denominators.rows == sum(len(group.input_ids) for group in groups)
    counts = stream.turns()
    assert counts is not None
    assert len(mini.row_ids) == mini.denominators.rows - counts["merged"]
    for reduction in REDUCTIONS:
        got, want = (
            as_served(model, stream, dp_size, reduction),
            gradient(model, by_row(model, groups, reduction)),
        )
        assert distance(got, want) < 1e-6, reduction


def test_a_conversation_is_one_row_with_each_turn_of_its_own_weight(tmp_path: Path) -> None:
    ids = [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 11, 3, 4]]
    masks = [[0, 0, 1], [0, 0, 0, 0, 1, 1, 1], [0] * 8 + [1]]
    tokens = {"advantages": [np.full(len(each), float(n + 1), np.float32) for n, each in enumerate(ids)]}
    group = Group("g", ids, masks, tokens=tokens)
    columns = ("input_ids", "labels", "advantages")
    stream = served(tmp_path, [group], columns=columns)
    _, (shard,) = stream.make(0, (1,))
    assert shard.arrays["input_ids"].tolist() == [ids[2]]
    assert shard.arrays["labels"].tolist() == [[-100, -100, 7, -100, 9, 10, 11, -100, 4]]
    trained = shard.arrays["labels"][0] != -100
    assert shard.arrays["advantages"][0][trained].tolist() == [1, 2, 2, 2, 3]
    assert shard.arrays["turn_tokens"][0][trained].tolist() == [1, 3, 3, 3, 1]
    weights = token_weights(shard.arrays, shard.denominators, "sequence_mean", dtype=np.float64)
    assert np.allclose(weights[0][trained], [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 3])
    assert stream.turns() == {"merged": 2, "broken": 0, "apart": {}}
    assert stream.outline(0, 1).nbytes == shard.nbytes
    kept = served(tmp_path, [group], columns=columns, rows="keep")
    assert len(kept.make(0, (1,))[0].mini_batches[0].row_ids) == 3
    assert kept.turns() is None


def test_rows_that_no_turn_continues_have_the_bytes_of_rows_that_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    groups = [
        Group(
            f"g{n}", [[1, 2, 3, *rng.integers(4, 30, 5).tolist()] for _ in range(4)], [[0] * 3 + [1] * 5] * 4
        )
        for n in range(3)
    ]
    shards = [
        served(tmp_path, groups, columns=("input_ids", "labels"), rows=rows).make(0, (2,))[1]
        for rows in ("merge", "keep")
    ]
    assert [shard.digest() for shard in shards[0]] == [shard.digest() for shard in shards[1]]


def test_a_group_that_two_threads_look_at_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group("g", [[5, 6, 7], [5, 6, 7, 8, 9]], [[0, 0, 1], [0, 0, 0, 0, 1]])
    stream = served(tmp_path, [group], columns=("input_ids", "labels"))
    both = threading.Barrier(2)

    def looked(rows: TurnRows) -> Turns:
        both.wait(60)
        return find_turns(rows)

    monkeypatch.setattr("raysvc.actors.rollouts.turn_merger.find_turns", looked)
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda _: stream.make(0, (1,))[1][0].digest(), range(2)))
    assert made[0] == made[1]
    assert stream.turns() == {"merged": 1, "broken": 0, "apart": {}}


def turns_of(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], **fields: Any) -> Turns:
    targets = [np.array(mask, bool) & (np.arange(len(mask)) > 0) for mask in masks]
    rows = [np.array(each, np.int32) for each in ids]
    return find_turns(TurnRows(rows, targets, fields.get("read", {}), fields.get("whole", {})))


TURN, NEXT = [1, 2, 3], [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("masks", "fields", "reason"),
    [
        ([[0, 0, 1], [0, 0, 1, 0, 1]], {}, "trains the same tokens"),
        ([[0, 0, 1], [0, 0, 0, 0, 1]], {"whole": {"reward": np.array([0.0, 1.0])}}, "differs in 'reward'"),
        ([[0, 0, 1], [0, 0, 0, 0, 1]], {"read": {"experts": [np.array([1, 2, 0]), np.array([9, 2, 3, 4, 5])]}},
         "differs in 'experts'"),
        ([[0, 0, 1], [0, 0, 0, 0, 1]], {"read": {"experts": [np.array([1, 2, 0]), np.array([1, 2, 3, 4, 5])]}}, None),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_merged_is_counted_with_its_reason(
    masks: list[list[int]], fields: dict[str, Any], reason: str | None
) -> None:
    found = turns_of([TURN, NEXT], masks, **fields)
    assert found.apart == ({} if reason is None else {reason: 1})
    assert found.holder.tolist() == ([1, 1] if reason is None else [0, 1])


def test_a_branch_is_held_by_one_of_the_rows_that_continue_it() -> None:
    found = turns_of(
        [[1, 2], [1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4, 7, 8]],
        [[0, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0] * 5 + [1]],
    )
    assert found.holder.tolist() == [3, 3, 2, 3]


def test_a_history_that_was_tokenized_again_is_named_with_its_first_token() -> None:
    first, mask = [1, 2, 3, 4], [0, 0, 1, 1]  # samples 3, 4
    again = [1, 2, 3, 9, 5, 6, 7]  # 4 became 9
    found = turns_of([first, again], [mask, [0] * 6 + [1]])
    assert found.broken == ((0, 1, 3, (4,), (9, 5, 6, 7)),)
    # other samples of the same prompt, also with the same first token, are no turns of it
    assert turns_of([first, [1, 2, 3, 8]], [mask, mask]).broken == ()
    # nor is another trajectory's turn, where its own is there to the token
    other = turns_of([first, [1, 2, 3, 8, 8], [1, 2, 3, 8, 8, 5, 6]], [mask, [0, 0, 1, 1, 1], [0] * 6 + [1]])
    assert other.broken == ()
    apart = turns_of([first, again], [mask, [0] * 6 + [1]], whole={"trajectory": np.array([0, 1])})
    assert apart.broken == ()


def test_trajectories_travel_with_their_group_and_are_refused_by_name() -> None:
    group = Group("g", [[1, 2], [1, 2, 3], [1, 4]], [[0, 1], [0, 0, 1], [0, 1]], trajectory=[0, 0, 1])
    (back,) = groups_of(table_of([group]))
    assert back.trajectory.tolist() == [0, 0, 1]
    assert "trajectory" not in back.rows
    for wrong, told in (
        ([0, 1], "2 values"),
        ([0.5, 1.0, 2.0], "one count each"),
        ([-1, 0, 0], "one count each"),
    ):
        with pytest.raises(SourceError, match=told):
            table_of([Group("g", group.input_ids, group.loss_mask, trajectory=wrong)])
    with pytest.raises(SourceError, match="'trajectory' twice"):
        table_of(
            [
                Group(
                    "g",
                    group.input_ids,
                    group.loss_mask,
                    rows={"trajectory": [0, 0, 1]},
                    trajectory=[0, 0, 1],
                )
            ]
        )


def rollouts_of(trials: Sequence[dict[str, Any]], tokenizer: Any) -> Group:
    """A row per assistant message: all that came before, and the message."""
    ids: list[list[int]] = []
    masks, numbers = [], []
    for trial, line in enumerate(trials):
        history: list[int] = []
        for message in line["messages"]:
            text = str(message.get("content") or json.dumps(message.get("tool_calls")))
            own = tokenizer.encode(
                f"<|im_start|>{message['role']}\n{text}<|im_end|>\n", add_special_tokens=False
            )
            if message["role"] == "assistant":
                ids.append([*history, *own])
                masks.append([0] * len(history) + [1] * len(own))
                numbers.append(trial)
            history += own
    rng = np.random.default_rng(len(ids))
    tokens = {
        "advantages": [rng.normal(size=len(each)).astype(np.float32) for each in ids],
        "old_logprobs": [np.full(len(each), -4.0, np.float32) for each in ids],
    }
    return Group(str(trials[0]["uid"]), ids, masks, tokens=tokens, trajectory=numbers)


@pytest.fixture(scope="module")
def real_groups() -> list[Group]:
    file = SHARED / "data" / "tau_airline_rollouts.jsonl"
    if not file.exists():
        pytest.skip(f"needs {file}")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHARED / "tokenizers" / "qwen2_5" / "tokenizer.json"))

    class Encodes:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    by_uid: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        by_uid.setdefault(line["uid"], []).append(line)
    return [rollouts_of(trials, Encodes()) for trials in list(by_uid.values())[:6]]


def test_real_rollouts_have_a_row_per_trajectory_and_no_turn_is_lost(
    real_groups: list[Group], tmp_path: Path
) -> None:
    stream = served(tmp_path, real_groups, columns=("input_ids", "labels"))
    [mini] = stream.make(0, (1,))[0].mini_batches
    trajectories = sum(len(set(group.trajectory)) for group in real_groups)
    assert len(mini.row_ids) == trajectories
    per_turn = [len(ids) for group in real_groups for ids in group.input_ids]
    assert (mini.denominators.rows, mini.denominators.trajectories) == (len(per_turn), trajectories)
    assert sum(per_turn) > 5 * int(mini.lengths.sum())
    counts = stream.turns()
    assert counts is not None
    assert (counts["broken"], counts["apart"]) == (0, {})


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "trajectory_mean"])
def test_gradients_of_real_rollouts_are_those_of_a_row_per_turn(
    real_groups: list[Group], tmp_path: Path, reduction: str
) -> None:
    first = real_groups[0]
    few = [row for row, ids in enumerate(first.input_ids) if len(ids) < 2200][:6]
    known = {token: n for n, token in enumerate(sorted({t for row in few for t in first.input_ids[row]}))}
    group = Group(
        "few",
        [[known[token] for token in first.input_ids[row]] for row in few],
        [first.loss_mask[row] for row in few],
        tokens={name: [values[row] for row in few] for name, values in first.tokens.items()},
        trajectory=[first.trajectory[row] for row in few],
    )
    model = Tiny(vocab=len(known))
    stream = served(tmp_path, [group], micro_batch_size=1)
    got, want = as_served(model, stream, 1, reduction), gradient(model, by_row(model, [group], reduction))
    counts = stream.turns()
    assert counts is not None
    assert counts["merged"] > 0
    assert distance(got, want) < 1e-6


@pytest.mark.ray
def test_a_replayed_step_shows_what_was_sampled_and_what_came_back(tmp_path: Path, ray_session: None) -> None:
    from typer.testing import CliRunner

    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.cli.main import app

    ids = [[9707, 11, 3720, 1056, 13], [9707, 11, 32475, 13, 7, 7]]  # " air", "line" came back as " airline"
    plan = {"batch_size": 1, "columns": ("input_ids", "labels")}
    server = raysvc.serve_rollouts("again", run_dir=str(tmp_path), pad_token_id=0, plan=plan, num_cpus=0)
    try:
        producer = raysvc.rollouts(server.name)
        producer.put_groups(Group("g", ids, [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]], trajectory=[0, 0]))
        with raysvc.attach(server.name, dp_size=1) as client:
            for step in client.steps(stop=1):
                client.commit(step.index)
        assert producer.stats()["turns"] == {"merged": 0, "broken": 1, "apart": {}}
    finally:
        stop_server(server.name)
    tokenizer = SHARED / "tokenizers" / "qwen2_5"
    texts = ["--tokenizer", str(tokenizer)] if tokenizer.exists() else []
    told = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "0", "--dp-size", "1", *texts])
    assert told.exit_code == 0, told.output
    want = (
        "where ' air' became ' airline': sampled ' airline.', then found ' airline.(('"
        if texts
        else "where ids [3720] became ids [32475]: sampled ids [3720, 1056, 13], then found ids [32475, 13, 7, 7]"
    )
    assert f"group g#0: row 1 continues row 0 up to token 2, {want}" in told.output


@pytest.mark.parametrize("oversize", ["truncate", "drop", "alone"])
def test_rows_over_the_budget_lose_no_turn_that_a_row_per_turn_would_train(
    tmp_path: Path, oversize: str
) -> None:
    model, merged = Tiny(), 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        groups = [random_group(rng, f"g{n}", reads=False, trajectories=seed % 2 > 0) for n in range(3)]
        options = {"layout": "packed", "micro_batch_tokens": 16, "oversize": oversize}
        keep, merge = (served(tmp_path, groups, rows=rows, **options) for rows in ("keep", "merge"))
        for reduction in REDUCTIONS:
            got, want = as_served(model, merge, 2, reduction), as_served(model, keep, 2, reduction)
            assert distance(got, want) < 1e-6, (seed, reduction)
        merged += (merge.turns() or {})["merged"]
    assert merged


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_context_parallel_ranks_share_the_weights_of_turns(tmp_path: Path, layout: str) -> None:
    from raysvc.actors.server.spec import Role

    groups = [
        random_group(np.random.default_rng(n), f"g{n}", reads=False, trajectories=n > 1) for n in (4, 9)
    ]
    groups = [replace(group, trajectory=None) for group in groups]
    options = {**LAYOUTS[layout], "columns": ("input_ids", "labels", "advantages")}
    whole = served(tmp_path, groups, **options)
    cut = served(tmp_path, groups, **options, cp_split="zigzag" if layout == "packed" else "head_tail")
    assert (whole.turns() or {}).get("merged") == 0, "nothing was made yet"
    (_, one), (_, parts) = whole.make(0, (2,)), cut.make(0, (Role(2, cp=2),))
    assert (whole.turns() or {})["merged"] > 0
    for reduction in REDUCTIONS:
        weigh = lambda shard: token_weights(shard.arrays, shard.denominators, reduction, constant=9.0)  # noqa: B023, E731
        trained = [np.sort(weigh(shard)[shard.arrays["labels"] != -100]) for shard in (*one, *parts)]
        assert np.allclose(np.sort(np.concatenate(trained[:2])), np.sort(np.concatenate(trained[2:]))), (
            reduction
        )


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_trajectory_in_a_shard_has_the_reward_of_its_last_turn(tmp_path: Path, layout: str) -> None:
    lengths, rewards = [2, 5, 7, 4, 6, 3], np.array([9.0, 2.0, 0.5, 8.0, 7.0, 3.5])  # the last: 2.0, 3.5, 0.5
    ids = [[row, *[10 * row + 1] * (length - 1)] for row, length in enumerate(lengths)]
    masks = [[0, *[1] * (length - 1)] for length in lengths]
    group = Group("g", ids, masks, rows={"reward": rewards}, trajectory=[0, 0, 2, 1, 1, 1])
    columns = ("input_ids", "attention_mask", "labels", "reward", "trajectory")
    _, (shard,) = served(tmp_path, [group], **{**LAYOUTS[layout], "columns": columns}).make(0, (1,))
    arrays = shard.arrays
    assert shard.row_ids[shard.row_ids >= 0].tolist() != list(range(6)), "the shard has another order"
    got = group_advantages(
        arrays["reward"],
        arrays["row_group"],
        "mean_only",
        trajectories=arrays["trajectory"],
        order=shard.row_ids,
    )
    by_row = np.array([0.0, 0.0, -1.5, 1.5, 1.5, 1.5])  # less their mean, 2.0
    assert got.tolist() == np.where(shard.row_ids < 0, 0.0, by_row[shard.row_ids]).tolist()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_loss_of_one_number_a_row_weighs_trajectories_alike(tmp_path: Path, layout: str) -> None:
    rng = np.random.default_rng(12)
    groups = [random_group(rng, f"g{n}", reads=False, trajectories=True) for n in range(3)]
    stream = served(tmp_path, groups, **LAYOUTS[layout])
    _, shards = stream.make(0, (2,))
    of_trajectory: dict[tuple[int, int], list[float]] = {}
    for number, group in enumerate(groups):
        for row, own in enumerate(group.trajectory):
            targets = float(np.sum(np.asarray(group.loss_mask[row])[1:]))
            of_trajectory.setdefault((number, own), []).append(targets)
    kept = sum(int((shard.row_ids >= 0).sum()) for shard in shards)
    weights = np.concatenate(
        [sequence_weights(shard.arrays, shard.denominators, dp_size=2) for shard in shards]
    )
    assert kept < sum(map(len, of_trajectory.values())), "some turns were merged"
    some = sum(1 for targets in of_trajectory.values() if sum(targets))
    assert weights.sum() / 2 == pytest.approx(some / len(of_trajectory))


def test_what_a_role_cannot_have_of_turns_quarantines_no_group(tmp_path: Path) -> None:
    from raysvc.actors.server.spec import Role
    from raysvc.integrations.skyrl import BatchRules

    turns = [[1, 2, 3], [1, 2, 3, 4, 5]]
    rows = {"prompt_tokens": [2, 2]}
    groups = [
        Group("turns", turns, [[0, 0, 1], [0, 0, 0, 0, 1]], rows=rows),
        Group("apart", [[6, 7, 8], [9, 8, 7]], [[0, 0, 1]] * 2, rows={"prompt_tokens": [2, 2]}),
        Group("late", [[6, 7, 8], [9, 8, 7]], [[0, 0, 1]] * 2, rows={"prompt_tokens": [2, 9]}),
    ]
    columns = ("input_ids", "attention_mask", "loss_mask", "prompt_tokens")
    stream = served(tmp_path, groups, columns=columns, layout="padded_left")
    role = Role(1, batches=BatchRules(reduction="sequence_mean"))
    assert stream.repair(0, (role,)), "a row that says what cannot be is a mistake of its group"
    assert [uid for uid, _ in stream.pool.quarantined] == ["late"]
    with pytest.raises(ConfigError, match="serve with rows='keep'"):
        stream.make(0, (role,))
    assert not stream.repair(0, (role,)), "and no other one is given up for what the role asks"
    assert len(stream.make(0, (1,))[1]) == 1
