"""A tokenizer that cannot be loaded is a mistake that names the file or the code, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.errors import TokenizerError
from raysvc.job.config import TokenizerConfig

from .conftest import CHATML_TOKENS, TEMPLATES, byte_level, save

SLOW = """
from transformers import PreTrainedTokenizer
class Own(PreTrainedTokenizer):
    def __init__(self, **options):
        super().__init__(**options)
    vocab_size = 256
    def get_vocab(self):
        return {chr(n): n for n in range(256)}
    def _tokenize(self, text):
        return list(text)
    def _convert_token_to_id(self, token):
        return ord(token) % 256
    def _convert_id_to_token(self, number):
        return chr(number)
"""
CONFIG, TEMPLATE, STOPS = "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
Change = Callable[[Path], Any]


@pytest.fixture(autouse=True, scope="module")
def by_transformers() -> None:
    """Not here: a folder is read as users have it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "own"
    save(made, byte_level(CHATML_TOKENS), TEMPLATES["chatml_bare"], eos_token="<|im_end|>")
    return made


def written(name: str, data: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def configured(**options: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text()) | options
        (folder / CONFIG).write_text(json.dumps(config))
        (folder / TEMPLATE).unlink()

    return change


def with_code(code: str, keep: bool = False) -> Change:
    def change(folder: Path) -> None:
        configured(tokenizer_class="Own", auto_map={"AutoTokenizer": ["own_code.Own", None]})(folder)
        (folder / "own_code.py").write_text(code)
        if not keep:
            (folder / "tokenizer.json").unlink()

    return change


NO_ID = r"eos_token_id of .*generation_config.json is .*, and no ids; repair or remove it"
NEITHER = r"chat_template in the tokenizer_config.json of .* is neither a text nor a list"
BROKEN: dict[str, tuple[Change, str]] = {
    "a list": (written(CONFIG, "[]"), r"own/tokenizer_config.json is no JSON object, but a list"),
    "not downloaded": (
        written("tokenizer.json", "version https://git-lfs.github.com/spec/v1\nsize 9\n"),
        r"own/tokenizer.json is a pointer of Git LFS, and not the file; run git lfs pull",
    ),
    "Latin-1": (written(TEMPLATE, "{# é #}".encode("latin-1")), r"own/chat_template.jinja is not UTF-8"),
    "unnamed templates": (configured(chat_template=[{"text": "x"}]), NEITHER),
    "a number for a template": (configured(chat_template=5), NEITHER),
    "cut stops": (written(STOPS, "{"), r"own/generation_config.json is no JSON object"),
    "stops in a list": (written(STOPS, "[]"), r"own/generation_config.json is no JSON object"),
    "a text for a stop": (written(STOPS, '{"eos_token_id": "2"}'), NO_ID),
    "a text among stops": (written(STOPS, '{"eos_token_id": [1, null]}'), NO_ID),
}


def with_only(name: str = "", data: str = "") -> Change:
    def change(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        if name:
            (folder / name).write_text(data)

    return change


def with_model(**model: Any) -> Change:
    def change(folder: Path) -> None:
        made = json.loads((folder / "tokenizer.json").read_text())
        made["model"] = model
        (folder / "tokenizer.json").write_text(json.dumps(made))

    return change


BROKEN |= {
    "tekken alone": (
        with_only("tekken.json", "{}"),
        r"own has tekken.json and no tokenizer.json; .*mistral-common.*save_pretrained",
    ),
    "sentencepiece alone": (
        with_only("tokenizer.model", "x"),
        r"own has tokenizer.model and no tokenizer.json; .*sentencepiece.*save_pretrained",
    ),
    "nothing": (with_only(), r"own is an empty folder; give a folder"),
    "cut": (written("tokenizer.json", '{"model": {"vo'), r"own/tokenizer.json is not JSON .*download"),
    "words without the unknown one": (
        with_model(type="WordLevel", vocab={"hello": 0}, unk_token="[UNK]"),
        r"lacks its unknown token '\[UNK\]', .*add '\[UNK\]' to model.vocab",
    ),
    "letters without the unknown one": (
        with_model(type="BPE", vocab={"a": 0}, merges=[], unk_token="[UNK]"),
        r"lacks its unknown token '\[UNK\]', .*add '\[UNK\]' to model.vocab",
    ),
    "pieces without the unknown one": (
        with_model(type="Unigram", vocab=[["a", 0.0]], unk_id=None, byte_fallback=False),
        r"names no unknown token, .*set model.unk_id",
    ),
    "merges left out at random": (
        with_model(type="BPE", vocab={"a": 0}, merges=[], dropout=0.1),
        r"merges at random \(dropout 0.1\), .*set model.dropout in tokenizer.json to null",
    ),
}
CODE: dict[str, tuple[Change, bool, str]] = {
    "not allowed": (with_code(SLOW), False, r"brings Python code, which was not run; .*trust_remote_code"),
    "alone": (with_code(SLOW), True, r"is Python code alone \(Own\), .*; give a copy with tokenizer.json"),
    "beside a file": (
        with_code(SLOW, keep=True),
        True,
        r"Python code alone .* has a tokenizer.json too: remove",
    ),
    "that raises": (with_code("raise RuntimeError('boom')"), True, r"\(RuntimeError: boom\); its own Python"),
    "that is none": (with_code("def ("), True, r"\(SyntaxError: .*; its own Python code may have failed"),
}


def loaded(folder: Path, trust: bool = False) -> LoadedTokenizer:
    made = LoadedTokenizer(TokenizerConfig(name=str(folder), trust_remote_code=trust))
    assert isinstance(made.stop_tokens, tuple)
    return made


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_what_to_do(name: str, folder: Path) -> None:
    change, words = BROKEN[name]
    loaded(folder)
    change(folder)
    with pytest.raises(TokenizerError, match=words):
        loaded(folder)


@pytest.mark.parametrize("name", CODE)
def test_code_that_comes_with_a_tokenizer_is_named_with_what_to_do(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
    change, trust, words = CODE[name]
    change(folder)
    with pytest.raises(TokenizerError, match=words):
        loaded(folder, trust)


@pytest.mark.parametrize("given", ["{}", '{"eos_token_id": null}', '{"eos_token_id": [-1, 99999999]}'])
def test_stops_that_the_vocabulary_does_not_have_are_none(given: str, folder: Path) -> None:
    (folder / STOPS).write_text(given)
    assert loaded(folder).stop_tokens == ()
