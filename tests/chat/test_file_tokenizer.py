"""A tokenizer read from its files does what `AutoTokenizer` does, or leaves it to `AutoTokenizer`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from raysvc.chat.render.chat_environment import chat_environment, json_writer
from raysvc.chat.tokens import tokenizer as loading
from raysvc.chat.tokens.file_tokenizer import FileTokenizer, read_folder
from raysvc.chat.tokens.probe import PROBES
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TokenizerConfig

ROOT = Path(__file__).parents[2]
NAMES = ("chatml_bare", "qwen3_like", "llama3_trimming", "merges_tools", "captured", "none")
KINDS = ("nfc", "metaspace", "adds_bos")
Pair = tuple[LoadedTokenizer, LoadedTokenizer]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "b": [1, None, "ü"]}}}
]
# from this version on, a message's reasoning has one name for templates, and `namespace` takes no underscores: as here
AS_NEW = pytest.mark.skipif(
    Version(metadata.version("transformers")) < Version("5.23"),
    reason="transformers before 5.23 shows templates other messages",
)
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <|im_end|> you "}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ü\n"},
        {"role": "assistant", "content": ""},
    ],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning": "why"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "thinking": "hm"}],
    [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"x": 1.5, "y": [True]}}}
            ],
        },
        {"role": "tool", "content": "{}", "name": "f"},
        {"role": "assistant", "content": "done"},
    ],
    [{"role": "assistant", "content": "alone"}],
]


@pytest.fixture(autouse=True, scope="module")
def by_transformers() -> None:
    """Not here: both readers are asked."""


def both(folder: str | Path) -> Pair:
    """The tokenizer of a folder, from its files and by transformers."""
    config = TokenizerConfig(name=str(folder))
    ours = LoadedTokenizer(config)
    assert isinstance(ours.hf, FileTokenizer), "it is understood"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_load", loading._load_by_transformers)
        return ours, LoadedTokenizer(config)


@pytest.fixture(scope="module")
def pairs(
    sample: dict[str, str], tokenizer_folder: Callable[[str], str], special_folder: Callable[[str, str], str]
) -> list[Pair]:
    """Every tokenizer at hand that is read from its files."""
    folders = [sample["tokenizer"], *map(tokenizer_folder, NAMES)]
    folders += [special_folder(kind, "chatml_bare") for kind in KINDS]
    return [both(folder) for folder in folders]


def real_pair() -> Pair:
    shared = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared")) / "tokenizers" / "qwen2_5"
    if not shared.exists():
        pytest.skip(f"no tokenizer at {shared}")
    return both(shared)


def check_facts(ours: LoadedTokenizer, theirs: LoadedTokenizer) -> None:
    assert ours.identity() == theirs.identity()
    assert ours.templates == theirs.templates
    assert ours.template_variables == theirs.template_variables
    assert len(ours.hf) == len(theirs.hf)
    for name in ("pad_token_id", "eos_token_id", "eos_token", "split_special_tokens"):
        assert getattr(ours.hf, name) == getattr(theirs.hf, name), name
    assert sorted(ours.hf.all_special_ids) == sorted(theirs.hf.all_special_ids)
    assert {n: str(t) for n, t in ours.hf.added_tokens_decoder.items()} == {
        n: str(t) for n, t in theirs.hf.added_tokens_decoder.items()
    }


def check_text(ours: LoadedTokenizer, theirs: LoadedTokenizer, text: str) -> None:
    for special in (False, True):
        ids = theirs.hf(text, add_special_tokens=special)["input_ids"]
        assert ours.hf(text, add_special_tokens=special)["input_ids"] == ids
        assert ours.hf.decode(ids) == theirs.hf.decode(ids)
        assert ours.hf.decode(ids, skip_special_tokens=True) == theirs.hf.decode(
            ids, skip_special_tokens=True
        )
        assert ours.hf.convert_ids_to_tokens(ids) == theirs.hf.convert_ids_to_tokens(ids)


def rendered(tokenizer: LoadedTokenizer, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
    try:
        template = tokenizer.templates[tokenizer.template_name(tools is not None)]
        return tokenizer.hf.apply_chat_template(
            messages, tools=tools, chat_template=template, return_dict=False, **options
        )
    except Exception as error:  # noqa: BLE001  templates refuse: both must, with the same words
        return type(error).__name__, str(error)


def check_chats(ours: LoadedTokenizer, theirs: LoadedTokenizer) -> None:
    for messages in TALKS:
        for tools in (None, TOOLS):
            for options in (
                {},
                {"tokenize": False},
                {"add_generation_prompt": True, "enable_thinking": False},
            ):
                mine = rendered(ours, messages, tools, **options)
                assert mine == rendered(theirs, messages, tools, **options)


@AS_NEW
def test_facts_templates_and_identity_are_those_of_transformers(pairs: list[Pair]) -> None:
    for ours, theirs in pairs:
        check_facts(ours, theirs)
        check_chats(ours, theirs)
        for text in PROBES:
            check_text(ours, theirs, text)


@AS_NEW
def test_a_real_tokenizer_too() -> None:
    ours, theirs = real_pair()
    check_facts(ours, theirs)
    check_chats(ours, theirs)
    for text in (*PROBES, *(f"a {token} b" for token in theirs.hf.all_special_tokens)):
        check_text(ours, theirs, text)


PIECES = st.one_of(
    st.text(max_size=20), st.sampled_from(["<|im_start|>", "<|im_end|>", "<s>", "\n", "  ", "<0x41>"])
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(PIECES, max_size=8))
def test_any_text_has_the_ids_and_the_text_of_transformers(pairs: list[Pair], pieces: list[str]) -> None:
    text = "".join(pieces).encode(errors="ignore").decode()
    for ours, theirs in pairs:
        check_text(ours, theirs, text)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": None},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"split_special_tokens": True},
        {"image_token": "<|im_end|>"},
        {"extra_special_tokens": ["<|not there|>"]},
        {"extra_special_tokens": {"image_token": "<|im_end|>"}},
        {"eos_token": "<|not there|>"},
        {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "lstrip": True, "special": True}}},
        {"added_tokens_decoder": {"99999": {"content": "<|new|>", "special": True}}},
    ],
    ids=str,
)
def test_what_is_not_understood_is_left_to_transformers(
    tmp_path: Path, sample: dict[str, str], change: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(sample["tokenizer"], tmp_path / "tokenizer"))
    path = folder / "tokenizer_config.json"
    assert read_folder(folder) is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_folder(folder) is None


def edit(path: Path, *keys: str, **changes: Any) -> None:
    """Change fields of a JSON file, or of an object inside it."""
    whole = json.loads(path.read_text())
    inner = whole
    for key in keys:
        inner = inner[key]
    inner.update(changes)
    path.write_text(json.dumps(whole))


CONFIG, STATE = "tokenizer_config.json", "tokenizer.json"
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None}
PLAIN_BPE = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
FOLDERS: dict[str, Callable[[Path], None]] = {
    "no tokenizer.json": lambda folder: (folder / STATE).unlink(),
    "a broken one": lambda folder: (folder / STATE).write_text("{}"),
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "truncation": lambda folder: edit(
        folder / STATE,
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    ),
    "a file of added tokens": lambda folder: (folder / "added_tokens.json").write_text("{}"),
    "a broken config.json": lambda folder: (folder / "config.json").write_text("["),
    "a model of words": lambda folder: edit(
        folder / STATE, model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    ),
    "Qwen2's class, a blank before": lambda folder: edit(folder / CONFIG, **QWEN, add_prefix_space=True),
    "Qwen2's class, an unknown token": lambda folder: (
        edit(folder / CONFIG, **QWEN),
        edit(folder / STATE, "model", **PLAIN_BPE, unk_token="a"),
    )[0],
    "Qwen2's class, affixes": lambda folder: (
        edit(folder / CONFIG, **QWEN),
        edit(folder / STATE, "model", **PLAIN_BPE | {"end_of_word_suffix": "</w>"}),
    )[0],
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_not_understood_is_left_to_transformers(
    name: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    folder = Path(shutil.copytree(sample["tokenizer"], tmp_path / "tokenizer"))
    FOLDERS[name](folder)
    assert read_folder(folder) is None


def test_a_folder_that_is_left_to_transformers_is_loaded_by_it(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    folder = Path(shutil.copytree(sample["tokenizer"], tmp_path / "tokenizer"))
    edit(folder / CONFIG, extra_special_tokens={"image_token": "<|im_end|>"})
    loaded = LoadedTokenizer(TokenizerConfig(name=str(folder)))
    assert not isinstance(loaded.hf, FileTokenizer)
    assert loaded.hf.image_token == "<|im_end|>"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer"])
def test_a_model_config_beside_it_changes_what_it_changes_for_transformers(
    tmp_path: Path, sample: dict[str, str], kind: str, name: str
) -> None:
    folder = Path(shutil.copytree(sample["tokenizer"], tmp_path / "tokenizer"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": name, "unk_token": None}))
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    ours = read_folder(folder)
    if ours is not None:
        theirs = loading._load_by_transformers(TokenizerConfig(name=str(folder)))
        assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (ours is not None) == (
        (kind == "llama") != (name == "Qwen2Tokenizer") and kind in ("llama", "qwen2", "qwen3")
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ dict(a=1, **{'b': 2}) | tojson }}{{ dict.fromkeys([1]) }}{{ dict.mro }}",
        "{% set n = namespace(x=1, self=2) %}{% set n.x = 5 %}{{ n.x }}{{ n.self }}",
        pytest.param("{% set n = namespace(__class__=1) %}", marks=AS_NEW),
        pytest.param("{% set n = namespace() %}{% set n._x = 1 %}", marks=AS_NEW),
        "{{ {'ü': '<'} | tojson(indent=2) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
        "{{ raise_exception('no') }}",
        "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
        "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}",
        "   {% generation %}  a {% endgeneration %}\n b",
        "{{ [].append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ strftime_now('%Y') }}",
        "{{ missing.x }}",
    ],
)
def test_a_template_renders_or_is_refused_as_by_transformers(template: str) -> None:
    from transformers.utils import chat_template_utils

    def outcome(make: Callable[[], Any]) -> str:
        try:
            return str(make().render())
        except Exception as error:  # noqa: BLE001  any
            return type(error).__name__

    ours = outcome(lambda: chat_environment().from_string(template))
    assert ours == outcome(lambda: chat_template_utils._compile_jinja_template(template))


def test_neither_torch_nor_transformers_is_imported(sample: dict[str, str]) -> None:
    code = """
import sys
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TokenizerConfig
tokenizer = LoadedTokenizer(TokenizerConfig(name=sys.argv[1]))
tokenizer.identity()
tokenizer.reference_ids([{"role": "user", "content": "a"}], None)
print(*sorted({"torch", "transformers", "ray"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, sample["tokenizer"]], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize(
    "value",
    ['a"\u00e9\n\u2028', 1.5, 2**70, True, None, {"a": [1, {"b": []}], 3: {}}, float("nan"), {"x": object()}],
)
def test_json_is_written_as_the_standard_library_writes_it(value: Any) -> None:
    def outcome(write: Callable[[Any], str]) -> Any:
        try:
            return write(value)
        except (ValueError, TypeError) as error:
            return type(error)

    plain = json.JSONEncoder(ensure_ascii=False)
    assert outcome(json_writer()) == outcome(plain.encode)
    strict = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
    assert outcome(json_writer(allow_nan=False)) == outcome(strict.encode)
