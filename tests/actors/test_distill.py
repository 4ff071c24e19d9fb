"""Distillation from a teacher's likeliest entries; oracle: a dense KL in float64 over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raysvc.actors.model import token_model
from raysvc.actors.model.head_logprobs import head_top_k
from raysvc.actors.worker.losses import DistillLoss, SftLoss
from raysvc.actors.worker.torch_worker import CausalLMWorker
from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.errors import ConfigError
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan
from raysvc.row_batch import RowBatch, WideRows

from .ranks import VOCAB, DoubleWorker, Ranks, gradients_of, tiny_spec
from .reference import distance
from .shards import COLUMNS, random_rows, some_rows

K = 5
EXACT = 3e-7
PLANS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "padded_right", "micro_batch_size": 2},
    "left": {"layout": "padded_left", "micro_batch_size": 3},
    "packed": {"layout": "packed", "micro_batch_tokens": 30, "align": 4},
}
LOSSES = [DistillLoss(temperature=2.0), DistillLoss(temperature_column="hot", weight_column="trust")]


def taught(num_rows: int = 6) -> RowBatch:
    """Rows with a teacher's entries at every token; some tokens have fewer than K, some none."""
    rows, rng = random_rows(num_rows, seed=4), np.random.default_rng(4)
    ids, logprobs = [], []
    for length in rows.lengths.tolist():
        logits = rng.normal(size=(length, VOCAB)) * 2
        every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        best = np.argsort(-every, axis=-1)[:, :K].astype(np.int32)
        values = np.take_along_axis(every, best, -1).astype(np.float32)
        best[rng.random(best.shape) < 0.2] = -1
        best[0] = -1
        best[-1] = -1
        ids.append(best)
        logprobs.append(values)
    hot = np.where(np.arange(num_rows) % 2, 1.0, 4.0).astype(np.float32)
    wide = {
        "teacher_ids": WideRows(np.dtype(np.int32), (K,), ids),
        "teacher_logprobs": WideRows(np.dtype(np.float32), (K,), logprobs),
    }
    trust = np.linspace(0.25, 1.5, num_rows).astype(np.float32)
    return RowBatch(rows.row_ids, rows.offsets, rows.tokens, {"hot": hot, "trust": trust}, wide)


def shards_of(rows: RowBatch, layout: str, dp_size: int) -> Any:
    config = PlanConfig(batch_size=len(rows), shuffle="none", **PLANS[layout])
    [mini] = Plan(config, rows.lengths.astype(np.int32)).step(0, dp_size).mini_batches
    taken, order = some_rows(rows, mini.row_ids), mini.row_ids
    wide = {
        name: WideRows(one.dtype, one.shape, [one.pieces[row] for row in order.tolist()])
        for name, one in rows.wide.items()
    }
    batch = RowBatch(
        order, taken.offsets, taken.tokens, {name: values[order] for name, values in rows.rows.items()}, wide
    )
    return collate_mini_batch(
        batch, mini, CollateSpec(step=0, mini_index=0, layout=config.layout, pad_token_id=1, align=config.align,
        columns=[*COLUMNS, "teacher_ids", "teacher_logprobs", "hot", "trust"],
        pad_values={"teacher_ids": -1 if rows.wide["teacher_ids"].dtype.kind == "i" else 0})
    )  # fmt: skip


def dense(rows: RowBatch, per_row: bool) -> tuple[dict[str, np.ndarray], float]:
    """One process, a row at a time, probabilities of the whole vocabulary."""
    torch.manual_seed(0)
    lm = CausalLMWorker(0, 1, "cpu", tiny_spec().model_dump_json()).load_lm().double().eval()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(rows)):
        here = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        ids = torch.tensor(rows.tokens["input_ids"][here].astype(np.int64))
        logits = lm(input_ids=ids[None], use_cache=False).logits[0]
        heat = float(rows.rows["hot"][row]) if per_row else 2.0
        trust = float(rows.rows["trust"][row]) if per_row else 1.0
        for token in np.flatnonzero(rows.tokens["loss_mask"][here]).tolist():
            if token == 0:
                continue
            count += 1
            entries = rows.wide["teacher_ids"].pieces[row][token]
            known = entries >= 0
            if not known.any():
                continue
            teacher = torch.zeros(VOCAB, dtype=torch.float64)
            values = torch.tensor(rows.wide["teacher_logprobs"].pieces[row][token][known].astype(np.float64))
            teacher[torch.tensor(entries[known].astype(np.int64))] = torch.softmax(values / heat, 0)
            student = torch.softmax(logits[token - 1] / heat, 0)
            some = teacher > 0
            kl = (teacher[some] * (teacher[some].log() - student[some].log())).sum()
            total = total + trust * heat**2 * kl
    (total / count).backward()
    return {f"lm.{n}": p.grad.numpy().copy() for n, p in lm.named_parameters()}, float(total.detach() / count)


def check(results: list[Any], expected: list[tuple[dict[str, np.ndarray], float]]) -> None:
    for number, (grads, loss) in enumerate(expected):
        assert sum(rank[number][1]["loss"] for rank in results) == pytest.approx(loss, rel=1e-6)
        for rank in results:
            assert distance(rank[number][0], grads) < EXACT


@pytest.mark.parametrize("layout", PLANS)
def test_the_gradient_is_that_of_a_dense_kl(layout: str) -> None:
    rows = taught()
    worker = DoubleWorker(0, 1, "cpu", tiny_spec().model_dump_json())
    worker.setup("")
    found = gradients_of(worker, list(shards_of(rows, layout, 1)), LOSSES)
    check([found], [dense(rows, False), dense(rows, True)])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("dp_size", [2, 3])
