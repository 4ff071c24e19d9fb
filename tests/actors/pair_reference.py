"""Losses of pairs by one process, a row at a time, by the formulas of the papers; nothing of the project's losses is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from raysvc.row_batch import RowBatch

Score = tuple[torch.Tensor, torch.Tensor, int]  # log-probability of the targets, of the reference's, how many
Formula = Callable[[list[Score], RowBatch], torch.Tensor]


def scores(lm: Any, rows: RowBatch) -> list[Score]:
    out = []
    for row in range(len(rows)):
        here = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids = torch.tensor(rows.tokens["input_ids"][here].astype(np.int64))
        mask = rows.tokens["loss_mask"][here].astype(bool).copy()
        mask[0] = False
        where = torch.tensor(np.flatnonzero(mask))
        logprobs = lm(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        own = logprobs[where - 1].gather(-1, ids[where][:, None]).sum()
        reference = torch.tensor(rows.tokens["ref_logprobs"][here].astype(np.float64))[where].sum()
        out.append((own, reference, len(where)))
    return out


def sigmoid(beta: float) -> Formula:
    def loss(found: list[Score], rows: RowBatch) -> torch.Tensor:
        pairs = zip(found[0::2], found[1::2], strict=True)
        return torch.stack(
            [torch.log(1 + torch.exp(-beta * ((c - rc) - (r - rr)))) for (c, rc, _), (r, rr, _) in pairs]
        )

    return loss


def ipo(beta: float) -> Formula:
    def loss(found: list[Score], rows: RowBatch) -> torch.Tensor:
        pairs = zip(found[0::2], found[1::2], strict=True)
        return torch.stack(
            [((c - rc) / n - (r - rr) / m - 0.5 / beta) ** 2 for (c, rc, n), (r, rr, m) in pairs]
        )

    return loss


def simpo(beta: float, margin: float) -> Formula:
    def loss(found: list[Score], rows: RowBatch) -> torch.Tensor:
        pairs = zip(found[0::2], found[1::2], strict=True)
        return torch.stack(
            [torch.log(1 + torch.exp(margin - beta * (c / n - r / m))) for (c, _, n), (r, _, m) in pairs]
        )

    return loss


def orpo(beta: float) -> Formula:
    def odds(mean: torch.Tensor) -> torch.Tensor:
        return torch.exp(mean) / (1 - torch.exp(mean))

    def loss(found: list[Score], rows: RowBatch) -> torch.Tensor:
        pairs = zip(found[0::2], found[1::2], strict=True)
        return torch.stack(
            [-c / n - beta * torch.log(torch.sigmoid(torch.log(odds(c / n) / odds(r / m)))) for (c, _, n), (r, _, m) in pairs]
        )  # fmt: skip

    return loss


def kto(beta: float, good: float, bad: float) -> Formula:
    def loss(found: list[Score], rows: RowBatch) -> torch.Tensor:
        kl = torch.stack([own - ref for own, ref, _ in found[1::2]]).mean().detach().clamp(min=0)
        out = []
        for (own, ref, _), label in zip(found[0::2], rows.rows["label"][0::2].tolist(), strict=True):
            gain = (own - ref) - kl if label else kl - (own - ref)
            out.append((good if label else bad) * (1 - torch.sigmoid(beta * gain)))
        return torch.stack(out)

    return loss


def reward(critic: Any, rows: RowBatch, center: float) -> torch.Tensor:
    values = []
    for row in range(len(rows)):
        ids = torch.tensor(
            rows.tokens["input_ids"][rows.offsets[row] : rows.offsets[row + 1]].astype(np.int64)
        )
        values.append(critic(input_ids=ids[None], use_cache=False).logits[0, -1, 0])
    chosen, rejected = torch.stack(values[0::2]), torch.stack(values[1::2])
    margin = torch.tensor(rows.rows["margin"][0::2].astype(np.float64))
    return torch.log(1 + torch.exp(margin - chosen + rejected)) + center * (chosen + rejected) ** 2


def gradient(model: Any, losses: torch.Tensor) -> tuple[dict[str, np.ndarray], float]:
    model.zero_grad()
    losses.mean().backward()
    grads = {
        f"lm.{name}": (torch.zeros_like(p) if p.grad is None else p.grad).double().numpy().copy()
        for name, p in model.named_parameters()
    }
    return grads, float(losses.mean().detach())
