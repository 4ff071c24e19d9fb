"""The losses of a shard's micro-batches for a loop of one's own: those that `CausalLMWorker` trains with, of any causal model of `transformers`.

Axes: B lines of a micro-batch, L its width.
Always true:
- the gradients of all micro-batches of all ranks, averaged over the ranks, are those of the mini-batch;
- the rows of a micro-batch are kept apart as was proved on the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.actors.worker.losses import Loss, LossSum
from raysvc.actors.worker.row_losses import RowLoss
from raysvc.actors.worker.torch_worker import column_of
from raysvc.collate.loss_weights import Reduction, token_weights
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError
from raysvc.job.column_dtypes import BF16

if TYPE_CHECKING:
    import torch

    from raysvc.actors.model.row_isolation import Proof


class MicroLosses:
    """See the module.

    Args:
        lm: a causal model of `transformers`, on the device where it trains.
        loss: of tokens, such as `PolicyLoss()`; the columns that it needs are in `plan.columns`.
        reduction: what the loss is a mean over.
        dp_size: ranks whose gradients are averaged.
        constant: tokens that `constant` divides a row by.

    Raises:
        ConfigError: a loss of rows.
    """

    def __init__(
        self,
        lm: Any,
        loss: Loss,
        reduction: Reduction = "token_mean",
        *,
        dp_size: int = 1,
        constant: float | None = None,
    ) -> None:
        from raysvc.actors.model.token_model import TokenModel

        if isinstance(loss, RowLoss):
            what = f"{type(loss).__name__} is of rows, and this is for losses of tokens"
            raise ConfigError("MicroLosses(loss)", what, "train with CausalLMWorker")
        self._model, self._loss = TokenModel(lm), loss
        self._rules: dict[str, Any] = {"reduction": reduction, "dp_size": dp_size, "constant": constant}
        self._proofs: dict[str, Proof] = {}  # by layout

    def __call__(self, shard: Shard) -> Iterator[LossSum]:
        """Yields of each micro-batch the weighted sum of its losses, which has a gradient, and metrics: call `total.backward()` on one after the other.

        Raises:
            ConfigError: a column that the loss needs is not there; the model does not keep the rows of this layout apart.
        """
        weights = token_weights(shard.arrays, shard.denominators, **self._rules)
        weighed = replace(shard, arrays={**shard.arrays, "loss_weights": weights})
        for index in range(len(shard.micro_batches)):
            tensors = {
                name: self._tensor(array)
                for name, array in weighed.micro(index).items()
                if array.dtype.kind != "U"
            }
            total, metrics = self._model(
                self._inputs(tensors, shard.layout),
                tensors["labels"].long(),
                tensors["loss_weights"],
                {name: column_of(tensors, name) for name in self._loss.columns},
                self._loss,
            )
            yield LossSum(total, metrics)

    def _inputs(self, tensors: dict[str, torch.Tensor], layout: str) -> dict[str, Any]:
        from raysvc.actors.model.row_isolation import mixes_rows, prove

        if layout not in self._proofs:
            self._proofs[layout] = prove(self._outputs, self._model.lm, layout)
        proof = self._proofs[layout]
        if proof.inputs is None:
            raise mixes_rows(type(self._model.lm).__name__, layout, proof)
        return proof.inputs(tensors)

    def _outputs(self, inputs: dict[str, Any]) -> torch.Tensor:
        rows_TD, head = self._model.rows_and_head(inputs)
        out: torch.Tensor = head(rows_TD).unflatten(0, (len(inputs["input_ids"]), -1))
        return out

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        import torch

        device = self._model.lm.device
        if array.dtype == BF16:
            return torch.tensor(array["bfloat16"].view(np.int16)).view(torch.bfloat16).to(device).float()
        tensor = torch.tensor(array).to(device)
        return tensor.float() if tensor.dtype == torch.float16 else tensor
