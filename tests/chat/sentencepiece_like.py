"""Small tokenizers that are configured as Llama-2, Mistral, Gemma and normalizing ones are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

BLANK = "\u2581"
SPECIALS = ["<unk>", "<s>", "</s>"]
REPLACE = normalizers.Replace(" ", BLANK)
PREPEND = normalizers.Prepend(BLANK)
MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}"""
INST = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def trained(corpus: Iterable[str], vocab_size: int) -> dict[str, Any]:
    """The model of a BPE tokenizer whose tokens hold a blank only at their start."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    for run in (BLANK, BLANK * 2):  # runs of blanks are tokens of Llama-2 and Gemma
        model["vocab"][run * 2] = len(model["vocab"])
        model["merges"].append([run, run])
    return model


def backend(
    model: dict[str, Any], normalizer: Any = None, pre: Any = None, unigram: bool = False
) -> Tokenizer:
    """A tokenizer with byte fallback."""
    if unigram:
        scores = [(piece, -float(number) / 100) for piece, number in model["vocab"].items()]
        made = Tokenizer(models.Unigram(scores, 0, True))
    else:
        merges = [tuple(pair) for pair in model["merges"]]
        made = Tokenizer(
            models.BPE(
                vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
            )
        )
    if normalizer is not None:
        made.normalizer = normalizer
    if pre is not None:
        made.pre_tokenizer = pre
    made.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    return made


def _all(*parts: Any) -> Any:
    return normalizers.Sequence(list(parts))


KINDS: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
    "llama2": lambda m: backend(m, _all(PREPEND, REPLACE)),
    "mistral": lambda m: backend(m, None, pre_tokenizers.Metaspace(BLANK, "first", False)),
    "always": lambda m: backend(m, None, pre_tokenizers.Metaspace(BLANK, "always", False)),
    "always_split": lambda m: backend(m, None, pre_tokenizers.Metaspace(BLANK, "always", True)),
    "never": lambda m: backend(m, None, pre_tokenizers.Metaspace(BLANK, "never", False)),
    "gemma": lambda m: backend(m, REPLACE, pre_tokenizers.Split(" ", "merged_with_previous")),
    "nfc": lambda m: backend(m, _all(normalizers.NFC(), PREPEND, REPLACE)),
    "nfkc": lambda m: backend(m, _all(normalizers.NFKC(), REPLACE)),
    "lowercase": lambda m: backend(m, _all(normalizers.Lowercase(), PREPEND, REPLACE)),
    "unigram": lambda m: backend(m, None, pre_tokenizers.Metaspace(BLANK, "always", True), unigram=True),
}


@cache
def small_model() -> dict[str, Any]:
    """Trained on a few sentences."""
    from .conftest import CORPUS

    return trained([*CORPUS, "naïve Übung, 你好 각 ﬁ Å [INST] [/INST]"], 600)


def save(folder: Path, tokenizer: Tokenizer, template: str) -> str:
    """A folder that `AutoTokenizer` loads."""
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    hf.save_pretrained(folder)
    return str(folder)
