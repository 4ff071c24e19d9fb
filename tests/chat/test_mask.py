"""The mask that is found is the one that others mark: `{% generation %}` marks, and a count of tokens by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.job.config import TextSpec, TokenizerConfig

words = st.lists(
    st.sampled_from(["a", "hello", "2 + 2", "\u4f60\u597d", "e\u0301", "\n", " ", "x" * 30]),
    min_size=1,
    max_size=6,
)
said = words.map(" ".join).filter(lambda text: text.strip() and not text[0].isspace())
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), said), min_size=1, max_size=6).filter(
    lambda made: any(role == "assistant" for role, _ in made)
)


@pytest.fixture(scope="module")
def tokenizers(tokenizer_folder: Any, special_folder: Any) -> dict[str, SliceTokenizer]:
    folders = {
        name: tokenizer_folder(name) for name in ("generation_marks", "marks_without_eot", "chatml_bare")
    }
    folders["nfc"] = special_folder("nfc", "chatml_bare")
    folders["metaspace"] = special_folder("metaspace", "chatml_bare")
    folders["metaspace_marks"] = special_folder("metaspace", "generation_marks")
    return {
        name: SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=path))) for name, path in folders.items()
    }


def messages(made: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in made]


def run(tokenizer: SliceTokenizer, made: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    result = tokenizer.run([SourceRow(0, {"messages": messages(made)})])
    assert result.row_counts.rows_written == 1, result.examples
    return result.table["input_ids"][0].as_py(), result.table["loss_mask"][0].as_py()


@given(made=turns)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_marks_give_the_mask_of_transformers(tokenizers: dict[str, SliceTokenizer], made: Any) -> None:
    for name in ("generation_marks", "metaspace_marks"):
        tokenizer = tokenizers[name]
        truth = tokenizer.tokenizer.hf.apply_chat_template(
            messages(made), return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = run(tokenizer, made)
        assert ids == truth["input_ids"]
        assert mask == truth["assistant_masks"]


@given(made=turns)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_what_is_found_is_what_is_marked(tokenizers: dict[str, SliceTokenizer], made: Any) -> None:
    found = run(tokenizers["chatml_bare"], made)
    assert found == run(tokenizers["generation_marks"], made) == run(tokenizers["marks_without_eot"], made)


@pytest.mark.parametrize("kind", ["chatml_bare", "nfc", "metaspace"])
@given(made=turns)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_every_trained_run_lies_between_its_header_and_its_end_of_turn(
    kind: str, tokenizers: dict[str, SliceTokenizer], made: Any
) -> None:
    tokenizer = tokenizers[kind]
    hf = tokenizer.tokenizer.hf
    ids, mask = run(tokenizer, made)
    opening, closing = hf.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    header = hf("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    expected, at = [0] * len(ids), 0
    while at < len(ids):
        if ids[at] == opening and ids[at : at + len(header)] == header:
            end = ids.index(closing, at)
            expected[at + len(header) : end + 1] = [1] * (end + 1 - at - len(header))
        at += 1
    assert mask == expected
