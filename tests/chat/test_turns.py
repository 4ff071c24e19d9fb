"""One row for each turn, whole last turns of long rows, and reasoning that a template removes."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import raysvc
from raysvc.chat.row_counts import reasoning_remedy, warnings_of
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.cli.main import app
from raysvc.job.config import TextSpec, TokenizerConfig

from .conftest import metaspace, save
from .test_zoo import hugging_face, template_named
from .zoo import Template, say, tokenizer_folder
from .zoo_judge import faults, runs, truth

U, A, S, T = "user", "assistant", "system", "tool"
GEMMA_LIKE = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- first if loop.first }}{{ message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
THINKS = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last and message.reasoning_content %}
    {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def made(folder: str, *rows: Any, **options: Any) -> Any:
    tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder, date=date.today()), **options))
    result = tokenizer.run([SourceRow(n, {"messages": row}) for n, row in enumerate(rows)])
    return hugging_face(folder), result


def gemma(folder: Path) -> str:
    return tokenizer_folder(Template("gemma_like", GEMMA_LIKE, "", ("<bos>", "<end_of_turn>")), folder)


def chat(turns: int) -> list[dict[str, Any]]:
    messages = [say(S, "Be brief.")]
    for number in range(turns):
        messages += [say(U, f"question {number}"), say(A, f"answer {number}")]
    return messages


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_keep_end_turns_keeps_a_system_prompt_inside_the_first_user_turn(kind: str, tmp_path: Path) -> None:
    folder = gemma(tmp_path)
    if kind == "metaspace":
        backend = metaspace(["<bos>", "<start_of_turn>", "<end_of_turn>"])
        roles = {"bos_token": "<bos>", "eos_token": "<end_of_turn>"}
        folder = save(tmp_path / "metaspace", backend, GEMMA_LIKE, **roles)
    hf, whole = made(folder, chat(6))
    length = len(whole.table["input_ids"][0])
    _, result = made(folder, chat(6), max_length=length // 2, truncation="keep_end_turns")
    ids = result.table["input_ids"][0].as_py()
    kept = next(
        n
        for n in range(6, 0, -1)
        if len(hf.apply_chat_template([chat(6)[0], *chat(6)[-2 * n :]], return_dict=False)) <= length // 2
    )
    assert 1 <= kept < 6
    assert ids == hf.apply_chat_template([chat(6)[0], *chat(6)[-2 * kept :]], return_dict=False)
    assert "Be brief." in hf.decode(ids)
    counts = result.row_counts
    assert (counts.rows_written, counts.rows_truncated) == (1, 1)
    assert counts.tokens_truncated == length - len(ids)


def test_a_turn_that_is_too_long_alone_is_dropped_by_name(tmp_path: Path) -> None:
    folder = gemma(tmp_path)
    _, result = made(folder, chat(3), max_length=5, truncation="keep_end_turns")
    assert result.row_counts.dropped == {"the last turn alone is longer than max_length": 1}


def thinking(folder: Path) -> str:
    return tokenizer_folder(Template("thinks", THINKS, "", ("<|endoftext|>", "<|im_end|>")), folder)


THOUGHTS = [
    say(U, "2 + 2?"),
    say(A, "It is 4.", reasoning_content="two and two"),
    say(U, "and 5 + 5?"),
    say(A, "Ten.", reasoning_content="five twice"),
]


def test_each_assistant_turn_is_a_row_as_the_model_sees_it_when_it_speaks(tmp_path: Path) -> None:
    hf, result = made(thinking(tmp_path), THOUGHTS, chat(1), train_on="each_assistant_turn")
    table = result.table
    assert table["source_row"].to_pylist() == [0, 0, 1]
    for index, size in enumerate((2, 4)):
        ids, mask = table["input_ids"][index].as_py(), table["loss_mask"][index].as_py()
        assert ids == hf.apply_chat_template(THOUGHTS[:size], return_dict=False)
        said = THOUGHTS[size - 1]
        trained = hf.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
        assert trained == f"<think>\n{said['reasoning_content']}\n</think>\n\n{said['content']}<|im_end|>"
    assert (result.row_counts.rows_in, result.row_counts.rows_written) == (2, 2)
    assert result.row_counts.reasoning_removed == 0


def test_reasoning_that_the_template_removes_is_counted(tmp_path: Path) -> None:
    folder = thinking(tmp_path)
    _, result = made(folder, THOUGHTS, chat(2))
    assert result.row_counts.reasoning_removed == 1
    _, last = made(folder, THOUGHTS, train_on="last_assistant_message")
    assert last.row_counts.reasoning_removed == 0


def test_reasoning_that_is_removed_once_and_written_once_is_counted_where_both_say_the_same(
    tmp_path: Path,
) -> None:
    again = [
        {**one, "reasoning_content": "as ever"} if one["role"] == "assistant" else one for one in THOUGHTS
    ]
    _, result = made(thinking(tmp_path), again)
    assert result.row_counts.reasoning_removed == 1


NO_PLACE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
KEEPS, NONE = "train_on: each_assistant_turn keeps it", "set tokenizer.chat_template"


@pytest.mark.parametrize(
    ("template", "row", "train_on", "remedy"),
    [
        (THINKS, THOUGHTS, "all_assistant_messages", KEEPS),
        (THINKS, THOUGHTS, "each_assistant_turn", ""),
        (NO_PLACE, THOUGHTS, "all_assistant_messages", NONE),
        (NO_PLACE, THOUGHTS, "each_assistant_turn", NONE),
        (NO_PLACE, THOUGHTS, "last_assistant_message", NONE),
        (NO_PLACE, chat(2), "all_assistant_messages", ""),
        ("qwen2_5", THOUGHTS, "each_assistant_turn", NONE),
        ("qwen3", THOUGHTS, "all_assistant_messages", KEEPS),
        ("qwen3", THOUGHTS, "each_assistant_turn", ""),
    ],
)
def test_a_remedy_for_lost_reasoning_is_told_only_where_it_helps(
    template: str, row: Any, train_on: str, remedy: str, tmp_path: Path
) -> None:
    is_text = "{" in template
    own = (
        Template("own", template, "", ("<|endoftext|>", "<|im_end|>"))
        if is_text
        else template_named(template)
    )
    _, result = made(tokenizer_folder(own, tmp_path), row, chat(1), train_on=train_on)
    counts = result.row_counts.to_json()
    assert (remedy in reasoning_remedy(counts)) if remedy else (reasoning_remedy(counts) == "")
    assert [remedy in warning for warning in warnings_of(counts)] == [True] * bool(remedy)
    other = NONE if remedy == KEEPS else KEEPS
    assert other not in " ".join(warnings_of(counts))


def test_a_pair_is_not_told_to_be_turns(tmp_path: Path) -> None:
    folder = thinking(tmp_path)
    tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder)))
    pair = {"chosen": THOUGHTS, "rejected": [*THOUGHTS[:-1], say(A, "Nine.", reasoning_content="hm")]}
    no_place = Template("own", NO_PLACE, "", ("<|endoftext|>", "<|im_end|>"))
    other = SliceTokenizer(
        TextSpec(tokenizer=TokenizerConfig(name=tokenizer_folder(no_place, tmp_path / "b")))
    )
    for one, count in ((tokenizer, 0), (other, 2)):
        counts = one.run([SourceRow(0, pair)]).row_counts
        assert (counts.reasoning_removed, counts.reasoning_kept_by_turns) == (count, 0)


def job_file(folder: Path, rows: list[Any], **options: Any) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    job = {
        "source": {"path": str(folder / "rows.jsonl"), "format": "chat"},
        "tokenizer": thinking(folder / "tokenizer"),
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 2},
        "trainer": {"run_dir": str(folder / "run")},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job | options))
    return folder / "job.yaml"


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What builds warn of; a client of another test may lose its server meanwhile."""
    warnings = (line for line in caplog.records if line.levelname == "WARNING")
    return [line.getMessage() for line in warnings if line.name.startswith("raysvc.builds")]


