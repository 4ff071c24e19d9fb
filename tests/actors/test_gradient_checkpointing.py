"""Layers that compute their activations again: the same gradients, and nothing kept of a layer but what enters it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from raysvc.actors.worker.losses import SftLoss, ValueLoss
from raysvc.actors.worker.torch_worker import recompute_layers
from raysvc.errors import ConfigError

from .ranks import DoubleWorker, gradients_of, tiny_spec
from .shards import minis_of, random_rows

COLUMNS = ("advantages", "old_logprobs", "ref_logprobs", "returns", "old_values")


@pytest.mark.parametrize("role", ["policy", "critic"])  # the tiny model, and one of transformers
@pytest.mark.parametrize("layout", ["padded_right", "packed"])
def test_gradients_are_the_same_and_each_layer_runs_twice(role: str, layout: str) -> None:
    size = {"micro_batch_tokens": 40} if layout == "packed" else {"micro_batch_size": 2}
    plan = {"batch_size": 6, "shuffle": "none", "layout": layout, **size}
    ((_, (shard,), _),) = minis_of(random_rows(6, seed=1), plan, 1, columns=COLUMNS)
    loss, found = ValueLoss() if role == "critic" else SftLoss(), []
    for again in (False, True):
        worker = DoubleWorker(
            0, 1, "cpu", tiny_spec(role=role, gradient_checkpointing=again).model_dump_json()
        )
        worker.setup("")
        runs: list[None] = []
        for layer in worker.model.lm.base_model.layers:
            norm = layer.post_attention_layernorm
            norm.register_forward_hook(lambda *_, runs=runs: runs.append(None))
        found.append((gradients_of(worker, [shard], [loss]), len(runs)))
    ((plain, metrics),), num_runs = found[0]
    ((other, others),), num_others = found[1]
    assert (metrics, num_others) == (others, 2 * num_runs)
    assert plain.keys() == other.keys()
    for name, gradient in plain.items():
        assert np.array_equal(gradient, other[name]), name


def test_a_model_that_names_no_layers_is_refused() -> None:
    lm = SimpleNamespace(_no_split_modules=None, modules=list)
    with pytest.raises(ConfigError, match=r"trainer\.gradient_checkpointing: SimpleNamespace does not say"):
        recompute_layers(lm)
