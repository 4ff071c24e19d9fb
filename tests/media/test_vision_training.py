"""Models of images, of audio and of videos through the whole service: JPEGs, WAVs or MP4s in, a trained model out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .rows import data_url, wav, write_jsonl
from .videos import mp4_of
from .vision_models import model_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}


def colored(number: int, color: tuple[int, int, int]) -> bytes:
    from PIL import Image

    rng = np.random.default_rng(number)
    file = io.BytesIO()
    width, height = rng.integers(60, 140, 2).tolist()
    Image.new("RGB", (width, height), tuple(int(part) for part in color)).save(file, "JPEG")
    return file.getvalue()


TONES = {"low": 200.0, "mid": 900.0, "high": 3000.0, "hiss": 6500.0}


def tones(count: int) -> list[dict[str, Any]]:
    """Questions that only the sound answers, and every eighth row without one."""
    made = []
    for number in range(count):
        name = list(TONES)[number % len(TONES)]
        asked: list[dict[str, Any]] = [{"type": "text", "text": "tone?"}]
        if number % 8 != 7:
            clip = wav(4000 + 331 * number, TONES[name])
            asked.insert(0, {"type": "audio_url", "audio_url": {"url": data_url(clip)}})
        else:
            name = "none"
        answer = {"role": "assistant", "content": [{"type": "text", "text": name}]}
        made.append({"messages": [{"role": "user", "content": asked}, answer]})
    return made


def talks(count: int) -> list[dict[str, Any]]:
    """Questions about an image and a sound of one row: half of the answer is in each, and every fourth row lacks one."""
    made = []
    for number in range(count):
        color, tone = list(COLORS)[number % 4], list(TONES)[number // 4 % 4]
        clip, picture = wav(4000 + 331 * number, TONES[tone]), colored(number, COLORS[color])
        asked: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_url(picture)}},
            {"type": "text", "text": "which?"},
            {"type": "audio_url", "audio_url": {"url": data_url(clip)}},
        ]
        if number % 8 in (3, 6):
            color, tone = ("none", tone) if number % 8 == 3 else (color, "none")
            del asked[0 if number % 8 == 3 else 2]
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"{color} {tone}"}]}
        made.append({"messages": [{"role": "user", "content": asked}, answer]})
    return made


def films(count: int) -> list[dict[str, Any]]:
    """Questions about the color of a video; an image of another color stands beside every third."""
    made = []
    for number in range(count):
        name = list(COLORS)[number % len(COLORS)]
        film = mp4_of(COLORS[name], 4 + number % 7)
        asked: list[dict[str, Any]] = [
            {"type": "video", "video": data_url(film)},
            {"type": "text", "text": "film?"},
        ]
        if number % 3 == 2:
            other = colored(number, COLORS[list(COLORS)[(number + 1) % 4]])
            asked.insert(0, {"type": "image", "image": data_url(other)})
        answer = {"role": "assistant", "content": [{"type": "text", "text": name}]}
        made.append({"messages": [{"role": "user", "content": asked}, answer]})
    return made


def rows(count: int) -> list[dict[str, Any]]:
    """Questions that only the image answers, and every eighth row without one."""
    made = []
    for number in range(count):
        name = list(COLORS)[number % len(COLORS)]
        asked: list[dict[str, Any]] = [{"type": "text", "text": "color?"}]
        if number % 8 != 7:
            url = data_url(colored(number, COLORS[name]))
            asked.insert(0, {"type": "image_url", "image_url": {"url": url}})
        else:
            name = "none"
        answer = {"role": "assistant", "content": [{"type": "text", "text": name}]}
        made.append({"messages": [{"role": "user", "content": asked}, answer]})
    return made


@pytest.mark.parametrize("family", ["llava", "qwen2_5_omni", "qwen2_vl_videos"])
def test_a_model_learns_from_jpegs_wavs_or_mp4s_through_collators_and_is_exported_with_its_processor(
    family: str, tmp_path: Path, ray_session: None
) -> None:
    import raysvc
    from raysvc.actors.model.load_model import load_lm
    from raysvc.media.media_processor import MediaProcessor

    folder = model_folder(family, tmp_path / "model")
    makers = {"qwen2_audio": tones, "qwen2_5_omni": talks, "qwen2_vl_videos": films}
    made = makers.get(family, rows)(64)
    job = {
        "source": {"path": str(write_jsonl(tmp_path / "rows.jsonl", made))},
        "tokenizer": str(folder),
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 16, "epochs": 8, "layout": "packed", "micro_batch_tokens": 512},
        "server": {"name": f"colors-{family.replace('_', '-')}", "num_cpus": 0, "collators": 1},
        "trainer": {
            "dp_size": 2,
            "model": str(folder),
            "learning_rate": 3.0e-3,
            "run_dir": str(tmp_path / "run"),
            "cpus_per_worker": 0.5,
        },
    }
    summary = raysvc.train(job).metrics
    assert summary["steps"] == 32
    assert summary["loss_last"] < 0.5 * summary["loss_first"]
    exported = tmp_path / "run" / "model"
    trained = load_lm(str(exported), 0)
    assert type(trained) is type(load_lm(str(folder), 0))
    assert MediaProcessor.load(str(exported)).identity() == MediaProcessor.load(str(folder)).identity()
