"""What a user of Hugging Face's `Trainer` may set, and do: right, or refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysvc.errors import ConfigError

from .stream_client import StreamClient, arguments, tiny_lm
from .stream_client import client_of as sample_client

pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


client_of = partial(  # four steps of two mini-batches, 32 of the sample's rows
    sample_client, batch_size=60, mini_batch_size=30, micro_batch_size=30
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
        assert client.next_step == 2, "four mini-batches are two steps"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dataloader_num_workers": 2}, "dataloader_num_workers: is 2, and the server reads ahead"),
        ({"dataloader_drop_last": True}, r"dataloader_drop_last: .* use plan\.tail"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: is 'group_by_length'"),
        ({"train_sampling_strategy": "sequential"}, r"train_sampling_strategy: .* use plan\.shuffle"),
        ({"data_seed": 1}, r"data_seed: .* use plan\.seed"),
        ({"auto_find_batch_size": True}, r"auto_find_batch_size: .* plan\.micro_batch_tokens"),
        ({"per_device_train_batch_size": 2}, r"per_device_train_batch_size: .* use plan\.micro_batch_size"),
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states_from_checkpoint"),
        ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps: .* plan\.mini_batch_size"),
        ({"num_train_epochs": 2}, r"num_train_epochs: .* use 1, and plan\.epochs"),
    ],
)
def test_options_that_would_be_ignored_are_refused_by_name(
    options: dict[str, Any], what: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    trainer = trainer_of(tmp_path, client_of(tmp_path, sample), **options)
    with pytest.raises(ConfigError, match=what):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"packing": True}, r"packing: .* use plan\.layout: packed"),
        ({"padding_free": True}, r"p[a-z_]*: .* use plan\.layout: packed"),
        ({"assistant_only_loss": True}, "assistant_only_loss: .* use train_on of the job"),
        ({"completion_only_loss": False}, "completion_only_loss: .* use train_on of the job"),
    ],
)
def test_options_of_trls_sft_that_would_be_ignored_are_refused_by_name(
    options: dict[str, Any], what: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    trl = pytest.importorskip("trl")
    from raysvc.integrations.trl_server import TrlFromServer

    trainer = TrlFromServer.__new__(TrlFromServer)
    fields = {**arguments(tmp_path), "bf16": False, **options}
    trainer.args, trainer.client = trl.SFTConfig(**fields), client_of(tmp_path, sample)
    with pytest.raises(ConfigError, match=what):
        trainer.get_train_dataloader()


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_whatever_is_said_of_skipping_data_or_of_micro_batches(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}

    def losses(trainer: Any) -> list[float]:
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    whole = trainer_of(tmp_path / "whole", client_of(tmp_path, sample))
    whole.train()
    trainer_of(tmp_path / "halves", client_of(tmp_path, sample), max_steps=3, **saving).train()
    for options, plan in (({}, {}), ({"ignore_data_skip": True}, {}), ({}, {"micro_batch_size": 7})):
        client = client_of(tmp_path, sample, **plan)
        resumed = trainer_of(tmp_path / "halves", client, **options)
        resumed.train(resume_from_checkpoint=True)
        assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
        assert len(losses(resumed)) == 8
        assert client.next_step == 4
