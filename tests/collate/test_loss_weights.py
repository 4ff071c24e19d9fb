"""Gradients of a mini-batch equal those of one process without padding, packing or ranks, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raysvc
from raysvc.collate.loss_weights import row_weights, token_weights
from raysvc.collate.shard import Denominators
from raysvc.job.config import PlanConfig

REDUCTIONS = ("token_mean", "sequence_mean", "trajectory_mean", "group_mean", "prompt_mean", "constant")
CONSTANT = 37.0
SHAPES = {
    "right, one row": {"micro_batch_size": 1},
    "right, two rows": {"micro_batch_size": 2, "pad_to_multiple": 4},
    "left, two rows": {"layout": "padded_left", "micro_batch_size": 2},
    "right, by tokens": {"micro_batch_tokens": 24},
    "packed": {"layout": "packed", "micro_batch_tokens": 24},
    "packed, aligned": {"layout": "packed", "micro_batch_tokens": 32, "align": 4, "pad_to_multiple": 8},
}
COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels")


@pytest.fixture(autouse=True)
def _one_thread():
    """The tensors are tiny: a second thread only waits, and badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tiny(nn.Module):
    """One attention layer over ids and positions; sees only tokens of its own segment, before and at its place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(64, 8), nn.Embedding(32, 8)
        self.qkv, self.up, self.out = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 64)
        self.double()

    def forward(self, ids: Tensor, places: Tensor, segments: Tensor) -> Tensor:
        x = self.token(ids) + self.place(places)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        width = ids.shape[1]
        seen = (segments[:, :, None] == segments[:, None, :]) & torch.ones(width, width).tril().bool()
        attended = torch.softmax((q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(~seen, -1e30), dim=-1) @ v
        return self.out(torch.tanh(self.up(x + attended)))


def target_losses(model: Tiny, arrays: dict[str, np.ndarray]) -> Tensor:
    """[B, W - 1], cross entropy of each label; the model shifts."""
    tensors = {name: torch.tensor(arrays[name].astype(np.int64)) for name in COLUMNS}
    segments = arrays.get("segment_ids", arrays["attention_mask"]).astype(np.int64)
    logits = model(tensors["input_ids"], tensors["position_ids"], torch.tensor(segments))
    return nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tensors["labels"][:, 1:], ignore_index=-100, reduction="none"
    )


def gradient(model: Tiny, loss: Tensor) -> Tensor:
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
    )


def rows_alone(model, data, row_ids):
    """Loss of every target of every row, one unpadded forward per row: row -> [targets]."""
    out = {}
    for row in row_ids:
        ids, mask = data.row(row), data.row(row, "loss_mask").astype(bool)
        places = torch.arange(len(ids))[None]
        logits = model(torch.tensor(ids.astype(np.int64))[None], places, torch.ones_like(places))
        losses = nn.functional.cross_entropy(
            logits[0, :-1], torch.tensor(ids[1:].astype(np.int64)), reduction="none"
        )
        out[row] = losses[torch.tensor(mask[1:])]
    return out


def reference(model, data, row_ids, uids):
    """Gradient of the whole mini-batch by each definition, written as the definition reads."""
    losses = rows_alone(model, data, row_ids)
    every = torch.cat(list(losses.values()))
    means = {row: loss.mean() if len(loss) else loss.sum() for row, loss in losses.items()}
    groups: dict[str, list[Tensor]] = {}
    prompts: dict[str, list[Tensor]] = {}
    for row in row_ids:
        groups.setdefault(uids[row], []).append(means[row])
        prompts.setdefault(uids[row], []).append(losses[row])
    tokens = [torch.cat(rows) for rows in prompts.values()]
    loss = {
        "token_mean": every.sum() / max(len(every), 1),
        "sequence_mean": sum(means.values()) / len(row_ids),
        "group_mean": sum(sum(group) / len(group) for group in groups.values()) / len(groups),
        "prompt_mean": sum(each.mean() if len(each) else each.sum() for each in tokens) / len(tokens),
        "trajectory_mean": of_trajectories(losses, data, row_ids, uids),
        "constant": sum(rows.sum() / CONSTANT for rows in losses.values()) / len(row_ids),
    }
    return {name: gradient(model, value) for name, value in loss.items()}


def of_trajectories(losses, data, row_ids, uids):
    """The mean over trajectories of the mean of the tokens of all their rows; a row that names none is one."""
    named = data.rows.get("trajectory", np.arange(len(data.lengths)))
    pooled: dict[tuple[str, int], list[Tensor]] = {}
    for row in row_ids:
        pooled.setdefault((uids[row], int(named[row])), []).append(losses[row])
    every = [torch.cat(rows) for rows in pooled.values()]
    return sum(each.mean() if len(each) else each.sum() for each in every) / len(every)


def over_ranks(model, shards, weights_of):
    """What an averaging reducer leaves: the mean over ranks of the sum over micro-batches."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for shard in shards:
        for number in range(len(shard.micro_batches)):
            arrays = shard.micro(number)
            weights = torch.tensor(weights_of(arrays, shard.denominators)[:, 1:])
            total += gradient(model, (weights * target_losses(model, arrays)).sum())
    return total / len(shards)


