"""Reads a job: a YAML file, keyword arguments over it, dotted overrides over both.

Always true:
- what comes out is a checked `JobConfig`, or one ConfigError that names the field, the value and the law;
- an unknown key is refused with the nearest known one;
- no message repeats a value of `storage_options`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig

WITH_PASSWORD = re.compile(r"[A-Za-z0-9+.:-]+://[^/@]*:[^/@]*@|https?://[^/@]+@")
SHORT = {"name": ("server", "name")}


def load_job(
    job: str | Path | Mapping[str, Any] | JobConfig | None = None,
    overrides: Sequence[str] = (),
    **sections: Any,
) -> JobConfig:
    """Make a `JobConfig`.

    Args:
        job: path of a `job.yaml`, a mapping, or a finished config; None: everything comes from `sections`.
        overrides: dotted assignments, like `plan.batch_size=64`; values are read as YAML.
        sections: top-level keys merged over `job`; a section may be a mapping. `name` is short for `server.name`.

    Raises:
        ConfigError: a file that is missing or no YAML, an unknown key, a wrong value.
    """
    if isinstance(job, JobConfig) and not overrides and not sections:
        return job
    tree = _tree(job)
    for key, value in sections.items():
        _merge(tree, _nested(SHORT.get(key, (key,)), value))
    for text in overrides:
        _merge(tree, _override(text))
    try:
        found = JobConfig.model_validate(tree)
    except ValidationError as error:
        raise _explain(error) from None
    _refuse_credentials(found)
    return found


def _refuse_credentials(job: JobConfig) -> None:
    """Addresses are printed, logged and kept in manifests; the message does not repeat what it refuses."""
    sources = {
        "source": job.source,
        **{f"evals.{name}.source": each.source for name, each in job.evals.items()},
    }
    for name, each in (job.mixture.sources if job.mixture else {}).items():
        sources[f"mixture.sources.{name}.source"] = each.source
    paths = {f"{where}.path": source.path for where, source in sources.items()}
    for where, addresses in {**paths, "cache.root": (job.cache.root or "",)}.items():
        if any(WITH_PASSWORD.match(address) for address in addresses):
            remedy = "give them in storage_options or in the environment"
            raise ConfigError(where, "holds credentials in its address", remedy)


def _tree(job: str | Path | Mapping[str, Any] | JobConfig | None) -> dict[str, Any]:
    if job is None:
        return {}
    if isinstance(job, JobConfig):
        return job.model_dump(exclude_unset=True)
    if isinstance(job, Mapping):
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in job.items()}
    if not isinstance(job, str | Path):
        raise ConfigError(
            "job", f"{job!r} is not a job", "give the path of a job.yaml, a mapping or a JobConfig"
        )
    path = Path(job)
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read ({error.strerror})", "give the path of a job.yaml"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # without the line itself, which may hold a secret
        place = f" (line {mark.line + 1}: {getattr(error, 'problem', '')})" if mark else ""
        raise ConfigError(str(path), f"is not valid YAML{place}", "fix that line") from None
    except ValueError as error:  # a day that no month has, or bytes that are no text
        raise ConfigError(str(path), f"is not valid YAML ({error})", "fix that value") from None
    if not isinstance(tree, dict):
        raise ConfigError(str(path), "has no keys", "begin with source: and tokenizer:")
    return tree


def _override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"override {text!r}", "is not KEY=VALUE", "write plan.batch_size=64, or -c in front of a job file"
        )
    try:
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        parsed = value
    return _nested(tuple(key.strip().split(".")), parsed)


def _nested(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _merge(into: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if key == "tokenizer" and isinstance(into.get(key), str) and isinstance(value, Mapping):
            into[key] = {"name": into[key]}
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _explain(error: ValidationError) -> ConfigError:
    """The first problem, in one line; unknown keys first, since they cause the others."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    where = ".".join(path) or "job"
    if first["type"] == "extra_forbidden":
        known = _fields_at(path[:-1])
        close = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
        remedy = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        return ConfigError(where, "unknown key", remedy)
    if first["type"] == "missing":
        return ConfigError(where, "is missing", "every job needs source and tokenizer")
    message = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    shown = "" if isinstance(given, Mapping) or "storage_options" in path else f" (given {given!r})"
    return ConfigError(where, f"{message}{shown}", "change this value")


def _fields_at(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = JobConfig
    for name in path:
        field = model.model_fields.get(name)
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), JobConfig)
    return list(model.model_fields)
