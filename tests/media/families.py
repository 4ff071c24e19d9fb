"""Processors of several families in the size of a test, saved as models save them; all of transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO"
    "{% elif part['type'] == 'audio' %}AUDIO"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER_PARTS = (  # the way of LLaVA: contents are lists of parts, images first
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def tokenizer(special: list[str], **named: Any) -> PreTrainedTokenizerFast:
    """Bytes as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def qwen(folder: Path) -> Path:
    """Qwen2-VL without its video processor, which needs torchvision."""
    special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    made = tokenizer([*special, "<|video_pad|>"], eos_token="<|im_end|>", pad_token="<|im_end|>")
    template = CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    made.chat_template = template.replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>")
    made.save_pretrained(folder)
    images = _qwen_images()
    images.save_pretrained(folder)
    config = folder / "preprocessor_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "processor_class": "Qwen2VLProcessor"}))
    return folder


def _qwen_images() -> Any:
    """The processor of images that needs no torchvision: transformers has it from 5.5 on, where Pillow is there."""
    module = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    processor = pytest.importorskip(module, exc_type=ImportError).Qwen2VLImageProcessorPil
    return processor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 30)


def qwen_2_5(folder: Path) -> Path:
    """Qwen2.5-VL, which also says how many seconds a layer of patches of a video is long."""
    return _like_qwen(folder, processor_class="Qwen2_5_VLProcessor")


def qwen3(folder: Path) -> Path:
    """Qwen3-VL, whose patches have 16 pixels a side."""
    size = {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 30}
    return _like_qwen(folder, processor_class="Qwen3VLProcessor", patch_size=16, size=size)


def _like_qwen(folder: Path, **settings: Any) -> Path:
    config = qwen(folder) / "preprocessor_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    return folder


def internvl(folder: Path) -> Path:
    """InternVL, which cuts an image into tiles of 56 x 56 pixels, at most four and one of the whole."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    named = {
        "start_image": "<img>",
        "end_image": "</img>",
        "context_image": "<IMG_CONTEXT>",
        "video": "<video>",
    }
    _save_tokenizer(folder, named, CHATML.replace("IMAGE", "<IMG_CONTEXT>"))
    images = GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=4
    ).to_dict()
    own = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(own))
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, **own}, default=str))
    return folder


def _save_tokenizer(folder: Path, named: dict[str, str], template: str) -> None:
    """One that knows tokens by name: `named["image"]` is its `image_token`."""
    special = {f"{name}_token": token for name, token in named.items()}
    made = tokenizer(
        ["<|im_start|>", "<|im_end|>", *special.values()],
        eos_token="<|im_end|>", pad_token="<|im_end|>", extra_special_tokens=special,
    )  # fmt: skip
    made.chat_template = template
    made.save_pretrained(folder)


def llava(folder: Path) -> Path:
    """LLaVA with a CLIP of 28 x 28 pixels in tiles of 7."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return _of_clip(folder, LlavaProcessor, CLIPImageProcessorPil)


def llava_next(folder: Path) -> Path:
    """LLaVA-NeXT, which cuts an image into a grid of tiles of 28 x 28 pixels by its shape, and adds a whole view."""
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    return _of_clip(folder, LlavaNextProcessor, LlavaNextImageProcessorPil, image_grid_pinpoints=PINPOINTS)


def _of_clip(folder: Path, kind: Any, images: Any, **more: Any) -> Path:
    kind(
        image_processor=images(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, **more),
        tokenizer=tokenizer(["<image>", "</s>"], eos_token="</s>", pad_token="</s>"),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=USER_PARTS,
    ).save_pretrained(folder)
    return folder


def idefics(folder: Path) -> Path:
    """Idefics3, which cuts an image into tiles and writes rows and columns between them."""
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    special += ["<|im_start|>", "<|im_end|>"]
    images = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    Idefics3Processor(
        image_processor=images,
        tokenizer=tokenizer([*special, *places], eos_token="<|im_end|>", pad_token="<|im_end|>"),
        image_seq_len=4,
        chat_template=CHATML.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)
    return folder


def smolvlm(folder: Path) -> Path:
    """SmolVLM, whose files are those of Idefics3 by other names; num2words, which its videos need, may be missing."""
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    for file in idefics(folder).iterdir():
        file.write_text(file.read_text().replace("Idefics3", "SmolVLM"))
    return folder


def qwen_audio(folder: Path) -> Path:
    """Qwen2-Audio that hears two seconds in 16 mel bands."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    special = ["<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=16, chunk_length=2),
        tokenizer=tokenizer(special, eos_token="<|im_end|>", pad_token="<|im_end|>"),
        chat_template=CHATML.replace("AUDIO", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    ).save_pretrained(folder)
    return folder


def qwen_omni(folder: Path) -> Path:
    """Qwen2.5-Omni, which takes images and audio in one row; without its video processor, which needs torchvision."""
    from transformers import WhisperFeatureExtractor

    named = {"image": "<|IMAGE|>", "audio": "<|AUDIO|>", "video": "<|VIDEO|>"}
    named |= {f"{kind}_{end}": f"<|{kind}_{end}|>" for kind in ("vision", "audio") for end in ("bos", "eos")}
    template = CHATML.replace("AUDIO", "<|audio_bos|><|AUDIO|><|audio_eos|>")
    _save_tokenizer(folder, named, template.replace("IMAGE", "<|vision_bos|><|IMAGE|><|vision_eos|>"))
    images = _qwen_images().to_dict()
    heard = WhisperFeatureExtractor(feature_size=16, chunk_length=2).to_dict()
    both = {**heard, **images, "processor_class": "Qwen2_5OmniProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(both, default=str))
    return folder


FAMILIES = {"qwen2_vl": qwen, "llava": llava, "llava_next": llava_next, "idefics3": idefics}
