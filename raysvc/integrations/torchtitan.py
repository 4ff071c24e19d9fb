"""Makes what torchtitan's trainer takes of an item of `as_torch_dataset()`. Imports nothing of torchtitan.

    ParallelAwareDataloader(client.as_torch_dataset(), rank, ranks, batch_size=None, collate_fn=titan_batch)

Always true:
- a label stands at the token that predicts it, where torchtitan looks for it; ours stand at their own token;
- no label crosses the edge of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysvc.integrations.row_tensors import Tensors, moved_labels

if TYPE_CHECKING:
    import torch


def titan_batch(item: Tensors, cp: int = 1) -> tuple[Tensors, torch.Tensor]:
    """`input` and `positions`, int64 [B, L], and labels, int64 [B, L], -100 where there is no loss; `cp`: ranks for which torchtitan cuts."""
    inputs = {"input": item["input_ids"].long(), "positions": item["position_ids"].long()}
    return inputs, moved_labels(item["labels"], cp)