def test_ranks_change_nothing(ranks: Ranks, dp_size: int) -> None:
    rows = taught()
    expected = [dense(rows, False), dense(rows, True)]
    for layout in PLANS:
        shards = shards_of(rows, layout, dp_size)
        check(ranks.run(tiny_spec(), gradients_of, [([one], LOSSES) for one in shards]), expected)


def with_ids(rows: RowBatch, ids: list[np.ndarray]) -> RowBatch:
    wide = {**rows.wide, "teacher_ids": WideRows(ids[0].dtype, (K,), ids)}
    return RowBatch(rows.row_ids, rows.offsets, rows.tokens, rows.rows, wide)


@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("loss", [None, DistillLoss()])
def test_an_id_that_the_model_does_not_have_is_refused_by_row_and_number(layout: str, loss: Any) -> None:
    """At a target alone: what teachers say of other tokens is not looked at."""
    rows = taught()
    ids = [piece.copy() for piece in rows.wide["teacher_ids"].pieces]
    masks = [rows.tokens["loss_mask"][rows.offsets[row] : rows.offsets[row + 1]] for row in range(len(rows))]
    assert masks[4][1:].any()
    assert sum(int((mask == 0).sum()) for mask in masks) > 5
    for row in range(len(rows)):
        ids[row][masks[row] == 0] = VOCAB
        ids[row][0] = VOCAB
    worker = DoubleWorker(0, 1, "cpu", tiny_spec(own_loss=DistillLoss()).model_dump_json())
    worker.setup("")
    [_, metrics] = gradients_of(worker, list(shards_of(with_ids(rows, ids), layout, 1)), [loss])[0]
    assert np.isfinite(metrics["loss"])
    ids[4][1 + np.flatnonzero(masks[4][1:])[-1], K - 1] = VOCAB
    expected = rf"column 'teacher_ids': row 4 has the id {VOCAB}, and the model that is trained has {VOCAB} entries; take a"
    with pytest.raises(ConfigError, match=expected):
        gradients_of(worker, list(shards_of(with_ids(rows, ids), layout, 1)), [loss])


@pytest.mark.parametrize("layout", PLANS)
def test_tokens_that_the_model_does_not_have_are_refused_by_row(layout: str) -> None:
    """A tokenizer may have entries that no row uses."""
    worker = DoubleWorker(0, 1, "cpu", tiny_spec().model_dump_json())
    worker.setup("")
    worker.spec = tiny_spec(vocab_size=VOCAB + 1)
    rows = taught()
    [_, metrics] = gradients_of(worker, list(shards_of(rows, layout, 1)), [SftLoss()])[0]
    assert np.isfinite(metrics["loss"])
    rows.tokens["input_ids"][rows.offsets[4] + 1] = VOCAB
    expected = rf"trainer.model: has {VOCAB} entries, and row 4 or its padding the id {VOCAB}; give a model"
    with pytest.raises(ConfigError, match=expected):
        gradients_of(worker, list(shards_of(rows, layout, 1)), [SftLoss()])


@pytest.mark.parametrize("dtype", ["int64", "int16", "uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("large", [False, True])
def test_ids_may_be_any_integers(dtype: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_model, "_is_large", lambda head, rows: large)
    rows = taught()
    rng = np.random.default_rng(0)
    ids = [np.argsort(rng.random((n, VOCAB)))[:, :K].astype(dtype) for n in rows.lengths.tolist()]
    worker = DoubleWorker(0, 1, "cpu", tiny_spec().model_dump_json())
    worker.setup("")
    found, beyond = (with_ids(rows, [one + add for one in ids]) for add in (0, VOCAB))
    grads = gradients_of(worker, list(shards_of(found, "packed", 1)), LOSSES[:1])
    assert distance(grads[0][0], dense(found, False)[0]) < EXACT
    with pytest.raises(ConfigError, match="teacher_ids"):
        gradients_of(worker, list(shards_of(beyond, "packed", 1)), LOSSES[:1])


def test_a_large_vocabulary_gives_the_same_without_its_logits() -> None:
    """Tiles in float64, against autograd through the dense logits."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5000, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 5000, (300, 64), generator=generator)
    factors = torch.randn(300, 64, generator=generator, dtype=torch.float64)
    grads = []
    for found in (head_top_k(rows, weight, ids), (rows @ weight.T).log_softmax(-1).gather(-1, ids)):
        (found * factors).sum().backward()
        grads.append((found.detach(), rows.grad.clone(), weight.grad.clone()))
        rows.grad = weight.grad = None
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def test_no_tensor_of_targets_by_vocabulary_is_made() -> None:
    """128 k entries, 64 a target: the largest tensor that any operation makes is the head's own gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):  # type: ignore[misc]
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, torch.Tensor):
                    Largest.numel = max(Largest.numel, each.numel())
            return out

    targets, entries, width = 200, 1 << 17, 4
    rows = torch.randn(targets, width, requires_grad=True)
    weight = torch.randn(entries, width, requires_grad=True)
    ids = torch.randint(0, entries, (targets, 64))
    with Largest():
        head_top_k(rows, weight, ids).sum().backward()
    assert Largest.numel <= max(entries * width, 256 * 2048)
    assert Largest.numel < targets * entries / 40
