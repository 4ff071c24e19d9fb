"""What we assume of chat templates and of the dictionaries that they get, held against `transformers` and the templates of the zoo."""

from __future__ import annotations

import json
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.source.template_fit import CONTENT_ADDED, TOOLS_BARE
from raysvc.chat.source.tools import TOOLS_WRAPPED
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TextSpec, TokenizerConfig
from tests.chat.zoo import TOOL, Row, as_taken, say, tokenizer_folder, zoo

TEMPLATES = {template.name: template for template in zoo()}
FIRST = (
    "deepseek_r1_distill_training",
    "gptoss_training",
    "lfm2",
    "mistral_v3",
    "olmo2",
    "phi3_5",
    "qwen2_5",
    "qwen3_8",
)
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST)) for name in TEMPLATES]
ASKED = say("user", "weather in Oslo?")
SAID = say("assistant", "Rain it is.")
RESULT = say("tool", "rain", tool_call_id="callid001", name="get_weather")


def calling(arguments: Any, **fields: Any) -> Row:
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        **fields,
        "tool_calls": [{"id": "callid001", "type": "function", "function": function}],
    }


def with_call(arguments: Any, **fields: Any) -> Row:
    return {"messages": [ASKED, calling(arguments, **fields), RESULT, SAID], "tools": [TOOL]}


@lru_cache(maxsize=4)
def loaded(name: str, folder: Path) -> LoadedTokenizer:
    path = tokenizer_folder(TEMPLATES[name], folder / name)
    return LoadedTokenizer(TokenizerConfig(name=path, date=date.today()))


