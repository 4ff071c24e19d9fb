"""A language model or a critic as a module whose forward ends in a loss (or in numbers per token).

This file imports torch; import it inside the function that builds a model.

Axes: B lines, L tokens of a line, T targets, D hidden, V vocabulary.
Always true:
- the head is applied to targets alone, some at a time, and computed again in the backward pass (but for the last ones, where
  that pass begins): a vocabulary of 150 k costs megabytes instead of gigabytes (where the head is no plain projection, checked here, the model's own logits
  are taken);
- a micro-batch without a target gives zero and still takes part in the backward pass;
- losses are computed in float32 or wider, whatever the forward pass ran in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from raysvc.actors.model.head_logprobs import head_logprobs, head_top_k
from raysvc.actors.model.media_inputs import BLANK, blanks_encoded
from raysvc.actors.worker.losses import DistillLoss, Loss, LossSum, StepLoss, Targets
from raysvc.actors.worker.results import extreme_of
from raysvc.actors.worker.row_losses import LossRows, RowLoss
from raysvc.collate.columns import IGNORED

# float32 logits held at once: on a CPU what malloc keeps and reuses, on a GPU what makes large matrices
LOGIT_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}
FEW_TARGETS = 64  # of a piece; below it, above 65,536 entries, the head goes through tiles


class TokenModel(torch.nn.Module):  # type: ignore[misc]  # torch is Any to the type checker
    """Wraps a `transformers` model with a token head.

    Args:
        lm: a causal LM, or a token classifier of one label (a critic).
        critic: the head gives values.
        of_steps: a value is about what ends with its token, not about what comes behind it, also without a loss.
    """

    def __init__(self, lm: Any, critic: bool = False, of_steps: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.critic, self.of_steps = critic, of_steps
        self.plain_head = critic or head_is_plain(lm)
        width = 1 if critic else lm.config.get_text_config().vocab_size
        self.at_once = max(16, LOGIT_BYTES.get(lm.device.type, 16 << 20) // (4 * width))

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        labels_BL: torch.Tensor,
        weights_BL: torch.Tensor,
        columns_BL: Mapping[str, torch.Tensor],
        loss: Loss | RowLoss | None,
        rows: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns with a loss its total and metrics; without one, a zero and numbers per token [B, L], which are 0
        where no target is.

        Labels, weights and columns lie at their own token; a label of -100 is no target. A loss of rows gets `rows`:
        `row_BL`, the row of each cell, `last_S`, the flat cell of each row's last token, `weights_S`, and what else it
        needs per row.
        """
        if rows is not None:
            assert isinstance(loss, RowLoss)
            return self._loss_of_rows(loss, inputs, labels_BL, columns_BL, rows)
        assert not isinstance(loss, RowLoss)
        at_target = isinstance(loss, StepLoss) or (loss is None and self.of_steps)
        rows_TD, head = self.rows_and_head(inputs, at_target)
        labels_T = labels_BL[:, 1:].flatten()
        (targets,) = torch.nonzero(labels_T != IGNORED, as_tuple=True)
        if loss is not None and len(targets) and _is_large(head, rows_TD):
            return self._loss_of_large_head(
                loss, head.weight, rows_TD, labels_BL, weights_BL, columns_BL, targets
            )
        pieces = targets.split(self.at_once)
        # a micro-batch without a target takes part in the backward pass, head and all: DDP waits for every weight
        zero = rows_TD.sum() * 0.0 + head(rows_TD[:1]).sum() * 0.0
        if loss is None:
            return zero, self._per_token(rows_TD, head, labels_BL, pieces)
        columns = {name: columns_BL[name][:, 1:].flatten(0, 1) for name in loss.columns}
        weights_T = weights_BL[:, 1:].flatten()
        total: torch.Tensor = zero.to(weights_T.dtype)
        metrics: dict[str, torch.Tensor] = {}
        for some in pieces if len(targets) else ():
            there = {name: column[some] for name, column in columns.items()}
            arguments = (loss, head, rows_TD[some], labels_T[some], weights_T[some], there)
            part = _piece(some is pieces[-1], self._loss, *arguments)
            total, metrics = total + part.total, merge_metrics(metrics, part.metrics)
        return total, metrics

    def _loss_of_large_head(
        self,
        loss: Loss,
        weight_VD: torch.Tensor,
        rows_TD: torch.Tensor,
        labels_BL: torch.Tensor,
        weights_BL: torch.Tensor,
        columns_BL: Mapping[str, torch.Tensor],
        targets: torch.Tensor,
    ) -> LossSum:
        flat = {name: columns_BL[name][:, 1:].flatten(0, 1)[targets] for name in loss.columns}
        labels_T, weights_T = labels_BL[:, 1:].flatten()[targets], weights_BL[:, 1:].flatten()[targets]
        if isinstance(loss, DistillLoss):
            scaled_TD = rows_TD[targets] / _column_of(loss.temperatures(flat))
            top_k = head_top_k(scaled_TD, weight_VD, flat["teacher_ids"].long().clamp(min=0))
            found = loss(Targets(weights_T, flat, top_k=top_k))
            return LossSum((rows_TD.sum() * 0.0).to(weights_T.dtype) + found.total, found.metrics)
        logprobs_T, entropy_T = head_logprobs(rows_TD[targets], weight_VD, labels_T, loss.needs_entropy)
        found = loss(Targets(weights_T, flat, logprobs_T, entropy_T))
        return LossSum((rows_TD.sum() * 0.0).to(weights_T.dtype) + found.total, found.metrics)

    def _loss_of_rows(
        self,
        loss: RowLoss,
        inputs: Mapping[str, torch.Tensor],
        labels_BL: torch.Tensor,
        columns_BL: Mapping[str, torch.Tensor],
        rows: Mapping[str, torch.Tensor],
    ) -> LossSum:
        others = {
            name: value for name, value in rows.items() if name not in ("row_BL", "last_S", "weights_S")
        }
        weights_S = rows["weights_S"]
        if loss.of_values:
            hidden_BLD = self.lm.base_model(**inputs, use_cache=False).last_hidden_state
            values_S = self.lm.score(hidden_BLD.flatten(0, 1)[rows["last_S"]]).squeeze(-1)
            with torch.autocast(values_S.device.type, enabled=False):
                values_S = values_S.float() if values_S.dtype in (torch.bfloat16, torch.float16) else values_S
                return loss.of_rows(LossRows(weights_S, torch.ones_like(weights_S), others, values=values_S))
        rows_TD, head = self.rows_and_head(inputs)
        labels_T, row_T = labels_BL[:, 1:].flatten(), rows["row_BL"][:, 1:].flatten()
        (targets,) = torch.nonzero(labels_T != IGNORED, as_tuple=True)
        zero = rows_TD.sum() * 0.0 + head(rows_TD[:1]).sum() * 0.0
        parts = [zero.reshape(1)[:0]]
        if len(targets) and _is_large(head, rows_TD):
            parts.append(head_logprobs(rows_TD[targets], head.weight, labels_T[targets], False)[0])
        else:
            pieces: tuple[torch.Tensor, ...] = targets.split(self.at_once) if len(targets) else ()
            for some in pieces:
                arguments = (head, rows_TD[some], labels_T[some])
                parts.append(_piece(some is pieces[-1], self._label_logprobs, *arguments))
        logprobs_T = torch.cat(parts)

        def sums(values_T: torch.Tensor) -> torch.Tensor:
            out = values_T.new_zeros(len(weights_S))
            return out.index_add(0, row_T[targets], values_T)

        for name in loss.columns:
            others[name] = sums(columns_BL[name][:, 1:].flatten()[targets].to(logprobs_T.dtype))
        counts_S = sums(torch.ones_like(logprobs_T))
        found = loss.of_rows(LossRows(weights_S, counts_S, others, sums(logprobs_T), shared={**others}))
        return LossSum(zero.to(found.total.dtype) + found.total, found.metrics)

    def _label_logprobs(
        self, head: torch.nn.Module, rows_TD: torch.Tensor, labels_T: torch.Tensor
    ) -> torch.Tensor:
        targets = self._targets(head, rows_TD, labels_T, labels_T, {}, entropy=False)
        assert targets.logprobs is not None
        return targets.logprobs

    def rows_and_head(
        self, inputs: Mapping[str, torch.Tensor], at_target: bool = False
    ) -> tuple[torch.Tensor, torch.nn.Module]:
        """[T, D] what the head makes a target of, at the token before it (`at_target`: at its own); and the head."""
        inputs = dict(inputs)
        blanks = inputs.pop(BLANK, ())
        # before the language model, as where there are media: under FSDP the collectives of all ranks must match
        with blanks_encoded(self.lm, blanks, inputs) as zeros:
            if not self.plain_head:
                logits_BLV = self.lm(**inputs, use_cache=False).logits
                return sum(zeros, logits_BLV)[:, :-1].flatten(0, 1), torch.nn.Identity()
            hidden_BLD = self.lm.base_model(**inputs, use_cache=False).last_hidden_state
        hidden_BLD = sum(zeros, hidden_BLD)
        head = self.lm.score if self.critic else self.lm.get_output_embeddings()
        return (hidden_BLD[:, 1:] if at_target else hidden_BLD[:, :-1]).flatten(0, 1), head

    def _loss(
        self,
        loss: Loss,
        head: torch.nn.Module,
        rows_TD: torch.Tensor,
        labels_T: torch.Tensor,
        weights_T: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
    ) -> LossSum:
        if isinstance(loss, DistillLoss):
            return loss(Targets(weights_T, columns, top_k=_dense_top_k(head(rows_TD), loss, columns)))
        return loss(self._targets(head, rows_TD, labels_T, weights_T, columns, loss.needs_entropy))

    def _targets(
        self,
        head: torch.nn.Module,
        rows_TD: torch.Tensor,
        labels_T: torch.Tensor,
        weights_T: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
        entropy: bool,
    ) -> Targets:
        out = head(rows_TD)
        with torch.autocast(out.device.type, enabled=False):
            out = out.float() if out.dtype in (torch.bfloat16, torch.float16) else out
            if self.critic:
                return Targets(weights_T, columns, values=out.squeeze(-1))
            logprobs_TV = out.log_softmax(-1)
            logprobs_T = logprobs_TV.gather(-1, labels_T[:, None]).squeeze(-1)
            entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1) if entropy else None
            return Targets(weights_T, columns, logprobs_T, entropy_T)

    def _per_token(
        self,
        rows_TD: torch.Tensor,
        head: torch.nn.Module,
        labels_BL: torch.Tensor,
        pieces: tuple[torch.Tensor, ...],
    ) -> dict[str, torch.Tensor]:
        lines, width = labels_BL.shape
        labels_T = labels_BL[:, 1:].flatten()
        names = ("values",) if self.critic else ("logprobs", "entropy")
        out = {name: rows_TD.new_zeros(lines * (width - 1), dtype=torch.float32) for name in names}
        for some in pieces if labels_T.numel() else ():
            parts = self._targets(head, rows_TD[some], labels_T[some], labels_T[some], {}, entropy=True)
            for name in names:
                out[name][some] = getattr(parts, name).float()
        return {
            name: torch.nn.functional.pad(values.view(lines, width - 1), (1, 0))
            for name, values in out.items()
        }


