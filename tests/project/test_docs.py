"""Documentation that is checked: the reference follows the models, links lead somewhere, job files load."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import raysvc
from raysvc.job.job_file import load_job

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def rendered(name: str) -> str:
    """What a script of docs/ would write."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.render())


def test_the_reference_is_what_the_config_models_say() -> None:
    text = rendered("make_reference")
    assert (ROOT / "docs" / "reference.md").read_text() == text, "run python docs/make_reference.py"
    assert "|  |" not in text, "every key has a description"


def test_the_schema_for_editors_takes_what_loads_and_refuses_what_does_not() -> None:
    from jsonschema import Draft202012Validator

    from raysvc.job.job_schema import FILE, job_schema, schema_text

    assert (ROOT / "docs" / FILE).read_text() == schema_text(), "run python docs/make_reference.py"
    Draft202012Validator.check_schema(job_schema())
    editor = Draft202012Validator(job_schema())
    for block in job_blocks():
        editor.validate(yaml.safe_load(block))
    good = {"source": {"path": ["a.jsonl"]}, "tokenizer": {"name": "t"}, "plan": {"skip_rows": "ids.txt"}}
    editor.validate(good)
    wrong: list[dict[str, Any]] = [
        {**good, "plan": {"bach_size": 4}},
        {**good, "plan": {"batch_size": 0}},
        {**good, "plan": {"layout": "wide"}},
        {**good, "tokenizer": 4},
        {"tokenizer": "t"},
    ]
    for job in wrong:
        assert not editor.is_valid(job), job
        with pytest.raises(raysvc.errors.ConfigError):
            load_job(job)


def api_objects() -> dict[str, str]:
    """Heading of docs/api.md -> path of the object that is shown under it."""
    page = (ROOT / "docs" / "api.md").read_text()
    return dict(re.findall(r"^##+ (\S+)\n\n(?:[^#:].*\n\n)?::: (\S+)$", page, re.MULTILINE))


def test_the_api_page_shows_every_public_name_and_what_users_receive() -> None:
    shown = api_objects()
    assert {f"raysvc.{name}" for name in raysvc.__all__} <= set(shown)
    for heading, path in shown.items():
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        assert inspect.getdoc(value), path
        if heading.startswith("raysvc."):
            assert value is getattr(raysvc, heading.removeprefix("raysvc.")), heading


def test_dir_shows_the_public_names() -> None:
    assert {name for name in dir(raysvc) if not name.startswith("__")} == set(raysvc.__all__)


def test_the_version_is_one() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert built["project"]["dynamic"] == ["version"]
    assert built["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "raysvc.__version__"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_inside_the_project_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def prose(page: Path) -> str:
    """A page without its code and without tables that a script writes, whose lines may be long."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"<!-- table begins -->.*?<!-- table ends -->", "", text, flags=re.DOTALL)


def test_the_pages_can_be_read() -> None:
    """All pages together are counted as `cat *.md | wc -w` counts: code and tables of scripts too."""
    words = {page: len(page.read_text().split()) for page in PAGES}
    assert sum(words.values()) <= 45_000, "say it once, and link to it"
    assert max(words.values()) <= 6_000
    for page in PAGES:
        long = [line for line in prose(page).splitlines() if len(line) > 200 and not line.startswith("|")]
        assert not long, f"{page.name}: {long[0][:80]}"


def test_every_test_that_a_page_names_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(?:[\w/]+\.py::)?(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, f"{page.name} names {name}"


def job_blocks() -> list[str]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        found += [block for block in blocks if "tokenizer:" in block and "source:" in block]
    return found


@pytest.mark.parametrize("block", job_blocks(), ids=lambda block: block.splitlines()[0][:30])
def test_a_job_that_a_page_shows_is_a_valid_job(block: str) -> None:
    load_job(yaml.safe_load(block))


def lines_of(text: str) -> list[str]:
    """Lines without the indentation of the whole."""
    return textwrap.dedent(text).strip("\n").splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_block_that_is_quoted_from_a_file_stands_in_it(page: Path) -> None:
    quotes = re.findall(r"<!-- from (\S+) -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(quotes) == page.read_text().count("<!-- from ")
    for name, block in quotes:
        wanted, lines = lines_of(block), (ROOT / name).read_text().splitlines()
        windows = (lines[first : first + len(wanted)] for first in range(len(lines)))
        assert any(lines_of("\n".join(window)) == wanted for window in windows), f"{name} lacks {wanted[0]!r}"


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks of some languages."""
    kinds = "|".join(languages)
    return re.findall(rf"^```(?:{kinds})\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def python_blocks() -> list[Any]:
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, "python"))
    ]


@pytest.mark.parametrize("block", python_blocks())
def test_python_that_a_page_shows_compiles_and_its_names_of_raysvc_exist(block: str) -> None:
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("raysvc"):
            pytest.importorskip(
                {"raysvc.integrations.transformers": "accelerate"}.get(str(node.module), "ray")
            )
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raysvc":
            assert hasattr(raysvc, node.attr), ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("raysvc."):
            function = getattr(raysvc, ast.unparse(node.func).removeprefix("raysvc."))
            known = inspect.signature(function).parameters
            takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
            for keyword in node.keywords:
                assert takes_any or keyword.arg in known, ast.unparse(node)


def commands(page: Path) -> list[list[str]]:
    """The arguments of every `raysvc …` that a page shows, also behind `ray job submit … --`."""
    lines = [
        line.removeprefix("$ ") for block in blocks(page, "console", "bash") for line in block.splitlines()
    ]
    found = (re.search(r"(?:^|-- )(?:python -m raysvc\.cli|raysvc) (.*)", line) for line in lines)
    return [shlex.split(each.group(1), comments=True) for each in found if each]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_that_a_page_shows_is_one_that_the_command_line_takes(page: Path) -> None:
    from typer.main import get_command

    from raysvc.cli.main import app

    for arguments in commands(page):
        command, left, context = get_command(app), arguments, None
        while hasattr(command, "commands"):
            assert left[0] in command.commands, arguments
            context = command.make_context(left[0], [], parent=context, resilient_parsing=True)
            command, left = command.commands[left[0]], left[1:]
        parsed = command.make_context(arguments[0], list(left), parent=context)  # refuses unknown options
        overrides = [text for text in parsed.params.get("overrides") or () if "=" in text]
        load_job({"source": {"path": "rows.jsonl"}, "tokenizer": "t"}, overrides)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_every_page(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed: pip install 'raysvc[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(config["nav"])))
    docs = ROOT / "docs"
    assert listed == {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    html = (tmp_path / "concepts" / "index.html").read_text()
    assert "datapath.svg" in html
    assert not re.findall(r'(?:src|href)="https?://(?!squidfunk)[^"]+\.(?:js|css|woff2?)"', html), (
        "works offline"
    )
