"""The zoo again: with one row a turn, with rows that are too long, and with contents in parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import date
from functools import lru_cache
from typing import Any

import pytest

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.errors import SourceError
from raysvc.job.config import TextSpec, TokenizerConfig

from .test_zoo import MODES, NAMES, TEMPLATES, hugging_face
from .zoo import ROWS, Row, Template, as_taken, tokenizer_folder
from .zoo_judge import Truth, faults, own_words, refusal_is_right, truth

ALL = "all_assistant_messages"
TURNS = "each_assistant_turn"
QUICK = ("lfm2", "cohere2", "gptoss_training", "mistral_v3", "qwen3")
SHARES = (0.4, 0.7, 0.95)
every_template = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES]
)


def in_turn(modes: Sequence[str]) -> pytest.MarkDecorator:
    """Every template in one of the modes, and the quick ones in all of them."""
    cases = [
        pytest.param(name, mode, marks=[] if name in QUICK else [pytest.mark.slow])
        for place, name in enumerate(NAMES)
        for number, mode in enumerate(modes)
        if name in QUICK or place % len(modes) == number
    ]
    return pytest.mark.parametrize(("name", "mode"), cases)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in made:
            made[name] = tokenizer_folder(TEMPLATES[name], tmp_path_factory.mktemp("zoo"))
        return made[name]

    return folder


@lru_cache(maxsize=2)
def _tokenizer(folder: str, train_on: str) -> SliceTokenizer:
    config = TokenizerConfig(name=folder, date=date.today())
    return SliceTokenizer(TextSpec(tokenizer=config, train_on=train_on))


def tokenizer(folder: str, train_on: str = ALL, **options: Any) -> SliceTokenizer:
    """The one of a template and mode, set to a policy: to make one takes longer than a row."""
    made = _tokenizer(folder, train_on)
    made._rows.spec = made.spec.model_copy(update={"max_length": None, "truncation": "drop", **options})
    return made


def rows_of(made: SliceTokenizer, row: Row) -> tuple[list[tuple[list[int], list[int]]], list[str]]:
    """(ids and mask of every row that is written, why it was left out)."""
    result = made.run([SourceRow(0, copy.deepcopy(row))])
    table, counts = result.table, result.row_counts
    pairs = zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    return list(pairs), [*map(str, result.examples), *counts.dropped]


def oracle_of(template: Template, hf: Any, row: Row) -> Truth:
    marked = template.text if "endgeneration" in template.text else template.marked
    return truth(hf, as_taken(template, row), marked)


def places(row: Row) -> list[int]:
    """Places of the assistant's messages that say something."""
    return [n for n, m in enumerate(row["messages"]) if m["role"] == "assistant" and own_words(m)]


def prefixes(row: Row) -> list[Row]:
    """One conversation for each turn of the assistant, which it ends with."""
    return [{**row, "messages": row["messages"][: place + 1]} for place in places(row)]


def shorter(row: Row) -> list[Row]:
    """The conversation without its first turn, without its first two, and so on."""
    messages = row["messages"]
    head = 1 if messages[0]["role"] == "system" else 0
    users = [n for n in range(head + 1, len(messages)) if messages[n]["role"] == "user"]
    return [{**row, "messages": [*messages[:head], *messages[start:]]} for start in users]


def wrong_in(
    hf: Any, template: Template, row: Row, trained: list[int], ids: list[int], mask: list[int]
) -> list[str]:
    found = oracle_of(template, hf, row)
    return (
        [f"refused by the template: {found.refusal}"]
        if found.refusal
        else faults(hf, row, trained, found, ids, mask)
    )


@every_template
def test_one_row_a_turn_is_exact_or_refused_by_the_template(name: str, folder_of: Any) -> None:
    template, hf = TEMPLATES[name], hugging_face(folder_of(name))
    made, wrong = tokenizer(folder_of(name), train_on=TURNS), []
    for kind, rows in ROWS.items():
        for row in rows:
            written, why = rows_of(made, row)
            wanted = prefixes(row)
            if not written:
                right = any(refusal_is_right(each, truth(hf, as_taken(template, each))) for each in wanted)
                wrong += [] if right else [f"{kind}: refused, {why}"]
                continue
            assert len(written) == len(wanted), kind
            for each, (ids, mask) in zip(wanted, written, strict=True):
                last = [len(each["messages"]) - 1]
                wrong += [f"{kind}: {fault}" for fault in wrong_in(hf, template, each, last, ids, mask)]
    assert wrong == []


