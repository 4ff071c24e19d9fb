"""Vision models in the size of a test: transformers' own classes with random weights, beside the processors of their families."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from .families import FAMILIES


def images(count: int, seed: int = 0) -> list[bytes]:
    """JPEGs of smooth colors, of many sizes."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        width, height = rng.integers(40, 160, 2).tolist()
        coarse = rng.integers(0, 256, (4, 4, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((width, height)).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def model_folder(family: str, folder: Path) -> Path:
    """Tokenizer, processor and weights of a model."""
    import torch

    FAMILIES[family](folder)
    torch.manual_seed(0)
    lm = {"qwen2_vl": _qwen, "llava": _llava}[family](folder)
    with torch.no_grad():  # as initialised, an image changes next to nothing
        for weight in lm.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.2)
    lm.save_pretrained(folder)
    return folder


def _text(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }


def _qwen(folder: Path) -> Any:
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {
        name: tokenizer.convert_tokens_to_ids(text)
        for name, text in {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }.items()
    }
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text = {**_text(len(tokenizer)), "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    vision = {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
    }
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))


def _llava(folder: Path) -> Any:
    from transformers import (
        AutoTokenizer,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28,
        patch_size=7, projection_dim=16,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_text(len(tokenizer))),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


def conversations(family: str, processor: Any, seed: int = 0) -> list[dict[str, Any]]:
    """Seven rows of text, images, and what the processor itself makes of them: `ids`, and where the answer begins."""
    from raysvc.media.pixels import rgb

    rng, rows = np.random.default_rng(seed), []
    for number, count in enumerate([1, 0, 2, 1, 3, 0, 1]):
        encoded = images(count, seed=100 * seed + number)
        words = " ".join(rng.choice(["red", "blue", "sky", "two", "cats"], int(rng.integers(1, 9))))
        parts = [*({"type": "image"} for _ in encoded), {"type": "text", "text": f"{number}? {words}"}]
        answer = [{"type": "text", "text": words[::-1]}]
        asked = [{"role": "user", "content": parts}]
        told = [*asked, {"role": "assistant", "content": answer}]
        pixels = [rgb(each) for each in encoded]

        def ids(messages: Any, more: bool, pixels: Any = pixels) -> list[int]:
            text = processor.apply_chat_template(messages, add_generation_prompt=more, tokenize=False)
            made = processor(text=[text], images=pixels or None, add_special_tokens=False)
            return [int(one) for one in made["input_ids"][0]]

        rows.append(
            {"images": encoded, "ids": ids(told, False), "prompt": len(ids(asked, True)), "told": told}
        )
    return rows


def write_rows(root: Path, folder: Path, rows: list[dict[str, Any]]) -> str:
    """An entry of such rows, written without the build; its uri."""
    import pyarrow as pa

    from raysvc.cache.key import cache_key
    from raysvc.cache.store.open import open_store
    from raysvc.cache.writer import EntryWriter
    from raysvc.media.media_processor import MediaProcessor
    from raysvc.media.media_store import write_medium
    from raysvc.media.medium import Medium, text_of
    from raysvc.media.pixels import image_size

    processor, store = MediaProcessor.load(str(folder)), open_store(str(root))
    media = []
    for row in rows:
        own, at = [], row["ids"].index(processor.image_token_id) if row["images"] else 0
        for data in row["images"]:
            size = image_size(data)
            counted = processor.replacement(*size)
            digest = write_medium(store, data)
            own.append(Medium(digest, "image", *size, counted.tokens, at, counted.patches, len(data)))
        media.append(tuple(own))
    masks = [[0] * row["prompt"] + [1] * (len(row["ids"]) - row["prompt"]) for row in rows]
    table = pa.table(
        {
            "input_ids": pa.array([row["ids"] for row in rows], pa.list_(pa.int32())),
            "loss_mask": pa.array(masks, pa.list_(pa.uint8())),
            "source_row": pa.array(np.arange(len(rows))),
            "media": pa.array([text_of(own) for own in media], pa.string()),
            "media_tokens": pa.array([sum(one.tokens for one in own) for own in media], pa.int32()),
            "media_patches": pa.array([sum(one.patches for one in own) for own in media], pa.int32()),
        }
    )
    recipe = {
        "rows": len(rows),
        "media": {"processor": processor.identity()},
        "ids": [row["ids"] for row in rows],
    }
    writer = EntryWriter(store, cache_key(recipe))
    writer.commit([writer.write_part(0, table, {})], recipe, {"vocab_size": 300, "pad_token_id": 0})
    return writer.uri
