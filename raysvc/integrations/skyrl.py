"""A shard as the columns of SkyRL's `TrainingInputBatch`; needs torch alone.

    columns, response_length = training_input(shard)
    batch = TrainingInputBatch(columns)
    batch.metadata = {"response_length": response_length}

Axes: B rows and dummies of a rank, S width, A columns from the earliest target of any row on.
Always true:
- columns end at the right edge, as SkyRL slices them: `sequences` and `attention_mask` [B, S], all others [B, A];
- `loss_mask` is 1 on targets alone: padding, context and dummies have 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raysvc.collate.columns import IGNORED
from raysvc.errors import ConfigError
from raysvc.job.carried import BF16, dtype_name

if TYPE_CHECKING:
    import torch

    from raysvc.collate.shard import Shard

OURS = {"input_ids", "attention_mask", "position_ids", "labels", "loss_mask"}
OURS |= {"seq_lengths", "row_tokens", "row_group", "row_group_rows", "row_group_tokens"}


class TrainingInput(NamedTuple):
    """Name -> tensor; and A, which SkyRL keeps in the batch's metadata."""

    columns: dict[str, torch.Tensor]
    response_length: int


def training_input(shard: Shard) -> TrainingInput:
    """The shard's rows; further columns of the plan come along, those with one value per row spread over its targets.

    Raises:
        ConfigError: the layout is not `padded_left`, or a column is text or several numbers a row.
    """
    import torch

    if shard.layout != "padded_left":
        remedy = "use plan.layout=padded_left"
        raise ConfigError("plan.layout", f"is {shard.layout}, and SkyRL pads on the left", remedy)
    arrays = shard.arrays
    targets = arrays["labels"] != IGNORED
    width = targets.shape[1]
    # a dummy has no target; one column stays, so that the batch has a shape
    response = max(width - int(np.argmax(targets.any(axis=0))), 1) if targets.any() else 1
    mask = targets[:, -response:].astype(np.float32)
    begun = np.maximum.accumulate(mask, axis=1) * arrays["attention_mask"][:, -response:]
    columns = {
        "sequences": arrays["input_ids"].astype(np.int64),
        "attention_mask": arrays["attention_mask"].astype(np.int64),
        "loss_mask": mask,
        "response_mask": begun.astype(np.int64),
    }
    for name, values in arrays.items():
        if name not in OURS:
            if name in shard.row_vectors or values.dtype.kind == "U":
                what = (
                    f"{name!r} is {dtype_name(values.dtype)} {list(values.shape)}: no number per row or token"
                )
                raise ConfigError("plan.columns", what, "leave it out; SkyRL's batch has no place for it")
            columns[name] = values[:, -response:].copy() if values.ndim > 1 else values[:, None] * mask
    tensors = {name: torch.from_numpy(each) for name, each in columns.items() if each.dtype != BF16}
    halves = {name: each["bfloat16"].copy() for name, each in columns.items() if each.dtype == BF16}
    tensors |= {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in halves.items()}
    return TrainingInput(tensors, response)