@in_turn(MODES)
def test_rows_that_are_too_long_are_cut_as_they_are_declared(name: str, mode: str, folder_of: Any) -> None:
    template, hf = TEMPLATES[name], hugging_face(folder_of(name))
    wrong = []

    def with_policy(limit: int | None, truncation: str) -> SliceTokenizer:
        return tokenizer(folder_of(name), mode, max_length=limit, truncation=truncation)

    for kind, rows in ROWS.items():
        for row in rows:
            written, _ = rows_of(with_policy(None, "drop"), row)
            for share in SHARES if written else ():
                (ids, mask), limit = written[0], int(len(written[0][0]) * share)
                assert rows_of(with_policy(limit, "drop"), row)[0] == []
                start = [(ids[:limit], mask[:limit])] if any(mask[:limit]) else []
                assert rows_of(with_policy(limit, "keep_start"), row)[0] == start, kind
                with pytest.raises(SourceError):
                    rows_of(with_policy(limit, "error"), row)
                end = wrong_end(hf, template, row, with_policy(limit, "keep_end_turns"), limit)
                wrong += [f"{kind}, {share}: {fault}" for fault in end]
    assert wrong == []


def wrong_end(hf: Any, template: Template, row: Row, made: SliceTokenizer, limit: int) -> list[str]:
    """What is wrong with what `keep_end_turns` leaves of a row."""
    written, why = rows_of(made, row)
    truths = [(each, truth(hf, as_taken(template, each))) for each in shorter(row)]
    fit = [each for each, found in truths if not found.refusal and len(found.ids) <= limit]
    if not fit:
        return [] if not written else ["written, and nothing fits"]
    if not written:
        right = refusal_is_right(fit[0], truth(hf, as_taken(template, fit[0])))
        return [] if right else [f"left out, and {len(fit[0]['messages'])} messages fit: {why}"]
    ids, mask = written[0]
    trained = places(fit[0]) if made.spec.train_on == ALL else places(fit[0])[-1:]
    return wrong_in(hf, template, fit[0], trained, ids, mask)


@every_template
def test_one_row_a_turn_keeps_its_last_turns(name: str, folder_of: Any) -> None:
    template, hf = TEMPLATES[name], hugging_face(folder_of(name))
    (row,) = ROWS["system"]
    written, _ = rows_of(tokenizer(folder_of(name), train_on=TURNS), row)
    if not written:
        pytest.skip("the template refuses a system message")
    limit = len(written[-1][0]) - 1
    made = tokenizer(folder_of(name), train_on=TURNS, max_length=limit, truncation="keep_end_turns")
    cut, why = rows_of(made, row)
    last = shorter(row)[0]
    assert cut, why
    assert cut[0] == written[0]
    assert wrong_in(hf, template, last, places(last)[-1:], *cut[1]) == []


@in_turn([ALL, TURNS])
def test_contents_in_parts_are_those_of_texts(name: str, mode: str, folder_of: Any) -> None:
    hf = hugging_face(folder_of(name))
    made = tokenizer(folder_of(name), train_on=mode)
    for kind in ("plain", "alternating", "system"):
        for row in ROWS[kind]:
            parts = {"messages": [in_parts(message) for message in row["messages"]]}
            as_parts, as_texts = truth(hf, parts), truth(hf, row)
            takes = (
                not as_parts.refusal
                and not any(form in as_parts.text for form in ("{'type'", '{"type"'))
                and shows(row, as_parts)
            )
            written, why = rows_of(made, parts)
            if not written:
                assert refusal_is_right(row, as_texts), (kind, why)
                continue
            assert written[-1][0] == (as_parts if takes else as_texts).ids, kind
            assert len(written) == (len(places(row)) if mode == TURNS else 1)


def in_parts(message: Row) -> Row:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def shows(row: Row, found: Truth) -> bool:
    return all(word in found.text for message in row["messages"] for word in message["content"].split())
