"""The zoo: every template times every kind of row is exact, or refused where the template itself refuses."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TextSpec, TokenizerConfig

from .conftest import stamp
from .zoo import (
    FIRST_TIER,
    ROWS,
    Row,
    Template,
    as_taken,
    in_parts,
    in_tiers,
    tokenizer_folder,
    trl_folder,
    zoo,
)
from .zoo_judge import Truth, faults, refusal_is_right, truth

DOCS = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
NAMES = [template.name for template in zoo()]
TEMPLATES = {template.name: template for template in zoo()}
MODES = ("all_assistant_messages", "last_assistant_message")


def template_named(name: str) -> Template:
    """Of the zoo; without it, as an older TRL is, the test is skipped."""
    if name not in TEMPLATES:
        pytest.skip(f"no template {name} here: TRL is missing or too old")
    return TEMPLATES[name]


def tokenizers_of(template: Template, folder: Path) -> dict[str, Any]:
    """Mode -> slice tokenizer; what a row of one mode shows of the template, the other one knows."""
    config = TokenizerConfig(name=tokenizer_folder(template, folder), date=date.today())
    loaded = LoadedTokenizer(config)
    made = {mode: SliceTokenizer(TextSpec(tokenizer=config, train_on=mode), "", loaded) for mode in MODES}
    made[MODES[1]]._rows.renderer = copy.copy(made[MODES[0]]._rows.renderer)
    return made


def row_of_table(template: Template, tokenizers: dict[str, Any]) -> tuple[str, list[str]]:
    """(marks of one template as the table of the docs begins with them, what is wrong)."""
    cells, wrong = [], []
    for kind, rows in ROWS.items():
        cell = ""
        for row in rows:
            for mode, tokenizer in tokenizers.items():
                mark, why = judged(template, tokenizer, mode, row)
                cell = mark if mode == MODES[0] else cell
                wrong += [f"{kind}, {mode}: {each}" for each in why]
        cells.append(cell)
    return "| " + " | ".join(cells) + " |", wrong


def hugging_face(folder: str) -> Any:
    """The tokenizer as Hugging Face loads it."""
    return _hugging_face(folder, stamp(folder))


@lru_cache(maxsize=1)
def _hugging_face(folder: str, _: tuple[int, int]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@lru_cache(maxsize=1)
def true_of(hf: Any, template: Template, row: str) -> Truth:
    """The truth of one row, in JSON, for all modes."""
    oracle = template.text if "endgeneration" in template.text else template.marked
    return truth(hf, as_taken(template, json.loads(row)), oracle)


def judged(template: Template, tokenizer: Any, mode: str, row: Row) -> tuple[str, list[str]]:
    """(`=` equal to the marks, `+` right, `-` refused by the template; what is wrong) of one row."""
    hf = hugging_face(tokenizer.spec.tokenizer.name)
    found = true_of(hf, template, json.dumps(row))
    found = found if mode == MODES[0] else replace(found, mask=None)
    result = tokenizer.run([SourceRow(0, copy.deepcopy(row))])
    if not result.table.num_rows:
        why = refusal_is_right(row, found)
        return "-", [] if why else [f"refused: {[str(each) for each in result.examples]}"]
    places = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    places = places if mode == MODES[0] else places[-1:]
    ids, mask = result.table["input_ids"][0].as_py(), result.table["loss_mask"][0].as_py()
    return "=" if found.mask is not None else "+", faults(hf, row, places, found, ids, mask)


@pytest.mark.skipif(trl_folder() is None, reason="TRL is not installed")
def test_the_zoo_has_all_of_trl_s_templates() -> None:
    assert len(NAMES) >= 72 + 7
    assert set(NAMES) >= FIRST_TIER


@pytest.mark.parametrize("name", in_tiers(NAMES))
def test_a_template_of_the_zoo_is_exact_or_refuses(name: str, tmp_path: Path) -> None:
    marks, wrong = row_of_table(TEMPLATES[name], tokenizers_of(TEMPLATES[name], tmp_path))
    assert wrong == []
    (line,) = [line for line in DOCS.read_text().splitlines() if line.startswith(marks)]
    listed = line.removeprefix(marks).strip(" |").split(", ")
    assert name in listed, f"docs/templates.md is old: run docs/make_templates.py\n{marks} {name}"


@pytest.mark.skipif(trl_folder() is None, reason="TRL is not installed")
@pytest.mark.parametrize("name", ["idefics3", "smolvlm_training", "llava_next"])
def test_a_template_that_takes_nothing_but_parts_gets_each_text_as_one(name: str, tmp_path: Path) -> None:
    template = TEMPLATES[name]
    tokenizer = tokenizers_of(template, tmp_path)[MODES[0]]
    [plain] = ROWS["plain"][:1]
    whole, (user, answer) = in_parts(plain), plain["messages"]
    mixed = {"messages": [user, whole["messages"][1]]}, {"messages": [whole["messages"][0], answer]}
    result = tokenizer.run([SourceRow(n, copy.deepcopy(row)) for n, row in enumerate((plain, whole, *mixed))])
    ids = hugging_face(tokenizer.spec.tokenizer.name).apply_chat_template(
        whole["messages"], return_dict=False
    )
    assert result.table["input_ids"].to_pylist() == [ids] * 4, result.examples
