"""A layout that a model cannot keep apart is refused before a row is read: a tiny model of its architecture is asked."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import raysvc
from raysvc.actors.model.model_layout import layout_proof
from raysvc.actors.model.tiny_twin import tiny_twin
from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig
from raysvc.training.model_name import check_layout
from tests.actors.small_models import small_folder

THERE: Future[str] = Future()
THERE.set_result("local")


def job_of(model: str, layout: str = "packed", device: str = "cpu") -> JobConfig:
    return JobConfig.model_validate(
        {
            "source": {"path": "rows.jsonl", "format": "chat"},
            "tokenizer": "nobody/reads-it",
            "plan": {"layout": layout, "batch_size": 2},
            "trainer": {"model": model, "device": device},
        }
    )


@pytest.mark.parametrize(
    ("name", "layout", "refused"),
    [
        ("llama", "packed", False),
        ("gpt_oss", "packed", False),
        ("gpt_oss", "padded_left", False),
        ("bloom", "packed", True),
        ("lfm2", "packed", True),
        ("mamba2", "packed", True),
        ("mamba2", "padded_left", False),
        ("recurrent_gemma", "padded_left", True),
        ("rwkv", "padded_left", True),
        ("rwkv", "padded_right", False),
    ],
)
def test_the_driver_says_what_the_workers_would(
    name: str, layout: str, refused: bool, tmp_path: Path
) -> None:
    job = job_of(small_folder(name, tmp_path), layout)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()  # the configuration is all that is read
    if not refused:
        check_layout(job, THERE)
        return
    with pytest.raises(
        ConfigError, match=rf"is {layout}, and {tmp_path} does not .*; use padded_right, which"
    ):
        check_layout(job, THERE)


@pytest.mark.parametrize("vocab_size", [64, 512], ids=["fewer than the tokenizer", "enough"])
def test_nothing_is_built_for_a_job_that_is_refused(
    vocab_size: int, tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"layout": "packed", "batch_size": 8},
        "trainer": {
            "model": small_folder("mamba", tmp_path / "model", vocab_size=vocab_size),
            "device": "cpu",
            "run_dir": str(tmp_path / "run"),
        },
    }
    with pytest.raises(ConfigError, match=r"plan\.layout: is packed"):
        raysvc.train(job)
    assert not (tmp_path / "cache").exists()


def test_a_model_with_kernels_for_a_gpu_is_left_to_workers_that_may_have_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    kernels, none = (small_folder(name, tmp_path / name) for name in ("qwen3_5_text", "mamba"))
    gpus = {"GPU": 8.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: gpus)
    with caplog.at_level(logging.WARNING):
        check_layout(job_of(kernels, device="cuda"), THERE)
        check_layout(job_of(kernels, device="auto"), THERE)
    assert caplog.text.count("the workers try it where they run") == 2
    for job in (job_of(kernels), job_of(none, device="cuda")):
        with pytest.raises(ConfigError, match=r"plan\.layout: is packed"):
            check_layout(job, THERE)
    gpus.clear()
    with pytest.raises(ConfigError, match=r"plan\.layout: is packed"):
        check_layout(job_of(kernels, device="auto"), THERE)
    check_layout(job_of(kernels, device="auto"), None)  # asked again when Ray is there


def test_what_cannot_be_asked_is_left_to_the_workers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))
    for model in ("tiny", "/nowhere/model", str(tmp_path)):
        assert layout_proof(model, "packed") is None


REAL: dict[str, dict[str, Any]] = {  # sizes of released models
    "qwen2": {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "num_hidden_layers": 24},
    "qwen3_5_text": {},
    "falcon": {},
    "deepseek_v3": {},
    "nemotron_h": {},
    "gpt_oss": {},
    "zamba2": {},
    "llama4_text": {},
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_tiny_twin_has_the_kinds_of_layers_of_the_real_model_and_few_weights(name: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **REAL[name])
    state = torch.random.get_rng_state()
    twin = tiny_twin(config)
    assert torch.equal(state, torch.random.get_rng_state())
    assert twin.config.model_type == config.model_type
    assert (getattr(twin.config, "sliding_window", None) or 0) <= 8, "shorter than a row of the proof"
    assert sum(weight.numel() for weight in twin.parameters()) < 20e6
    assert set(getattr(twin.config, "layer_types", None) or ()) == set(
        getattr(config, "layer_types", None) or ()
    )
