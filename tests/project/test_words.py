"""Words that were retired stay out: one thing has one name, and it is the field's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "AGENTS.md",
    "docs",
    "raysvc",
    "actors",
    "pipelines",
    "deploy",
)
RETIRED = {
    r"set(s|ting)? aside": "quarantined",
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again",
    r"headspace": "headroom",
    r"half a surrogate": "a lone surrogate",
    r"is no known key": "unknown key",
    r"is none of": "must be in [0, N)",
    r"is no YAML": "is not valid YAML",
    r"finished or not there": "atomic: complete or absent",
    r"made here": "synthetic",
    r"left at once": "exited immediately",
    r"born": "incarnation_id",
    r"how-manieth": "index",
    r"proved (loss )?masks?": "verified loss masks",
    r"doomed": "deleting",
    r"(could|can) ?not be proved": "cannot be verified",
    r"for people": "for display",
    r"errors alone": "only errors",
    r"has no form": "is not KEY=VALUE",
    r"is no number": "is not a number",
    r"for so many days": "for N days",
}


def texts() -> list[Path]:
    found = [ROOT / place for place in PLACES if (ROOT / place).is_file()]
    folders = [ROOT / place for place in PLACES if (ROOT / place).is_dir()]
    found += [
        p
        for folder in folders
        for p in folder.rglob("*")
        if p.suffix in (".py", ".md", ".yml", ".yaml", ".json")
    ]
    return [p for p in found if not any(part.is_symlink() for part in [p, *p.parents])]


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_stays_out(word: str) -> None:
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    for path in texts():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found = pattern.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number} says {found[0]!r}; say {RETIRED[word]!r}"


def test_the_places_are_there() -> None:
    assert len(texts()) > 200


STUBS = (
    "Of",
    "As",
    "With",
    "For",
    "From",
    "In",
    "By",
    "At",
    "Which",
    "How",
    "Where",
    "Whose",
    "When",
    "There",
)
QUESTIONS = ("What", "Whether", "Who", "Why")  # of modules


def test_a_docstring_begins_with_a_sentence() -> None:
    """Not with a stub like "Of a file" or "Which rows": what is it, what does it do? Sections of a job are headings in the reference."""
    found = []
    for path in (p for p in texts() if p.suffix == ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                continue
            name = getattr(node, "name", "module")
            text = ast.get_docstring(node) or "-"
            is_section = any(ast.unparse(base) == "Section" for base in getattr(node, "bases", ()))
            stubs = STUBS + QUESTIONS if isinstance(node, ast.Module) else STUBS
            is_stub = text.split()[0].rstrip(",:") in stubs
            if is_stub and not is_section and not name.startswith("_"):
                line = getattr(node, "lineno", 1)
                found.append(f"{path.relative_to(ROOT)}:{line} {name}: {text.splitlines()[0]}")
    assert not found, "say what it returns or does: " + "; ".join(found)


PARTICIPLES = {"Given", "Left", "Made", "News", "Ready"}
NOUNS = {
    "Finding",
    "Listing",
    "Pending",
    "Staging",
    "Quarantined",
    "Reserved",
}  # the last two say what they are of


def test_a_class_is_named_by_a_noun() -> None:
    """Not `Given` or `Restored`: what was given, what was restored?"""
    found = []
    for path in (p for p in texts() if p.suffix == ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in NOUNS:
                is_participle = re.fullmatch("[A-Z][a-z]+(ed|ing)", node.name) or node.name in PARTICIPLES
                found += [f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] if is_participle else []
    assert not found, "say what it is: " + ", ".join(found)
