"""Reads a job: a YAML file, keyword arguments over it, dotted overrides over both.

Always true:
- what comes out is a checked `JobConfig`, or one ConfigError that names the field, the value and the law;
- an unknown key is refused with the nearest known one;
- no message repeats a value of `storage_options`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig
from raysvc.job.known_keys import advice_on

WITH_PASSWORD = re.compile(r"[A-Za-z0-9+.:-]+://[^/@]*:[^/@]*@|https?://[^/@]+@")
SECTIONS = ("plan", "trainer", "workers")  # whose keys are told to who writes them elsewhere
ROWS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".tar", ".txt")  # a job may be JSON
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
        **{f"evals.{name}.source": each.source for name, each in job.evals.items() if each.source},
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
    if path.suffix.lower() in ROWS and path.is_file():
        raise _no_override(str(job))
    try:
        tree = _JobYaml(path.read_text()).get_single_data()
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


class _JobYaml(yaml.SafeLoader):
    """YAML as it is usually read, but for two habits of PyYAML.

    A key that stands twice is refused: PyYAML takes the last, and a section is lost. And `2:17:45`, the id of a row, is text:
    PyYAML counts it in base 60, as YAML 1.1 did and YAML 1.2 does not.
    """

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        """The tag of a node."""
        tag = str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
        in_base_60 = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and ":" in (value or "")
        return "tag:yaml.org,2002:str" if in_base_60 else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node.

        Raises:
            yaml.YAMLError: a key stands twice.
        """
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise _no_override(text)
    try:
        parsed = _JobYaml(value).get_single_data()
    except (yaml.YAMLError, ValueError):
        parsed = value
    return _nested(tuple(key.strip().split(".")), parsed)


def _no_override(text: str) -> ConfigError:
    """Returns what somebody may have meant who wrote a word without `=`."""
    path = Path(text)
    if path.suffix.lower() in ROWS and path.is_file():
        return ConfigError(
            text, "is a file of rows, and not a job", f"run raysvc init {text} --tokenizer ..."
        )
    what = "is neither KEY=VALUE nor a run"
    return ConfigError(f"override {text!r}", what, "write plan.batch_size=64, or -c in front of a job file")


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
    """The first problem, in one line; unknown keys first, since they cause the others.

    The section `source` of a mixture is a copy of its first source, which has the same problem under its own name.
    """
    problems = error.errors()
    mixed = any(problem["loc"][:1] == ("mixture",) for problem in problems)
    problems.sort(
        key=lambda problem: (
            mixed and problem["loc"][:1] == ("source",),
            problem["type"] != "extra_forbidden",
        )
    )
    first = problems[0]
    path = _of_the_user(first["loc"])
    where = ".".join(path) or "job"
    if first["type"] == "extra_forbidden":
        return ConfigError(where, "unknown key", _remedy(path))
    if first["type"] == "missing":
        remedy = "every job needs source and tokenizer" if len(path) == 1 else "give it a value"
        return ConfigError(where, "is missing", remedy)
    told = [_plain(problem["msg"]) for problem in problems if _of_the_user(problem["loc"]) == path]
    what, semicolon, remedy = " or ".join(dict.fromkeys(told)).rpartition("; ")
    given = first["input"]
    told_already = isinstance(given, str) and repr(given) in (what or remedy)
    secret = isinstance(given, Mapping) or "storage_options" in path
    shown = "" if secret or told_already else f" (given {given if isinstance(given, date) else repr(given)})"
    if given is None:
        return ConfigError(where, f"{what or remedy}{shown}", "give it a value, or leave the key out")
    return ConfigError(where, f"{what or remedy}{shown}", remedy if semicolon else "change this value")


def _remedy(path: Sequence[str]) -> str:
    """Returns what to write in place of an unknown key."""
    name, known = path[-1], _fields_at(path[:-1])
    if (advice := advice_on(name)) is not None:
        of_an_eval = path[0] == "evals" and len(path) > 2
        return advice.replace("evals.NAME", ".".join(path[:2])) if of_an_eval else advice
    here = path[:-1]  # deeper down than the sections, a key of the same name is another thing
    sections = [[*here, one] for one in known if here] + [[one] for one in SECTIONS if len(path) < 3]
    if found := [[*one, name] for one in sections if name in _fields_at(one)]:
        more = [f" ({_description(one)})" if len(found) > 1 else "" for one in found]
        return "write " + ", or ".join(".".join(one) + its for one, its in zip(found, more, strict=True))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"


def _of_the_user(place: Sequence[int | str]) -> list[str]:
    """The place of a problem, without what pydantic adds: which of a field's types it tried, and that a key is meant."""
    kind, path = JobConfig, []  # type: tuple[Any, list[str]]
    for part in place:
        name = str(part)
        if part == "[key]" or (kind is None and not isinstance(part, int)):
            break
        path.append(name)
        kind = _inside(kind, name)
    return path


def _plain(message: str) -> str:
    """Returns what pydantic says, in the words of a job file."""
    for told, ours in _WORDS:
        message = re.sub(told, ours, message)
    return message


_WORDS = (
    ("^Value error, ", ""),
    (r"a valid dictionary( or instance of \w+)?", "keys with values"),
    ("a valid tuple", "a list"),
    ("a valid string", "text; put it in quotes"),
    ("a valid boolean, unable to interpret input", "true or false"),
    ("a valid boolean", "true or false"),
    ("a valid integer, unable to parse string as an integer", "an integer"),
    ("a valid integer, got a number with a fractional part", "an integer"),
    ("a valid integer", "an integer"),
    ("a valid number, unable to parse string as a number", "a number"),
    ("a valid number", "a number"),
    ("^Input should be ", "should be "),
    (
        r"^String should match pattern .*\{0,99\}.*",
        "should have letters, digits, '.', '_' and '-', at most 100 of them, and begin with a letter or digit",
    ),
    ("^String should match pattern .*:.*", "should be module:function"),
    ("^.*(date or datetime|zero time).*", "should be a day like 2026-11-23"),
    ("^Dictionary should have at least 1 item .*", "is empty; name at least one"),
)


def _fields_at(path: Sequence[str]) -> list[str]:
    """Keys that are known at a place of the job."""
    kind: Any = JobConfig
    for name in path:
        kind = _inside(kind, name)
    return list(getattr(kind, "model_fields", {}))


def _description(path: Sequence[str]) -> str:
    kind: Any = JobConfig
    for name in path[:-1]:
        kind = _inside(kind, name)
    return str(kind.model_fields[path[-1]].description).rstrip(".")


def _inside(kind: Any, name: str) -> Any:
    """Returns what a key of a section, or of a mapping whose keys are the user's, holds: a section, a mapping, or None: a value."""
    fields = getattr(kind, "model_fields", None)
    if fields is None:
        held = get_args(kind)[1] if get_origin(kind) is dict else None
    else:
        held = fields[name].annotation if name in fields else None
    for one in (held, *(get_args(held) if get_origin(held) is not dict else ())):
        if get_origin(one) is dict or (isinstance(one, type) and issubclass(one, BaseModel)):
            return one
    return None
