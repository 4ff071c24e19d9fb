"""Keys of other trainers: each is met with the key that a job has, in the file and in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysvc.errors import ConfigError
from raysvc.job.job_file import _fields_at, load_job
from raysvc.job.known_keys import KNOWN_KEYS, table

JOB = {"source": {"path": "rows.jsonl"}, "tokenizer": "folder"}
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "keys.md"


def test_every_key_on_the_right_is_one_of_a_job_and_none_on_the_left_is() -> None:
    assert len(KNOWN_KEYS) >= 50
    for key, found in KNOWN_KEYS.items():
        *sections, name = found.path.split(".") if found.path else ["source", "path"]
        assert name in _fields_at(sections), key
        assert key not in _fields_at([]), key
        assert found.path or found.note, key


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"lr": 1}, "lr: unknown key; write trainer.learning_rate"),
        ({"trainer": {"lr": 1}}, "trainer.lr: unknown key; write trainer.learning_rate"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing: unknown key; write trainer.gradient_checkpointing"),
        ({"trainer": {"neftune_noise_alpha": 5}}, "unknown key; the built-in trainer has none; for one of TRL"),
        ({"trainer": {"load_best_model_at_end": True}}, "unknown key; write trainer.keep_best ({eval: NAME, metric: loss})"),
        ({"early_stopping_patience": 3}, "unknown key; write trainer.stop_after.patience ({eval: NAME, patience: 3})"),
        ({"lora_r": 8}, "lora_r: unknown key; the built-in trainer trains all weights; for TRL with PEFT: raysvc init --trainer trl"),
        ({"trainer": {"lora": True}}, "trainer.lora: unknown key; the built-in trainer trains all weights"),
        ({"evals": {"held": {"folds": 50}}}, "evals.held.folds: unknown key; known are source, share, rows, batch_size"),
        ({"batch_size": 8}, "batch_size: unknown key; write plan.batch_size"),
        ({"trainer": {"batch_size": 8}}, "trainer.batch_size: unknown key; write plan.batch_size"),
        ({"plan": {"packing": "best_fit", "sample_packing": True}}, "plan.sample_packing: unknown key; write plan.layout (packed)"),
        ({"packing": True}, "packing: unknown key; write plan.layout (packed)"),
        ({"adam_beta1": 0.9}, "adam_beta1: unknown key; the built-in trainer has torch's AdamW alone"),
        ({"save_strategy": "steps"}, "save_strategy: unknown key; write trainer.checkpoint_every_steps"),
        ({"ddp_timeout": 60}, "ddp_timeout: unknown key; the built-in trainer has none"),
        ({"tokenizer": {"name": "t", "eos_token": "</s>"}}, "tokenizer.eos_token: unknown key; write train_end (append; the tokenizer's files"),
        ({"seed": 3}, "seed: unknown key; write plan.seed (Seed of the shuffle), or trainer.seed (Seed of the initial weights)"),
        ({"lora_bias": "none"}, "lora_bias: unknown key; the built-in trainer trains all weights"),
        ({"evals": {"held": {"path": "a.jsonl"}}}, "evals.held.path: unknown key; write evals.held.source.path"),
        ({"evals": {"held": {"test_size": 0.1}}}, "evals.held.test_size: unknown key; write evals.held.share"),
        ({"trainer": {"patience": 3}}, "trainer.patience: unknown key; write trainer.stop_after.patience"),
        ({"warmup_ratio": 0.1}, "warmup_ratio: unknown key; write trainer.warmup_steps (a number of steps)"),
    ],
)  # fmt: skip
def test_a_known_key_is_met_half_way(sections: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job({**JOB, **sections})
    assert told in str(caught.value)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "write table() into it"
