"""What we assume of tokenizers and chat templates, asked of `transformers`, `tokenizers` and Jinja themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2 import nodes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}{% endfor %}"
)
ADDED = ["\n", "\n\n", "<b>", "def", "7", "<|user|>"]  # none of them special


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False, special=True)])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("</s>", *ADDED)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    folder: Path = tmp_path_factory.mktemp("assumed")
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def ids_of(hf: Any, text: str) -> list[str]:
    return list(hf.convert_ids_to_tokens(hf(text, add_special_tokens=False)["input_ids"]))


def test_added_does_not_mean_special(hf: Any) -> None:
    """An added token keeps its own flag `special` in a saved folder."""
    flags = {token.content: token.special for token in hf.added_tokens_decoder.values()}
    assert flags["<s>"]
    assert not any(flags[text] for text in ADDED)


def test_a_role_makes_a_token_special(hf: Any) -> None:
    """A token that was added as a plain one is special once it has a role."""
    assert "</s>" in hf.all_special_tokens
    assert hf.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}  # plain texts, no lists


def test_decoding_leaves_out_special_tokens_alone(hf: Any) -> None:
    """A decoder that skips special tokens keeps the added ones that are text."""
    ids = hf("<s>def <b>7\n\n</s>", add_special_tokens=False)["input_ids"]
    assert hf.decode(ids, skip_special_tokens=True) == "def <b>7\n\n"


def test_the_longest_added_token_is_cut_out_first(hf: Any) -> None:
    """Added tokens are found in the text from the left, the longest first, whatever stands around them."""
    assert ids_of(hf, "a\n\n\nb") == ["a", "\n\n", "\n", "b"]
    assert ids_of(hf, "undefined") == ["u", "n", "def", "i", "n", "e", "d"]


def test_an_added_token_of_blanks_may_span_a_header_and_its_message(hf: Any) -> None:
    """So the first token of an answer may be context by its first character."""
    ids = hf.apply_chat_template([{"role": "user", "content": "\nq"}], return_dict=False)
    assert hf.convert_ids_to_tokens(ids) == ["<s>", "<|user|>", "\n\n", "q", "</s>"]


def test_a_text_that_begins_with_its_first_token_gets_a_second_one(hf: Any) -> None:
    """`tokenizer(text)` puts the beginning of a sequence before every text."""
    assert hf.convert_ids_to_tokens(hf("<s>q")["input_ids"]) == ["<s>", "<s>", "q"]


def test_a_chat_template_gets_no_special_tokens_but_its_own(hf: Any) -> None:
    """`apply_chat_template` adds nothing to what the template wrote."""
    messages = [{"role": "user", "content": "q"}]
    text = hf.apply_chat_template(messages, tokenize=False)
    ids = hf.apply_chat_template(messages, return_dict=False)
    assert ids == hf(text, add_special_tokens=False)["input_ids"]
    assert ids.count(hf.bos_token_id) == 1


def test_the_syntax_of_a_template_tells_its_texts_from_its_keys() -> None:
    """Strings and texts of a template are nodes of their own, with their escapes read."""
    environment = chat_template_utils._compile_jinja_template("").environment
    tree = environment.parse("a<b>{{ messages[0]['content'] + '<|x|>\\n' }}{% if '[0]' %}{% endif %}")
    strings = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    assert [node.data for node in tree.find_all(nodes.TemplateData)] == ["a<b>"]
    assert sorted(strings) == ["<|x|>\n", "[0]", "content"]