def test_a_build_warns_once_of_removed_reasoning_and_every_view_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_file(tmp_path, [THOUGHTS, chat(2), THOUGHTS])
    raysvc.tokenize(job)
    (warning,) = logged(caplog)
    assert "the reasoning of 2 trained messages" in warning
    assert "train_on: each_assistant_turn" in warning
    page = tmp_path / "page.html"
    run = CliRunner().invoke
    assert "trained messages without their reasoning" in run(app, ["tokenize", "-c", str(job)]).stdout
    assert "the reasoning of 2 trained messages" in run(app, ["show", "-c", str(job)]).stdout
    assert run(app, ["report", "-c", str(job), "--out", str(page)]).exit_code == 0
    assert "the reasoning of 2 trained messages" in page.read_text()


def test_a_build_that_keeps_the_reasoning_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_file(tmp_path, [THOUGHTS, chat(2), THOUGHTS], train_on="each_assistant_turn")
    raysvc.tokenize(job)
    assert logged(caplog) == []
    assert "reasoning" not in CliRunner().invoke(app, ["tokenize", "-c", str(job)]).stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("glm4moe", ["\n<think></think>\nGood day to you.<|user|>", "\n<think></think>\nTen, I think."]),
        ("nemotron_3_nano", ["</think>Good day to you.<|im_end|>", "</think>Ten, I think.<|im_end|>"]),
        (
            "qwen2_5_vl",
            ["Good day to you.<|im_end|>", "Ten, I think.<|im_end|>"],
        ),  # a system prompt of its own
        ("llama3", ["Good day to you.<|eot_id|>", "Ten, I think.<|eot_id|>"]),
        ("kimi_k2", ["Good day to you.<|im_end|>", "Ten, I think.<|im_end|>"]),
    ],
)
def test_a_conversation_may_begin_with_the_assistant(name: str, says: list[str], tmp_path: Path) -> None:
    row = [say(A, "Good day to you."), say(U, "what is 5 + 5?"), say(A, "Ten, I think.")]
    template = template_named(name)
    hf, result = made(tokenizer_folder(template, tmp_path), row)
    ids, mask = result.table["input_ids"][0].as_py(), result.table["loss_mask"][0].as_py()
    found = truth(hf, {"messages": row}, template.marked)
    assert faults(hf, {"messages": row}, [0, 2], found, ids, mask) == []
    assert (found.mask is None) == (name == "kimi_k2")
    assert [hf.decode(ids[start:end]) for start, end in runs(mask)] == says


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("glm4moe", "tool_calls"),  # writes a text of a call as it is, with its line ends
        ("gemma4", "tool_calls"),
        ("qwen2_5", "tool_calls"),
        ("gptoss", "thinking"),
        ("qwen3", "reasoning_content"),
    ],
)
def test_a_turn_may_repeat_what_others_said(name: str, field: str, tmp_path: Path) -> None:
    said = "Write this to the file:\n\x8c it's <b>\\d+</b>"
    call = {"type": "function", "function": {"name": "write", "arguments": {"text": said}}}
    own: Any = [call] if field == "tool_calls" else f"They want {said!s} and that is easy."
    row = [
        say(U, said),
        {**say(A, ""), "tool_calls": [call]} if own == [call] else {**say(A, "Done."), field: own},
    ]
    hf, result = made(tokenizer_folder(template_named(name), tmp_path), row)
    assert result.row_counts.quarantined == {}
    trained = [
        hf.decode(result.table["input_ids"][0].as_py()[a:b])
        for a, b in runs(result.table["loss_mask"][0].as_py())
    ]
    assert "it's" in "".join(trained)


