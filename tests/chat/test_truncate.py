"""What is left of a row that is too long is part of it, and still verified."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.chat.select import LAST_TURN_TOO_LONG, MAX_TOKENS, NOTHING_LEFT, TOO_LONG, TOO_MANY
from raysvc.chat.source.json_rows import SourceRow
from raysvc.errors import SourceError

TEMPLATE = "merges_tools"


def talk(turns: int, system: str = "") -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    for number in range(turns):
        messages.append({"role": "user", "content": f"question {number}"})
        messages.append({"role": "assistant", "content": f"answer {number}"})
    return {"messages": messages}


def whole(slice_tokenizer: Any, tokenize: Any, row: dict[str, Any]) -> Any:
    (made,), _ = tokenize(slice_tokenizer(TEMPLATE), row)
    return made


def test_drop_leaves_out_what_is_too_long(slice_tokenizer: Any, tokenize: Any) -> None:
    limit = len(whole(slice_tokenizer, tokenize, talk(2)).ids)
    made, result = tokenize(slice_tokenizer(TEMPLATE, max_length=limit), talk(2), talk(3), talk(1))
    assert result.table["source_row"].to_pylist() == [0, 2]
    assert result.row_counts.dropped == {TOO_LONG: 1}
    assert len(made[0].ids) == limit


def test_without_a_max_length_a_row_of_more_than_a_million_tokens_is_quarantined(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    rows = [{"input_ids": [1] * n} for n in (MAX_TOKENS, MAX_TOKENS + 1)]
    for limit, written in ((None, 1), (MAX_TOKENS + 1, 2)):
        tokenizer = slice_tokenizer(TEMPLATE, train_on="all_tokens", max_length=limit)
        result = tokenizer.run([SourceRow(n, row) for n, row in enumerate(rows)])
        assert result.row_counts.rows_written == written
        assert result.row_counts.quarantined == ({TOO_MANY: 1} if limit is None else {})


def test_error_names_the_row_and_both_lengths(slice_tokenizer: Any, tokenize: Any) -> None:
    limit = len(whole(slice_tokenizer, tokenize, talk(2)).ids)
    long = len(whole(slice_tokenizer, tokenize, talk(3)).ids)
    with pytest.raises(SourceError, match=f"test:1: the row has {long} tokens and max_length is {limit}"):
        tokenize(slice_tokenizer(TEMPLATE, max_length=limit, truncation="error"), talk(2), talk(3))


def test_keep_start_trains_the_beginning_of_a_cut_turn_without_its_end(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    row = talk(2)
    full = whole(slice_tokenizer, tokenize, row)
    for limit in range(1, len(full.ids), 3):
        made, result = tokenize(slice_tokenizer(TEMPLATE, max_length=limit, truncation="keep_start"), row)
        if not any(full.mask[:limit]):
            assert result.row_counts.dropped == {NOTHING_LEFT: 1}
            continue
        assert (made[0].ids, made[0].mask) == (full.ids[:limit], full.mask[:limit])
        expected = ["answer 0<|im_end|>", "answer 1<|im_end|>"]
        assert all(whole_.startswith(part) for whole_, part in zip(expected, made[0].trained, strict=False))
        row_counts = result.row_counts
        assert row_counts.tokens_truncated == len(full.ids) - limit
        assert row_counts.tokens_trained == sum(full.mask[:limit])


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_keep_end_turns_keeps_the_head_and_the_last_whole_turns(
    system: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    row = talk(4, system)
    full = whole(slice_tokenizer, tokenize, row)
    seen = set()
    for limit in range(10, len(full.ids), 3):
        made, result = tokenize(slice_tokenizer(TEMPLATE, max_length=limit, truncation="keep_end_turns"), row)
        if not made:
            assert result.row_counts.dropped == {LAST_TURN_TOO_LONG: 1}
            seen.add(0)
            continue
        left = len(made[0].trained)
        seen.add(left)
        assert len(made[0].ids) <= limit
        assert made[0].trained == [f"answer {number}<|im_end|>" for number in range(4 - left, 4)]
        text = made[0].hf.decode(made[0].ids)
        assert text.startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user" if system else "<|im_start|>user"
        )
        assert text == made[0].hf.decode(whole(slice_tokenizer, tokenize, kept_talk(row, left, system)).ids)
    assert seen == {0, 1, 2, 3}


def kept_talk(row: dict[str, Any], turns: int, system: str) -> dict[str, Any]:
    return {"messages": row["messages"][: bool(system)] + row["messages"][-2 * turns :]}


def test_keep_end_turns_does_not_part_messages_of_the_user_that_follow_each_other(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    def ask(*texts: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text} for text in texts]

    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    last = [*ask("a document", "and what about it?"), *answer("it is long")]
    row = {"messages": [*ask("first", "second"), *answer("one"), *last]}
    whole_last = whole(slice_tokenizer, tokenize, {"messages": last})
    part = whole(slice_tokenizer, tokenize, {"messages": last[1:]})
    for limit, kept in ((len(whole_last.ids), [whole_last.ids]), (len(part.ids), [])):
        made, result = tokenize(slice_tokenizer(TEMPLATE, max_length=limit, truncation="keep_end_turns"), row)
        assert [one.ids for one in made] == kept
        assert result.row_counts.dropped == ({} if kept else {LAST_TURN_TOO_LONG: 1})


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.integers(1, 80),
    st.sampled_from(["drop", "keep_start", "keep_end_turns"]),
    st.sampled_from(["all_assistant_messages", "last_assistant_message", "all_tokens"]),
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_no_row_is_left_without_loss_and_all_tokens_are_accounted_for(
    slice_tokenizer: Any, tokenize: Any, sizes: list[int], limit: int, policy: str, train_on: str
) -> None:
    rows = [talk(size + 1, "x" * size) for size in sizes]
    options = {"max_length": limit, "truncation": policy, "train_on": train_on}
    made, result = tokenize(slice_tokenizer(TEMPLATE, **options), *rows)
    result.row_counts.check()
    assert result.row_counts.rows_in == len(rows)
    assert all(any(row.mask) and len(row.ids) <= limit for row in made)
    assert sum(sum(row.mask) for row in made) == result.row_counts.tokens_trained


def test_cut_tokens_that_came_as_tokens(slice_tokenizer: Any, tokenize: Any) -> None:
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    made, _ = tokenize(slice_tokenizer("none", max_length=3, truncation="keep_start"), row)
    assert (made[0].ids, made[0].mask) == ([5, 6, 7], [0, 0, 1])
