"""A processor as the build and the collators use it, against the processor itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from raysvc.errors import TokenizerError
from raysvc.media.media_processor import TEXT_KEYS, MediaProcessor, has_processor

from .families import tokenizer

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def processor(family: Path) -> MediaProcessor:
    assert has_processor(str(family))
    return MediaProcessor.load(str(family))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


@SLOW
@given(width=st.integers(28, 400), height=st.integers(28, 400))
def test_a_text_with_replacements_has_the_ids_of_the_processor(
    processor: MediaProcessor, width: int, height: int
) -> None:
    text, tokens, patches = processor.replacement("image", width, height)
    truth = processor.hf(text=["a" + processor.tokens["image"] + "b"], images=[picture(width, height)])
    ids = processor.hf.tokenizer("a" + text + "b")["input_ids"]
    assert ids == truth["input_ids"][0]
    assert tokens == ids.count(processor.token_ids["image"]) > 0
    assert patches > 0


def test_the_arrays_of_images_are_those_of_the_processor(processor: MediaProcessor) -> None:
    images = [picture(60, 44), picture(90, 200, 1)]
    token = processor.tokens["image"]
    text = f"x{token}y{token}"
    truth = processor.hf(text=[text], images=images, return_tensors="np")
    found = processor.arrays([("image", one) for one in images])
    assert found.keys() == truth.keys() - TEXT_KEYS
    assert "pixel_values" in found
    for name, values in found.items():
        np.testing.assert_array_equal(values, truth[name])


def test_two_copies_have_one_identity_and_another_size_has_another(
    family: Path, processor: MediaProcessor, tmp_path: Path
) -> None:
    import json
    import shutil

    copy = Path(shutil.copytree(family, tmp_path / "copy"))
    assert MediaProcessor.load(str(copy)).identity() == processor.identity()
    name = next(n for n in ("preprocessor_config.json", "processor_config.json") if (copy / n).exists())
    config: dict[str, Any] = json.loads((copy / name).read_text())
    images = config.get("image_processor", config)
    images["image_mean"] = [0.1, 0.2, 0.3]
    (copy / name).write_text(json.dumps(config))
    assert MediaProcessor.load(str(copy)).identity() != processor.identity()


def test_a_folder_without_a_processor_says_so(tmp_path: Path) -> None:
    tokenizer(["</s>"]).save_pretrained(tmp_path)
    assert not has_processor(str(tmp_path))
    with pytest.raises(TokenizerError, match="processor"):
        MediaProcessor.load(str(tmp_path))


def test_an_exported_model_has_the_processor_of_its_tokenizer(family: Path, tmp_path: Path) -> None:
    from raysvc.job.config import TokenizerConfig
    from raysvc.training.export import tokenizer_of

    tokenizer_of(TokenizerConfig(name=str(family)))(tmp_path)
    exported, own = MediaProcessor.load(str(tmp_path)), MediaProcessor.load(str(family))
    assert exported.identity() == own.identity()
    assert exported.replacement("image", 200, 90) == own.replacement("image", 200, 90)
