"""Rows of which the long first block holds an image are the processor's: the block is not shared once its image has a size."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.job.config import TextSpec, TokenizerConfig
from raysvc.media.media_desk import MediaDesk
from raysvc.media.media_processor import MediaProcessor

from .families import qwen
from .rows import data_url, jpeg

RULES = "Look at the picture before you say anything about it. " * 8
SIZES = [(28 + 28 * (number % 3), 28 + 28 * (number // 3)) for number in range(9)]


def row(data: bytes, number: int) -> dict[str, Any]:
    system: list[dict[str, Any]] = [
        {"type": "text", "text": RULES},
        {"type": "image_url", "image_url": {"url": data_url(data)}},
    ]
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    }


def test_an_image_in_a_head_that_rows_share_has_the_tokens_of_its_own_size(tmp_path: Path) -> None:
    """The first image is one token, so the first row has the text that was rendered: it would show no difference."""
    config = qwen(tmp_path) / "preprocessor_config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "size": {**told["size"], "shortest_edge": 28 * 28}}))
    processor = MediaProcessor.load(str(tmp_path))
    desk = MediaDesk(processor, None, lambda *_: b"")
    spec = TextSpec(tokenizer=TokenizerConfig(name=str(tmp_path)), format="chat", media=processor.kinds)
    pictures = [jpeg(*size, seed) for seed, size in enumerate(SIZES)]
    rows = [row(data, number) for number, data in enumerate(pictures)]
    result = SliceTokenizer(spec, desk=desk).run([SourceRow(n, one) for n, one in enumerate(rows)])
    found = result.table["input_ids"].to_pylist()
    for number, (one, data) in enumerate(zip(rows, pictures, strict=True)):
        system, *others = one["messages"]
        parts = [{"type": "text", "text": RULES}, {"type": "image"}]
        shown = [{**system, "content": parts}, *others]
        text = processor.hf.tokenizer.apply_chat_template(shown, tokenize=False)
        truth = processor.hf(text=[text], images=[Image.open(io.BytesIO(data))])
        assert found[number] == truth["input_ids"][0], result.examples
    pad = processor.token_ids["image"]
    assert [ids.count(pad) for ids in found] == [width * height // 28**2 for width, height in SIZES]
