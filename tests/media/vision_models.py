"""Vision models in the size of a test: transformers' own classes with random weights, beside the processors of their families."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from raysvc.media.media_processor import MediaProcessor
from raysvc.media.video_patches import PROCESSORS

from .families import (
    FAMILIES,
    PINPOINTS,
    internvl,
    qwen,
    qwen3,
    qwen_2_5,
    qwen_audio,
    qwen_omni,
    smolvlm,
)
from .rows import data_url, heard, wav, write_jsonl
from .videos import mp4, oracle, seen

LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "padded_right", "micro_batch_size": 2},
    "left": {"layout": "padded_left", "micro_batch_size": 1},
    "packed": {"layout": "packed", "micro_batch_tokens": 400, "align": 4},
}


ALL_FAMILIES = {**FAMILIES, "qwen2_audio": qwen_audio, "qwen2_vl_videos": qwen, "qwen2_5_vl_videos": qwen_2_5}
ALL_FAMILIES |= {"qwen2_5_omni": qwen_omni, "qwen3_vl": qwen3, "internvl": internvl, "smolvlm": smolvlm}


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

    ALL_FAMILIES[family](folder)
    torch.manual_seed(0)
    makers = {
        "qwen2_5_vl_videos": _qwen_2_5,
        "llava": _llava,
        "llava_next": _llava_next,
        "idefics3": _idefics,
        "qwen2_audio": _qwen_audio,
        "qwen2_5_omni": _qwen_omni,
        "qwen3_vl": _qwen_3,
        "internvl": _internvl,
        "smolvlm": _smolvlm,
    }
    lm = makers.get(family, _qwen)(folder)
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
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
    }
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, **_text_of_qwen(folder)))


def _qwen_2_5(folder: Path) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 14,
        "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 4,
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, **_text_of_qwen(folder)))


def _qwen_3(folder: Path) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {
        "depth": 3, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 16,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    told = _text_of_qwen(folder)
    told["text_config"] |= {"head_dim": 8}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, **told))


def _internvl(folder: Path) -> Any:
    from transformers import AutoTokenizer, InternVLConfig, InternVLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": [56, 56], "patch_size": [14, 14],
    }  # fmt: skip
    text = {"model_type": "qwen2", **_text(len(tokenizer)), "bos_token_id": None, "eos_token_id": None}
    token = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=token, image_seq_length=4)
    return InternVLForConditionalGeneration(config)


def _text_of_qwen(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

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
    return {"text_config": text, **ids}


def _llava(folder: Path) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    return LlavaForConditionalGeneration(LlavaConfig(**_clip_and_llama(folder)))


def _llava_next(folder: Path) -> Any:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    config = LlavaNextConfig(**_clip_and_llama(folder), image_grid_pinpoints=PINPOINTS)
    return LlavaNextForConditionalGeneration(config)


def _clip_and_llama(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer, CLIPVisionConfig, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28,
        patch_size=7, projection_dim=16,
    )  # fmt: skip
    return {
        "vision_config": vision,
        "text_config": LlamaConfig(**_text(len(tokenizer))),
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "vision_feature_select_strategy": "default",
    }


def _idefics(folder: Path, name: str = "Idefics3") -> Any:
    import transformers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
        "patch_size": 14,
    }  # fmt: skip
    text = {"model_type": "llama", **_text(len(tokenizer)), "pad_token_id": tokenizer.pad_token_id}
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=text, image_token_id=token, scale_factor=2
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _smolvlm(folder: Path) -> Any:
    return _idefics(folder, "SmolVLM")


def _qwen_audio(folder: Path) -> Any:
    from transformers import AutoTokenizer, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(folder)
    heard = {
        "model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "d_model": 16, "max_source_positions": 100,
    }  # fmt: skip
    text = {"model_type": "qwen2", **_text(len(tokenizer)), "bos_token_id": None, "eos_token_id": None}
    token = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(audio_config=heard, text_config=text, audio_token_index=token)
    )


def _qwen_omni(folder: Path) -> Any:
    from transformers import (
        AutoTokenizer,
        Qwen2_5OmniThinkerConfig,
        Qwen2_5OmniThinkerForConditionalGeneration,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vision = {
        "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 14,
        "window_size": 56, "fullatt_block_indexes": [1],
    }  # fmt: skip
    heard = {
        "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 16,
        "output_dim": 32, "n_window": 20,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    names = {
        "image_token_id": "<|IMAGE|>", "audio_token_id": "<|AUDIO|>", "video_token_id": "<|VIDEO|>",
        "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>",
        "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
    }  # fmt: skip
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    config = Qwen2_5OmniThinkerConfig(
        vision_config=vision,
        audio_config=heard,
        text_config={**_text(len(tokenizer)), "rope_parameters": rope},
        **ids,
    )
    return Qwen2_5OmniThinkerForConditionalGeneration(config)


def both(count: int, seed: int = 0) -> list[bytes]:
    """Images and sounds in turn, so that one row has both."""
    pairs = zip(images(count, seed), sounds(count, seed), strict=True)
    return [one for number, pair in enumerate(pairs) for one in (pair if (number + seed) % 2 else pair[::-1])]


def sounds(count: int, seed: int = 0) -> list[bytes]:
    """WAVs of one tone each, of many lengths up to two seconds."""
    rng = np.random.default_rng(seed)
    return [wav(int(rng.integers(1600, 32000)), float(rng.integers(100, 4000))) for _ in range(count)]


def films(count: int, seed: int = 0) -> list[bytes]:
    """Videos of many lengths, and an image behind every other one of them."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        width, height = (28 * rng.integers(2, 4, 2)).tolist()
        found.append(mp4(int(rng.integers(4, 13)), width, height, seed=seed + number))
        found += images(1, seed + number) if (number + seed) % 2 else []
    return found


