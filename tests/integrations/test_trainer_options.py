"""What a user of Hugging Face's `Trainer` may set, and do: right, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysvc.job.job_file import load_job

from .stream_client import StreamClient, arguments, tiny_lm

pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


def client_of(folder: Path, sample: dict[str, str], **plan: Any) -> StreamClient:
    """Four steps of two mini-batches, 32 of the sample's rows."""
    return StreamClient(
        load_job(
            {
                "source": {"path": sample["rows"], "format": "chat"},
                "tokenizer": sample["tokenizer"],
                "train_on": "all_assistant_messages",
                "cache": {"root": str(folder / "cache")},
                "plan": {"batch_size": 60, "mini_batch_size": 30, "micro_batch_size": 30, **plan},
            }
        )
    )


def trainer_of(folder: Path, client: StreamClient, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from raysvc.integrations.transformers import FromServer

    kind = type("Mine", (FromServer, Trainer), {"client": client})
    return kind(model=tiny_lm(), args=TrainingArguments(**{**arguments(folder), **options}))


def test_a_second_train_of_the_same_trainer_commits_each_step_once(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    client = client_of(tmp_path, sample)
    trainer = trainer_of(tmp_path, client, max_steps=4)
    for _ in range(2):
        trainer.train()
        assert client.frontier == 2, "four mini-batches are two steps"
