"""Processors and models of media that do not fit shards are refused by name, before a row is built or trained."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from raysvc.actors.model.load_model import MEDIA_MODELS
from raysvc.errors import ConfigError, TokenizerError
from raysvc.media.media_processor import MediaProcessor

from .families import CHATML, llava, tokenizer
from .rows import data_url, jpeg, openai
from .test_media_build import build
from .test_tiny_vision import vision_of

TOKENS = {
    "image_token": "<image>",
    "image_boundary_token": "<fake>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
}
TILES = [[28, 56], [56, 28], [56, 56]]
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # its class -> what its images are, what else it has, why
    "Idefics2Processor": (
        "idefics2.Idefics2ImageProcessorPil",
        {"size": {"shortest_edge": 28, "longest_edge": 56}},
        {"image_seq_len": 4},
        "Idefics2Processor does not say what an image becomes",
    ),
    "MllamaProcessor": (
        "mllama.MllamaImageProcessorPil",
        {"size": {"height": 56, "width": 56}},
        {},
        "MllamaProcessor (does not say what an image becomes|gives)",
    ),
    "Llama4Processor": (
        "llava.LlavaImageProcessorPil",
        {},
        {},
        "the tokenizer has no .*, which Llama4Processor puts for an image",
    ),
    "LlavaOnevisionProcessor": (
        "llava_onevision.LlavaOnevisionImageProcessorPil",
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": TILES},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        r"LlavaOnevisionProcessor gives pixel_values of shapes .*, which do not lie in one array",
    ),
    "PixtralProcessor": (
        "pixtral.PixtralImageProcessorPil",
        {},
        {},
        r"requires the Torchvision library.*install what it names|gives pixel_values of shapes",
    ),
}


def saved(name: str, folder: Path) -> Path:
    """Tokenizer and processor of a class."""
    kind, sizes, own, _ = REFUSED[name]
    module, _, images = kind.partition(".")
    made = tokenizer(
        ["<|im_start|>", "<|im_end|>", *TOKENS.values()], eos_token="<|im_end|>", extra_special_tokens=TOKENS
    )
    made.chat_template = CHATML.replace("IMAGE", "<image>")
    made.save_pretrained(folder)
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    settings = getattr(found, images)(**sizes).to_dict()
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **own}))
    config = {**settings, "processor_class": name, **own}
    (folder / "preprocessor_config.json").write_text(json.dumps(config, default=str))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_a_processor_whose_images_do_not_fit_shards_is_refused_before_the_build(
    name: str, tmp_path: Path
) -> None:
    rows = [openai([data_url(jpeg(84, 56))])]
    with pytest.raises(TokenizerError, match=REFUSED[name][3]):
        build(tmp_path, saved(name, tmp_path / "processor"), rows)
    assert not list((tmp_path / "cache").glob("*/*")), "nothing was built"


def test_a_fault_of_ours_is_not_said_to_be_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = MediaProcessor.load(str(llava(tmp_path / "llava")))
    processor.check()

    def broken(*_: object, **__: object) -> object:
        raise ValueError("a mistake")

    for kind, name in (
        (type(processor.hf.image_processor), "__call__"),
        (type(processor.hf), "_process_images"),
        (type(processor.hf), "_get_num_multimodal_tokens"),
    ):
        with monkeypatch.context() as theirs:
            theirs.setattr(kind, name, broken)
            fresh = MediaProcessor(processor.hf, processor.kinds)
            with pytest.raises(TokenizerError, match=r"what an image becomes \(ValueError: a mistake\)"):
                fresh.check()
    for name in ("_arguments", "_replacement"):
        with monkeypatch.context() as ours:
            ours.setattr(MediaProcessor, name, broken)
            processor.replacement = processor._replacement
            with pytest.raises(ValueError, match=r"^a mistake$"):
                processor.check()


def test_a_model_that_was_not_proved_on_media_is_refused_before_it_trains(tmp_path: Path) -> None:
    """Gemma 3 looks at all tokens of an image at once, which nobody would tell it: the same arrays, another gradient."""
    model = tmp_path / "model"
    llava(model)
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows" / "rows.jsonl"
    path.write_text(json.dumps(openai([data_url(jpeg(84, 56))])) + "\n")
    job = {"source": {"path": str(path)}, "tokenizer": str(model), "trainer": {"model": str(model)}}
    for kind in ("gemma3", "mllama", "paligemma"):
        (model / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(
            ConfigError, match=rf"trainer\.model: .*{kind} is not among the models.*give tiny-vision, or"
        ):
            vision_of(tmp_path, job)
    (model / "config.json").write_text(json.dumps({"model_type": "llava"}))
    assert vision_of(tmp_path, job) is None


def test_a_worker_refuses_such_a_model_at_its_first_rows(tmp_path: Path) -> None:
    import torch
    from transformers import Gemma3Config

    from raysvc.actors.model.media_inputs import media_inputs

    tensors = {"pixel_values": torch.zeros(1, 3), "pixel_values_bounds": torch.zeros(2)}
    lm = type("Model", (), {"config": Gemma3Config()})()
    with pytest.raises(ConfigError, match="gemma3 is not among the models"):
        media_inputs(lm, tensors, torch.zeros(1, 1))


def test_each_model_that_is_taken_has_its_gradient_compared() -> None:
    from .test_vision_gradients import TRAINED

    types = {
        "qwen2_5_omni": "qwen2_5_omni_thinker",
        "qwen2_vl_videos": "qwen2_vl",
        "qwen2_5_vl_videos": "qwen2_5_vl",
    }
    assert {types.get(name, name) for name in TRAINED} == set(MEDIA_MODELS)
