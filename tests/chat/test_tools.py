"""Tools that rows share are the same objects, and their JSON, written once for each form, is what templates write of new ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source import tools
from raysvc.chat.source.tools import read_tools

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
