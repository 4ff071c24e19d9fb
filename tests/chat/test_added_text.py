"""Added tokens that are text, under every template of the zoo: the same characters are trained as without them.

The oracle of the ids is `apply_chat_template` with that tokenizer, the oracle of the mask is the template's own marks, and where
it has none the trained text under a tokenizer that adds nothing, which `test_zoo` holds against the words of the row.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.job.config import TextSpec, TokenizerConfig

from .test_zoo import NAMES, TEMPLATES
from .test_zoo_cross import rows_of
from .zoo import ROWS, A, Row, Template, U, as_taken, say, tokenizer_folder
from .zoo_judge import faults, runs, truth

ADDED: dict[str, tuple[list[str], bool]] = {
    "blanks": (["\n" * n for n in range(1, 6)] + [" " * n for n in range(2, 9)] + ["\t", " \n"], True),
    "digits": ([*map(str, range(12))], True),
    "words": (
        ["user", "assistant", "model", "the", "It", "turn", " of", "lines", "result", "Oslo", "no"],
        True,
    ),
    "tags": (["<b>", "</b>", "<h1>", "<table>", "<unused12>", "[multimodal]", "[y]", "<|reserved_7|>"], True),
    "code": (
        ["def", "return ", "->", "==", "{", "}", '"name"', '": ', "();", "- ", "//", ". ", "[0]", "],"],
        True,
    ),
    "marks that are not special": ([], False),
}
QUICK = {
    ("qwen2_5", "blanks"),
    ("gemma3", "blanks"),
    ("llama3", "words"),
    ("glm4moe", "tags"),
    ("gptoss", "code"),
    ("mistral_v3", "digits"),
    ("deepseekv3", "marks that are not special"),
}
LINES = "def f():\n\n  return <b>1</b> -> <unused12>\n\n\n- the [y] 42\n<h1>"
MORE: list[Row] = [
    {"messages": [say(U, LINES[::-1]), say(A, LINES), say(U, "no\n\nmore"), say(A, "1 line\n\nand 22")]},
]
CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in QUICK else [pytest.mark.slow])
    for place, name in enumerate(NAMES)
    for number, kind in enumerate(ADDED)
    if (place + number) % 2 == 0 or (name, kind) in QUICK  # every kind in every other template
]


def loaded(template: Template, folder: Path, kind: str = "") -> SliceTokenizer:
    more, special = ADDED.get(kind, ([], True))
    config = TokenizerConfig(name=tokenizer_folder(template, folder, more, special), date=date.today())
    return SliceTokenizer(TextSpec(tokenizer=config))


def trained(hf: Any, written: list[tuple[list[int], list[int]]]) -> list[list[str]]:
    """Text of each run of trained tokens, without the blanks at its ends: an added token of blanks may span a boundary."""
    return [[hf.decode(ids[a:b]).strip() for a, b in runs(mask)] for ids, mask in written]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_added_text_is_trained_as_text(name: str, kind: str, tmp_path: Path) -> None:
    template = TEMPLATES[name]
    with_them, without = loaded(template, tmp_path / "with", kind), loaded(template, tmp_path / "without")
    hf, plain_hf = with_them.tokenizer.hf, without.tokenizer.hf
    marked = template.text if "endgeneration" in template.text else template.marked
    wrong = []
    for row in (*MORE, *(row for rows in ROWS.values() for row in rows)):
        (written, why), (expected, _) = rows_of(with_them, row), rows_of(without, row)
        if trained(hf, written) != trained(plain_hf, expected):
            wrong.append(
                f"{json.dumps(row)[:60]}: {why} {trained(hf, written)} {trained(plain_hf, expected)}"
            )
        for ids, mask in written:
            places = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
            found = truth(hf, as_taken(template, row), marked if kind != "marks that are not special" else "")
            wrong += faults(hf, row, places, found, ids, mask)
    assert wrong == []
