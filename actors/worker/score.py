"""Computes what a model says of rows that it is not trained on: log-probabilities of their targets, or its likeliest entries.

Axes: N rows, T their tokens one after the other, B rows of a forward pass, L its width, S targets, K entries, D hidden.

A target is a trained token of a row that is not its first. Numbers are at temperature 1, and lie at the token that they
are about, given all tokens before it.

Always true:
- no gradient, no dropout, no random number;
- cells that are no target hold 0, and -1 where an entry's id would be;
- logits exist for some targets at a time, and become log-probabilities in float32;
- a number that is not finite is an error that names the row, never a value;
- entries are among the first `vocab_size`: what the rows' tokenizer does not have is not taught.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from raysvc.actors.model.load_model import load_lm
from raysvc.errors import ConfigError
from raysvc.ragged import Int64s
from raysvc.row_batch import AddedColumns, Array, RowBatch

if TYPE_CHECKING:
    import torch

    from raysvc.actors.model.token_model import TokenModel

LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # float32 logits held at once


@dataclass(frozen=True)
class ScoreSpec:
    """Says which columns of which models are computed.

    Attributes:
        kind: `ref_logprobs`, or `teacher` for `teacher_ids` and `teacher_logprobs`.
        models: value of the column `by` -> model; without `by` one, under any name.
        by: a per-row column that names the model of each row.
        revisions: model -> commit on the hub.
        top_k: entries of a target.
        dtype: of weights and forward pass.
        vocab_size: of the rows' tokenizer.
        micro_batch_tokens: of a forward pass, padding included.
        seed: of the weights of `tiny`.
        device: cpu or cuda.
    """

    kind: Literal["ref_logprobs", "teacher"]
    models: Mapping[str, str]
    by: str | None
    revisions: Mapping[str, str]
    top_k: int
    dtype: str
    vocab_size: int
    micro_batch_tokens: int
    seed: int
    device: str


class RowScorer:
    """Computes the columns of rows; every model is loaded when its first row comes.

    Of several models one is on the device at a time, and the others are in host memory.
    """

    def __init__(self, spec: ScoreSpec) -> None:
        self.spec = spec
        self._models: dict[str, TokenModel] = {}

    def __call__(self, rows: RowBatch) -> AddedColumns:
        """The columns of all tokens.

        Raises:
            ConfigError: a model is not there, says something that is not finite, or is not named for a row.
        """
        import torch

        is_target = targets_of(rows)
        columns, total = self._empty(len(is_target)), 0.0
        with torch.no_grad():
            for name, chosen in self._by_model(rows):
                need = needed_lengths(rows, is_target)[chosen]
                batches = token_batches(need, self.spec.micro_batch_tokens)
                if batches:
                    model = self._on_device(name)
                for batch in batches:
                    total += self._fill(name, model, rows, is_target, chosen[batch], columns)
        return AddedColumns(columns, {"targets": int(is_target.sum()), self.fact: total})

    @property
    def fact(self) -> str:
        """Returns what is added up over targets: log-probabilities, or the probability of the entries."""
        return "logprob" if self.spec.kind == "ref_logprobs" else "probability"

    def _empty(self, num_tokens: int) -> dict[str, Array]:
        if self.spec.kind == "ref_logprobs":
            return {"ref_logprobs": np.zeros(num_tokens, np.float32)}
        shape = (num_tokens, self.spec.top_k)
        return {"teacher_ids": np.full(shape, -1, np.int32), "teacher_logprobs": np.zeros(shape, np.float32)}

    def _by_model(self, rows: RowBatch) -> Iterator[tuple[str, Int64s]]:
        """Each model's name with its rows."""
        models = self.spec.models
        if self.spec.by is None:
            yield next(iter(models.values())), np.arange(len(rows))
            return
        values = np.array([str(value) for value in rows.rows[self.spec.by].tolist()])
        if unknown := sorted(set(values.tolist()) - models.keys()):
            raise no_model(self.spec.by, unknown[0], models)
        names = np.array([models[value] for value in values.tolist()])
        for name in dict.fromkeys(models.values()):
            yield name, np.flatnonzero(names == name)

    def _on_device(self, name: str) -> TokenModel:
        import torch

        from raysvc.actors.model.token_model import TokenModel

        for other, model in self._models.items():
            if other != name:
                model.to("cpu")
        if name not in self._models:
            spec = self.spec
            revision = spec.revisions.get(name)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.seed)  # as a trainer begins: only `tiny` is random
                lm = load_lm(name, spec.vocab_size, dtype=spec.dtype, revision=revision, where="enrich")
            self._models[name] = TokenModel(lm.to(spec.device, getattr(torch, spec.dtype)).eval())
        self._models[name].to(self.spec.device)
        return self._models[name]

    def _fill(
        self,
        name: str,
        model: TokenModel,
        rows: RowBatch,
        is_target: Array,
        batch: Int64s,
        columns: Mapping[str, Array],
    ) -> float:
        """One forward pass; writes the numbers of its targets and adds up what `fact` says."""
        import torch

        ids_BL, tokens_S, cells_S = _sheet(rows, is_target, batch)
        num_entries, most = model.lm.config.get_text_config().vocab_size, int(ids_BL.max(initial=0))
        if most >= num_entries:
            row = int(rows.row_ids[batch[int(ids_BL.max(1).argmax())]])
            what = f"has {num_entries} entries, and row {row} the id {most}"
            raise ConfigError(f"model {name}", what, "give a model of the same tokenizer")
        hidden_TD, head = model.rows_and_head({"input_ids": torch.from_numpy(ids_BL).to(self.spec.device)})
        at_once = max(16, LOGIT_BYTES.get(self.spec.device, 64 << 20) // (4 * model.lm.config.vocab_size))
        total = 0.0
        for first in range(0, len(tokens_S), at_once):
            tokens = tokens_S[first : first + at_once]
            cells = torch.from_numpy(cells_S[first : first + at_once]).to(self.spec.device)
            logits_SV = head(hidden_TD[cells]).float()
            lse_S = logits_SV.logsumexp(-1)
            if self.spec.kind == "ref_logprobs":
                labels_S = torch.from_numpy(rows.tokens["input_ids"][tokens].astype(np.int64))
                labels_S = labels_S.to(self.spec.device)
                found = (logits_SV.gather(-1, labels_S[:, None])[:, 0] - lse_S).cpu().numpy()
                self._refuse_bad(name, rows, tokens, np.isfinite(found))
                columns["ref_logprobs"][tokens] = found
                total += float(found.sum(dtype=np.float64))
            else:
                total += self._top_k(name, rows, tokens, logits_SV, lse_S, columns)
        return total

    def _top_k(
        self,
        name: str,
        rows: RowBatch,
        tokens: Int64s,
        logits_SV: torch.Tensor,
        lse_S: torch.Tensor,
        columns: Mapping[str, Array],
    ) -> float:
        values_SK, ids_SK = logits_SV[:, : self.spec.vocab_size].topk(self.spec.top_k, dim=-1)
        found = (values_SK - lse_S[:, None]).cpu().numpy()
        there = found > -np.inf  # a model may forbid entries
        self._refuse_bad(
            name, rows, tokens, (np.isfinite(found) | (found == -np.inf)).all(-1) & there.any(-1)
        )
        columns["teacher_ids"][tokens] = np.where(there, ids_SK.cpu().numpy(), -1)
        columns["teacher_logprobs"][tokens] = np.where(there, found, 0.0)
        return float(np.exp(found.astype(np.float64)).sum())

    def _refuse_bad(self, name: str, rows: RowBatch, tokens: Int64s, good: Array) -> None:
        if good.all():
            return
        token = int(tokens[np.argmin(good)])
        row = int(np.searchsorted(rows.offsets, token, "right")) - 1
        what = f"gives no finite log-probability for token {token - int(rows.offsets[row])} of row {int(rows.row_ids[row])}"
        remedy = (
            "check its weights"
            if self.spec.dtype == "float32"
            else "give dtype: float32, or check its weights"
        )
        raise ConfigError(f"model {name}", what, remedy)


def no_model(by: str, value: str, models: Mapping[str, str]) -> ConfigError:
    """Returns what to say of a row whose teacher is not named."""
    what = f"has no model for rows with {by} = {value!r} (it has {', '.join(sorted(models))})"
    return ConfigError("enrich.teacher.models", what, "name one")


def targets_of(rows: RowBatch) -> Array:
    """bool [T]: trained tokens but the first of each row."""
    out = rows.tokens["loss_mask"].astype(bool)
    out[rows.offsets[:-1][rows.lengths > 0]] = False
    return out


def needed_lengths(rows: RowBatch, is_target: Array) -> Int64s:
    """int64 [N]: tokens of each row up to its last target, which nothing behind it can change; 0 without a target."""
    cells = np.flatnonzero(is_target)
    row = np.searchsorted(rows.offsets, cells, "right") - 1
    out = np.zeros(len(rows), np.int64)
    out[row] = cells - rows.offsets[row] + 1  # the last one wins: cells ascend
    return out


def token_batches(lengths: Int64s, budget: int) -> list[Int64s]:
    """Indices of rows, batch after batch, the longest first; a batch is within the budget or one row.

    Args:
        lengths: int64 [N]; rows of length 0 are in no batch.
        budget: of rows times the longest of them.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    batches, start = [], 0
    while start < len(order):
        count = max(1, budget // int(lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches


def _sheet(rows: RowBatch, is_target: Array, batch: Int64s) -> tuple[Array, Int64s, Int64s]:
    """Ids [B, L], padded on the right, where no causal model looks; the tokens [S] of all targets; and the cell [S] of
    the token before each, in [B, L - 1]."""
    starts = rows.offsets[batch]
    targets = [np.flatnonzero(is_target[a:b]) for a, b in zip(starts, rows.offsets[batch + 1], strict=True)]
    width = max(int(one[-1]) for one in targets) + 1
    ids_BL = np.zeros((len(batch), width), np.int64)
    for line, (start, its) in enumerate(zip(starts.tolist(), targets, strict=True)):
        length = int(its[-1]) + 1
        ids_BL[line, :length] = rows.tokens["input_ids"][start : start + length]
    tokens = np.concatenate([start + its for start, its in zip(starts, targets, strict=True)])
    cells = np.concatenate([line * (width - 1) + its - 1 for line, its in enumerate(targets)])
    return ids_BL, tokens, cells
