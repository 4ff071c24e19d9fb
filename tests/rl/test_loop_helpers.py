"""What a loop of one's own needs beside the data: groups of a prompt, losses of micro-batches, a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import RolloutSpec
from raysvc.actors.worker.losses import PolicyLoss
from raysvc.actors.worker.micro_losses import MicroLosses
from raysvc.actors.worker.row_losses import SequencePolicyLoss
from raysvc.errors import ConfigError, SourceError, StateMismatch
from raysvc.job.config import PlanConfig
from raysvc.rl.group import Group, checked
from raysvc.rl.group_table import table_of
from raysvc.rl.loop_checkpoint import LoopCheckpoint
from raysvc.rl.prompt import Prompt

COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "old_logprobs", "advantages")


def test_a_group_of_a_prompt_trains_what_stands_behind_it() -> None:
    prompt = Prompt("7/0:0:3", 2, 5, 0, np.array([4, 5, 6], np.int32), {})
    answers = [torch.tensor([4, 5, 6, 7, 8]), torch.tensor([4, 5, 6])]
    group = checked(prompt.group(answers, rows={"reward": [1.0, 0.0]}))
    assert [mask.tolist() for mask in group.loss_mask] == [[0, 0, 0, 1, 1], [0, 0, 0]]
    assert (group.uid, group.attempt, group.weight_version) == ("7/0:0:3", 2, 5)
    turn = [[4, 5, 9, 7]]
    with pytest.raises(SourceError, match="has a sequence 0 that does not begin with its prompt"):
        prompt.group(turn)
    own = prompt.group(turn, [[0, 0, 0, 1]], weight_version=4)
    assert (own.loss_mask, own.weight_version) == ([[0, 0, 0, 1]], 4)


@pytest.fixture
def model() -> Iterator[Any]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=40, attn_implementation="eager", **size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield transformers.LlamaForCausalLM(config).double()
    torch.set_num_threads(threads)


def gradient(model: nn.Module) -> torch.Tensor:
    found = torch.cat([each.grad.flatten() for each in model.parameters()])
    model.zero_grad()
    return found


def by_row(model: Any, groups: list[Group]) -> None:
    """The mean over all targets of PPO's clipped loss, as its paper has it, a row at a time."""
    losses = []
    for group in groups:
        for row, ids in enumerate(group.input_ids):
            logits = model(torch.tensor([ids])).logits[0, :-1]
            at = torch.tensor(group.loss_mask[row][1:]) > 0
            now = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][at]
            old = torch.tensor(group.tokens["old_logprobs"][row], dtype=torch.float32)[1:][at].double()
            ratio, advantage = (now - old).exp(), float(group.rows["advantages"][row])
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    torch.cat(losses).mean().backward()


@pytest.mark.parametrize(
    "plan",
    [{"micro_batch_size": 2}, {"layout": "packed", "micro_batch_tokens": 40}],
    ids=["padded", "packed"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_micro_batches_have_the_gradient_of_the_formula(
    tmp_path: Path, model: Any, plan: dict[str, Any], dtype: torch.dtype
) -> None:
    rng, groups = np.random.default_rng(3), []
    for number in range(3):
        ids = [rng.integers(1, 40, int(rng.integers(4, 16))).tolist() for _ in range(3)]
        advantages = torch.tensor(rng.normal(size=3)).to(dtype)
        old = [np.log(rng.uniform(0.01, 0.06, len(each))).tolist() for each in ids]
        masks = [[0, 0] + [1] * (len(each) - 2) for each in ids]
        rows = {"advantages": advantages}
        groups.append(Group(f"g{number}", ids, masks, tokens={"old_logprobs": old}, rows=rows))
    recipe = Recipe(PlanConfig(batch_size=3, columns=COLUMNS, **plan), 0)
    stream = RolloutStream("own", RolloutSpec(max_staleness=None), recipe, str(tmp_path), {})
    stream.put(table_of(groups))
    assert stream.form(0, 0)
    _, shards = stream.make(0, (2,))
    losses = MicroLosses(model, PolicyLoss(), dp_size=2)
    counts = []
    for shard in shards:
        found = list(losses(shard))
        counts.append(len(found))
        for each in found:
            each.total.backward()
    got = gradient(model) / 2  # what a reducer that averages over ranks leaves
    by_row(model, groups)
    want = gradient(model)
    assert max(counts) > 1
    assert float((got - want).norm() / want.norm()) < 1e-5
    assert "clip_ratio/region_mean" in found[0].metrics


def test_a_loss_of_rows_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="is of rows"):
        MicroLosses(model, SequencePolicyLoss())  # type: ignore[arg-type]


class Client:
    """The calls of a client that a checkpoint makes."""

    def __init__(self, frontier: int) -> None:
        self.next_step = frontier

    def state_dict(self) -> dict[str, Any]:
        return {"frontier": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_step = state["frontier"]

    def rewind(self, step: int) -> None:
        self.next_step = step


def parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_loop_goes_on_from_its_last_checkpoint_or_from_the_start(tmp_path: Path) -> None:
    path, saved, other = tmp_path / "new" / "checkpoint.pt", parts(1), parts(2)
    started: Any = Client(9)
    assert LoopCheckpoint(path, started, **saved).restore() == 0
    assert started.next_step == 0, (
        "without a checkpoint nothing that was committed is trained in these weights"
    )
    started.next_step = 4
    LoopCheckpoint(path, started, **saved).save()
    goes_on: Any = Client(7)
    assert LoopCheckpoint(path, goes_on, **other).restore() == 4
    assert goes_on.next_step == 4
    assert torch.equal(other["model"].weight, saved["model"].weight)
    state = other["optimizer"].state_dict()["state"][0]
    assert torch.equal(state["exp_avg"], saved["optimizer"].state_dict()["state"][0]["exp_avg"])
    assert [each.name for each in path.parent.iterdir()] == ["checkpoint.pt"]
    with pytest.raises(StateMismatch, match="holds model, optimizer, not model"):
        LoopCheckpoint(path, goes_on, model=other["model"]).restore()


def test_a_loop_that_is_killed_while_it_saves_has_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = tmp_path / "checkpoint.pt", parts(1)
    client: Any = Client(4)
    checkpoint = LoopCheckpoint(path, client, **saved)
    checkpoint.save()
    client.next_step = 5

    def torn(state: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save()
    assert LoopCheckpoint(path, client, **saved).restore() == 4