@lru_cache(maxsize=4)
def theirs(path: str) -> Any:
    """The tokenizer as `transformers` loads it: the truth."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def shown(folder: Path, template: str, messages: list[Row], tools: list[Row] | None = None) -> str:
    """What `apply_chat_template` of `transformers` writes."""
    hf = theirs(loaded("qwen2_5", folder).config.name)
    return str(hf.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


def rendered(tokenizer: LoadedTokenizer, row: Row) -> str | None:
    """What `apply_chat_template` writes, None where the template refuses."""
    try:
        hf = theirs(tokenizer.config.name)
        return str(hf.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False))
    except Exception:  # noqa: BLE001  a template may raise anything
        return None


@lru_cache(maxsize=2)
def slices_of(tokenizer: LoadedTokenizer) -> SliceTokenizer:
    return SliceTokenizer(TextSpec(tokenizer=tokenizer.config), "", tokenizer)


def ours(tokenizer: LoadedTokenizer, row: Row) -> tuple[list[int], Any]:
    """(ids of the one row, the result)."""
    result = slices_of(tokenizer).run([SourceRow(0, row)])
    ids = result.table["input_ids"].to_pylist()
    return (ids[0] if ids else []), result


def ids_of(tokenizer: LoadedTokenizer, text: str) -> list[int]:
    return list(tokenizer.hf(text, add_special_tokens=False)["input_ids"])


def test_a_null_of_a_message_is_not_given_to_the_template(folder: Path) -> None:
    """`apply_chat_template` leaves out keys of messages whose value is None, so null and absent are one thing."""
    template = "{% for m in messages %}{{ m.content is defined }}{{ m.tool_calls is defined }};{% endfor %}"
    said = [{"role": "assistant", "content": None, "tool_calls": None}]
    assert shown(folder, template, said) == "FalseFalse;"


def test_a_null_inside_a_call_is_given_to_the_template(folder: Path) -> None:
    """A null among the arguments of a call is a value, and reaches the template."""
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert shown(folder, template, [calling({"city": None})]) == '{"city": null}'


def test_json_in_a_template_keeps_the_order_of_keys(folder: Path) -> None:
    """`tojson` writes keys as they come, so a declaration in another order is another prompt."""
    for tool in ({"b": 1, "a": 2}, {"a": 2, "b": 1}):
        assert shown(folder, "{{ tools | tojson }}", [ASKED], [tool]) == json.dumps([tool])


def test_a_template_cannot_change_messages_or_tools(folder: Path) -> None:
    """Templates run in a sandbox where lists and dicts are immutable, so rows may share their objects."""
    from jinja2.exceptions import SecurityError

    for change in ("messages.append(1)", "messages[0].update(a=1)", "tools[0].pop('type')"):
        with pytest.raises(SecurityError):
            shown(folder, f"{{{{ {change} }}}}", [ASKED], [TOOL])


def test_unknown_keys_of_a_message_reach_the_template(folder: Path) -> None:
    """`apply_chat_template` passes on keys that it does not know, so what a message says about its loss changes no text by itself."""
    assert shown(folder, "{{ messages[0].loss_mask }}", [{**SAID, "loss_mask": 0}]) == "0"


def test_filters_that_draw_are_in_the_environment_of_templates(folder: Path) -> None:
    """`|random` and `lipsum` work in a chat template, so a template has to be looked at for them."""
    for drawing in ("{{ range(9999) | random }}", "{{ lipsum() }}"):
        assert len({shown(folder, drawing, [ASKED]) for _ in range(4)}) > 1


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_content_beside_a_call_is_an_absent_one(name: str, folder: Path) -> None:
    """A template that takes a call without a content writes the same for an empty one; any other fails without."""
    tokenizer, template = loaded(name, folder), TEMPLATES[name]
    arguments = '{"city": "Oslo"}' if tokenizer.fit(True).text_arguments else {"city": "Oslo"}
    absent, empty = (rendered(tokenizer, with_call(arguments, **more)) for more in ({}, {"content": ""}))
    if template.name.startswith(("idefics", "llava", "smolvlm")):
        empty = rendered(tokenizer, as_taken(template, with_call(arguments, content="")))
        empty = None if absent is None else empty
    assert absent in (None, empty)
    if empty is not None:
        assert ("tool_calls" in tokenizer.fit(True).needs_content) is (absent is None)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_without_a_content_is_what_the_empty_one_is(name: str, folder: Path) -> None:
    """So the normal form fills it in where a template needs it, and changes no other template's text."""
    tokenizer = loaded(name, folder)
    for nothing in ({}, {"content": None}):
        filled, _ = ours(tokenizer, with_call({"city": "Oslo"}, content=""))
        made, result = ours(tokenizer, with_call({"city": "Oslo"}, **nothing))
        assert made == filled
        assert (CONTENT_ADDED in result.row_counts.normalized) is (
            bool(made) and "tool_calls" in tokenizer.fit(True).needs_content
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_null_argument_is_shown_or_left_out_and_never_a_fault(name: str, folder: Path) -> None:
    """Templates write a null argument as null, None or nothing, or leave out its key."""
    tokenizer = loaded(name, folder)
    without, _ = ours(tokenizer, with_call({"city": "Oslo"}, content=""))
    made, result = ours(tokenizer, with_call({"city": "Oslo", "days": None}, content=""))
    assert bool(made) is bool(without), result.examples


def served(tool: Row) -> Row:
    """A declaration as a server with OpenAI's protocol gives it to a template: its request model, dumped with all its fields."""
    function = tool.get("function", tool)
    return {
        "type": "function",
        "function": {key: function.get(key) for key in ("name", "description", "parameters")},
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_bare_declaration_renders_as_at_inference(name: str, folder: Path) -> None:
    """No template of the zoo wants bare declarations, and in any shape a row renders as a server would render it."""
    tokenizer, template = loaded(name, folder), TEMPLATES[name]
    assert not tokenizer.fit(True).bare_tools
    function = TOOL["function"]
    anthropic = {"input_schema" if key == "parameters" else key: value for key, value in function.items()}
    said = {"messages": [ASKED, SAID]}
    truth = rendered(
        tokenizer, as_taken(template, {**said, "tools": [served(function)]}) | {"tools": [served(function)]}
    )
    for tools in (
        [function],
        [anthropic],
        json.dumps([function]),
        [json.dumps(function)],
        [{"type": "function", **function}],
    ):
        made, result = ours(tokenizer, {**said, "tools": tools})
        assert made == (ids_of(tokenizer, truth) if truth is not None else []), result.examples
        assert TOOLS_BARE not in result.row_counts.normalized
        assert result.row_counts.normalized.get(TOOLS_WRAPPED) == (1 if made else None)