def _piece(last: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` of a piece; what it keeps for the backward pass is computed again there, but for the last piece.

    The backward pass begins with the last one: it would have the same numbers in memory at once. And `checkpoint` imports
    `torch._dynamo`, which a first step waits for.
    """
    if last or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False)


def _dense_top_k(
    logits_TV: torch.Tensor, loss: DistillLoss, columns: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """[T, K] of the few targets of a piece, whose logits are there anyway."""
    with torch.autocast(logits_TV.device.type, enabled=False):
        low = logits_TV.dtype in (torch.bfloat16, torch.float16)
        scaled_TV = (logits_TV.float() if low else logits_TV) / _column_of(loss.temperatures(columns))
        picked_TK = scaled_TV.gather(-1, columns["teacher_ids"].long().clamp(min=0))
        return picked_TK - scaled_TV.logsumexp(-1, keepdim=True)


def _column_of(values: torch.Tensor | float) -> torch.Tensor | float:
    """[T, 1] of [T]."""
    return values[:, None] if isinstance(values, torch.Tensor) else values


def _is_large(head: torch.nn.Module, rows_TD: torch.Tensor) -> bool:
    """Returns whether the vocabulary is so large that only few targets would be a piece, and the head be read for each."""
    if type(head) is not torch.nn.Linear or head.bias is not None or rows_TD.device.type != "cpu":
        return False
    cast = torch.is_autocast_enabled("cpu") and rows_TD.dtype == torch.bfloat16
    plain = head.weight.dtype == torch.float32 and (cast or rows_TD.dtype == torch.float32)
    return plain and LOGIT_BYTES["cpu"] // (4 * len(head.weight)) < FEW_TARGETS


def merge_metrics(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the metrics of two parts of a mini-batch: sums, or the larger or smaller where `extreme_of` says so."""
    merge = {"": torch.add, "max": torch.maximum, "min": torch.minimum}
    out = dict(one)
    for name, value in other.items():
        out[name] = merge[extreme_of(name)](out[name], value) if name in out else value
    return out


def head_is_plain(model: Any) -> bool:
    """Returns whether logits are just the output embedding of the last hidden state (no soft-capping, no scale)."""
    if model.get_output_embeddings() is None or model.base_model is model:
        return False
    ids_BL = torch.arange(8, device=model.device)[None]
    training = model.training
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids_BL, use_cache=False).logits
        hidden = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
        same = torch.allclose(expected, model.get_output_embeddings()(hidden), rtol=1e-4, atol=1e-5)
    model.train(training)
    return bool(same)
