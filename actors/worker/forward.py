"""Computes what a forward pass over a shard says of its rows: numbers per token, and sums per row of an eval.

Axes: B lines of a shard or micro-batch, L its width, N real rows, T their tokens, V vocabulary.
Always true:
- a model runs as it will be used: without dropout, without a gradient, and no random number is drawn for it;
- rows come in the order of the shard, dummies not at all;
- bytes are counted on the CPU, at targets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import IGNORED
from raysvc.collate.row_values import RowValues, gather_rows
from raysvc.collate.shard import Shard

if TYPE_CHECKING:
    import torch

MicroForward = Callable[["dict[str, torch.Tensor]", str], "dict[str, torch.Tensor]"]
PLACES = ("seq_lengths", "cu_seqlens", "cu_seqlens_offsets")  # arrays that say where rows lie


def forward_rows(model: torch.nn.Module, shard: Shard, micro_forward: MicroForward) -> RowValues:
    """Outputs of all micro-batches at the tokens of the rows, and their `labels`."""
    sheets: dict[str, torch.Tensor] = {}
    with as_used(model):
        for index, micro in enumerate(shard.micro_batches):
            for name, values_BL in micro_forward(shard.micro(index), shard.layout).items():
                if name not in sheets:
                    sheets[name] = values_BL.new_zeros(shard.arrays["input_ids"].shape)
                left = shard.layout == "padded_left"
                columns = slice(-micro.width, None) if left else slice(0, micro.width)
                sheets[name][micro.start : micro.stop, columns] = values_BL
    places = {name: _numpy(shard.arrays[name]) for name in PLACES if name in shard.arrays}
    on_host = replace(shard, arrays={**places, "input_ids": shard.arrays["input_ids"]})
    outputs = {name: _numpy(sheet) for name, sheet in sheets.items()}
    return gather_rows(on_host, {**outputs, "labels": _numpy(shard.arrays["labels"])})


def without_labels(values: RowValues) -> RowValues:
    """The outputs alone."""
    return replace(values, tokens={name: value for name, value in values.tokens.items() if name != "labels"})


def eval_sums(values: RowValues, token_bytes: npt.NDArray[np.int32] | None) -> RowValues:
    """Returns per row `nll` (nats over its targets) and `targets`; with the bytes of every id [V] also `text_bytes`
    and `text_nll`.
    """
    labels, nll = values.tokens["labels"], -values.tokens["logprobs"].astype(np.float64)
    is_target = labels != IGNORED
    rows = {"nll": _row_sums(values, nll * is_target), "targets": _row_sums(values, is_target)}
    if token_bytes is not None:
        counts = np.where(is_target, token_bytes[np.where(is_target, labels, 0)], 0)
        rows["text_bytes"] = _row_sums(values, counts)
        rows["text_nll"] = _row_sums(values, nll * (counts > 0))
    return RowValues(values.row_ids, values.lengths, {}, rows)


def row_losses(shard: Shard, loss_S: npt.NDArray[Any], count_S: npt.NDArray[Any] | None = None) -> RowValues:
    """`loss` and `targets` of a shard's real rows, from the sums of all its rows and dummies.

    Args:
        shard: that was trained.
        loss_S: of each row.
        count_S: targets or pairs that it is the sum over; None: the row's targets.
    """
    real = shard.row_ids >= 0
    lengths = _numpy(shard.arrays["seq_lengths"]).astype(np.int64)[real]
    counts = _numpy(shard.arrays["row_tokens"]) if count_S is None else count_S
    rows = {"loss": loss_S[real], "targets": counts.astype(np.int64)[real]}
    return RowValues(shard.row_ids[real], lengths, {}, rows)


def _row_sums(values: RowValues, per_token: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[N], int64 or float64."""
    dtype = np.float64 if per_token.dtype.kind == "f" else np.int64
    sums = np.append(np.zeros(1, dtype), np.cumsum(per_token, dtype=dtype))
    return np.asarray(sums[values.starts + values.lengths] - sums[values.starts])


@contextmanager
def as_used(model: torch.nn.Module) -> Iterator[None]:
    """Within it a model runs as the module says."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _numpy(tensor: Any) -> npt.NDArray[Any]:
    return np.asarray(tensor.cpu().numpy())
