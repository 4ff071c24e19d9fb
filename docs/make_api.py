"""Writes docs/api.md, the public names of `raysvc` with their signatures: `python docs/make_api.py`.

A test holds the page against the package, so a public name cannot change unnoticed.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import raysvc

INTRO = """# Python API

Every public name, as of version {version}. Made from the package by `python docs/make_api.py`.

What stands here changes incompatibly only with a new version (before 1.0 a new minor one) and a line under "Breaking" in
CHANGELOG.md. What does not stand here may change at any time, but for the names that [integrations](integrations.md) and
[workers and dispatch](workers.md) use.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRO.format(version=raysvc.__version__)]
    for name in sorted(raysvc.__all__):
        value = getattr(raysvc, name)
        parts.append(module_errors(value) if isinstance(value, ModuleType) else entry(name, value))
    return "\n".join(parts)


def entry(name: str, value: Any) -> str:
    """A function, or a class with its public members."""
    if not inspect.isclass(value):
        return f"## raysvc.{name}\n\n{code(signature(name, value))}\n{doc(value)}\n"
    rows = [f"## raysvc.{name}\n\n{doc(value)}\n", "| member | |", "| --- | --- |"]
    fields = {k: v for base in value.__mro__ for k, v in inspect.get_annotations(base).items()}
    for member in sorted({*dir(value), *fields}):
        if member.startswith("_"):
            continue
        raw = inspect.getattr_static(value, member, None)
        if inspect.isfunction(raw):
            rows.append(f"| `{cell(signature(member, raw))}` | {doc(raw)} |")
        elif member in fields:
            rows.append(f"| `{cell(f'{member}: {fields[member]}')}` | |")
        else:  # a property, plain or cached
            rows.append(f"| `{member}` | {doc(getattr(raw, 'fget', None) or getattr(raw, 'func', None))} |")
    return "\n".join([*rows, ""])


def module_errors(module: ModuleType) -> str:
    """The errors, each with its parents."""
    rows = ["## raysvc.errors\n", "| error | is a | |", "| --- | --- | --- |"]
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) and issubclass(value, module.RaysvcError):
            parents = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
            rows.append(f"| `{cell(signature(name, value.__init__))}` | {parents} | {doc(value)} |")
    return "\n".join([*rows, ""])


def signature(name: str, value: Any) -> str:
    """As it is written, without `self`."""
    out, star = [], False
    found = inspect.signature(value)
    for each in found.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not star:
            out.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.annotation is each.empty else f": {each.annotation}"
        out.append(f"{stars}{each.name}{kind}{default(each.default)}")
    returned = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    return f"{name}({', '.join(one for one in out if one != 'self')}){returned}"


def default(value: Any) -> str:
    """How a default is written."""
    if value is inspect.Parameter.empty:
        return ""
    return f" = {value.__name__ if inspect.isfunction(value) else repr(value)}"


def doc(value: Any) -> str:
    """The first sentence of a docstring."""
    text = (inspect.getdoc(value) or "").split("\n\n")[0].split("\n")
    return cell(" ".join(text))


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


def code(text: str) -> str:
    """A fenced line."""
    return f"```text\n{text}\n```\n"


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(render())