def by_tokens(model, shards, name):
    """The gradient with the weights of a mean, as averaged over ranks."""
    return over_ranks(
        model,
        shards,
        lambda arrays, counts: token_weights(
            arrays, counts, name, dp_size=len(shards), constant=CONSTANT, dtype=np.float64
        ),
    )


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / max(other.norm(), 1e-12))


def mini_batch(make_data, num_rows):
    data = make_data(np.random.default_rng(num_rows).integers(2, 13, num_rows), seed=num_rows)
    data.tokens["loss_mask"][: data.lengths[0]] = 0  # a row without targets
    return data, [f"u{row // 3}" for row in range(num_rows)]


def numbers_of_rows(dp_size):
    """Dummies 0, 1, dp - 1, and more dummies than rows."""
    return sorted({2 * dp_size, 2 * dp_size - 1, dp_size + 1, max(2, dp_size // 2 - 1)})


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 8])
def test_gradients_do_not_depend_on_ranks_micro_batches_layout_or_dummies(
    make_data, make_shards, dp_size, shape
):
    model = Tiny()
    for num_rows in numbers_of_rows(dp_size):
        data, uids = mini_batch(make_data, num_rows)
        config = PlanConfig(batch_size=num_rows, columns=COLUMNS, **SHAPES[shape])
        [(mini, shards)] = make_shards(data, config, dp_size, uids=uids)
        want = reference(model, data, mini.row_ids.tolist(), uids)
        for name in REDUCTIONS:
            assert distance(by_tokens(model, shards, name), want[name]) < 1e-10, (name, num_rows)


@pytest.mark.parametrize("shape", ["right, two rows", "packed, aligned"])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
def test_one_factor_of_the_summed_losses_is_enough_for_means_over_tokens(
    make_data, make_shards, dp_size, shape
):
    model = Tiny()
    data, uids = mini_batch(make_data, 7)
    config = PlanConfig(batch_size=7, columns=COLUMNS, **SHAPES[shape])
    [(mini, shards)] = make_shards(data, config, dp_size, uids=uids)
    want = reference(model, data, mini.row_ids.tolist(), uids)

    def scaled(arrays, counts):
        return (arrays["labels"] != -100) * raysvc.loss_scale(counts, dp_size, name, constant=CONSTANT)

    for name in ("token_mean", "constant"):
        assert distance(over_ranks(model, shards, scaled), want[name]) < 1e-10, name


@pytest.mark.parametrize("shape", ["right, two rows", "packed"])
@pytest.mark.parametrize("dp_size", [1, 3])
def test_rows_of_one_trajectory_weigh_by_all_its_tokens(make_data, make_shards, dp_size, shape):
    model = Tiny()
    data, uids = mini_batch(make_data, 9)
    data.rows["trajectory"] = np.array([0, 0, 1, 0, 1, 1, 0, 0, 0])
    [(mini, shards)] = make_shards(
        data, PlanConfig(batch_size=9, columns=COLUMNS, **SHAPES[shape]), dp_size, uids=uids
    )
    assert shards[0].denominators.trajectories == 5
    want = reference(model, data, mini.row_ids.tolist(), uids)
    for name in REDUCTIONS:
        assert distance(by_tokens(model, shards, name), want[name]) < 1e-10, name
    assert distance(want["trajectory_mean"], want["sequence_mean"]) > 1e-3


@pytest.mark.parametrize("name", ["sequence_mean", "group_mean", "prompt_mean"])
def test_a_mean_whose_rows_weigh_differently_has_no_one_factor(name):
    with pytest.raises(ValueError, match="token_weights"):
        raysvc.loss_scale(Denominators(5, 2, 1), 2, name)
    with pytest.raises(ValueError, match="at least 1"):
        raysvc.loss_scale(Denominators(5, 2, 1), 0)


@pytest.mark.parametrize("shape", ["right, two rows", "packed"])
def test_weights_of_torch_tensors_are_those_of_numpy_arrays(make_data, make_shards, shape):
    data, uids = mini_batch(make_data, 7)
    config = PlanConfig(batch_size=7, columns=COLUMNS, **SHAPES[shape])
    [(_, [shard])] = make_shards(data, config, 1, uids=uids)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in shard.arrays.items()}
    for name in REDUCTIONS:
        one, other = (
            token_weights(a, shard.denominators, name, constant=2.0) for a in (shard.arrays, tensors)
        )
        assert np.array_equal(one, other)


