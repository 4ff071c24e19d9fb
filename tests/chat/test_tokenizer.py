"""A tokenizer is known by its content, and a wrong one is a user's mistake that says what to do."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.errors import TokenizerError
from raysvc.job.config import TextSpec, TokenizerConfig

CHATML = "chatml_default_system"
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def loaded(name: str, **options: Any) -> LoadedTokenizer:
    return LoadedTokenizer(TokenizerConfig(name=name, **options))


def test_copies_in_other_folders_are_the_same_tokenizer(tokenizer_folder: Any, tmp_path: Path) -> None:
    folder = tokenizer_folder(CHATML)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert loaded(folder).identity() == loaded(str(copy)).identity()
    assert str(tmp_path) not in json.dumps(loaded(str(copy)).identity())


def test_whatever_decides_the_bytes_changes_the_identity(tokenizer_folder: Any, tmp_path: Path) -> None:
    folder = tokenizer_folder(CHATML)
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0].content }}")
    same_text = file.read_text()
    seen = [
        loaded(folder),
        loaded(tokenizer_folder("in_a_macro")),
        loaded(tokenizer_folder("llama3_trimming")),
        loaded(folder, chat_template=str(file)),
        loaded(folder, template_kwargs={"enable_thinking": False}),
    ]
    identities = [json.dumps(one.identity(), sort_keys=True) for one in seen]
    assert len(set(identities)) == len(identities)
    assert loaded(folder, chat_template=same_text).identity() == seen[3].identity()


DATED = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"


def test_templates_see_the_day_of_the_job_and_the_key_holds_it(tokenizer_folder: Any) -> None:
    keys = set()
    for day, shown in (("2024-07-26", "26 Jul 2024"), ("2025-01-02", "02 Jan 2025")):
        config = TokenizerConfig.model_validate(
            {"name": tokenizer_folder(CHATML), "chat_template": DATED, "date": day}
        )
        tokenizer = SliceTokenizer(TextSpec(tokenizer=config))
        result = tokenizer.run([SourceRow(0, ROW)])
        assert (result.sampled, result.switched) == (1, "")
        hf = tokenizer.tokenizer.hf
        assert hf.decode(result.table["input_ids"][0].as_py()).startswith(shown)
        assert hf.decode(tokenizer.tokenizer.reference_ids(ROW["messages"], None)).startswith(shown)
        keys.add(json.dumps(tokenizer.tokenizer.identity()))
    assert len(keys) == 2


def test_transformers_own_tokenizer_shows_the_day_of_the_job(tokenizer_folder: Any) -> None:
    from transformers import AutoTokenizer

    config = TokenizerConfig(name=tokenizer_folder(CHATML), chat_template=DATED, date=date(2024, 7, 26))
    tokenizer = LoadedTokenizer(config)
    tokenizer.hf = AutoTokenizer.from_pretrained(config.name)
    assert tokenizer.hf.decode(tokenizer.reference_ids(ROW["messages"], None)).startswith("26 Jul 2024")
    now = tokenizer.hf.apply_chat_template(ROW["messages"], tokenize=False, chat_template=DATED)
    assert now[:11] in {f"{datetime.now() - timedelta(seconds=s):%d %b %Y}" for s in (0, 60)}


def test_a_template_that_asks_for_the_day_needs_one(tokenizer_folder: Any) -> None:
    config = TokenizerConfig(name=tokenizer_folder(CHATML), chat_template=DATED)
    with pytest.raises(TokenizerError, match=r"tokenizer\.date"):
        SliceTokenizer(TextSpec(tokenizer=config)).run([SourceRow(0, ROW)])
    plain = SliceTokenizer(TextSpec(tokenizer=config, format="text")).run([SourceRow(0, {"text": "a"})])
    assert plain.row_counts.rows_written == 1


def test_template_kwargs_reach_the_template(tokenizer_folder: Any) -> None:
    template = "{{ greeting }} {% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    config = TokenizerConfig(
        name=tokenizer_folder(CHATML), chat_template=template, template_kwargs={"greeting": "Yes"}
    )
    tokenizer = SliceTokenizer(TextSpec(tokenizer=config))
    result = tokenizer.run([SourceRow(0, ROW)])
    assert tokenizer.tokenizer.hf.decode(result.table["input_ids"][0].as_py()).startswith("Yes a")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "/nowhere/at/all"}, "there is no folder /nowhere/at/all; give"),
        ({"chat_template": "/nowhere.jinja"}, "neither a file nor a template"),
        ({"chat_template": "{% for m in messages %}"}, "does not compile"),
    ],
)
def test_a_wrong_tokenizer_says_so(options: dict[str, str], words: str, tokenizer_folder: Any) -> None:
    config = TokenizerConfig(**{"name": tokenizer_folder(CHATML), **options})
    with pytest.raises(TokenizerError, match=words):
        SliceTokenizer(TextSpec(tokenizer=config))


SPOKEN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
NAMED = {"default": SPOKEN, "tool_use": "TOOLS {{ tools | length }}" + SPOKEN, "rag": "RAG" + SPOKEN}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def with_templates(folder: str, to: Path, form: str, names: list[str]) -> str:
    """A copy of a tokenizer with named templates: a list or an object in its config, or files beside it."""
    copy = Path(shutil.copytree(folder, to / "named"))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((copy / "tokenizer_config.json").read_text()) | {"chat_template": None}
    if form == "list":
        config["chat_template"] = [{"name": name, "template": NAMED[name]} for name in names]
    if form == "object":
        config["chat_template"] = {name: NAMED[name] for name in names}
    if form == "files":
        (copy / "additional_chat_templates").mkdir()
        for name in names:
            default = name == "default"
            file = "chat_template.jinja" if default else f"additional_chat_templates/{name}.jinja"
            (copy / file).write_text(NAMED[name])
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    return str(copy)


@pytest.mark.parametrize("form", ["list", "object", "files"])
def test_of_several_templates_a_row_gets_the_one_that_transformers_gives_it(
    form: str, tokenizer_folder: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = with_templates(tokenizer_folder(CHATML), tmp_path, form, [*NAMED])
    hf, identities = AutoTokenizer.from_pretrained(folder), set()
    for given in (None, "rag", "tool_use"):
        tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder, chat_template=given)))
        rows = [{**ROW, "tools": TOOLS}, ROW] if given != "tool_use" else [{**ROW, "tools": TOOLS}]
        result = tokenizer.run([SourceRow(n, row) for n, row in enumerate(rows)])
        assert result.table["input_ids"].to_pylist() == [
            hf.apply_chat_template(
                row["messages"], tools=row.get("tools"), chat_template=given, return_dict=False
            )
            for row in rows
        ]
        trained = [sum(mask) for mask in result.table["loss_mask"].to_pylist()]
        assert trained == [len(hf("b<|im_end|>")["input_ids"])] * len(rows)
        identities.add(json.dumps(tokenizer.tokenizer.identity(), sort_keys=True))
    assert len(identities) == 3


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        (
            ["default", "rag"],
            "rga",
            "'rga' is neither a file .* the tokenizer's own are default, rag; .* one of these",
        ),
        (
            ["rag", "tool_use"],
            None,
            "has the chat templates rag, tool_use, and no default; .* to one of rag, tool_use",
        ),
    ],
)
def test_a_template_that_has_no_such_name_is_refused_with_the_names(
    names: list[str], given: str | None, words: str, tokenizer_folder: Any, tmp_path: Path
) -> None:
    folder = with_templates(tokenizer_folder(CHATML), tmp_path, "list", names)
    with pytest.raises(TokenizerError, match=words):
        SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder, chat_template=given))).run(
            [SourceRow(0, {**ROW, "tools": TOOLS})]
        )


def test_a_broken_tokenizer_file_says_so(tokenizer_folder: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(tokenizer_folder(CHATML), tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not JSON"):
        loaded(str(copy))


def test_only_a_chat_needs_a_template(tokenizer_folder: Any) -> None:
    tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=tokenizer_folder("none"))))
    with pytest.raises(TokenizerError, match="has no chat template"):
        tokenizer.run([SourceRow(0, ROW)])
    tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=tokenizer_folder("none"))))
    assert tokenizer.run([SourceRow(0, {"text": "hello"})]).row_counts.rows_written == 1


def test_importing_the_room_is_quick_and_starts_nothing() -> None:
    code = (
        "import sys, raysvc.chat.slice_tokenizer, raysvc.chat.row_counts, raysvc.chat.source.formats\n"
        "print([m for m in ('ray', 'torch', 'transformers', 'datasets', 'gigatoken') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("ids", [0, [0, 2], None])
def test_the_model_stops_where_its_generation_config_says(
    ids: Any, tokenizer_folder: Any, tmp_path: Path
) -> None:
    from transformers import GenerationConfig

    folder = shutil.copytree(tokenizer_folder(CHATML), tmp_path / "model")
    assert loaded(str(folder)).stop_tokens == ()
    GenerationConfig(eos_token_id=ids).save_pretrained(folder)
    tokenizer = loaded(str(folder))
    wanted = [ids] if isinstance(ids, int) else ids or []
    assert list(tokenizer.stop_tokens) == [tokenizer.hf.decode([token]) for token in wanted]


def test_a_template_of_the_tokenizer_is_chosen_by_its_name(tokenizer_folder: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(tokenizer_folder(CHATML))
    hf.chat_template = {"default": hf.chat_template, "short": "{{ messages[0].content }}"}
    hf.save_pretrained(tmp_path / "two")
    chosen = loaded(str(tmp_path / "two"), chat_template="short")
    assert chosen.reference_text(ROW["messages"], None) == hf.apply_chat_template(
        ROW["messages"], chat_template="short", tokenize=False
    )


@pytest.mark.parametrize(
    "drawn",
    [
        "{{ ['a', 'b'] | random }}",
        "{% if m.content == 'no' %}{{ lipsum() }}{% endif %}",
        "{{ cycler('a', 'b') }}",  # shows where it lies, which may be the same place again
    ],
)
def test_a_template_that_writes_another_text_each_time_is_refused_in_words(
    drawn: str, tokenizer_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = itertools.count()
    monkeypatch.setattr("jinja2.utils.Cycler.__repr__", lambda self: f"<at {next(places)}>")
    text = f"{{% for m in messages %}}{drawn}{{{{ m.content + '<|im_end|>' }}}}{{% endfor %}}"
    config = TokenizerConfig(name=tokenizer_folder(CHATML), chat_template=text)
    with pytest.raises(TokenizerError, match="another text each time"):
        SliceTokenizer(TextSpec(tokenizer=config)).run([SourceRow(0, ROW)])
    plain = SliceTokenizer(TextSpec(tokenizer=config, format="text")).run([SourceRow(0, {"text": "a"})])
    assert plain.row_counts.rows_written == 1


def test_a_template_that_only_says_random_is_not_refused(tokenizer_folder: Any) -> None:
    text = "{# random #}{% for m in messages %}random {{ m.content + '<|im_end|>' }}{% endfor %}"
    config = TokenizerConfig(name=tokenizer_folder(CHATML), chat_template=text)
    result = SliceTokenizer(TextSpec(tokenizer=config)).run([SourceRow(0, ROW)])
    assert result.row_counts.rows_written == 1
