"""Sample data with pictures: made-up JPEGs, questions that only they answer, a tokenizer with a processor, and a job on them.

Always true:
- nothing is downloaded, and equal arguments give the same rows, tokenizer and processor;
- rows name their pictures by paths beside them; every eighth row has none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raysvc.cli.sample_data import row_texts, write_tokenizer

COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PATCH = 28  # pixels of a side that become one token
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- generation %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{{- '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ 'PLACEHOLDER' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""".replace(
    "PLACEHOLDER", PLACEHOLDER
)
PROCESSOR = {  # what of Qwen2-VL's differs: few pixels
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "size": {"shortest_edge": 4 * PATCH * PATCH, "longest_edge": 16 * PATCH * PATCH},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def write_image_job(folder: Path, num_rows: int, **sections: dict[str, Any]) -> Path:
    """Write pictures, rows, tokenizer, processor and a `job.yaml`; returns the path of the last.

    Args:
        sections: of the job.

    Raises:
        ConfigError: Pillow is missing.
    """
    import yaml

    from raysvc.media.pixels import check_pillow

    check_pillow()
    rows = list(image_rows(folder, num_rows))
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = write_tokenizer(
        folder / "tokenizer", row_texts(_texts(rows)), template=TEMPLATE, special=VISION
    )
    (tokenizer / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    job = {"source": {"path": str(source)}, "tokenizer": str(tokenizer), **sections}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def image_rows(folder: Path, num_rows: int, seed: int = 0) -> Iterable[dict[str, Any]]:
    """Questions about the color of a square; the pictures are written into `folder/images`."""
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(num_rows):
        color = rng.choice(sorted(COLORS))
        parts: list[dict[str, Any]] = [{"type": "text", "text": "Which color?"}]
        if number % 8 != 7:
            name = f"images/{number:05d}.jpg"
            _picture(folder / name, COLORS[color], rng)
            parts.insert(0, {"type": "image", "path": name})
        answer = f"It is {color}." if number % 8 != 7 else "There is no picture."
        yield {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def _picture(path: Path, color: tuple[int, int, int], rng: random.Random) -> None:
    """A square of some color on gray, in a picture of some size."""
    from PIL import Image

    width, height, gray = rng.randint(60, 140), rng.randint(60, 140), rng.randint(90, 160)
    picture = Image.new("RGB", (width, height), (gray, gray, gray))
    side = rng.randint(min(width, height) * 3 // 5, min(width, height))
    picture.paste(color, (left := rng.randint(0, width - side), 0, left + side, side))
    picture.save(path, "JPEG", quality=90)


def _texts(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for row in rows:
        question, answer = row["messages"]
        text = question["content"][-1]["text"]
        yield {"messages": [{"role": "user", "content": text}, answer]}
