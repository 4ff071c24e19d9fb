"""Tools that rows share are the same objects, and their JSON, written once for each form, is what templates write of new ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source import tools
from raysvc.chat.source.template_fit import TOOLS_BARE
from raysvc.chat.source.tools import TOOLS_LISTED, TOOLS_PARSED, TOOLS_UNKNOWN, TOOLS_WRAPPED, read_tools

FORMS = (
    "",
    "(indent=4)",
    "(indent=true)",
    "(ensure_ascii=true)",
    "(sort_keys=true)",
    "(separators=(',', ':'))",
)
FORMS += (
    "(indent=4, ensure_ascii=true)",
    "(indent=4, sort_keys=true)",
    "(indent=4, separators=('; ', '= '))",
)
FORMS += ("(indent='')", "(none, 4)", "(false, none, [',', ':'])", "(ensure_ascii=1, sort_keys=1)")
SHOWN = "".join(
    f"{{{{ {value} | tojson{form} }}}}\n"
    for form in FORMS
    for value in ("tools", "tool", "tool.function.parameters", "tool.function.name")
)
TEMPLATE = (
    f"{{% for tool in tools %}}{SHOWN}{{% endfor %}}"
    "{% for message in messages %}{{ message.role }}{{ (message.calls or {}) | tojson }}{% endfor %}"
)
ASKED = [{"role": "user", "content": "hello"}]


def tool(name: str, *cities: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"enum": list(cities)}, "a": {"type": "é<'"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SETS = [[tool("f", "Oslo")], [tool("f", "Rome")], [tool("g", "Oslo"), tool("f")], [tool("g", "Oslo", "Oslo")]]


@pytest.fixture(autouse=True)
def nothing_shared() -> Iterator[None]:
    tools._tools_of.cache_clear()
    tools._written.clear()
    yield
    tools._tools_of.cache_clear()
    tools._written.clear()


def as_transformers_writes(shown: list[Any]) -> str:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    given = {"messages": ASKED, "tools": shown, "add_generation_prompt": False}
    return str(_compile_jinja_template(TEMPLATE).render(**given))


@pytest.mark.parametrize("limit", [tools.MAX_OBJECTS, 0])
def test_shared_tools_are_written_as_new_ones_are(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MAX_OBJECTS", limit)
    template, expected = ChatTemplate(TEMPLATE, {}), [as_transformers_writes(given) for given in SETS]
    assert len({*expected}) == len(SETS)
    for _ in range(3):
        for given, text in zip(SETS, expected, strict=True):
            assert template.render(ASKED, read_tools(json.dumps(given), set())).text == text
            assert template.render(ASKED, read_tools(given, set())).text == text


def test_rows_with_the_same_text_write_its_json_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "{% for tool in tools %}{{ tool | tojson }}{{ tool | tojson(indent=4) }}{% endfor %}"
    template, written = ChatTemplate(shown, {}), []
    dumps = json.dumps
    monkeypatch.setattr(
        json, "dumps", lambda *args, **given: written.append(args[0]) or dumps(*args, **given)
    )
    for _ in range(5):
        template.render(ASKED, read_tools(dumps(SETS[2]), set()))
    assert written == [each for each in SETS[2] for _ in range(2)]


def test_no_more_objects_are_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MAX_OBJECTS", 40)
    for number in range(100):
        read_tools(json.dumps([tool(f"f{number}", "Oslo")]), set())
        assert 8 <= len(tools._written) <= 48
    for ident, (value, forms) in tools._written.items():
        assert (id(value), forms) == (ident, {})


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather of a city.", "parameters": SCHEMA}
WRAPPED = {"type": "function", "function": FUNCTION}
BARE_ONES: dict[str, dict[str, Any]] = {
    "bare": FUNCTION,
    "in another order": {key: FUNCTION[key] for key in ("parameters", "description", "name")},
    "of Responses": {"type": "function", **FUNCTION},
    "of Anthropic": {"name": "get_weather", "description": "Weather of a city.", "input_schema": SCHEMA},
    "custom of Anthropic": {
        "type": "custom",
        "name": "get_weather",
        "description": "Weather of a city.",
        "input_schema": SCHEMA,
        "cache_control": {"type": "ephemeral"},
    },
    "of MCP": {"name": "get_weather", "description": "Weather of a city.", "inputSchema": SCHEMA},
}
CONTAINERS: dict[str, Any] = {
    "a list": lambda one: [one],
    "one": lambda one: one,
    "JSON text of a list": lambda one: json.dumps([one]),
    "JSON text of one": json.dumps,
    "a list of JSON texts": lambda one: [json.dumps(one)],
    "JSON text of a list of them": lambda one: json.dumps([json.dumps(one)]),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("shape", ["wrapped", *BARE_ONES])
def test_a_declaration_is_given_as_servers_give_it(container: str, shape: str) -> None:
    changes: set[str] = set()
    given = CONTAINERS[container](BARE_ONES.get(shape, WRAPPED))
    kept = copy.deepcopy(given)
    assert json.dumps(read_tools(given, changes)) == json.dumps([WRAPPED])
    assert given == kept
    listed = container in ("one", "JSON text of one")
    counted = {TOOLS_WRAPPED: shape != "wrapped", TOOLS_PARSED: "JSON" in container, TOOLS_LISTED: listed}
    assert changes == {change for change, is_so in counted.items() if is_so}


@pytest.mark.parametrize("given", [None, "", " ", "[]", [], "{}", {}])
def test_no_tools_are_none(given: Any) -> None:
    changes: set[str] = set()
    assert (read_tools(given, changes), changes) == (None, set())


@pytest.mark.parametrize(
    "other",
    [
        {"type": "web_search"},
        {"type": "computer_20241022", "name": "computer"},
        {"type": "custom", "name": "f", "format": {"type": "text"}},
        {"function_declarations": [FUNCTION]},
    ],
)
def test_a_tool_without_a_function_stays_as_it_is(other: dict[str, Any]) -> None:
    changes: set[str] = set()
    assert read_tools([other, WRAPPED], changes) == [other, WRAPPED]
    assert changes == ({TOOLS_UNKNOWN} if "type" not in other else set())


@pytest.mark.parametrize("container", ["one", "JSON text of one"])
@pytest.mark.parametrize("shape", ["wrapped", "bare"])
def test_one_declaration_in_the_place_of_the_list_is_a_list_of_one(
    container: str, shape: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    rows = [
        {"messages": [*ASKED, {"role": "assistant", "content": "hi there"}], "tools": given}
        for given in ([WRAPPED], CONTAINERS[container](BARE_ONES.get(shape, WRAPPED)))
    ]
    (listed, one), result = tokenize(slice_tokenizer("merges_tools"), *rows)
    assert one.ids == listed.ids
    assert result.row_counts.normalized[TOOLS_LISTED] == 1


@pytest.mark.parametrize("given", [{"get_weather": FUNCTION}, {"tools": [WRAPPED]}])
@pytest.mark.parametrize("as_text", [False, True])
def test_an_object_that_declares_no_tool_sets_its_row_aside(
    given: dict[str, Any], as_text: bool, slice_tokenizer: Any, tokenize: Any
) -> None:
    said = [*ASKED, {"role": "assistant", "content": "hi there"}]
    rows = [{"messages": said}, {"messages": said, "tools": json.dumps(given) if as_text else given}]
    made, result = tokenize(slice_tokenizer("merges_tools"), *rows)
    assert len(made) == 1
    assert result.row_counts.quarantined == {"'tools' is an object that declares no tool": 1}


BARE_NAMES = "{% for tool in tools or [] %}{{ tool.name + ': ' + tool.description + tool.parameters | tojson }}{% endfor %}"
EITHER = "{% for t in tools or [] %}{% set t = t.function if t.function is defined else t %}{{ t.name + t.description + t.parameters | tojson }}{% endfor %}"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("shows", "bare"),
    [
        (BARE_NAMES, True),
        (EITHER, False),
        ("{{ tools | tojson if tools }}", False),
        ("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}", False),
        ("{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}", False),
        ("{% for t in tools or [] %}{{ t.name + t.function.name }}{% endfor %}", False),  # neither
        ("", False),
    ],
)
@pytest.mark.parametrize("shape", ["wrapped", *BARE_ONES])
def test_a_template_that_wants_bare_declarations_gets_them(
    shows: str, bare: bool, shape: str, tokenizer_folder: Any, tokenize: Any
) -> None:
    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.job.config import TextSpec, TokenizerConfig

    config = TokenizerConfig(name=tokenizer_folder("chatml_bare"), chat_template=shows + LOOP)
    tokenizer = SliceTokenizer(TextSpec(tokenizer=config))
    assert tokenizer.tokenizer.fit(True).bare_tools is bare
    if "t.name + t.function" in shows:
        return
    said = [*ASKED, {"role": "assistant", "content": "It is so."}]
    made, result = tokenize(tokenizer, {"messages": said, "tools": [BARE_ONES.get(shape, WRAPPED)]})
    wanted = FUNCTION if bare else WRAPPED
    template = {"chat_template": shows + LOOP, "return_dict": False}
    assert made[0].ids == made[0].hf.apply_chat_template(said, tools=[wanted], **template), result.examples
    assert (TOOLS_BARE in result.row_counts.normalized) is bare
    assert (TOOLS_WRAPPED in result.row_counts.normalized) is (shape != "wrapped" and not bare)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_are_taken_to_a_depth_and_deeper_ones_are_set_aside(
    as_text: bool, slice_tokenizer: Any, tokenize: Any
) -> None:
    def row(objects: int) -> dict[str, Any]:
        schema: Any = {"type": "string"}
        for _ in range(objects):
            schema = {"type": "object", "properties": {"a": schema}}
        given: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        said = [*ASKED, {"role": "assistant", "content": "It is so."}]
        return {"messages": said, "tools": json.dumps(given) if as_text else given}

    made, result = tokenize(slice_tokenizer("merges_tools"), row(120), row(160), row(300))
    assert len(made) == 1
    assert dict(result.row_counts.quarantined) == {"the tools are nested too deep": 2}


def test_tools_that_are_no_json_for_python_are_a_fault_of_their_row() -> None:
    with pytest.raises(RowFault, match="broken JSON in 'tools'"):
        read_tools(f'[{{"a": {"[" * 5000 + "]" * 5000}}}]', set())
