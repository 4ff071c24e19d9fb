"""What the adapters do with rows that an example does not have, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysvc.collate.shard import Denominators, MicroBatch, Shard
from raysvc.errors import ConfigError


def shard(layout: Any = "padded_left") -> Shard:
    """Two rows and a dummy on lines of five; labels lie at their own token."""
    ids = np.array([[0, 4, 5, 6, 7], [1, 2, 3, 8, 9], [0, 0, 0, 3, 3]], np.int32)
    labels = np.array([[-100, -100, -100, 6, 7], [-100, -100, 3, -100, 9], [-100] * 5], np.int32)
    arrays = {
        "input_ids": ids,
        "attention_mask": (ids > 0).astype(np.uint8),
        "labels": labels,
        "logprobs": np.full((3, 5), -0.5, np.float32),
        "reward": np.array([1.0, 2.0, 0.0], np.float32),
        "row_group": np.array([0, 1, -1], np.int32),
    }
    row_ids = np.array([7, 8, -1])
    return Shard(0, 0, 0, layout, arrays, row_ids, Denominators(4, 2, 2), (MicroBatch(0, 3, 5, 11),))


def test_a_shard_becomes_columns_that_end_at_the_right_edge() -> None:
    from raysvc.integrations.skyrl import training_input

    columns, width = training_input(shard())
    assert width == 3
    assert columns["sequences"].shape == (3, 5)
    assert columns["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 1], [0, 0, 0]]
    assert columns["response_mask"].tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 0]], "a dummy answers nothing"
    assert columns["reward"].tolist() == [[0, 1, 1], [2, 0, 2], [0, 0, 0]]
    assert columns["logprobs"].shape == (3, 3)
    assert "row_group" not in columns


def test_columns_of_several_numbers_a_token_are_cut_as_the_others_are() -> None:
    torch = pytest.importorskip("torch")
    from raysvc.integrations.skyrl import training_input
    from raysvc.job.carried import bf16_of

    rng, plain = np.random.default_rng(0), shard()
    experts, gate = rng.integers(0, 255, (3, 5, 4, 2), np.uint8), bf16_of(rng.integers(0, 99, (3, 5, 2)))
    wide = replace(plain, arrays={**plain.arrays, "experts": experts, "gate": gate})
    columns, width = training_input(wide)
    assert (columns["experts"].dtype, columns["gate"].dtype) == (torch.uint8, torch.bfloat16)
    assert columns["experts"].tolist() == experts[:, -width:].tolist()
    assert torch.equal(
        columns["gate"].view(torch.uint16), torch.from_numpy(gate["bfloat16"][:, -width:].copy())
    )
    experts[:] = 0
    assert columns["experts"].any(), "it is the batch's own memory"


@pytest.mark.parametrize(
    ("name", "values", "vectors"),
    [("state", np.zeros((3, 4), np.float32), ("state",)), ("domain", np.array(["math", "code", ""]), ())],
)
def test_what_a_training_batch_has_no_place_for_is_named(
    name: str, values: Any, vectors: tuple[str, ...]
) -> None:
    from raysvc.integrations.skyrl import training_input

    plain = shard()
    with pytest.raises(ConfigError, match=f"{name!r} is .*: no number per row or token; leave it out"):
        training_input(replace(plain, arrays={**plain.arrays, name: values}, row_vectors=vectors))


def test_only_rows_that_are_padded_on_the_left_become_a_training_batch() -> None:
    from raysvc.integrations.skyrl import training_input

    with pytest.raises(ConfigError, match=r"plan\.layout=padded_left"):
        training_input(shard("padded_right"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gradient_accumulation_steps": 4}, "a mini-batch is one optimizer step already"),
        ({"num_train_epochs": 3.0}, "the plan counts epochs"),
        ({"model_accepts_loss_kwargs": False}, "a mean of means"),
    ],
)
def test_a_trainer_whose_settings_would_change_the_gradient_is_refused(
    change: dict[str, Any], what: str
) -> None:
    pytest.importorskip("accelerate")
    from raysvc.integrations.transformers import FromServer

    fields = {"gradient_accumulation_steps": 1, "num_train_epochs": 1.0, "max_steps": -1, **change}
    accepts = fields.pop("model_accepts_loss_kwargs", True)
    trainer = FromServer()
    trainer.args = SimpleNamespace(**fields)
    trainer.model, trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = object(), accepts, None
    with pytest.raises(ConfigError, match=what):
        trainer.get_train_dataloader()
