"""What the adapters do with rows that an example does not have, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysvc.errors import ConfigError


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
