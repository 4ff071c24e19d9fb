"""A Trainer's model is called with what keeps the rows of a layout apart, or the layout is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysvc.errors import ConfigError
from tests.actors.small_models import small_model

from .stream_client import StreamClient, arguments
from .test_columns import job_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


def weights_of(model: str, tmp_path: Path, tokenizer: str, **plan: Any) -> np.ndarray:
    """After two steps of AdamW in float32."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from raysvc.integrations.transformers import FromServer

    folder = tmp_path / "-".join(map(str, plan.values()))
    folder.mkdir()
    kind: Any = type(
        "Mine", (FromServer, Trainer), {"client": StreamClient(job_of(folder, tokenizer, **plan))}
    )
    lm = small_model(model)
    kind(model=lm, args=TrainingArguments(**arguments(folder / "out"), bf16=False)).train()
    return np.concatenate([weight.detach().numpy().ravel() for weight in lm.parameters()])


def test_packed_rows_train_what_padded_ones_do_where_the_model_needs_masks(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    packed = weights_of("mpt", tmp_path, sample["tokenizer"], layout="packed", micro_batch_tokens=64)
    padded = weights_of("mpt", tmp_path, sample["tokenizer"], layout="padded_right", micro_batch_size=2)
    start = np.concatenate([weight.detach().numpy().ravel() for weight in small_model("mpt").parameters()])
    assert np.linalg.norm(padded - start) > 0
    assert np.linalg.norm(packed - padded) < 1e-3 * np.linalg.norm(padded - start)


def test_a_trainer_whose_model_would_mix_rows_is_refused(tmp_path: Path, sample: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"plan\.layout: is packed, and Lfm2ForCausalLM does not keep"):
        weights_of("lfm2", tmp_path, sample["tokenizer"], layout="packed", micro_batch_tokens=64)
    assert torch.isfinite(
        torch.from_numpy(
            weights_of("lfm2", tmp_path, sample["tokenizer"], layout="padded_right", micro_batch_size=2)
        )
    ).all()