@pytest.mark.parametrize("dp_size", [1, 3])
def test_windows_of_a_stream_equal_whole_windows_in_one_process(make_data, make_shards, dp_size):
    model, window = Tiny(), 10
    data, _ = mini_batch(make_data, 8)
    config = PlanConfig(layout="stream", window=window, batch_size=99, micro_batch_size=2, columns=COLUMNS)
    [(_, shards)] = make_shards(data, config, dp_size)
    for shard in shards:  # the model of this test cuts attention at segments; a stream is not cut
        shard.arrays["kept"] = shard.arrays.pop("segment_ids")
    ids = torch.tensor(data.tokens["input_ids"].astype(np.int64))
    mask = torch.tensor(data.tokens["loss_mask"].astype(bool))
    per_window = []
    for start in range(0, len(ids), window):
        places = torch.arange(min(window, len(ids) - start))[None]
        part, trained = ids[start : start + window], mask[start : start + window]
        # one document for attention: the layout does not cut it
        logits = model(part[None], places, torch.ones_like(places))[0, :-1]
        losses = nn.functional.cross_entropy(logits, part[1:], reduction="none")
        per_window.append(losses[trained[1:]])
    want = {
        "token_mean": torch.cat(per_window).mean(),
        "sequence_mean": sum(losses.mean() for losses in per_window if len(losses)) / len(per_window),
    }
    want["group_mean"] = want["prompt_mean"] = want["sequence_mean"]  # a window is a group
    for name, loss in want.items():
        got = over_ranks(
            model,
            shards,
            lambda arrays, counts, name=name: token_weights(
                arrays | {"segment_ids": arrays["kept"]}, counts, name, dp_size=dp_size, dtype=np.float64
            ),
        )
        assert distance(got, gradient(model, loss)) < 1e-10


def test_counting_dummies_or_averaging_means_would_be_seen(make_data, make_shards):
    model, dp_size = Tiny(), 4
    data, uids = mini_batch(make_data, 5)
    [(mini, shards)] = make_shards(
        data, PlanConfig(batch_size=9, micro_batch_size=1, columns=COLUMNS), dp_size
    )
    want = reference(model, data, mini.row_ids.tolist(), uids)

    def dummies_counted(arrays, counts):
        padded = Denominators(counts.tokens, len(np.concatenate([s.row_ids for s in shards])), counts.groups)
        return token_weights(arrays, padded, "sequence_mean", dp_size=dp_size, dtype=np.float64)

    def mean_of_means(arrays, counts):
        trained = arrays["labels"] != -100
        return trained / max(trained.sum(), 1) / len(shards[0].micro_batches)

    assert distance(over_ranks(model, shards, dummies_counted), want["sequence_mean"]) > 0.1
    assert distance(over_ranks(model, shards, mean_of_means), want["token_mean"]) > 0.1


def test_weights_of_a_mini_batch_sum_to_one_where_every_row_has_a_target(make_data, make_shards):
    data = make_data([5, 9, 2, 7, 3, 3, 8], trained=2.0)
    config = PlanConfig(layout="packed", micro_batch_tokens=16, batch_size=7)
    [(_, shards)] = make_shards(data, config, 3, uids=list("aabbbcc"))
    for name in ("token_mean", "sequence_mean", "group_mean", "prompt_mean"):
        parts = [token_weights(s.arrays, s.denominators, name, dtype=np.float64).sum() for s in shards]
        assert sum(parts) == pytest.approx(1.0)
    parts = [token_weights(s.arrays, s.denominators, "constant", constant=2.0).sum() for s in shards]
    assert sum(parts) == pytest.approx(shards[0].denominators.tokens / (2 * 7))


def test_a_mini_batch_without_any_target_weighs_nothing_and_is_finite(make_data, make_shards):
    data = make_data([5, 9, 2], trained=-1.0)
    [(_, shards)] = make_shards(data, PlanConfig(batch_size=3), 2)
    for shard in shards:
        for name in ("token_mean", "sequence_mean", "group_mean", "prompt_mean"):
            assert (token_weights(shard.arrays, shard.denominators, name) == 0).all()
            assert np.isfinite(row_weights(shard.arrays, shard.denominators, name)).all()


@pytest.mark.parametrize("constant", [None, 0.0, -1.0])
def test_the_constant_must_be_given_and_positive(make_data, make_shards, constant):
    [(_, [shard])] = make_shards(make_data([5, 9]), PlanConfig(batch_size=2), 1)
    with pytest.raises(ValueError, match="positive constant"):
        row_weights(shard.arrays, shard.denominators, "constant", constant=constant)
