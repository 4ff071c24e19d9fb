"""Rows with images in the shapes that people have, made up."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def jpeg(width: int, height: int, seed: int = 0, kind: str = "JPEG") -> bytes:
    """A made-up photo."""
    rng = np.random.default_rng((seed, width, height))
    small = Image.fromarray(rng.integers(0, 255, (4, 4, 3), np.uint8))
    out = io.BytesIO()
    small.resize((width, height)).save(out, kind)
    return out.getvalue()


def wav(samples: int, hertz: float = 440.0, rate: int = 16000, channels: int = 1) -> bytes:
    """A made-up sound of 16 bits, written by the standard library."""
    tone = 0.5 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat((tone * 32767).astype("<i2"), channels).tobytes())
    return out.getvalue()


def heard(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The samples of such a sound, read by the standard library."""
    with wave.open(io.BytesIO(data)) as file:
        raw = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
    return np.asarray((raw / 32768).mean(axis=1), np.float32)


def data_url(data: bytes) -> str:
    """The bytes inside of a URL."""
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """One object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def openai(images: list[str], question: str = "What is it?", answer: str = "A thing.") -> dict[str, Any]:
    """A row as OpenAI's API has it."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    parts.insert(len(parts) // 2, {"type": "text", "text": question})
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def sharegpt(images: list[str], question: str, answer: str = "A thing.") -> dict[str, Any]:
    """A row as LLaMA-Factory has it: `<image>` in texts, and a column."""
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": said, "images": images}
