"""Small tokenizers and chat templates of the shapes that real models have, made here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps for 12 hours.",
    "What is 2 + 2? The answer is 4. Thank you very much!",
    "system user assistant tool developer You are a helpful assistant.",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}',
    "<think>\nI should think about it.\n</think>\n\nHello there, how are you today?",
    "The answer is this.\n\nThe answer is that.\n\nThe answer is neither.\n\n" * 4,
    "def f(x):\n    return x * 2\n\nprint(f(21))\n",
]
CHATML_TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
INST_TOKENS = ["<s>", "</s>", "[INST]", "[/INST]"]

CHATML_LOOP = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES: dict[str, str] = {
    "chatml_default_system": """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"""
    + CHATML_LOOP,
    "chatml_bare": CHATML_LOOP,
    "llama3_trimming": """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "strips_think": """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}
    {%- set thought = message.reasoning_content or '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last and thought %}
        {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "merges_tools": """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' and message.tool_calls %}
    {{- '<|im_start|>assistant' }}
    {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls %}
        {%- if call.function is defined %}{% set call = call.function %}{% endif %}
        {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "prompt_opens_think": """\
{%- for message in messages %}
{%- if message.role == 'assistant' and loop.last %}
    {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {{- message.content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}""",
    "must_alternate": """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}""",
    "no_last_eot": """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}{% if not loop.last %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_end|>\\n<|im_start|>assistant\\n' }}{% endif %}""",
    "generation_marks": """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "marks_without_eot": """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}""",
    "deferred_tool_end": """\
{%- set ns = namespace(tool=false) %}{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|user|>' + message.content }}{% set ns.tool = false %}
{%- elif message.role == 'tool' %}{{ '<|tool|>' + message.content }}{% set ns.tool = true %}
{%- else %}
    {%- if ns.tool %}{{ '<|tool_end|>' }}{% set ns.tool = false %}{% else %}{{ '<|assistant|>' }}{% endif %}
    {{- message.content + eos_token }}
{%- endif %}
{%- endfor %}
{%- if ns.tool %}{{ '<|tool_end|>' }}{% elif add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "plain_words": """\
{%- for message in messages %}
{{- '### ' + message.role + ':\\n' + message.content + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}""",
    "takes_parts": """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part.text + ';' }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "qwen3_like": """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "only_one_turn": """\
{%- if messages | length > 2 %}{{ raise_exception('one question, one answer') }}{% endif %}"""
    + CHATML_LOOP,
    "shows_ten_letters": """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content[:10] + '<|im_end|>\\n' }}
{%- endfor %}""",
    "first_is_a_title": """\
{{- '# ' + messages[0].content + '\\n' }}
{%- for message in messages[1:] %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "lists_users_first": """\
{%- set ns = namespace(n=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.n = ns.n + 1 %}{{ message.content + ';' }}{% endif %}{% endfor %}"""
    + CHATML_LOOP,
    "in_a_macro": """\
{%- macro turn(message) %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endmacro %}
{%- for message in messages %}{{ turn(message) }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "captured": "{%- set text %}" + CHATML_LOOP + "{% endset %}{{ text }}",
}
SPECIALS = {
    "llama3_trimming": (LLAMA_TOKENS, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "must_alternate": (INST_TOKENS, {"bos_token": "<s>", "eos_token": "</s>"}),
    "deferred_tool_end": (
        ["<s>", "</s>", "<|user|>", "<|tool|>", "<|tool_end|>", "<|assistant|>"],
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
}
CHATML = (CHATML_TOKENS, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


def byte_level(specials: list[str], normalizer: Any = None, add_bos: str = "") -> Any:
    """A byte-level BPE backend, trained here."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{add_bos} $A", special_tokens=[(add_bos, backend.token_to_id(add_bos))]
        )
    return backend


def metaspace(specials: list[str]) -> Any:
    """A sentencepiece-like backend: a space is part of the next word, unknown characters are bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *pieces], show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    return backend


def save(folder: Path, backend: Any, template: str | None, **roles: str) -> str:
    """A folder that `AutoTokenizer` loads."""
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **roles)
    hf.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True, scope="module")
def by_transformers() -> Iterator[None]:
    """The oracle of these tests is `transformers` itself; `test_file_tokenizer` shows that both readers are equal."""
    from raysvc.chat.tokens import tokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_load", tokenizer._load_by_transformers)
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a template -> folder of a byte-level tokenizer with it; made once."""
    made: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in made:
            specials, roles = SPECIALS.get(name, CHATML)
            template = TEMPLATES.get(name)
            made[name] = save(tmp_path_factory.mktemp(name), byte_level(specials), template, **roles)
        return made[name]

    return folder


@pytest.fixture(scope="session")
def special_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """(kind, template name) -> folder of a tokenizer that is not plain byte-level BPE."""
    from tokenizers import normalizers

    made: dict[tuple[str, str], str] = {}

    def folder(kind: str, name: str) -> str:
        if (kind, name) not in made:
            specials, roles = SPECIALS.get(name, CHATML)
            backends = {
                "nfc": lambda: byte_level(specials, normalizers.NFC()),
                "metaspace": lambda: metaspace(specials),
                "adds_bos": lambda: byte_level(["<s>", *specials], add_bos="<s>"),
            }
            path = tmp_path_factory.mktemp(f"{kind}-{name}")
            made[kind, name] = save(path, backends[kind](), TEMPLATES.get(name), **roles)
        return made[kind, name]

    return folder


def stamp(folder: str) -> tuple[int, int]:
    """What tells a folder from one of the same path before: pytest removes that of a test that passed."""
    there = Path(folder).stat()
    return there.st_ino, there.st_mtime_ns


@pytest.fixture(scope="session")
def loaded() -> Callable[[str], Any]:
    """Folder -> its `LoadedTokenizer`; made once while it is in use, so nothing of it may be changed.

    Few are kept: the native encoder of one takes some 47 MB, whatever its vocabulary.
    """
    from raysvc.chat.tokens.tokenizer import LoadedTokenizer
    from raysvc.job.config import TokenizerConfig

    made = lru_cache(maxsize=8)(lambda folder, _: LoadedTokenizer(TokenizerConfig(name=folder)))
    return lambda folder: made(folder, stamp(folder))


@pytest.fixture(scope="session")
def slice_tokenizer(
    tokenizer_folder: Callable[[str], str], loaded: Callable[[str], Any]
) -> Callable[..., Any]:
    """Name of a template (or a folder) and options of a spec -> a `SliceTokenizer` of its own."""
    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.job.config import TextSpec

    def tokenizer(name: str, folder: str | None = None, **options: Any) -> Any:
        found = loaded(folder or tokenizer_folder(name))
        return SliceTokenizer(TextSpec(tokenizer=found.config, **options), "test", found)

    return tokenizer


class Tokens:
    """One written sequence, with what a test wants to know of it."""

    def __init__(self, hf: Any, ids: list[int], mask: list[int]) -> None:
        self.hf, self.ids, self.mask = hf, ids, mask

    @property
    def trained(self) -> list[str]:
        """Text of each run of trained tokens."""
        pairs = zip(self.ids, self.mask, strict=True)
        runs = [[token for token, _ in run] for bit, run in groupby(pairs, key=lambda pair: pair[1]) if bit]
        return [self.hf.decode(run, skip_special_tokens=False) for run in runs]


@pytest.fixture(scope="session")
def tokenize() -> Callable[..., Any]:
    """(slice tokenizer, rows) -> (written sequences, result)."""
    from raysvc.chat.source.json_rows import SourceRow

    def run(tokenizer: Any, *rows: dict[str, Any]) -> tuple[list[Tokens], Any]:
        result = tokenizer.run([SourceRow(number, row) for number, row in enumerate(rows)])
        ids, mask = result.table["input_ids"].to_pylist(), result.table["loss_mask"].to_pylist()
        hf = tokenizer.tokenizer.hf
        return [Tokens(hf, a, b) for a, b in zip(ids, mask, strict=True)], result

    return run
