"""What a mini-batch's gradient is: one process, one row per forward, no padding, no dummies, plain formulas.

Nothing of the project's workers, losses, weights or collation is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from raysvc.row_batch import RowBatch

PerRow = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


def reference_gradient(
    lm: Any, rows: RowBatch, per_target: PerRow, head: str, groups: list[int], reduction: str
) -> tuple[dict[str, np.ndarray], float]:
    """Gradient and loss of all `rows` as one mini-batch.

    `per_target(outputs [T, V or 1], labels [T], columns)` gives the losses of a row's targets.
    """
    lm.zero_grad()
    masks = []
    for row in range(len(rows.lengths)):
        mask = rows.tokens["loss_mask"][rows.offsets[row] : rows.offsets[row + 1]].astype(bool).copy()
        mask[0] = False
        masks.append(mask)
    targets, num_groups = sum(int(mask.sum()) for mask in masks), len(set(groups))
    of_group = {g: sum(int(m.sum()) for m, h in zip(masks, groups, strict=True) if h == g) for g in groups}
    total = torch.zeros((), dtype=torch.float64)
    for row, mask in enumerate(masks):
        if not mask.any():
            continue
        here = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids = torch.tensor(rows.tokens["input_ids"][here].astype(np.int64))
        logits = lm(input_ids=ids[None], use_cache=False).logits[0]
        where = torch.tensor(np.flatnonzero(mask))
        columns = {
            name: torch.tensor(values[here].astype(np.float64))[where] for name, values in rows.tokens.items()
        }
        losses = per_target(logits[where - 1], ids[where], columns)
        weight = {
            "token_mean": 1 / targets,
            "sequence_mean": 1 / (len(masks) * mask.sum()),
            "group_mean": 1 / (num_groups * groups.count(groups[row]) * mask.sum()),
            "prompt_mean": 1 / (num_groups * max(of_group[groups[row]], 1)),
            "constant": 1 / (len(masks) * 9.0),
        }[reduction]
        total = total + weight * losses.sum()
    total.backward()
    grads = {f"lm.{name}": p.grad.double().numpy().copy() for name, p in lm.named_parameters()}
    return grads, float(total.detach())


def sft(logits: torch.Tensor, labels: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def policy(low: float, high: float, kl: float, entropy: float, dual: float | None = None) -> PerRow:
    def losses(logits: torch.Tensor, labels: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        distribution = torch.distributions.Categorical(logits=logits)
        now = distribution.log_prob(labels)
        advantage = columns["advantages"]
        ratio = torch.exp(now - columns["old_logprobs"])
        surrogate = torch.stack([ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage]).amin(0)
        if dual is not None:
            surrogate = torch.where(advantage < 0, surrogate.maximum(dual * advantage), surrogate)
        apart = columns["ref_logprobs"] - now
        return -surrogate + kl * (apart.exp() - 1 - apart) - entropy * distribution.entropy()

    return losses


def sequence_policy(low: float, high: float) -> PerRow:
    """GSPO: one number a row, at each of its targets."""

    def losses(logits: torch.Tensor, labels: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        now = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
        advantage = columns["advantages"].mean()
        ratio = (now.mean() - columns["old_logprobs"].mean()).exp()
        return -torch.minimum(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage).expand(
            len(labels)
        )

    return losses


def value(clip: float) -> PerRow:
    def losses(values: torch.Tensor, labels: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        now, old, goal = values[:, 0], columns["old_values"], columns["returns"]
        held = torch.maximum(torch.minimum(now, old + clip), old - clip)
        return 0.5 * torch.maximum((now - goal).square(), (held - goal).square())

    return losses


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Norm of the difference by norm of `other`."""
    assert one.keys() == other.keys()
    apart = sum(float(((one[name] - other[name]) ** 2).sum()) for name in other)
    return float(np.sqrt(apart / sum(float((grad**2).sum()) for grad in other.values())))
