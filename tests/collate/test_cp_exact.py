"""A transformer whose context-parallel ranks each see their part of a shard has the losses and gradients of one process.

The oracle runs every row alone, unpadded, in float64. The ranks are simulated: each embeds its own tokens, all gather keys and
values, and each attends with its own queries, so that what a rank gets is all that it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from raysvc.collate.cp_cut import cp_cut
from raysvc.collate.loss_weights import token_weights
from raysvc.collate.shard import Shard
from raysvc.job.config import PlanConfig
from tests.collate.conftest import collate_step, random_data

torch = pytest.importorskip("torch")
LENGTHS = [3, 17, 9, 30, 1, 22, 14, 5, 40]
COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "advantages")
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed", "micro_batch_tokens": 64},
    "padded_right": {"layout": "padded_right", "micro_batch_size": 2},
    "padded_left": {"layout": "padded_left", "micro_batch_size": 2},
}
WIDTH, HEADS, VOCABULARY, LAYERS = 16, 2, 60, 2


def weights() -> dict[str, Any]:
    """Parameters of a small transformer with learned positions."""
    torch.manual_seed(0)

    def matrix(*shape: int) -> Any:
        return (torch.randn(*shape, dtype=torch.float64) / 4).requires_grad_()

    made = {
        "tokens": matrix(VOCABULARY, WIDTH),
        "positions": matrix(64, WIDTH),
        "head": matrix(WIDTH, VOCABULARY),
    }
    for layer in range(LAYERS):
        made |= {f"{name}{layer}": matrix(WIDTH, WIDTH) for name in ("q", "k", "v", "out", "up")}
    return made


def logits_of(model: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> list[Any]:
    """[B, L, VOCABULARY] of each rank, which holds a part of the same lines."""
    hidden = [model["tokens"][rank["ids"]] + model["positions"][rank["positions"]] for rank in ranks]
    segments, positions = (torch.cat([rank[name] for rank in ranks], 1) for name in ("segments", "positions"))
    for layer in range(LAYERS):
        keys, values = (
            _heads(torch.cat([one @ model[f"{name}{layer}"] for one in hidden], 1)) for name in "kv"
        )
        hidden = [
            one
            + torch.tanh(
                _attended(one, rank, model, layer, keys, values, segments, positions) @ model[f"up{layer}"]
            )
            for one, rank in zip(hidden, ranks, strict=True)
        ]
    return [one @ model["head"] for one in hidden]


def _attended(
    own: Any,
    rank: dict[str, Any],
    model: dict[str, Any],
    layer: int,
    keys: Any,
    values: Any,
    segments: Any,
    positions: Any,
) -> Any:
    queries = _heads(own @ model[f"q{layer}"])
    same = (rank["segments"][:, :, None] == segments[:, None, :]) & (rank["segments"][:, :, None] > 0)
    seen = (same & (rank["positions"][:, :, None] >= positions[:, None, :]))[:, None]
    scores = (queries @ keys.transpose(-1, -2) / WIDTH**0.5).masked_fill(~seen, -1e9)
    found = (scores.softmax(-1) * seen) @ values
    return own + found.transpose(1, 2).flatten(2) @ model[f"out{layer}"]


def _heads(tensor: Any) -> Any:
    return tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def inputs_of(micro: dict[str, Any]) -> dict[str, Any]:
    """What a rank embeds and attends by."""
    names = {"ids": "input_ids", "positions": "position_ids"}
    found = {mine: torch.from_numpy(np.ascontiguousarray(micro[name])).long() for mine, name in names.items()}
    segments = micro["segment_ids"] if "segment_ids" in micro else micro["attention_mask"]
    return found | {"segments": torch.from_numpy(np.ascontiguousarray(segments)).long()}


def loss_of(logits: Any, labels: Any, weights: Any) -> Any:
    """Sum of weighted token losses: sum over tokens, labels where they are predicted."""
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        torch.from_numpy(labels.astype(np.int64)).flatten(),
        reduction="none",
        ignore_index=-100,
    )
    return (flat * torch.from_numpy(weights).flatten()).sum()


def gradients(model: dict[str, Any], loss: Any) -> list[Any]:
    return [
        grad
        for grad in torch.autograd.grad(loss, list(model.values()), allow_unused=True)
        if grad is not None
    ]


def of_rows(model: dict[str, Any], data: Any, reduction: str) -> Any:
    """The loss of a mini-batch of all rows by the formula of the mean, row after row, from the raw rows."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    sums = []
    for row in range(len(data.lengths)):
        ids = torch.from_numpy(data.row(row)).long()[None]
        positions = torch.arange(ids.shape[1])[None]
        rank = {"ids": ids, "positions": positions, "segments": torch.ones_like(ids)}
        (logits,) = logits_of(model, [rank])
        trained = torch.from_numpy(data.row(row, "loss_mask")[1:].astype(bool))
        advantages = torch.from_numpy(data.row(row, "advantages")[1:].astype(np.float64))
        losses = -logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] * advantages
        sums.append((losses[trained].sum(), int(trained.sum())))
        targets += int(trained.sum())
    for own, count in sums:
        total = total + (own / targets if reduction == "token_mean" else own / max(count, 1) / len(sums))
    return total


def of_parts(model: dict[str, Any], shards: Sequence[Shard], cp: int, split: Any, reduction: Any) -> Any:
    """The same loss, as dp x cp ranks add it up over their micro-batches."""
    total = torch.zeros((), dtype=torch.float64)
    for shard in shards:
        parts = cp_cut(shard, cp, split)
        for number in range(len(shard.micro_batches)):
            micros = [part.micro(number) for part in parts]
            for micro, logits in zip(
                micros, logits_of(model, [inputs_of(micro) for micro in micros]), strict=True
            ):
                own = token_weights(micro, shard.denominators, reduction, dtype=np.float64)
                total = total + loss_of(logits, micro["labels"], own * micro["advantages"].astype(np.float64))
    return total


@pytest.mark.parametrize("split", ["zigzag", "head_tail", "contiguous"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2), (1, 4), (2, 4), (4, 4)])
def test_losses_and_gradients_are_those_of_one_process(dp: int, cp: int, layout: str, split: str) -> None:
    data, model = random_data(LENGTHS), weights()
    config = PlanConfig(
        batch_size=len(LENGTHS), columns=COLUMNS, align=2 * cp, pad_to_multiple=2 * cp, **LAYOUTS[layout]
    )
    [(_, shards)] = collate_step(data, config, dp)
    for reduction in ("token_mean", "sequence_mean"):
        expected, found = of_rows(model, data, reduction), of_parts(model, shards, cp, split, reduction)
        assert found.item() == pytest.approx(expected.item(), rel=1e-9)
        for own, wanted in zip(gradients(model, found), gradients(model, expected), strict=True):
            assert float((own - wanted).norm()) <= 1e-9 * float(wanted.norm())
