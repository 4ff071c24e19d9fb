"""Each trained turn has one end: not two where a template writes a second, and none is silent where it writes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import CHATML_LOOP, CHATML_TOKENS, byte_level, save

LOOP, PROMPT = CHATML_LOOP.split("{%- if add_generation_prompt", 1)
PROMPT = "{%- if add_generation_prompt" + PROMPT
AFTER_LOOP = f"{LOOP}{{%- if not add_generation_prompt %}}{{{{- eos_token }}}}{{%- endif %}}{PROMPT}"
IN_LOOP = LOOP.replace("{%- endfor", "{%- if loop.last %}{{- eos_token }}{%- endif %}{%- endfor") + PROMPT
ROW = {
    "messages": [
        {"role": role, "content": text}
        for role, text in (
            ("user", "a"),
            ("assistant", "The answer is b"),
            ("user", "c"),
            ("assistant", "d\n\ne"),
        )
    ]
}


@pytest.mark.parametrize("template", [AFTER_LOOP, IN_LOOP], ids=["after the loop", "in the last block"])
@pytest.mark.parametrize(
    ("eos", "last"),
    [("<|im_end|>", "d\n\ne<|im_end|>"), ("<|endoftext|>", "d\n\ne<|im_end|>\n<|endoftext|>")],
)
def test_an_end_of_sequence_behind_the_end_of_turn_is_trained_unless_it_is_the_same_token(
    template: str, eos: str, last: str, tmp_path: Path, slice_tokenizer: Any, tokenize: Any
) -> None:
    folder = save(tmp_path, byte_level(CHATML_TOKENS), template, eos_token=eos)
    made = slice_tokenizer("", folder)
    [row], _ = tokenize(made, ROW)
    assert row.ids == made.tokenizer.hf.apply_chat_template(ROW["messages"], return_dict=False)
    assert row.hf.decode(row.ids).endswith(f"<|im_end|>\n{eos}")
    assert row.trained == ["The answer is b<|im_end|>", last]