def calling(name: str, text: str, *results: str, says: str = "") -> list[dict[str, Any]]:
    call = {"type": "function", "id": "callid001", "function": {"name": name, "arguments": {"text": text}}}
    return [
        say(U, "Do it, please."),
        say(A, says, tool_calls=[call]),
        *(say(T, result, tool_call_id="callid001", name=name) for result in results),
    ]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        # empty results in the block of their call, and one that is a part of any block
        ("diffusion_gemma", [*calling("mkdir", "x", ""), say(A, "It was made.")]),
        ("gemma4", [*calling("mkdir", "x", "\n"), say(A, "It was made.")]),
        ("muse_glimmer", [*calling("count", "a b", "a"), say(A, "One a.")]),
        ("lfm2_2_5_vl", [*calling("write", "if a:\n\tb = 'c\\d'\n", "fine"), say(A, "Written.")]),
        ("diffusion_gemma", [say(U, "Hello."), say(A, "First part."), say(A, "Second part.")]),
        ("diffusion_gemma", [say(U, "Hello."), say(A, "First part."), *calling("mkdir", "x", "ok")[1:]]),
    ],
)
def test_what_agents_do_is_trained(name: str, row: list[dict[str, Any]], tmp_path: Path) -> None:
    template = template_named(name)
    hf, result = made(tokenizer_folder(template, tmp_path), row)
    assert result.examples == ()
    ids, mask = (result.table[column][0].as_py() for column in ("input_ids", "loss_mask"))
    places = [place for place, message in enumerate(row) if message["role"] == A]
    oracle = template.text if "endgeneration" in template.text else template.marked
    found = truth(hf, {"messages": row}, oracle)
    wrong = faults(hf, {"messages": row}, places, found, ids, mask)
    assert [each for each in wrong if not each.startswith("trained: ")] == []  # a short result is in any text
    assert (found.mask is None) == (name == "gemma4")


@pytest.mark.parametrize("says", ["I look.", "x"])
def test_a_text_behind_the_results_of_its_calls_is_refused(says: str, tmp_path: Path) -> None:
    folder, row = tokenizer_folder(template_named("gemma4_v5"), tmp_path), calling("cat", "x", "y", says=says)
    _, result = made(folder, [*row, say(A, "Seen.")])
    assert result.row_counts.quarantined == {"the template writes a text behind the results of its calls": 1}
    _, result = made(folder, [*row, say(A, "Seen.")], train_on="each_assistant_turn")
    assert result.table.num_rows == 2


@pytest.mark.parametrize(  # the results as blocks of their own, or as a part of the call's
    ("each", "content"),
    [
        ("other in messages if other", "other.content"),
        ("k in range(messages | length) if messages[k]", "messages[k].content"),
    ],
)
def test_a_text_that_stays_behind_its_results_without_them_is_refused_too(
    each: str, content: str, tmp_path: Path
) -> None:
    text = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
        "{% for call in m.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>"
        f"{{% for {each}.tool_call_id == call.id %}}<tool_response>{{{{ {content} }}}}</tool_response>{{% endfor %}}"
        "{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = tokenizer_folder(Template("calls first", text, "", ("<s>", "<|im_end|>")), tmp_path)
    for says, refused in {"I look.": 1, "": 0}.items():
        _, result = made(folder, [*calling("cat", "x", "y", says=says), say(A, "Seen.")])
        assert sum(result.row_counts.quarantined.values()) == refused, says
