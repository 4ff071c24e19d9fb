"""Documentation that is checked: the reference follows the models, links lead somewhere, job files load."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
import yaml

from raysvc.jobfile import load_job

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_reference_is_what_the_config_models_say() -> None:
    path = ROOT / "docs" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.render()
    assert (ROOT / "docs" / "reference.md").read_text() == text, "run python docs/make_reference.py"
    assert "|  |" not in text, "every key has a description"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_project_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_that_is_quoted_from_a_file_stands_in_it(page: Path) -> None:
    quotes = re.findall(r"<!-- from (\S+) -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(quotes) == page.read_text().count("<!-- from ")
    for name, block in quotes:
        wanted, lines = lines_of(block), (ROOT / name).read_text().splitlines()
        windows = (lines[first : first + len(wanted)] for first in range(len(lines)))
        assert any(lines_of("\n".join(window)) == wanted for window in windows), f"{name} lacks {wanted[0]!r}"


def test_every_command_that_a_page_shows_exists() -> None:
    from raysvc.cli.main import app

    known = {
        str(command.name or getattr(command.callback, "__name__", "")) for command in app.registered_commands
    }
    known |= {str(group.name) for group in app.registered_groups}
    for page in PAGES:
        for command in re.findall(r"^(?:\$ )?raysvc (\w+)", page.read_text(), re.MULTILINE):
            assert command in known, f"{page.name}: raysvc {command}"
