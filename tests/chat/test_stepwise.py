"""Solutions in steps with a label each; oracle: what TRL's PRMTrainer makes of the same row (`tokenize_row` of TRL 0.29)."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from raysvc.chat.source.detect import resolve_format
from raysvc.errors import ConfigError
from raysvc.job.carried import CarriedColumn
from raysvc.job.config import TextSpec, TokenizerConfig

CHATML, LLAMA = "chatml_bare", "llama3_trimming"
IGNORED = -100
ROW = {
    "prompt": "What is 2 + 2?",
    "completions": ["First, 2 is 2.", "So the answer is 4.\n", "", "Thank you\n\nvery much!"],
    "labels": [True, False, True, False],
}


def as_trl(row: dict[str, Any], tokenizer: Any, begin: list[int]) -> tuple[list[int], list[int]]:
    """Ids and labels; `begin` is what the tokenizer puts before a text."""
    prompt = [*begin, *tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]]
    steps = [tokenizer(step, add_special_tokens=False)["input_ids"] for step in row["completions"]]
    end = tokenizer.encode("\n", add_special_tokens=False)
    steps = [step + end for step in steps]
    labels = [
        [IGNORED] * (len(step) - 1) + [int(label)] for step, label in zip(steps, row["labels"], strict=True)
    ]
    return prompt + list(chain(*steps)), [IGNORED] * len(prompt) + list(chain(*labels))


@pytest.mark.parametrize("kind", [CHATML, LLAMA])
def test_ids_and_labels_are_those_of_trl(kind: str, slice_tokenizer: Any, tokenize: Any) -> None:
    tokenizer = slice_tokenizer(kind)
    _, result = tokenize(tokenizer, ROW, {**ROW, "labels": [0.25, 1, 0, 0.5]})
    assert result.row_counts.quarantined == {}, result.examples
    hf = tokenizer.tokenizer.hf
    bare = hf("a", add_special_tokens=False)["input_ids"]
    begin = hf("a")["input_ids"][: -len(bare)] if hf("a")["input_ids"][-len(bare) :] == bare else []
    ids, labels = as_trl(ROW, hf, begin)
    first, second = result.table.to_pylist()
    assert first["input_ids"] == ids
    assert first["loss_mask"] == [int(label != IGNORED) for label in labels]
    assert first["step_labels"] == [-1.0 if label == IGNORED else float(label) for label in labels]
    assert [value for value in second["step_labels"] if value >= 0] == [0.25, 1.0, 0.0, 0.5]


def test_a_prompt_of_messages_is_rendered_with_the_generation_prompt(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    tokenizer, messages = slice_tokenizer(CHATML), [{"role": "user", "content": ROW["prompt"]}]
    _, result = tokenize(tokenizer, {**ROW, "prompt": messages})
    hf = tokenizer.tokenizer.hf
    text = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids, _ = as_trl({**ROW, "prompt": text}, hf, [])
    assert result.table["input_ids"].to_pylist() == [ids]


def test_a_row_that_is_cut_keeps_the_labels_of_the_steps_that_are_left(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    _, whole = tokenize(slice_tokenizer(CHATML), ROW)
    row = whole.table.to_pylist()[0]
    ends = [place for place, hit in enumerate(row["loss_mask"]) if hit]
    _, cut = tokenize(slice_tokenizer(CHATML, max_length=ends[2], truncation="keep_start"), ROW)
    short = cut.table.to_pylist()[0]
    assert short["step_labels"] == row["step_labels"][: ends[2]]
    assert [value for value in short["step_labels"] if value >= 0] == [1.0, 0.0]


def test_what_comes_with_each_step_is_carried_to_its_last_token(slice_tokenizer: Any, tokenize: Any) -> None:
    weight = CarriedColumn(dtype="float32", per="token", align="response")
    _, result = tokenize(slice_tokenizer(CHATML, carry={"w": weight}), {**ROW, "w": [1, 2, 3, 4]})
    row = result.table.to_pylist()[0]
    assert [w for w, hit in zip(row["w"], row["loss_mask"], strict=True) if hit] == [1, 2, 3, 4]
    _, result = tokenize(slice_tokenizer(CHATML, carry={"w": weight}), {**ROW, "w": [1, 2, 3]})
    assert result.table.num_rows == 0
    with pytest.raises(ConfigError, match="makes the tokens of stepwise rows"):
        tokenize(slice_tokenizer(CHATML, carry={"w": CarriedColumn(dtype="float32", per="token")}), ROW)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": [True]}, "'labels' are not one for each step"),
        ({"completions": [], "labels": []}, "'labels' are not one for each step"),
        ({"labels": [True, False, None, True]}, "'labels' is not a list of labels"),
        ({"labels": [True, False, 2, True]}, "'labels' is not a list of labels"),
        ({"labels": [True, False, float("nan"), True]}, "'labels' is not a list of labels"),
        ({"completions": ["a", 3], "labels": [True, True]}, "'completions' is not a list of texts"),
        ({"prompt": "", "completions": [""], "labels": [True]}, "the first step ends at the first token"),
    ],
)
def test_a_row_that_is_no_solution_in_steps_is_quarantined(
    change: dict[str, Any], reason: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    _, result = tokenize(slice_tokenizer(CHATML), ROW, {**ROW, **change})
    assert result.table.num_rows == 1
    assert [one.startswith(reason) for one in result.row_counts.quarantined] == [True]


def test_the_columns_say_what_the_rows_are() -> None:
    spec = TextSpec(tokenizer=TokenizerConfig(name="none"))
    assert resolve_format(spec, ROW).name == "stepwise"
    mapped = spec.model_copy(update={"columns": {"completions": "steps", "labels": "ratings"}})
    other = {"prompt": "a", "steps": ["b"], "ratings": [True]}
    assert resolve_format(mapped, other).name == "stepwise"
