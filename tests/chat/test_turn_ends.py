"""Each trained turn has one end: not two where a template writes a second, and none is silent where it writes none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.chat.render.renderer import HAD_BEGIN, HAD_END
from raysvc.chat.row_counts import warnings_of
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import JobConfig, TokenizerConfig

from .conftest import CHATML_LOOP, CHATML_TOKENS, byte_level, save

LOOP, PROMPT = CHATML_LOOP.split("{%- if add_generation_prompt", 1)
PROMPT = "{%- if add_generation_prompt" + PROMPT
AFTER_LOOP = f"{LOOP}{{%- if not add_generation_prompt %}}{{{{- eos_token }}}}{{%- endif %}}{PROMPT}"
IN_LOOP = LOOP.replace("{%- endfor", "{%- if loop.last %}{{- eos_token }}{%- endif %}{%- endfor") + PROMPT
OF_ANSWERS = IN_LOOP.replace("if loop.last", "if loop.last and message.role == 'assistant'")
ROW = {
    "messages": [
        {"role": role, "content": text}
        for role, text in (
            ("user", "a"),
            ("assistant", "The answer is b"),
            ("user", "c"),
            ("assistant", "d\n\ne"),
        )
    ]
}


@pytest.mark.parametrize(
    "template", [AFTER_LOOP, IN_LOOP, OF_ANSWERS], ids=["after", "in any", "in an answer"]
)
@pytest.mark.parametrize(
    ("eos", "last"),
    [("<|im_end|>", "d\n\ne<|im_end|>"), ("<|endoftext|>", "d\n\ne<|im_end|>\n<|endoftext|>")],
)
def test_an_end_of_sequence_behind_the_end_of_turn_is_trained_unless_it_is_the_same_token(
    template: str, eos: str, last: str, tmp_path: Path, slice_tokenizer: Any, tokenize: Any
) -> None:
    folder = save(tmp_path, byte_level(CHATML_TOKENS), template, eos_token=eos)
    made = slice_tokenizer("", folder)
    [row], _ = tokenize(made, ROW)
    assert row.ids == made.tokenizer.hf.apply_chat_template(ROW["messages"], return_dict=False)
    assert row.hf.decode(row.ids).endswith(f"<|im_end|>\n{eos}")
    assert row.trained == ["The answer is b<|im_end|>", last]


GLM_LIKE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]
ONE = {"messages": ROW["messages"][:2]}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("endless")
    return save(folder, byte_level(MARKS), GLM_LIKE, eos_token="<|endoftext|>")


def test_turns_without_an_end_are_counted(endless: str, slice_tokenizer: Any, tokenize: Any) -> None:
    [one, two], result = tokenize(slice_tokenizer("", endless), ONE, ROW)
    assert one.trained == ["\nThe answer is b"]
    assert two.trained == ["\nThe answer is b<|user|>", "\nd\n\ne"]
    counts = result.row_counts
    assert (counts.turns_without_end, counts.rows_without_end) == (2, 1)
    (some,) = warnings_of(counts.to_json())
    assert some.startswith("2 trained turns without an end of turn, and 1 row without a turn that has one")
    _, result = tokenize(slice_tokenizer("", endless), ONE)
    (none,) = warnings_of(result.row_counts.to_json())
    assert none.startswith("NO ROW TEACHES THE MODEL TO STOP")
    assert "train_end: append" in none


def test_a_mark_that_leaves_out_the_end_is_no_end(slice_tokenizer: Any, tokenize: Any) -> None:
    [row], result = tokenize(slice_tokenizer("marks_without_eot"), ROW)
    ended = sum(text.endswith("<|im_end|>") for text in row.trained)
    assert result.row_counts.turns_without_end == 2 - ended


def test_a_text_behind_every_turn_is_an_end(tmp_path: Path, slice_tokenizer: Any, tokenize: Any) -> None:
    text = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</' + m.role + '>\n' }}{% endfor %}"
    folder = save(tmp_path, byte_level(["<|endoftext|>"]), text, eos_token="<|endoftext|>")
    [row], result = tokenize(slice_tokenizer("", folder, train_end="append"), ROW)
    assert row.ids == row.hf.apply_chat_template(ROW["messages"], return_dict=False)
    assert row.trained[-1] == "d\n\ne</assistant>"
    assert result.row_counts.turns_without_end == 0


@pytest.mark.parametrize(
    ("stops", "end"),
    [
        ([], "<|endoftext|>"),
        (["<|endoftext|>", "<|user|>"], "<|endoftext|>"),
        (["<|user|>"], "<|user|>"),
    ],
)
def test_the_end_of_the_model_is_appended_to_a_turn_without_one(
    stops: list[str], end: str, tmp_path: Path, slice_tokenizer: Any, tokenize: Any
) -> None:
    folder = save(tmp_path, byte_level(MARKS), GLM_LIKE, eos_token="<|endoftext|>")
    hf = LoadedTokenizer(TokenizerConfig(name=folder)).hf
    if stops:
        config = {"eos_token_id": hf.convert_tokens_to_ids(stops)}
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    made = slice_tokenizer("", folder, train_end="append")
    rows, result = tokenize(made, ONE, ROW)
    for row, given in zip(rows, (ONE, ROW), strict=True):
        truth = hf.apply_chat_template(given["messages"], return_dict=False)
        assert row.ids == [*truth, hf.convert_tokens_to_ids(end)]
        assert row.trained[-1].endswith(given["messages"][-1]["content"] + end)
        assert row.mask[-1] == 1
    middle = (
        result.row_counts.turns_without_end
    )  # the end of a turn in the middle is the next header, if that stops
    assert middle == (0 if not stops or "<|user|>" in stops else 1)


def test_nothing_is_appended_to_a_turn_that_has_an_end(slice_tokenizer: Any, tokenize: Any) -> None:
    [plain], _ = tokenize(slice_tokenizer("chatml_bare"), ROW)
    [row], result = tokenize(slice_tokenizer("chatml_bare", train_end="append"), ROW)
    assert (row.ids, row.mask) == (plain.ids, plain.mask)
    assert result.row_counts.turns_without_end == 0


def test_rows_with_and_without_an_end_side_by_side_get_it_where_they_need_it(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    short = {"messages": [{**ONE["messages"][0], "content": "What is it?"}, ONE["messages"][1]]}
    asked = [{"messages": [*short["messages"], {"role": "user", "content": f"and {n}"}]} for n in range(60)]
    made = slice_tokenizer("no_last_eot", train_end="append")
    rows, result = tokenize(made, *asked, short, *asked[:5])
    truth = made.tokenizer.hf.apply_chat_template(short["messages"], return_dict=False)
    assert rows[60].ids == [*truth, made.tokenizer.hf.eos_token_id]
    assert {row.trained[0] for row in rows} == {"The answer is b<|im_end|>"}
    assert [row.mask[-1] for row in rows] == [*[0] * 60, 1, *[0] * 5]
    assert result.row_counts.turns_without_end == 0


ASKED, SAID, WORSE = (
    [{"role": "user", "content": "p"}],
    *([{"role": "assistant", "content": text}] for text in "cr"),
)
APPENDED: dict[
    str, tuple[list[dict[str, Any]], dict[str, Any], list[str]]
] = {  # rows, options -> what is trained
    "pairs": ([{"prompt": ASKED, "chosen": SAID, "rejected": WORSE}], {}, ["\nc", "\nr"]),
    "pairs of texts": ([{"prompt": "p", "chosen": " c", "rejected": " r"}], {}, [" c", " r"]),
    "labels": (
        [{"prompt": ASKED, "completion": one, "label": True} for one in (SAID, WORSE)],
        {},
        ["\nc", "\nr", "\nr", "\nc"],
    ),
    "a completion": ([{"prompt": ASKED, "completion": SAID}], {"train_on": "completion"}, ["\nc"]),
    "each turn": (
        [ROW],
        {"train_on": "each_assistant_turn"},
        ["\nThe answer is b", "\nd\n\ne"],
    ),
    "the last turns": (
        [ROW],
        {"max_length": 12, "truncation": "keep_end_turns"},
        ["\nd\n\ne"],
    ),
}


@pytest.mark.parametrize("kind", APPENDED)
def test_every_kind_of_row_has_an_end_where_one_is_appended(kind: str, endless: str, tmp_path: Path) -> None:
    given, options, texts = APPENDED[kind]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    entries = [
        raysvc.tokenize(
            source={"path": str(tmp_path / "rows.jsonl")},
            tokenizer=endless,
            cache={"root": str(tmp_path / "cache")},
            train_end=end,
            **options,
        )
        for end in ("template", "append")
    ]
    plain, ended = (entry.table().to_pylist() for entry in entries)
    hf = LoadedTokenizer(TokenizerConfig(name=endless)).hf
    for row, before, text in zip(ended, plain, texts, strict=True):
        trained = [token for token, is_on in zip(row["input_ids"], row["loss_mask"], strict=True) if is_on]
        assert hf.decode(trained) == text + "<|endoftext|>"
        is_text = kind == "pairs of texts"  # these have one in any case
        assert row["input_ids"] == [*before["input_ids"], *([] if is_text else [hf.eos_token_id])]
    assert ["train_end" in entry.entries[0].recipe for entry in entries] == [False, True]
    assert entries[0].key != entries[1].key


def test_a_turn_in_the_middle_gets_no_end_since_the_row_would_be_no_render(
    tmp_path: Path, slice_tokenizer: Any, tokenize: Any
) -> None:
    folder = save(tmp_path, byte_level(MARKS), GLM_LIKE, eos_token="<|endoftext|>")
    hf = LoadedTokenizer(TokenizerConfig(name=folder)).hf
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": hf.eos_token_id}))
    [row], result = tokenize(slice_tokenizer("", folder, train_end="append"), ROW)
    assert row.trained == ["\nThe answer is b", "\nd\n\ne<|endoftext|>"]
    assert result.row_counts.turns_without_end == 1
    made, result = tokenize(
        slice_tokenizer("", folder, train_end="append", train_on="each_assistant_turn"), ROW
    )
    assert [each.trained for each in made] == [["\nThe answer is b<|endoftext|>"], ["\nd\n\ne<|endoftext|>"]]
    assert result.row_counts.turns_without_end == 0


def test_append_goes_into_the_job_and_its_recipe_alone() -> None:
    with pytest.raises(ValueError, match="all_tokens has none"):
        JobConfig(source={"path": "x"}, tokenizer="y", train_on="all_tokens", train_end="append")
    assert JobConfig(source={"path": "x"}, tokenizer="y", train_end="append").text.train_end == "append"


BOS = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]


@pytest.fixture(scope="module")
def begins(tmp_path_factory: pytest.TempPathFactory) -> str:
    backend = byte_level(BOS, add_bos="<s>")
    folder = tmp_path_factory.mktemp("begins")
    return save(folder, backend, "{{ bos_token }}" + CHATML_LOOP, bos_token="<s>", eos_token="<|endoftext|>")


@pytest.mark.parametrize("end", ["", "<|endoftext|>", "<|im_end|>\n", "<|im_end|>"])
@pytest.mark.parametrize("begin", ["", "<s>"])
def test_a_rendered_text_gets_no_second_begin_and_no_second_end(
    begin: str, end: str, begins: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    body = f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na{end}"
    prompt, answer = body.removesuffix("a" + end), "a" + end
    cases: list[tuple[dict[str, Any], str]] = [
        ({"text": begin + body}, "all_tokens"),
        ({"prompt": begin + prompt, "completion": answer}, "completion"),
        ({"prompt": begin + prompt, "chosen": answer, "rejected": "b" + end}, "completion"),
    ]
    for given, mode in cases:
        rows, result = tokenize(slice_tokenizer("", begins, train_on=mode), given)
        row = rows[0]
        expected = row.hf(body)["input_ids"] + ([] if end else [row.hf.eos_token_id])
        assert row.ids == expected, given
        assert row.mask[0] == 0
        begun, ended = (result.row_counts.normalized.get(name, 0) for name in (HAD_BEGIN, HAD_END))
        assert (begun, ended) == (int(bool(begin)), int(bool(end)))


def test_steps_behind_a_prompt_that_begins_already_have_one_begin(
    begins: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    given = {"prompt": "q", "completions": ["one", "two"], "labels": [True, False]}
    [plain], _ = tokenize(slice_tokenizer("", begins), given)
    [row], result = tokenize(slice_tokenizer("", begins), {**given, "prompt": "<s>q"})
    assert row.ids == plain.ids
    assert result.row_counts.normalized == {HAD_BEGIN: 1}
