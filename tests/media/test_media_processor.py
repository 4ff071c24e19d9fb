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

from .families import PINPOINTS, idefics, llava_next, smolvlm, tokenizer

SLOW = settings(max_examples=25, suppress_health_check=list(HealthCheck))


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
        np.testing.assert_array_equal(values, tiles_of(truth)[name])


def tiles_of(truth: Any) -> dict[str, Any]:
    """The processor's arrays, where it cuts images into tiles without those that only fill up."""
    if "image_sizes" in truth:
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        counts = [image_size_to_num_patches(one, PINPOINTS, 28) for one in truth["image_sizes"]]
        assert len(set(counts)) > 1, "some are filled up"
        each = [one[:count] for one, count in zip(truth["pixel_values"], counts, strict=True)]
        return {**truth, "pixel_values": np.concatenate(each)}
    return {name: truth[name][0] for name in truth} if "pixel_attention_mask" in truth else truth


@SLOW
@given(width=st.integers(1, 3000), height=st.integers(1, 3000))
def test_the_tiles_of_llava_next_are_as_many_as_its_model_takes(
    tiled: MediaProcessor, width: int, height: int
) -> None:
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    expected = image_size_to_num_patches((height, width), PINPOINTS, 28)
    assert tiled.replacement("image", width, height).patches == expected


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    return MediaProcessor.load(str(llava_next(tmp_path_factory.mktemp("llava_next"))))


def test_smolvlm_has_the_arrays_of_idefics3_and_needs_no_processor_of_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = MediaProcessor.load(str(idefics(tmp_path / "idefics")))
    folder = smolvlm(tmp_path / "smolvlm")
    with monkeypatch.context() as without:
        without.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
        with pytest.raises(TokenizerError, match=r"pip install num2words.*; install what it names"):
            MediaProcessor.load(str(folder))
    found = MediaProcessor.load(str(folder))
    assert type(found.hf).__name__ == "SmolVLMProcessor"
    images: list[tuple[Any, Any]] = [("image", picture(60, 44)), ("image", picture(90, 200, 1))]
    for name, values in own.arrays(images).items():
        np.testing.assert_array_equal(found.arrays(images)[name], values)


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
