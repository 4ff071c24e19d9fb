"""Families of the zoo with the tokenizers of their models: rows are exact, and what they say is text, whatever it looks like.

`python tests/chat/fetch_tokenizers.py` brings the tokenizers; without them the tests are skipped.
"""

from __future__ import annotations

import json
import os
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.job.config import TextSpec, TokenizerConfig

from .fetch_tokenizers import FILES, PACKAGES, folder
from .test_added_text import MORE
from .test_zoo import MODES, TEMPLATES, judged
from .zoo import ROWS, Template

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared")) / "tokenizers"
FAMILIES = {
    "deepseek_v3": ["deepseekv3", "deepseekv3_training", "deepseek_r1_distill", "own"],
    "gemma3": ["gemma", "gemma_training", "gemma3", "gemma3_training", "own"],
    "gptoss": ["gptoss", "gptoss_training"],
    "llama2": ["llama2"],
    "llama3_1": ["llama3", "llama3_training", "llama3_1", "llama3_2", "own"],
    "qwen2_5": ["qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training", "own"],
    "qwen3": ["qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training", "own"],
}
PAIRS = [
    pytest.param(tokenizer, name, marks=[] if tokenizer == "llama2" else [pytest.mark.slow])
    for tokenizer, names in FAMILIES.items()
    for name in names
]


def files_of(name: str) -> Path:
    found = folder() / name if name in PACKAGES else SHARED / name
    if not (found / FILES[0]).is_file():
        how = "run tests/chat/fetch_tokenizers.py" if name in PACKAGES else "set RAYSVC_SHARED"
        pytest.skip(f"no tokenizer of {name} at {found}: {how}")
    return found


@lru_cache(maxsize=1)
def config_of(files: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files / "tokenizer_config.json").read_text())
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tokenizer", "name"), PAIRS)
def test_a_family_is_exact_with_the_tokenizer_of_its_model(
    tokenizer: str, name: str, mode: str, tmp_path: Path
) -> None:
    files = files_of(tokenizer)
    config = dict(config_of(files))
    template = Template("own", config["chat_template"]) if name == "own" else TEMPLATES[name]
    (tmp_path / "tokenizer.json").symlink_to(files / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template.text}))
    spec = TextSpec(tokenizer=TokenizerConfig(name=str(tmp_path), date=date.today()), train_on=mode)
    made, wrong = SliceTokenizer(spec), []
    for kind, rows in {**ROWS, "text that looks like tokens": MORE}.items():
        for row in rows:
            mark, why = judged(template, made, mode, row)
            wrong += [f"{kind}: {each}" for each in why]
            assert mark != "-" or kind not in ("plain", "text that looks like tokens"), kind
    assert wrong == []