def hf_of(folder: Path) -> Any:
    """The processor of a family, by `transformers` alone; of Qwen2-VL and Qwen2.5-VL with videos."""
    hf = MediaProcessor.load(str(folder)).hf
    return oracle(folder) if type(hf).__name__ in PROCESSORS else hf


def kind_of(encoded: bytes) -> str:
    """By its first bytes."""
    return {b"\xff\xd8": "image", b"RI": "audio"}.get(encoded[:2], "video")


def conversations(family: str, processor: Any, seed: int = 0) -> list[dict[str, Any]]:
    """Seven rows of text, media, and what the processor itself makes of them: `ids`, and where the answer begins and ends."""
    makers = {"qwen2_audio": sounds, "qwen2_5_omni": both}
    make = makers.get(family, films if family.endswith("videos") else images)
    rng, rows = np.random.default_rng(seed), []
    for number, count in enumerate([1, 0, 2, 1, 3, 0, 1]):
        encoded = make(count, seed=100 * seed + number)
        words = " ".join(rng.choice(["red", "blue", "sky", "two", "cats"], int(rng.integers(1, 9))))
        media_parts = [{"type": kind_of(one)} for one in encoded]
        parts = [*media_parts, {"type": "text", "text": f"{number}? {words}"}]
        answer = [{"type": "text", "text": words[::-1]}]
        asked = [{"role": "user", "content": parts}]
        told = [*asked, {"role": "assistant", "content": answer}]
        media = given(encoded)

        def ids(messages: Any, more: bool, media: Any = media) -> list[int]:
            text = rendered(processor, messages, more)
            made = processor(text=[text], **media, add_special_tokens=False)
            return [int(one) for one in made["input_ids"][0]]

        whole, prompt = ids(told, False), len(ids(asked, True))
        end = whole.index(processor.tokenizer.eos_token_id, prompt) + 1
        rows.append({"media": encoded, "ids": whole, "prompt": prompt, "end": end, "told": told})
    return rows


def rendered(processor: Any, messages: Any, more: bool = False) -> str:
    """A conversation by its template alone: SmolVLM's processor asks its video processor, which may be missing."""
    template = processor.chat_template or processor.tokenizer.chat_template
    return str(
        processor.tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=more, tokenize=False
        )
    )


def given(encoded: list[bytes]) -> dict[str, Any]:
    """The arguments of a processor for media."""
    from raysvc.media.pixels import rgb

    found: dict[str, Any] = {}
    for name, kind, decode in (
        ("images", "image", rgb),
        ("audio", "audio", heard),
        ("videos", "video", seen),
    ):
        some = [decode(one) for one in encoded if kind_of(one) == kind]
        found |= {name: some} if some else {}
    return {**found, "sampling_rate": 16000} if "audio" in found else found


def build_rows(root: Path, folder: Path, rows: list[dict[str, Any]]) -> str:
    """The entry of such rows, built of a JSONL with the images inside; its uri."""
    import raysvc

    told = []
    for row in rows:
        left = iter(row["media"])
        (asked, answer) = row["told"]
        parts = [
            part
            if (kind := part["type"]) == "text"
            else {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(next(left))}}
            for part in asked["content"]
        ]
        told.append({"messages": [{**asked, "content": parts}, answer]})
    source = write_jsonl(root / "rows.jsonl", told)
    cache = {"root": str(root / "cache")}
    entry = raysvc.tokenize(source={"path": str(source)}, tokenizer=str(folder), cache=cache)
    assert entry.num_rows == len(rows)
    return str(entry.uri)
