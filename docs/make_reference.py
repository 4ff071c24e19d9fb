"""Writes docs/reference.md and docs/job.schema.json from the config models: `python docs/make_reference.py`.

A test holds the files against the models, so they cannot go stale.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from raysvc.job import job_schema
from raysvc.job.config import JobConfig, SourceConfig

INTRO = """# job.yaml

Every key, with its default if it has one; `python docs/make_reference.py` writes this page. The same keys are keyword arguments
of `raysvc.tokenize`, `serve` and `train`, and dotted overrides of every command (`plan.batch_size=64`). Editors check a job.yaml
by [its JSON schema](job.schema.json). An unknown key is an error that names the nearest known one.
"""


def render() -> str:
    """The whole page."""
    top, sections = [], []
    for name, field in JobConfig.model_fields.items():
        model = model_of(field.annotation)
        if model is None or named_models(field.annotation):
            top.append(line(name, field, JobConfig.model_json_schema()))
        if model is not None:
            sections += section(f"{name}.NAME" if named_models(field.annotation) else name, model)
    return "\n".join([INTRO, table("## Top level", top), *sections])


def section(name: str, model: type[BaseModel]) -> list[str]:
    """One section, and those of models that it holds by name."""
    summary = (model.__doc__ or "").strip().splitlines()[0]
    schema = model.model_json_schema()
    rows = [line(key, item, schema) for key, item in model.model_fields.items()]
    inner = [
        section(f"{name}.{key}.NAME", held)
        for key, item in model.model_fields.items()
        if named_models(item.annotation) and (held := model_of(item.annotation))
    ]
    inner += [
        section(f"{name}.{key}", held)
        for key, item in model.model_fields.items()
        if not named_models(item.annotation)
        and item.default is not PydanticUndefined
        and (held := model_of(item.annotation))
        and held is not SourceConfig  # it stands at the top
    ]
    return [table(f"## {name}\n\n{summary}", rows), *itertools.chain(*inner)]


def named_models(annotation: Any) -> bool:
    """Tells whether a field maps names to models."""
    return get_origin(annotation) is dict and model_of(annotation) is not None


def table(head: str, rows: list[str]) -> str:
    """A headed Markdown table."""
    return "\n".join([head, "", "| key | type | |", "|---|---|---|", *rows, ""])


def line(name: str, field: Any, schema: dict[str, Any]) -> str:
    """One key."""
    kind = kind_of(schema["properties"][name])
    return f"| {key_of(name, field)} | {escape(kind)} | {escape(field.description or '')} |"


def kind_of(schema: dict[str, Any]) -> str:
    """A JSON schema as a user reads it."""
    if "$ref" in schema:
        return "section"
    if "anyOf" in schema:
        return " or ".join(kind_of(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    bounds = "".join(f" {sign} {schema[name]:g}" for name, sign in limits.items() if name in schema)
    inner = f" of {kind_of(schema['items'])}" if "items" in schema else ""
    names = {"array": "list", "object": "mapping", "string": "text", "boolean": "bool"}
    kind = schema.get("type", "any")
    return f"{names.get(kind, kind)}{inner}{bounds}"


def key_of(name: str, field: Any) -> str:
    """The key with its default, as YAML says them."""
    default = field.default if field.default_factory is None else field.default_factory()
    if default is PydanticUndefined:
        return f"`{name}` **needed**"
    if default is None or default in ((), {}) or isinstance(default, BaseModel):
        return f"`{name}`"
    value = list(default) if isinstance(default, tuple) else default
    return f"`{name}: {yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]}`"


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, None for a plain value."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def escape(text: str) -> str:
    """Text inside a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    Path(__file__).with_name("reference.md").write_text(render())
    Path(__file__).with_name(job_schema.FILE).write_text(job_schema.schema_text())
