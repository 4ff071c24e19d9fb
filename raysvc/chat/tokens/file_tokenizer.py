"""A tokenizer from its files alone: what `AutoTokenizer` gives, in a tenth of the time.

`tokenizer.json` is a `tokenizers` file and a chat template is Jinja; `transformers` is imported for neither. It also
changes some tokenizers while it loads them, so a folder is read here only when all that it says is understood; any
other goes to `transformers`.

1. The class: one that takes `tokenizer.json` as it is, or Qwen2's, which builds all around the vocabulary itself.
2. The options: only those that change no ids, or are followed here.
3. The special tokens: only such as `tokenizer.json` has, with the same flags, so that nothing is added.

Always true:
- ids, decoded text, identity and templates are those of `AutoTokenizer.from_pretrained` on the same folder;
- neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from raysvc.chat.source.messages import is_plain

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")
AS_IS = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
QWEN2 = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})
MODEL_TYPES = {  # of a `config.json` beside it, where the class stays the one that the tokenizer names
    **dict.fromkeys(AS_IS, (None, "llama")),
    **dict.fromkeys(QWEN2, (None, "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")),
}
UNDERSTOOD = {
    *NAMED,
    *(
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
    ),
    *(
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "errors",
        "extra_special_tokens",
        "is_local",
    ),
    *(
        "legacy",
        "local_files_only",
        "model_input_names",
        "model_max_length",
        "padding_side",
        "processor_class",
    ),
    *("split_special_tokens", "tokenizer_class", "truncation_side", "use_default_system_prompt"),
}
OTHER_FILES = ("added_tokens.json", "additional_chat_templates", "chat_template.json", "tekken.json")
QWEN2_DEFAULTS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class FileTokenizer:
    """Holds what raysvc uses of a `transformers` tokenizer, by the same names.

    Attributes:
        backend_tokenizer: of `tokenizers`.
        special_tokens_map: name -> text of the tokens that have a role.
        chat_template: text, or name -> text, or None.
    """

    split_special_tokens = False

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        extra_special_tokens: tuple[str, ...],
        chat_template: str | dict[str, str] | None,
    ) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template
        self.all_special_tokens = list(dict.fromkeys((*special_tokens.values(), *extra_special_tokens)))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": list(encoding.ids)}

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id -> added token."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of `all_special_tokens`."""
        found = (self.backend_tokenizer.token_to_id(text) for text in self.all_special_tokens)
        return [token for token in found if token is not None]

    @property
    def eos_token(self) -> str | None:
        """Text of the end of a sequence."""
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Its id."""
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of padding."""
        return self._id("pad_token")

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Vocabulary entries."""
        return [self.backend_tokenizer.id_to_token(int(token)) for token in ids]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Text of ids: a list, or an array."""
        plain = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        return str(self.backend_tokenizer.decode(plain, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        chat_template: str,
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        """Text of a conversation by a template, or its ids; as `transformers` does it, by Jinja's own code.

        Raises:
            jinja2.TemplateError: the template refused it.
        """
        assert not return_dict, "a plain list of ids, or a text"
        if not messages:
            raise ValueError("the conversation is empty")
        given = [{name: item for name, item in one.items() if item is not None} for one in messages]
        text = _compiled(chat_template).render(
            messages=[_with_reasoning(_plain_data(one)) for one in given],
            tools=_plain_data(tools),
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map | _plain_data(variables),
        )
        return self(text, add_special_tokens=False)["input_ids"] if tokenize else text

    def _id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        return None if text is None else self.backend_tokenizer.token_to_id(text)


def read_folder_once(folder: Path) -> FileTokenizer | None:
    """`read_folder`, remembered as long as no file of the folder changes: a command asks for it more than once."""
    infos = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in folder.iterdir())
    return _remembered(folder.absolute(), tuple(infos))


@lru_cache(maxsize=4)
def _remembered(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> FileTokenizer | None:
    return read_folder(folder)


def read_folder(folder: Path) -> FileTokenizer | None:
    """The tokenizer of a folder; None when something in it is not understood here."""
    config = _json(folder / "tokenizer_config.json")
    if config is None or not (folder / "tokenizer.json").is_file():
        return None
    if not _options_understood(folder, config):
        return None
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001  the binding raises its base class; transformers says what is wrong with the file
        return None
    is_qwen2 = config["tokenizer_class"] in QWEN2
    if backend.truncation or backend.padding or not (_as_qwen2 if is_qwen2 else _as_is)(backend, config):
        return None
    named = _named(config, QWEN2_DEFAULTS if is_qwen2 else {})
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = [_text(one) for one in extra] if isinstance(extra, list) else [None]
    if not _nothing_to_add(backend, config, [*named.values(), *extra], plain=is_qwen2):
        return None
    texts = {name: str(text) for name, text in named.items()}
    return FileTokenizer(backend, texts, tuple(str(one) for one in extra), _template(folder, config))


def _options_understood(folder: Path, config: dict[str, Any]) -> bool:
    kind = config.get("tokenizer_class")
    if kind not in MODEL_TYPES or not config.keys() <= UNDERSTOOD or config.get("split_special_tokens"):
        return False
    if any((folder / name).exists() for name in OTHER_FILES):
        return False
    if "added_tokens_decoder" not in config and (folder / "special_tokens_map.json").exists():
        return False
    beside = _json(folder / "config.json") or {}
    if (folder / "config.json").exists() and not beside:
        return False
    return (
        beside.get("model_type") in MODEL_TYPES[kind]
        and "tokenizer_class" not in beside
        and "auto_map" not in beside
    )


def _as_is(backend: Tokenizer, config: dict[str, Any]) -> bool:
    """Step 1 for a class that takes the file as it is; whether it is understood."""
    if not isinstance(backend.model, BPE) and config.get("clean_up_tokenization_spaces") is not False:
        return False  # the text of other models is changed after decoding
    return _with_post_processor(backend)


def _as_qwen2(backend: Tokenizer, config: dict[str, Any]) -> bool:
    """Step 1 for Qwen2's class: all but vocabulary and merges is its own."""
    model = backend.model
    if not isinstance(model, BPE) or config.get("add_prefix_space"):
        return False
    flags = (model.dropout, model.unk_token, model.fuse_unk, model.byte_fallback, model.ignore_merges)
    if flags != (None, None, False, False, False):
        return False
    if (model.continuing_subword_prefix, model.end_of_word_suffix) != ("", ""):
        return False
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _with_post_processor(backend)


def _with_post_processor(backend: Tokenizer) -> bool:
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )
    return True


def _nothing_to_add(
    backend: Tokenizer, config: dict[str, Any], special: list[str | None], *, plain: bool
) -> bool:
    """Returns whether the file has every added and special token, flag by flag."""
    there = backend.get_added_tokens_decoder()
    by_text = {token.content: token for token in there.values()}
    if not all(text in by_text and by_text[text].special for text in special):
        return False
    if plain and any(_flags(by_text[str(text)]) != (False,) * 4 for text in special):
        return False
    told = config.get("added_tokens_decoder", {})
    return all(
        int(number) in there
        and (there[int(number)].content, *_flags(there[int(number)]), there[int(number)].special)
        == (token.get("content"), *_flags_told(token), token.get("special", False))
        for number, token in told.items()
    )


def _flags(token: AddedToken) -> tuple[bool, ...]:
    return token.lstrip, token.rstrip, token.single_word, token.normalized


def _flags_told(token: dict[str, Any]) -> tuple[bool, ...]:
    normalized = token.get("normalized", not token.get("special", False))
    return token.get("lstrip", False), token.get("rstrip", False), token.get("single_word", False), normalized


def _named(config: dict[str, Any], defaults: Mapping[str, str]) -> dict[str, str | None]:
    found = {name: config.get(name, defaults.get(name)) for name in NAMED}
    return {name: _text(token) for name, token in found.items() if token is not None}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template(folder: Path, config: dict[str, Any]) -> Any:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    own = config.get("chat_template")
    if not isinstance(own, list) or not all(
        isinstance(one, dict) and {"name", "template"} <= {*one} for one in own
    ):
        return own
    return {one["name"]: one["template"] for one in own}


def _plain_data(value: Any) -> Any:
    """Plain JSON types, as `apply_chat_template` makes them of anything else."""
    if is_plain(value):
        return value
    from transformers.utils import chat_template_utils as theirs

    return theirs._plain_template_data(value)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the names that templates read."""
    said = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


@lru_cache(maxsize=16)
def _compiled(text: str) -> Any:
    from raysvc.chat.render.chat_environment import chat_environment

    return chat_environment().from_string(text)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
