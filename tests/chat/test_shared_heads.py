"""Heads that rows share are encoded once, and the rows are what they are without."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, pre_tokenizers

from raysvc.chat.render import renderer
from raysvc.chat.text_batch import ROWS_TO_SHARE, Batch, Heads, Spans
from raysvc.chat.tokens.align import TokenTable
from raysvc.chat.tokens.encoder import ReferenceEncoder
from raysvc.chat.tokens.shared_heads import SharedHeads, cutting_tokens
from raysvc.chat.tokens.token_rows import RowEncoder
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TokenizerConfig

from .conftest import byte_level, save

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CONTROLS = ["<|im_start|>", "<|im_end|>"]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"What {name} does, \u00e9. " * 12}}


def rows() -> list[dict[str, Any]]:
    made = []
    for number in range(30):
        messages = [
            {"role": "user", "content": f"ask {number}"},
            {"role": "assistant", "content": f"say {number}\n"},
        ]
        tools = [[tool("a")], [tool("b"), tool("a")], None][number % 3]
        made.append({"messages": messages * (1 + number % 2), "tools": tools})
    alone = [{**made[0], "tools": [tool("alone")]} for _ in range(ROWS_TO_SHARE - 1)]
    return [*made, *alone]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("heads"), byte_level(CONTROLS), TEMPLATE, eos_token="<|im_end|>")


def test_rows_with_shared_heads_are_those_that_are_encoded_whole(
    folder: str, slice_tokenizer: Any, tokenize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = slice_tokenizer("", folder=folder, train_on="all_assistant_messages")
    seen: list[list[bytes]] = []
    real = ours._encoder.encode_bytes

    def noted(data: Any, offsets: Any) -> Any:
        seen.append([data[a:b].tobytes() for a, b in pairwise(offsets)])
        return real(data, offsets)

    monkeypatch.setattr(ours._encoder, "encode_bytes", noted)
    made, result = tokenize(ours, *rows())
    assert len(seen) == 1
    assert len(seen[0]) == 37 + 2
    assert sum(b"What alone does" in text for text in seen[0]) == 7
    assert sum(b"What a does" in text for text in seen[0]) == 2
    monkeypatch.setattr(renderer, "MIN_HEAD", 1 << 30)
    whole, other = tokenize(slice_tokenizer("", folder=folder, train_on="all_assistant_messages"), *rows())
    assert [(one.ids, one.mask) for one in made] == [(one.ids, one.mask) for one in whole]
    assert len(made) == 37
    assert result.row_counts == other.row_counts


def test_a_head_that_ends_where_the_tokenizer_does_not_cut_ends_the_use_of_heads(folder: str) -> None:
    tokenizer = LoadedTokenizer(TokenizerConfig(name=folder))
    encoder = ReferenceEncoder(tokenizer)
    text = b"What the weather is"
    whole = [np.frombuffer(text, np.uint8), np.array([0, len(text)])]
    nothing = np.zeros(0, np.int64)
    spans = Spans(nothing, nothing, nothing, nothing.astype(np.int8))
    heads = SharedHeads(encoder)
    encode = RowEncoder(encoder, encoder, TokenTable(tokenizer)).encode
    for cut in ("What", "What the wea"):
        batch = Batch(*whole, spans, heads=Heads([cut], np.array([0])))
        found = heads.encode(batch, encode)
        assert found is None or found.ids.tolist() == encoder.encode([text.decode()]).ids.tolist()
    assert heads.encode(batch, encode) is None


def test_only_tokens_that_need_nothing_before_them_cut(tmp_path: Any) -> None:
    def cuts(place: str, *tokens: AddedToken, prefix_space: bool = False) -> tuple[str, ...]:
        backend = byte_level(CONTROLS)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
        backend.add_tokens(list(tokens))
        (tmp_path / place).mkdir()
        path = save(tmp_path / place, backend, TEMPLATE, eos_token="<|im_end|>")
        return cutting_tokens(LoadedTokenizer(TokenizerConfig(name=path)).hf)

    assert set(cuts("plain")) >= set(CONTROLS)
    assert cuts("inside", AddedToken("a<b", normalized=False)) == ()
    assert "[x]" not in cuts("left", AddedToken("[x]", lstrip=True, normalized=False))
    assert cuts("right", AddedToken("[y]", rstrip=True, normalized=False)) == ()
    assert cuts("blanks", prefix_space=True) == ()
