"""A layout that a model cannot keep apart is refused before a row is read: a tiny model of its architecture is asked."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysvc
from raysvc.actors.model.load_model import load_lm
from raysvc.actors.model.model_layout import layout_proof, scaling_of
from raysvc.actors.model.tiny_twin import tiny_twin
from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig
from raysvc.training.model_name import check_layout, check_model, check_scaling, warn_of_scaling
from tests.actors.small_models import small_folder

THERE: Future[str] = Future()
THERE.set_result("local")


def job_of(model: str, layout: str = "packed", device: str = "cpu") -> JobConfig:
    return JobConfig.model_validate(
        {
            "source": {"path": "rows.jsonl", "format": "chat"},
            "tokenizer": "nobody/reads-it",
            "plan": {"layout": layout, "batch_size": 2} | ({"window": 64} if layout == "stream" else {}),
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


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def scaled_folder(folder: Path, rope: dict[str, Any], context: int, **more: Any) -> str:
    original = {"original_max_position_embeddings": context} if rope is LONGROPE else {}
    most = context * 4 if rope is LONGROPE else context
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": most,
    }
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": {**rope, **original}, **more}))  # fmt: skip
    return str(folder)


def entry_of(sample: dict[str, str], cache: Path) -> Any:
    return raysvc.tokenize(
        source={"path": sample["rows"], "format": "chat"},
        tokenizer=sample["tokenizer"],
        cache={"root": str(cache)},
    )


@pytest.mark.parametrize("layout", ["packed", "padded_right"])
@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_rows_that_change_the_positions_of_their_neighbours_are_refused(
    rope: dict[str, Any], layout: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    entry = entry_of(sample, tmp_path / "cache")
    lengths = np.array(sorted(entry.rows.lengths()))
    context, longest = int(np.median(lengths)), int(lengths.max())
    beyond = int((lengths > context).sum())
    assert 0 < beyond < len(lengths)
    job = job_of(scaled_folder(tmp_path / "model", rope, context), layout)
    told = rf"{rope['rope_type']}, original context {context}\), and {beyond} rows are longer.*set max_length: {context}"
    with pytest.raises(ConfigError, match=told):
        check_scaling(job, entry)
    check_scaling(job_of(scaled_folder(tmp_path / "wide", rope, longest), layout), entry)
    check_scaling(job_of(scaled_folder(tmp_path / "line", rope, context), "stream"), entry)


def test_rows_that_are_all_beyond_the_context_or_alone_are_what_they_are_alone(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    entry = entry_of(sample, tmp_path / "cache")
    below = int(entry.rows.lengths().min()) - 1
    check_scaling(job_of(scaled_folder(tmp_path / "all", LONGROPE, below)), entry)
    with pytest.raises(ConfigError, match="dynamic"):  # depends on what the model saw before
        check_scaling(job_of(scaled_folder(tmp_path / "history", DYNAMIC, below)), entry)
    job = job_of(scaled_folder(tmp_path / "some", LONGROPE, below + 2), "padded_right")
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"micro_batch_size": 1})})
    check_scaling(job, entry)


@pytest.mark.parametrize("max_length", [None, 64, 32])
def test_rows_that_come_while_they_are_trained_are_warned_of(
    max_length: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(scaled_folder(tmp_path, LONGROPE, 32)).model_copy(update={"max_length": max_length})
    with caplog.at_level(logging.WARNING):
        warn_of_scaling(job)
    assert ("rows may be longer" in caplog.text) == (max_length != 32)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "phi3", "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}}, ("longrope", 4096)),
        ({"model_type": "internlm3", "max_position_embeddings": 32768, "rope_scaling": {"type": "dynamic", "factor": 6.0}}, ("dynamic", 32768)),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}}, None),
        ({"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}}, None),
        ({"model_type": "qwen2"}, None),
    ],
    ids=["Phi-3.5", "InternLM3", "Llama 3.1", "DeepSeek-V3", "Qwen2.5"],
)  # fmt: skip
def test_the_scaling_is_what_the_configuration_of_a_released_model_says(
    config: dict[str, Any], told: tuple[str, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert scaling_of(str(tmp_path)) == told


BROKEN: dict[str, dict[str, Any]] = {
    "nobody_knows": {"model_type": "nobody_knows"},
    "hidden_size": {"model_type": "llama", "hidden_size": "wide"},
    "original_max_position_embeddings": {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}},
}  # fmt: skip


@pytest.mark.parametrize("word", BROKEN)
def test_a_configuration_that_transformers_refuses_is_told_in_one_line(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(BROKEN[word]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"trainer\.model: 'model' cannot be loaded \(.*{word}"):
        check_model("model")
    with pytest.raises(ConfigError, match=rf"cannot be loaded \(.*{word}"):
        check_model(str(tmp_path / "model"), alone=True)
    with pytest.raises(ConfigError, match=rf"cannot be loaded \(.*{word}"):  # in a worker
        load_lm(str(tmp_path / "model"), 64)
    for layout in ("packed", "padded_right"):  # an absolute folder may be of the workers' nodes alone
        check_layout(job_of(str(tmp_path / "model"), layout), None)
