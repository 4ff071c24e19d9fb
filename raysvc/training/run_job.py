"""The job that a run had: `<run_dir>/job.json`, written whenever the run starts or goes on.

Always true:
- what it reads means the same from every working folder, and a folder that was moved names itself;
- credentials are not kept, and code is not named: a job with either is read from its own file;
- a changed byte is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raysvc.cache.local.sealed import opened, sealed
from raysvc.cache.store.disk_failures import named_failures
from raysvc.cache.store.open import absolute, default_root
from raysvc.chat.tokens.tokenizer import anchored
from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig, SourceConfig
from raysvc.job.job_file import load_job

FILE = "job.json"
SECRETS = (
    "storage_options",
    "args",
)  # sections that may hold credentials; args: of a function that makes a source
CODE = ("plan.order", "tokenizer.trust_remote_code", "source.ray")  # keys that name code


def keep_job(folder: Path, job: JobConfig) -> None:
    """Write the job of a run into its folder."""
    path = folder / FILE
    written = folder / f".{FILE}.{os.getpid()}"
    with named_failures(path):
        written.write_bytes(sealed(_plain(job)))
        written.replace(path)


def has_job(folder: str | Path) -> bool:
    """Returns whether a folder is one of a run that kept its job."""
    return (Path(folder) / FILE).is_file()


def job_of_run(folder: str | Path, today: JobConfig | None = None) -> JobConfig:
    """The job of the run in a folder, which it had when it started or went on last.

    Args:
        today: a job of the user's own file: it gives what is not kept, credentials and arguments, and names the same code.

    Raises:
        ConfigError: the file is missing or damaged, or the job names code that `today` does not.
    """
    path = Path(folder) / FILE
    remedy = "write -c job.yaml, the job whose trainer.run_dir it is"
    try:
        fields = opened(path.read_bytes())
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})", remedy) from None
    except ValueError as error:
        raise ConfigError(str(path), str(error), f"remove it, and {remedy}") from None
    trusted = given_fields(today) if today is not None else {}
    for key, value in _flat(fields):
        if value and key.endswith(CODE) and trusted.get(key) != value:
            raise ConfigError(str(path), f"names code that would run ({key})", remedy)
    if today is not None:
        fields = _with_secrets(fields, today.model_dump(exclude_unset=True))
    return load_job(fields, trainer={"run_dir": str(Path(folder).absolute())})


def differences(job: JobConfig, run: JobConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its value in a job and in that of a run, where they differ; where the run is does not count."""
    # a section that is empty is one that is not given
    ours, theirs = (
        {key: each for key, each in given_fields(one).items() if each != {}} for one in (job, run)
    )
    keys = dict.fromkeys([*ours, *theirs])
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def given_fields(job: JobConfig) -> dict[str, Any]:
    """Dotted key -> value of the fields that a job gives, without credentials."""
    return dict(_flat(_plain(job)))


def _plain(job: JobConfig) -> dict[str, Any]:
    """The fields that are given, with absolute paths, without credentials and run folder."""
    mixture, evals = job.mixture, job.evals
    if mixture is not None:
        sources = {
            name: one.model_copy(update={"source": _here(one.source)})
            for name, one in mixture.sources.items()
        }
        mixture = mixture.model_copy(update={"sources": sources})
    trainer = job.trainer
    if os.path.isdir(os.path.expanduser(trainer.model)):
        trainer = trainer.model_copy(update={"model": os.path.abspath(os.path.expanduser(trainer.model))})
    told = job.model_copy(
        update={
            "source": _here(job.source),
            "mixture": mixture,
            "evals": {
                name: one.model_copy(update={"source": _here(one.source)}) if one.source else one
                for name, one in evals.items()
            },
            "tokenizer": anchored(job.tokenizer),
            "cache": job.cache.model_copy(update={"root": default_root(job.cache.root)}),
            "trainer": trainer,
        }
    )
    fields = _without_credentials(told.model_dump(mode="json", exclude_unset=True))
    fields.get("trainer", {}).pop("run_dir", None)
    if mixture is not None:
        fields.pop("source", None)  # a copy of the first of the mixture
    kept: dict[str, Any] = fields
    return kept


def _here(source: SourceConfig) -> SourceConfig:
    if not source.path:
        return source
    return source.model_copy(update={"path": tuple(absolute(path) for path in source.path)})


def _without_credentials(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_credentials(one) for key, one in value.items() if key not in SECRETS}
    return value


def _with_secrets(fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with the secrets that another job gives at the same places."""
    inside = {
        key: _with_secrets(value, given[key])
        if isinstance(value, Mapping) and isinstance(given.get(key), Mapping)
        else value
        for key, value in fields.items()
    }
    has = (key for key in SECRETS if key in given and (key != "args" or fields.get("ray")))
    return {**inside, **{key: given[key] for key in has}}


def _flat(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
